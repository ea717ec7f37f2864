"""Builds a tiny base model from its recipe; as a script, it builds the model that ships with the package.

`python -m fedmem.models.presets.pretraining tiny-qwen2` trains a byte-level BPE tokenizer and a model of about a
million parameters on the
public part of the synthetic corpus and writes both, with a manifest, into the package's data folder. A model comes
pretrained because averaging clients that start from random weights forgets everything. This module does not depend on
clients or private rows.
"""

import argparse
import hashlib
import json
import platform
import random
from collections.abc import Iterator
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path

import pandas as pd
import tokenizers
import torch
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, GPT2Tokenizer, PreTrainedTokenizerFast, Qwen2Tokenizer

from fedmem.config.yaml_files import read
from fedmem.corpus.synthetic import public_texts
from fedmem.machine.paths import data_file
from fedmem.models.examples import encode, pad_batch
from fedmem.models.presets.recipes import DATA, RECIPES, Recipe, shipped

FAMILIES = read(data_file("tiny_families.yaml"))
PACKAGES = ("torch", "transformers", "tokenizers", "safetensors")


def build_tokenizer(recipe: Recipe, texts: list[str]):
    """Train a byte-level BPE tokenizer with the special tokens and the chat template (if any) of the recipe's family.

    texts: what the merges are learnt from. The end-of-turn token is the end-of-sequence token. qwen2 has a separate
    padding token and no beginning-of-sequence token.
    """
    family = FAMILIES[recipe.architecture]
    special, roles = family["special_tokens"], family["roles"]
    core = tokenizers.Tokenizer(tokenizers.models.BPE())
    core.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=recipe.vocabulary,
        special_tokens=special,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(texts, trainer)
    settings = roles | {
        "unk_token": None,
        "additional_special_tokens": [token for token in special if token not in roles.values()],
        "model_max_length": recipe.context_tokens,
        "clean_up_tokenization_spaces": False,
    }
    if recipe.architecture == "llama":
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, **settings)
    else:
        # The family's own class, so that the saved folder loads through AutoTokenizer under the name of its family.
        learnt = json.loads(core.to_str())["model"]
        merges = [tuple(pair) for pair in learnt["merges"]]
        own_class = GPT2Tokenizer if recipe.architecture == "gpt2" else Qwen2Tokenizer
        tokenizer = own_class(vocab=learnt["vocab"], merges=merges, **settings)
    tokenizer.chat_template = family["chat_template"]
    return tokenizer


def random_model(seed: int, recipe: Recipe):
    """Return an untrained model of the recipe's sizes (float32, evaluation mode) and its tokenizer."""
    recipe = replace(recipe, seed=seed)
    rows = public_texts(recipe.tokenizer_rows, recipe.seed).to_dict("records")
    parts = ("user", "input", "instruction", "assistant", "output")  # parts of a row, and the two roles of the template
    tokenizer = build_tokenizer(recipe, [row.get(part, part) for row in rows for part in parts])
    with torch.random.fork_rng(devices=[]):  # leaves the caller's random state unchanged
        torch.manual_seed(recipe.seed)
        return AutoModelForCausalLM.from_config(configuration(recipe, tokenizer)).eval(), tokenizer


def configuration(recipe: Recipe, tokenizer):
    """The configuration of the recipe's architecture. GPT-2 has no dropout: a model this small cannot learn with it."""
    settings = {
        "vocab_size": len(tokenizer),
        "tie_word_embeddings": True,  # most parameters of a model this small are its embeddings
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "hidden_size": recipe.hidden_size,
        "num_hidden_layers": recipe.layers,
        "num_attention_heads": recipe.heads,
        "max_position_embeddings": recipe.context_tokens,
    }
    if recipe.architecture == "gpt2":
        settings |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        return AutoConfig.for_model("gpt2", n_inner=recipe.intermediate_size, **settings)
    settings |= {"intermediate_size": recipe.intermediate_size, "num_key_value_heads": recipe.heads}
    return AutoConfig.for_model(recipe.architecture, **settings)


def pretrain(recipe: Recipe, name: str | None = None):
    """Train a model by its recipe. Returns the model, its tokenizer, and {losses: one per step, corpus_sha256}.

    In each part the learning rate rises over `warmup_steps`. Then it falls linearly to zero in the first part and stays
    constant in the second. name: what a progress bar is called; None: no bar.
    """
    model, tokenizer = random_model(recipe.seed, recipe)
    rows = public_texts(recipe.steps * recipe.rows_per_step, recipe.seed)
    plan = list(_plan(recipe, encode(tokenizer, rows, recipe.context_tokens).items))
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=recipe.weight_decay)
    model.train()
    losses = []
    for batch, rate in tqdm(plan, desc=name, unit="step", mininterval=5, disable=name is None):
        optimizer.param_groups[0]["lr"] = rate
        loss = model(**pad_batch(batch)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return model.eval(), tokenizer, {"losses": losses, "corpus_sha256": corpus_digest(rows)}


def corpus_digest(rows: pd.DataFrame) -> str:
    """Return the sha256 of a corpus, row by row, as JSON Lines."""
    return hashlib.sha256(rows.to_json(orient="records", lines=True).encode()).hexdigest()


def save(folder: Path, recipe: Recipe, model, tokenizer, record: dict) -> None:
    """Write a preset's folder: bf16 safetensors, configuration, tokenizer, and `manifest.json` with the recipe.

    folder: where to write; it is made if it is missing.
    recipe: the recipe that the model was trained by.
    model, tokenizer: what `pretrain` returns; the model is converted to bf16 in place.
    record: losses and corpus_sha256, as `pretrain` returns them.
    """
    folder.mkdir(parents=True, exist_ok=True)
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    manifest = {
        "recipe": asdict(recipe),
        "parameters": model.num_parameters(),
        "corpus": "fedmem.corpus.synthetic.public_texts",
        "corpus_sha256": record["corpus_sha256"],
        "loss_per_token": {
            "rows seen once, last 100 steps": _mean(record["losses"][: recipe.steps][-100:]),
            "rows rehearsed, last 20 steps": _mean(record["losses"][recipe.steps :][-20:]),
        },
        "versions": {"python": platform.python_version()} | {name: version(name) for name in PACKAGES},
    }
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n")


def build(name: str, folder: Path) -> None:
    """Train a preset by its recipe and write it into a folder: minutes on one thread, reproducible byte for byte."""
    recipe, threads = RECIPES[name], torch.get_num_threads()
    torch.set_num_threads(1)  # the order of sums depends on the number of threads, and so would the bytes
    try:
        save(folder, recipe, *pretrain(recipe, name))
    finally:
        torch.set_num_threads(threads)


def main(arguments: list[str] | None = None) -> None:
    """Build a preset from its recipe: `python -m fedmem.models.presets.pretraining tiny-qwen2 [--folder FOLDER]`."""
    parser = argparse.ArgumentParser(prog="python -m fedmem.models.presets.pretraining", description=main.__doc__)
    parser.add_argument("name", choices=sorted(RECIPES))
    parser.add_argument("--folder", type=Path, help="where to write it (default: the package's data folder)")
    chosen = parser.parse_args(arguments)
    if not (chosen.folder or shipped(chosen.name)):
        parser.error(f"{chosen.name} does not ship with the package: give a --folder")
    build(chosen.name, chosen.folder or DATA / chosen.name)


def _plan(recipe: Recipe, items: list[dict]) -> Iterator[tuple[list[dict], float]]:
    """Yield each step's batch and learning rate."""
    size, warmup = recipe.rows_per_step, recipe.warmup_steps
    for step in range(recipe.steps):
        share = min((step + 1) / warmup, (recipe.steps - step) / max(1, recipe.steps - warmup), 1)
        yield items[step * size : (step + 1) * size], share * recipe.learning_rate
    draw = random.Random(recipe.seed)
    step = 0  # the second part warms up again: the first one ended at a rate near zero
    for _ in range(recipe.rehearsals):
        order = draw.sample(range(recipe.rehearsed_rows), recipe.rehearsed_rows)
        for begin in range(0, len(order), size):
            step += 1
            yield [items[row] for row in order[begin : begin + size]], min(step / warmup, 1) * recipe.learning_rate


def _mean(losses: list[float]) -> float | None:
    return round(sum(losses) / len(losses), 4) if losses else None


if __name__ == "__main__":
    main()
