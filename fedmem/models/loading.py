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
    """Return where a model lies: a preset's folder, a folder, or a hub id (`owner/name`) as it is.

    A preset that does not ship with the package is made now, unless it is kept under results already. Raises ModelError
    for anything else, and for a folder whose configuration, tokenizer or weights are missing or damaged.
    """
    try:
        folder = model_folder(name)
    except ConfigError as error:
        raise ModelError(str(error)) from None
    if folder is None and name in PRESETS:
        from fedmem.models.presets import cache  # it makes models with this module

        return str(cache.get_or_build(name)) if digest(name) else cache.hub_id_if_reachable(name)
    return name if folder is None else str(_complete_folder(name, folder))


def load_model(
    name: str,
    device: str = "auto",
    checkpoint: str | Path | None = None,
    precision: str = "fp32",
    merge: bool = True,
):
    """Load a causal language model in evaluation mode, and its tokenizer.

    `device` is auto (CUDA where there is one), cpu or cuda. `precision`, fp32 or bf16, is that of the weights.
    `checkpoint` is a folder that `save_pretrained` wrote, whose weights are taken (and whose tokenizer, where it has
    one), or one of adapters, which are put on the model of `name`: merged into its weights (in fp32, then rounded to
    `precision`), or, with `merge=False`, left apart and trainable. Nothing is unpickled and no code of a model's author
    runs. Raises ModelError, also when the files lack an array of the model.
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
    from fedmem.models import adapters  # which imports this module

    model = adapters.put_on(_pretrained(name, model_location(name), torch.float32 if merge else dtype), folder)
    if merge:
        model = adapters.cast(adapters.merge(model), dtype)
    return model.to(target), load_tokenizer(name)


def _pretrained(name: str, where: str, dtype: torch.dtype):
    logging.disable_progress_bar()  # bars of loading and saving are noise in an executed notebook
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
    """Load the (fast) tokenizer of a model name; a missing pad token becomes an existing one.

    The vocabulary never grows, so the model's embeddings fit as they are. Decoding never edits spaces.
    """
    where = model_location(name)
    try:
        tokenizer = AutoTokenizer.from_pretrained(where, use_fast=True, trust_remote_code=False)
    except Exception as error:  # tokenizers raises that very class for some files, and KeyError for others
        files = " (tokenizer.json, tokenizer_config.json, as save_pretrained writes them)" * Path(where).is_dir()
        kind = "" if isinstance(error, OSError) else f"{type(error).__name__}: "
        raise ModelError(f"model {name!r}: cannot load its tokenizer{files}: {kind}{error}") from error
    if not tokenizer.is_fast:
        raise ModelError(f"model {name!r}: its tokenizer gives no offsets; a fast tokenizer is needed")
    if tokenizer.eos_token_id is None:
        raise ModelError(f"model {name!r}: its tokenizer has no end-of-sequence token, so no text would ever end")
    tokenizer.clean_up_tokenization_spaces = False
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token  # harmless: padding is told by the attention mask, never by its id
    return tokenizer


def _complete_folder(name: str, folder: Path) -> Path:
    if said := why_unloadable(folder):
        raise ModelError(f"model {name!r}: cannot be loaded: {said}")
    return folder


def _dtype(precision: str) -> torch.dtype:
    if precision not in PRECISIONS:
        raise ModelError(f"precision {precision!r}: allowed are {' and '.join(map(repr, PRECISIONS))}")
    return PRECISIONS[precision]


def _device(device: str) -> torch.device:
    if device not in ("auto", "cpu", "cuda"):
        raise ModelError(f"device {device!r}: allowed are 'auto', 'cpu' and 'cuda'")
    has_cuda = torch.cuda.is_available()
    if device == "cuda" and not has_cuda:
        raise ModelError("device 'cuda': torch sees no CUDA device here; take 'auto' or 'cpu'")
    return torch.device("cuda" if has_cuda and device != "cpu" else "cpu")


def load_trainable(config):
    """The model that a TrainConfig trains, and its tokenizer: whole, or frozen under new adapters.

    config: model, device, finetuning, precision, and what `add_adapters` reads. Raises ModelError.
    """
    if config.finetuning == "full":
        return load_model(config.model, config.device)
    from fedmem.models.adapters import add_adapters  # peft takes a second to import, which full models do without

    model, tokenizer = load_model(config.model, config.device, precision=config.precision)
    return add_adapters(model, config), tokenizer


def save_merged(name: str, adapter_folder: str | Path, target_folder: str | Path) -> None:
    """Write a model with saved adapters merged into it, and its tokenizer, as a folder that `from_pretrained` loads.

    name: the base model, as for `loading.load_model`. The weights are fp32. Raises ModelError when `target_folder`
    holds
    anything, and as `loading.load_model` does.
    """
    target = Path(target_folder)
    if target.exists() and any(target.iterdir()):
        raise ModelError(f"{target}: it is not empty; allowed is a new or an empty folder")
    model, tokenizer = load_model(name, "cpu", checkpoint=adapter_folder)
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
