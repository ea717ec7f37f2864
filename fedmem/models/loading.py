"""From a model's name to a loaded causal language model and its tokenizer.

A name is a preset, a folder, or a hub id. Nothing is unpickled and no code of a model's author runs. This module does
not depend on how models are trained, averaged or decoded.
"""

from pathlib import Path

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from fedmem.config.parameter import ConfigError
from fedmem.models.config_files import TOKENIZER_FILES, ModelError, model_folder, why_unloadable
from fedmem.models.presets.recipes import PRESETS, digest

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16}


def model_location(name: str) -> str:
    """Return where a model is loaded from: a preset's folder, a folder, or an unchanged hub id (`owner/name`).

    A preset that does not ship with the package is built now, unless it is under results already. Raises ModelError for
    any other name, and for a folder whose configuration, tokenizer or weights are missing or damaged.
    """
    try:
        folder = model_folder(name)
    except ConfigError as error:
        raise ModelError(str(error)) from None
    if folder is None and name in PRESETS:
        from fedmem.models.presets import cache  # imported here because it imports this module

        return str(cache.get_or_build(name)) if digest(name) else cache.hub_id_if_reachable(name)
    if folder is not None and (reason := why_unloadable(folder)):
        raise ModelError(f"model {name!r}: cannot be loaded: {reason}")
    return name if folder is None else str(folder)


def load_model(
    name: str,
    device: str = "auto",
    checkpoint: str | Path | None = None,
    precision: str = "fp32",
    merge: bool = True,
):
    """Load a causal language model in evaluation mode, and its tokenizer. Returns (model, tokenizer).

    name: preset, folder or hub id.
    device: auto (CUDA if available, else CPU), cpu or cuda.
    checkpoint: None: the model's own weights; a folder that `save_pretrained` wrote: its weights, and its tokenizer if
        it has one; a folder of adapters: the model of `name` with these adapters.
    precision: fp32 or bf16, the precision of the weights.
    merge: True merges adapters into the weights (in fp32, then rounded to `precision`); False keeps them separate and
        trainable.
    Nothing is unpickled, and no code of a model's author runs. Raises ModelError when an argument is not valid, when
    the model cannot be loaded, and when its files lack an array.
    """
    target, dtype = _device(device), _dtype(precision)
    folder = None if checkpoint is None else Path(checkpoint)
    if folder is None or (folder / "config.json").is_file():
        weights = model_location(name) if folder is None else str(folder)
        model = _pretrained(name, weights, dtype)
        has_tokenizer = any((Path(weights) / file).is_file() for file in TOKENIZER_FILES)
        return model.to(target).eval(), load_tokenizer(weights if has_tokenizer else name)
    if not (folder / "adapter_config.json").is_file():
        raise ModelError(
            f"checkpoint {folder}: no config.json and no adapter_config.json; give a folder that save_pretrained or "
            "fedmem.models.adapters.save wrote"
        )
    from fedmem.models import adapters  # imported here because it imports this module

    # merged in fp32: the sum would otherwise be computed from weights that are rounded already
    model = adapters.put_on(_pretrained(name, model_location(name), torch.float32 if merge else dtype), folder)
    if merge:
        model = adapters.cast(adapters.merge(model), dtype)
    return model.to(target), load_tokenizer(name)


def _pretrained(name: str, where: str, dtype: torch.dtype):
    logging.disable_progress_bar()  # progress bars would stay in the executed notebook
    try:
        model, found = AutoModelForCausalLM.from_pretrained(
            where, dtype=dtype, use_safetensors=True, trust_remote_code=False, output_loading_info=True
        )
    except (OSError, ValueError, RuntimeError, SafetensorError, StrictDataclassError) as error:
        raise ModelError(f"model {name!r}: cannot be loaded as a causal language model: {error}") from error
    if missing := sorted(found["missing_keys"]):
        raise ModelError(
            f"model {name!r}: its files lack {', '.join(missing[:5])} ({len(missing)} arrays in all), which would stay "
            "random; give a folder with all weights of a causal language model"
        )
    return model


def load_tokenizer(name: str):
    """Load the (fast) tokenizer of a model name; without a pad token, the end-of-sequence token is used for padding.

    The vocabulary does not grow, so the model's embeddings fit unchanged. Decoding does not edit spaces. Raises
    ModelError when the tokenizer cannot be loaded, is not a fast one, or has no end-of-sequence token.
    """
    where = model_location(name)
    try:
        tokenizer = AutoTokenizer.from_pretrained(where, use_fast=True, trust_remote_code=False)
    except Exception as error:  # tokenizers raises Exception itself for some files, KeyError for others
        files = " (tokenizer.json, tokenizer_config.json, as save_pretrained writes them)" * Path(where).is_dir()
        kind = "" if isinstance(error, OSError) else f"{type(error).__name__}: "
        raise ModelError(f"model {name!r}: cannot load its tokenizer{files}: {kind}{error}") from error
    if not tokenizer.is_fast:
        raise ModelError(f"model {name!r}: its tokenizer gives no offsets; a fast tokenizer is needed")
    if tokenizer.eos_token_id is None:
        raise ModelError(f"model {name!r}: its tokenizer has no end-of-sequence token, so no text would ever end")
    tokenizer.clean_up_tokenization_spaces = False
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token  # safe: the attention mask marks padding, not the id
    return tokenizer


def _dtype(precision: str) -> torch.dtype:
    if precision not in PRECISIONS:
        raise ModelError(f"precision: got {precision!r}; expected {' or '.join(map(repr, PRECISIONS))}")
    return PRECISIONS[precision]


def _device(device: str) -> torch.device:
    if device not in ("auto", "cpu", "cuda"):
        raise ModelError(f"device: got {device!r}; expected 'auto', 'cpu' or 'cuda'")
    has_cuda = torch.cuda.is_available()
    if device == "cuda" and not has_cuda:
        raise ModelError("device: got 'cuda', but torch finds no CUDA device on this machine; use 'auto' or 'cpu'")
    return torch.device("cuda" if has_cuda and device != "cpu" else "cpu")


def load_trainable(config):
    """Load the model that a TrainConfig trains, and its tokenizer: the full model, or a frozen one with new adapters.

    config: a TrainConfig; reads model, device, finetuning, precision, and the fields that `add_adapters` reads.
    Raises ModelError when the model cannot be loaded or the adapters cannot be added.
    """
    if config.finetuning == "full":
        return load_model(config.model, config.device)
    from fedmem.models.adapters import add_adapters  # peft takes a second to import, which full models do without

    model, tokenizer = load_model(config.model, config.device, precision=config.precision)
    return add_adapters(model, config), tokenizer


def save_merged(name: str, adapter_folder: str | Path, target_folder: str | Path) -> None:
    """Merge saved adapters into their base model; write it and its tokenizer as a folder for `from_pretrained`.

    name: the base model (preset, hub id or folder), as for `loading.load_model`.
    adapter_folder: what `save` wrote. target_folder: a new or an empty folder; the weights in it are fp32.
    Raises ModelError when `target_folder` is not empty, or when the model or the adapters cannot be loaded.
    """
    target = Path(target_folder)
    if target.exists() and any(target.iterdir()):
        raise ModelError(f"{target}: it is not empty; expected a new or an empty folder")
    model, tokenizer = load_model(name, "cpu", checkpoint=adapter_folder)
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
