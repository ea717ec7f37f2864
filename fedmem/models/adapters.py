"""Low-rank adapters (LoRA, by peft): put on a model, saved, loaded, merged into it.

What is trained is what `requires_grad`: with adapters, their matrices alone. This module does not depend on training,
averaging or decoding.
Source: Hu et al. 2021, "LoRA: Low-Rank Adaptation of Large Language Models", section 4.1: W + (alpha / rank) · B·A,
B zero at the start.
"""

import json
import warnings
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers.pytorch_utils import Conv1D

from fedmem.models.config_files import ModelError


def cast(model, dtype: torch.dtype):
    """Convert all weights of a model to a dtype, in place; return the model.

    Buffers keep their dtype: `to(bfloat16)` would also round the rotary frequencies, which loading in bf16 does not.
    """
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"


def add_adapters(model, config) -> PeftModel:
    """Freeze a model and add new adapters, in place; return it in evaluation mode.

    config: a TrainConfig; reads model (saved as the adapter's base model), lora_rank, lora_alpha, lora_dropout,
    lora_targets, train_seed and precision. The matrices A depend only on train_seed, not on earlier random draws; B is
    0, so the outputs are still those of the base model. Under precision bf16 the frozen weights become bf16; adapters
    are always fp32.

    Raises ModelError when the model already has adapters, or when a target is not one of its linear modules.
    """
    # peft would stack a second set of adapters with no more than a warning
    if hasattr(model, "peft_config"):
        raise ModelError(f"model {config.model!r} has adapters: another layer of them is not allowed. Load it again.")
    lora = LoraConfig(
        task_type="CAUSAL_LM",
        r=config.lora_rank,
        lora_alpha=config.lora_alpha,
        lora_dropout=config.lora_dropout,
        target_modules=_targets(model, config),
        # GPT-2's Conv1D stores its weights transposed, (in, out)
        fan_in_fan_out=any(isinstance(module, Conv1D) for module in model.modules()),
    )
    if config.precision == "bf16":
        cast(model, torch.bfloat16)  # before the adapters are added, so that they stay fp32
    adapted = _wrap(model, lora, config.train_seed)
    adapted.peft_config["default"].base_model_name_or_path = config.model
    return adapted


def save(model: PeftModel, folder: str | Path) -> None:
    """Write the adapters to adapter_config.json and adapter_model.safetensors; equal adapters give equal bytes."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    weights = get_peft_model_state_dict(model, save_embedding_layers=False)
    save_file({name: w.detach().cpu().contiguous() for name, w in weights.items()}, folder / WEIGHTS_FILE)
    settings = model.peft_config["default"].to_dict() | {"inference_mode": True}
    text = json.dumps(settings, indent=2, sort_keys=True, default=sorted)  # sets: their order is not stable
    (folder / CONFIG_FILE).write_text(text + "\n", encoding="utf-8")


def put_on(model, folder: str | Path) -> PeftModel:
    """Add saved adapters to their base model, in place; return it in evaluation mode, with the adapters trainable.

    model: the base model, without adapters. folder: what `save`, or save_pretrained of a peft model, wrote.
    Raises ModelError when the model has adapters, or when a file is missing, unreadable or from another model: the
    saved arrays and the adapter parameters of the model must match one to one.
    """
    folder = Path(folder)
    if hasattr(model, "peft_config"):
        raise ModelError(f"adapter {folder}: the model has adapters. Load the base model again.")
    if missing := [name for name in (CONFIG_FILE, WEIGHTS_FILE) if not (folder / name).is_file()]:
        pickled = " (its adapter_model.bin is a pickle, and nothing is unpickled here)"
        pickled *= (folder / "adapter_model.bin").is_file()
        raise ModelError(
            f"adapter {folder}: cannot be read: no {' and no '.join(missing)} in it{pickled}; give a folder that "
            "`adapters.save`, or save_pretrained of a peft model, wrote"
        )
    try:
        lora = LoraConfig.from_pretrained(str(folder))
        lora.inference_mode, lora.base_model_name_or_path = False, None
        weights = load_file(folder / WEIGHTS_FILE)
    except (OSError, ValueError, TypeError, SafetensorError) as error:
        raise ModelError(
            f"adapter {folder}: cannot be read: {error}; expected a folder that `adapters.save` wrote"
        ) from error
    try:
        adapted = _wrap(model, lora, seed=0)  # any seed: every adapter weight is overwritten below
        places = set(get_peft_model_state_dict(adapted, save_embedding_layers=False))
        # peft loads what matches and ignores the rest, so a wrong adapter would load in part without an error
        if different := places ^ set(weights):
            missing, unknown = sorted(different & places), sorted(different - places)
            raise ValueError(f"missing: {missing[:5]}, unknown: {unknown[:5]}")
        set_peft_model_state_dict(adapted, weights)
    except (RuntimeError, ValueError) as error:
        raise ModelError(f"adapter {folder}: it does not fit the model: {error}") from error
    return adapted


def merge(adapted: PeftModel):
    """Add the adapters into the weights and return the plain model, with all weights trainable."""
    # safe_merge raises when a merged weight is not finite; peft leaves the base weights frozen
    return adapted.merge_and_unload(safe_merge=True).requires_grad_(True).eval()


def _targets(model, config) -> str | list[str]:
    if config.lora_targets == "all-linear":
        return config.lora_targets  # peft's own keyword for all linear layers except the output head
    targets = [config.lora_targets] if isinstance(config.lora_targets, str) else list(config.lora_targets)
    head, embeddings = model.get_output_embeddings(), model.get_input_embeddings()
    # merging an adapter into a tied output head would change the input embeddings as well
    tied = head is not None and head.weight is embeddings.weight
    linear = [
        name
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear | Conv1D) and not (tied and module is head)
    ]
    for target in targets:
        if not any(name == target or name.endswith(f".{target}") for name in linear):
            there = sorted({name.rpartition(".")[2] for name in linear})
            raise ModelError(
                f"lora_targets: got {target!r}; model {config.model!r} has no linear module of that name"
                f"{' (its tied output head cannot have adapters)' if tied else ''}; expected all-linear, or a list "
                f"of: {', '.join(there)}"
            )
    return targets


def _wrap(model, lora: LoraConfig, seed: int) -> PeftModel:
    # peft draws A from the global generator; the fork keeps the caller's random state
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        # two warnings that the caller cannot act on: a deprecated name in transformers, and Conv1D layers
        warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing.*", category=FutureWarning)
        warnings.filterwarnings("ignore", message=".*fan_in_fan_out.*", category=UserWarning)
        torch.manual_seed(seed)
        return get_peft_model(model, lora).eval()
