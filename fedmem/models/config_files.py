"""What a model's name and its files say, without loading the model: folder, context, size, and why it cannot be loaded.

Sizes come from the safetensors headers of a folder, from a preset's recipe, from a table of the hub ids that fedmem's
own studies name, from a config.json in the hub's local cache, or, at last, from a size in the name ("7B"). Planning
asks this before any kernel starts, so nothing here imports torch and nothing is downloaded.
"""

import json
import re
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from fedmem.config.parameter import ConfigError, closest
from fedmem.config.yaml_files import read
from fedmem.machine.paths import data_file
from fedmem.models.presets import recipes
from fedmem.models.presets.recipes import PRESETS, RECIPES, WHEELS


class ModelError(ValueError):
    """A model name, folder or example that cannot be used; the message says what is expected."""


def model_folder(name: str) -> Path | None:
    """Return the folder of a shipped preset or of a local model; None for other presets and for hub ids.

    Raises ConfigError when the name is not a preset, a folder or a hub id.
    """
    # presets first, then folders: a folder owner/name here is meant rather than the hub id that reads alike
    if name in PRESETS:
        return recipes.shipped(name)
    if Path(name).expanduser().is_dir():
        return Path(name).expanduser()
    if re.fullmatch(r"\w[\w.-]*/[\w.-]+", name):
        return None
    raise ConfigError(
        f"model: got {name!r}{closest(name, PRESETS)}; expected a preset ({', '.join(PRESETS)}), an "
        "existing folder, or a hub id of the form owner/name"
    )


# a complete folder has one of them
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model")

CONTEXT = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")  # its key in different model families

SIZES = ("hidden_size", "n_embd", "num_hidden_layers", "n_layer", "num_attention_heads", "n_head", "vocab_size")

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"

PICKLES = ("pytorch_model*.bin", "consolidated*.pth")


def read_config(name: str) -> dict[str, Any] | None:
    """The config.json of a model name (preset, folder or hub id); None when it is not on this machine (yet).

    Raises ConfigError when the name is not valid, and when the file is not a JSON object.
    """
    folder = model_folder(name)
    path = _cached(name) if folder is None else folder / "config.json"
    if path is None or not path.is_file():
        return None
    try:
        return _parsed(path)
    except ValueError as error:
        raise ConfigError(f"model {name!r}: {error}") from None


def why_unloadable(folder: Path) -> str:
    """The reason why the model in a folder cannot be loaded, without loading it; empty when no flaw is found.

    Checks config.json, the presence of a tokenizer, and the headers of the weights.
    """
    if not (folder / "config.json").is_file():
        return "no config.json in its folder; give a folder that save_pretrained wrote"
    try:
        config = _parsed(folder / "config.json")
    except ValueError as error:
        return str(error)
    if reason := _flaw_of_config(config):
        return f"config.json in its folder {reason}: give the one that save_pretrained wrote"
    if not any((folder / file).is_file() for file in TOKENIZER_FILES):
        return (
            f"no tokenizer in its folder; expected one of {', '.join(TOKENIZER_FILES)}: save the tokenizer beside "
            "the model with save_pretrained"
        )
    if "transformers_weights" in config or (folder / "adapter_config.json").is_file():
        return ""  # its weights have other names or are in another place: only loading can check them
    return _flaw_of_weights(folder)


def _flaw_of_config(config: dict[str, Any]) -> str:
    text = config.get("text_config") or config
    if not isinstance(config.get("model_type"), str):
        return "has no model_type"
    if not isinstance(text, dict):
        return f"has text_config = {text!r}, which is not an object"
    wrong = [name for name in (*CONTEXT, *SIZES) if isinstance(text.get(name), str | dict)]
    return f"has {wrong[0]} = {text[wrong[0]]!r}, which is not a whole number" if wrong else ""


def _flaw_of_weights(folder: Path) -> str:
    """What is wrong with the safetensors files that would be loaded; pickled files are never loaded."""
    names = [WEIGHTS]  # transformers prefers the single file to the index, so the index is read only without it
    if not (folder / WEIGHTS).is_file():
        if not (folder / INDEX).is_file():
            return _flaw_without_weights(folder)
        try:
            names = sorted(set(_parsed(folder / INDEX)["weight_map"].values()))
        except (ValueError, LookupError, AttributeError, TypeError):
            return f"{INDEX} in its folder is damaged (it must have a weight_map): copy it again"
    for name in names:
        if not (folder / name).is_file():
            return f"no {name} in its folder, which {INDEX} names: copy it there"
        try:
            with safe_open(folder / name, framework="numpy"):
                pass  # opening reads the header and compares the file's length with it
        except (SafetensorError, OSError) as error:
            return f"{name} in its folder is empty, truncated or not a safetensors file ({error}): copy it again"
    return ""


def _flaw_without_weights(folder: Path) -> str:
    pickled = sorted(file.name for pattern in PICKLES for file in folder.glob(pattern))
    if pickled:
        return (
            f"its weights are pickled ({pickled[0]}), and fedmem unpickles nothing, because a pickle can run any code: "
            "load the model where you trust it and save it with save_pretrained, which writes safetensors"
        )
    return f"no weights in its folder; save_pretrained writes {WEIGHTS}, or {INDEX} and the files it names"


def context_tokens(model_config: Any) -> int | None:
    """The length of a model's context in tokens; None when its configuration sets no limit.

    model_config: the configuration of a loaded model, or the mapping that `read_config` returns.
    Raises ConfigError when the length is not a whole number.
    """
    if not isinstance(model_config, dict):
        model_config = model_config.to_dict() if hasattr(model_config, "to_dict") else vars(model_config)
    # a model that also reads images nests the configuration of its language model
    text = model_config.get("text_config") or model_config
    stated = [name for name in CONTEXT if text.get(name)]
    try:
        return int(text[stated[0]]) if stated else None
    except (ValueError, TypeError):
        raise ConfigError(f"{stated[0]} of the model: got {text[stated[0]]!r}; expected a whole number") from None


def _parsed(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises ValueError, which names the file, when it holds anything else."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # RecursionError: brackets nested too deeply
        raise ValueError(f"{path.name} in its folder is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path.name} in its folder holds {str(found)[:40]}, not a JSON object")
    return found


def _cached(name: str) -> Path | None:
    # imported here because only hub ids need it
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(name, "config.json")
    return Path(found) if isinstance(found, str) else None  # else None, or a marker that the hub lacks the file


@dataclass(frozen=True)
class Size:
    """The size of a model.

    parameters: number of weights. layers: number of decoder layers. hidden: width of the hidden state.
    keys: width of one layer's keys, all heads together. vocabulary: number of token ids.
    context: context length in tokens; None: not known.
    """

    parameters: int
    layers: int
    hidden: int
    keys: int
    vocabulary: int
    context: int | None = None


KNOWN = {hub_id: Size(**size) for hub_id, size in read(data_file("model_sizes.yaml")).items()}


def size_of(name: str) -> Size | None:
    """The size of a model by its name (preset, folder or hub id); None when no source gives it."""
    if name in RECIPES:
        recipe, width = RECIPES[name], RECIPES[name].hidden_size
        # GPT-2 learns an embedding for each position and has no gate in its inner layer; the other recipes have both
        # rotary positions and a gated inner layer
        gates, positions = (2, recipe.context_tokens) if recipe.architecture == "gpt2" else (3, 0)
        matrices = _count(recipe.layers, recipe.vocabulary, width, recipe.intermediate_size, gates, tied=True)
        return Size(matrices + positions * width, recipe.layers, width, width, recipe.vocabulary, recipe.context_tokens)
    hub_id = WHEELS[name].hub_id if name in WHEELS else name
    if hub_id in KNOWN:
        return KNOWN[hub_id]
    try:
        config, folder = read_config(name), model_folder(name)
        if config is not None:
            return _configured(config, _saved(folder) if folder else None)
    except (ConfigError, AttributeError, TypeError, ValueError):
        return None  # no valid configuration, or values that are not numbers
    # finds the "7B" of "Llama-2-7B"; neither "8bit" nor the digits of "v1.5b" match
    stated = re.search(r"(?<![\w.])(\d+(?:\.\d+)?)([bm])(?![a-z])", name.lower().replace("-", " ").replace("_", " "))
    if stated is None:
        return None
    parameters = int(float(stated[1]) * {"b": 10**9, "m": 10**6}[stated[2]])
    # layers and width of a typical shape: 12 · layers · hidden² parameters, hidden = 64 · layers
    layers = max(2, round((parameters / (12 * 64 * 64)) ** (1 / 3)))
    return Size(parameters, layers, 64 * layers, 16 * layers, 130_000)


def _configured(config: dict[str, Any], parameters: int | None) -> Size:
    """The size that a config.json gives; `parameters` is the counted number of weights, or None."""
    text = config.get("text_config") or config
    hidden = int(text.get("hidden_size") or text.get("n_embd") or text.get("d_model") or 1)
    layers = int(text.get("num_hidden_layers") or text.get("n_layer") or text.get("num_layers") or 1)
    # GPT-2 leaves n_inner null, which means four times the width
    inner = int(text.get("intermediate_size") or text.get("n_inner") or 4 * hidden)
    vocabulary = int(text.get("vocab_size") or 1)
    tied = bool(text.get("tie_word_embeddings", True))
    # families that name their inner layer intermediate_size usually gate it: three matrices instead of two
    counted = parameters or _count(layers, vocabulary, hidden, inner, 3 if "intermediate_size" in text else 2, tied)
    heads = int(text.get("num_attention_heads") or text.get("n_head") or 1)
    width = int(text.get("head_dim") or hidden // heads)
    keys = width * int(text.get("num_key_value_heads") or heads)
    return Size(counted, layers, hidden, keys, vocabulary, context_tokens(config))


def _count(layers: int, vocabulary: int, h: int, inner: int, gates: int, tied: bool) -> int:
    """Weights of a decoder: embeddings (once if tied), four attention matrices, `gates` matrices of the inner layer."""
    return vocabulary * h * (1 if tied else 2) + layers * (4 * h * h + gates * h * inner)


def _saved(folder: Path) -> int | None:
    """Parameters in a folder's safetensors files, from their headers alone; None when a file cannot be read."""
    total = 0
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, framework="numpy") as arrays:
                total += sum(prod(arrays.get_slice(name).get_shape()) for name in arrays.keys())  # noqa: SIM118
        except (SafetensorError, OSError):
            return None  # loading the model reports what is wrong
    return total or None
