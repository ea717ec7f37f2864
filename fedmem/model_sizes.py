"""How large a model is, found without loading it: parameters, layers, widths.

From the safetensors headers of a folder, from a preset's recipe, from a table of the hub ids that fedmem's own studies
name, from a config.json in the hub's local cache, or, at last, from a size that stands in the name ("7B"). Planning
asks; nothing here imports torch, and nothing is downloaded.
"""

import re
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from fedmem.config import ConfigError, model_folder
from fedmem.model_config import context_tokens, read_config
from fedmem.recipes import RECIPES, WHEELS

__all__ = ["KNOWN", "Size", "size_of"]


@dataclass(frozen=True)
class Size:
    """Parameters, layers, hidden units, units of a layer's keys, vocabulary and context in tokens (None: not known)."""

    parameters: int
    layers: int
    hidden: int
    keys: int
    vocabulary: int
    context: int | None = None


KNOWN = {  # as their authors publish them
    "Qwen/Qwen2.5-0.5B": Size(494_032_768, 24, 896, 128, 151_936, 32_768),
    "Qwen/Qwen2.5-1.5B": Size(1_543_714_304, 28, 1536, 256, 151_936, 131_072),
    "Qwen/Qwen2.5-3B": Size(3_085_938_688, 36, 2048, 256, 151_936, 32_768),
    "meta-llama/Llama-3.2-1B": Size(1_235_814_400, 16, 2048, 512, 128_256, 131_072),
    "meta-llama/Llama-3.2-3B": Size(3_212_749_824, 28, 3072, 1024, 128_256, 131_072),
    "openai-community/gpt2-xl": Size(1_557_611_200, 48, 1600, 1600, 50_257, 1024),
    WHEELS["smollm2-135m"].hub_id: Size(134_515_008, 30, 576, 192, 49_152, 8192),
}


def size_of(name: str) -> Size | None:
    """The size of a model by its name (preset, folder or hub id); None where nothing tells."""
    if name in RECIPES:
        recipe = RECIPES[name]
        table = recipe.context_tokens * recipe.hidden_size if recipe.architecture == "gpt2" else 0
        widths = {"h": recipe.hidden_size, "inner": recipe.intermediate_size}
        gates = 2 if recipe.architecture == "gpt2" else 3
        parameters = _count(recipe.layers, recipe.vocabulary, gates=gates, tied=True, **widths) + table
        width = recipe.hidden_size
        return Size(parameters, recipe.layers, width, width, recipe.vocabulary, recipe.context_tokens)
    hub_id = WHEELS[name].hub_id if name in WHEELS else name
    if hub_id in KNOWN:
        return KNOWN[hub_id]
    try:
        config, folder = read_config(name), model_folder(name)
        if config is not None:
            return _configured(config, _saved(folder) if folder else None)
    except (ConfigError, AttributeError, TypeError, ValueError):
        return None  # no configuration, or values in it that are no numbers
    stated = re.search(r"(?<![\w.])(\d+(?:\.\d+)?)([bm])(?![a-z])", name.lower().replace("-", " ").replace("_", " "))
    if stated is None:
        return None
    parameters = int(float(stated[1]) * {"b": 10**9, "m": 10**6}[stated[2]])
    # layers and width of a usual shape: 12 · layers · hidden² parameters, hidden = 64 · layers
    layers = max(2, round((parameters / (12 * 64 * 64)) ** (1 / 3)))
    return Size(parameters, layers, 64 * layers, 16 * layers, 130_000)


def _configured(config: dict[str, Any], parameters: int | None) -> Size:
    """The size that a config.json states; `parameters` where they were counted."""
    text = config.get("text_config") or config
    hidden = int(text.get("hidden_size") or text.get("n_embd") or text.get("d_model") or 1)
    layers = int(text.get("num_hidden_layers") or text.get("n_layer") or text.get("num_layers") or 1)
    inner = int(text.get("intermediate_size") or text.get("n_inner") or 4 * hidden)
    vocabulary = int(text.get("vocab_size") or 1)
    tied = bool(text.get("tie_word_embeddings", True))
    counted = parameters or _count(layers, vocabulary, hidden, inner, 3 if "intermediate_size" in text else 2, tied)
    heads = int(text.get("num_attention_heads") or text.get("n_head") or 1)
    width = int(text.get("head_dim") or hidden // heads)
    keys = width * int(text.get("num_key_value_heads") or heads)
    return Size(counted, layers, hidden, keys, vocabulary, context_tokens(config))


def _count(layers: int, vocabulary: int, h: int, inner: int, gates: int, tied: bool) -> int:
    """Weights of a decoder: embeddings (once where tied), four attention matrices, `gates` of the inner layer."""
    return vocabulary * h * (1 if tied else 2) + layers * (4 * h * h + gates * h * inner)


def _saved(folder: Path) -> int | None:
    """Parameters in a folder's safetensors files, by their headers alone; None where none can be read."""
    total = 0
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, framework="numpy") as arrays:
                total += sum(prod(arrays.get_slice(name).get_shape()) for name in arrays.keys())  # noqa: SIM118
        except (SafetensorError, OSError):
            return None  # loading it will say what is wrong
    return total or None
