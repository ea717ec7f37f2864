"""What a model's folder says, read without loading the model: its context in tokens, and what loading would stop at.

Planning asks this before any kernel starts, so nothing here imports torch and nothing is downloaded.
"""

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from fedmem.config import ConfigError, model_folder

__all__ = ["TOKENIZER_FILES", "context_tokens", "flaw", "read_config"]

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "spiece.model",
)  # a folder has one
CONTEXT = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")  # its names in different families
SIZES = ("hidden_size", "n_embd", "num_hidden_layers", "n_layer", "num_attention_heads", "n_head", "vocab_size")
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLES = ("pytorch_model*.bin", "consolidated*.pth")


def read_config(name: str) -> dict[str, Any] | None:
    """The config.json of a model name (preset, folder or hub id); None where it is not on this machine (yet).

    Raises ConfigError for a name that cannot be one, and for a file that holds no JSON object.
    """
    folder = model_folder(name)
    path = _cached(name) if folder is None else folder / "config.json"
    if path is None or not path.is_file():
        return None
    try:
        return _parsed(path)
    except ValueError as error:
        raise ConfigError(f"model {name!r}: {error}") from None


def flaw(folder: Path) -> str:
    """Why the model in a folder cannot be loaded, as far as its files tell without loading it; empty: nothing is seen.

    Read are config.json and the headers of the weights.
    """
    if not (folder / "config.json").is_file():
        return "no config.json in its folder; give a folder that save_pretrained wrote"
    try:
        config = _parsed(folder / "config.json")
    except ValueError as error:
        return str(error)
    if said := _flaw_of_config(config):
        return f"config.json in its folder {said}: give the one that save_pretrained wrote"
    if not any((folder / file).is_file() for file in TOKENIZER_FILES):
        return (
            f"no tokenizer in its folder; allowed is one of {', '.join(TOKENIZER_FILES)}: save the tokenizer beside "
            "the model with save_pretrained"
        )
    if "transformers_weights" in config or (folder / "adapter_config.json").is_file():
        return ""  # its weights have other names, or lie elsewhere
    return _flaw_of_weights(folder)


def _flaw_of_config(config: dict[str, Any]) -> str:
    text = config.get("text_config") or config
    if not isinstance(config.get("model_type"), str):
        return "names no model_type"
    if not isinstance(text, dict):
        return f"has text_config = {text!r}, which is no object"
    wrong = [name for name in (*CONTEXT, *SIZES) if isinstance(text.get(name), str | dict)]
    return f"has {wrong[0]} = {text[wrong[0]]!r}, which is no whole number" if wrong else ""


def _flaw_of_weights(folder: Path) -> str:
    """What is wrong with the safetensors files that would be loaded; pickled ones never are."""
    names = [WEIGHTS]
    if not (folder / WEIGHTS).is_file():
        if not (folder / INDEX).is_file():
            return _flaw_without_weights(folder)
        try:
            names = sorted(set(_parsed(folder / INDEX)["weight_map"].values()))
        except (ValueError, LookupError, AttributeError, TypeError):
            return f"{INDEX} in its folder is damaged (it is to have a weight_map): copy it anew"
    for name in names:
        if not (folder / name).is_file():
            return f"no {name} in its folder, which {INDEX} names: copy it there"
        try:
            with safe_open(folder / name, framework="numpy"):
                pass
        except (SafetensorError, OSError) as error:
            return f"{name} in its folder is empty, truncated or no safetensors file ({error}): copy it anew"
    return ""


def _flaw_without_weights(folder: Path) -> str:
    pickled = sorted(file.name for pattern in PICKLES for file in folder.glob(pattern))
    if pickled:
        return (
            f"its weights are pickled ({pickled[0]}), and nothing is unpickled here, since a pickle can run any code: "
            "load it where you trust it and write it with save_pretrained, which makes safetensors"
        )
    return f"no weights in its folder; save_pretrained writes {WEIGHTS}, or {INDEX} and the files it names"


def context_tokens(model_config: Any) -> int | None:
    """How many tokens a model's context holds; None where its configuration sets no limit.

    model_config: the configuration of a loaded model, or `read_config`'s mapping.
    """
    if not isinstance(model_config, dict):
        model_config = model_config.to_dict() if hasattr(model_config, "to_dict") else vars(model_config)
    text = model_config.get("text_config") or model_config  # of a model that also sees images
    stated = [name for name in CONTEXT if text.get(name)]
    try:
        return int(text[stated[0]]) if stated else None
    except (ValueError, TypeError):
        raise ConfigError(f"{stated[0]} of the model: got {text[stated[0]]!r}; allowed is a whole number") from None


def _parsed(path: Path) -> dict[str, Any]:
    """The JSON object that a file holds; ValueError, which names it, for anything else."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path.name} in its folder is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path.name} in its folder holds {str(found)[:40]}, not a JSON object")
    return found


def _cached(name: str) -> Path | None:
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(name, "config.json")
    return Path(found) if isinstance(found, str) else None
