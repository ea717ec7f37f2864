"""What a model's config.json says, read without loading the model: how many tokens its context holds.

Planning asks this before any kernel starts, so nothing here imports torch and nothing is downloaded.
"""

import json
from pathlib import Path
from typing import Any

from fedmem.config import ConfigError, model_folder

__all__ = ["TOKENIZER_FILES", "context_tokens", "read_config"]

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "spiece.model",
)  # a folder has one
CONTEXT = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")  # its names in different families


def read_config(name: str) -> dict[str, Any] | None:
    """The config.json of a model name (preset, folder or hub id); None where it is not on this machine (yet).

    Raises ConfigError for a name that cannot be one, and for a file that is not JSON.
    """
    folder = model_folder(name)
    path = _cached(name) if folder is None else folder / "config.json"
    if path is None or not path.is_file():
        return None
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"model {name!r}: {path.name} in its folder is not JSON: {error}") from None


def context_tokens(model_config: Any) -> int | None:
    """How many tokens a model's context holds; None where its configuration sets no limit.

    model_config: the configuration of a loaded model, or `read_config`'s mapping.
    """
    if not isinstance(model_config, dict):
        model_config = model_config.to_dict() if hasattr(model_config, "to_dict") else vars(model_config)
    text = model_config.get("text_config") or model_config  # of a model that also sees images
    return next((int(text[name]) for name in CONTEXT if text.get(name)), None)


def _cached(name: str) -> Path | None:
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(name, "config.json")
    return Path(found) if isinstance(found, str) else None
