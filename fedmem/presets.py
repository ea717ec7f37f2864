"""The recipe of the tiny base model that ships with the package, and the script that follows it.

`python -m fedmem.presets tiny-qwen2` trains a byte-level BPE tokenizer and a Qwen2 model of about a million parameters
on the public part of the synthetic corpus and writes both, with a manifest, into the package's data folder. The model
comes pretrained because averaging clients that start from random weights forgets everything. It knows nothing of
clients, of private rows, or of what the model is used for.
"""

import argparse
import hashlib
import json
import platform
import random
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path

import pandas as pd
import tokenizers
import torch
from tqdm import tqdm
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

from fedmem.config import DATA
from fedmem.models import encode, pad_batch
from fedmem.synthetic import public_texts

__all__ = ["RECIPES", "Recipe", "build_tokenizer", "corpus_digest", "pretrain", "random_model", "save"]

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
PACKAGES = ("torch", "transformers", "tokenizers", "safetensors")


@dataclass(frozen=True)
class Recipe:
    """All that decides the weights of a preset: sizes in units, tokens and rows; one seed for everything drawn.

    Training has two parts. In the first, `steps` steps, every public row is seen once: the model learns the language.
    In the second the first `rehearsed_rows` of them are seen `rehearsals` times more, until it knows them by heart: a
    model that has learnt texts by heart once does so with others several times faster, which is what a demo of
    memorization on two processor cores needs. Both parts take their rows from the public corpus alone.
    """

    hidden_size: int = 192
    layers: int = 2
    heads: int = 4
    intermediate_size: int = 512
    vocabulary: int = 2000
    context_tokens: int = 1024
    tokenizer_rows: int = 4000
    steps: int = 1200
    rehearsed_rows: int = 240
    rehearsals: int = 24
    rows_per_step: int = 8
    learning_rate: float = 2e-3
    warmup_steps: int = 100
    weight_decay: float = 0.01
    seed: int = 20260101


RECIPES = {"tiny-qwen2": Recipe()}


def build_tokenizer(recipe: Recipe, texts: list[str]):
    """Train a byte-level BPE tokenizer with Qwen2's special tokens and a small ChatML template.

    The end of turn is the end-of-sequence token, the pad token is another one, and there is no begin-of-sequence token.
    """
    core = tokenizers.Tokenizer(tokenizers.models.BPE())
    core.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=recipe.vocabulary,
        special_tokens=[PAD, START, END],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(texts, trainer)
    learnt = json.loads(core.to_str())["model"]
    tokenizer = Qwen2Tokenizer(
        vocab=learnt["vocab"],
        merges=[tuple(pair) for pair in learnt["merges"]],
        unk_token=None,
        bos_token=None,
        eos_token=END,
        pad_token=PAD,
        additional_special_tokens=[START],
        model_max_length=recipe.context_tokens,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def random_model(seed: int = 0, recipe: Recipe | None = None):
    """Return an untrained model of the recipe's sizes (float32, evaluation mode) and its tokenizer."""
    recipe = replace(recipe or RECIPES["tiny-qwen2"], seed=seed)
    rows = public_texts(recipe.tokenizer_rows, recipe.seed).to_dict("records")
    parts = ("user", "input", "instruction", "assistant", "output")  # a row's parts, and the template's two roles
    tokenizer = build_tokenizer(recipe, [row.get(part, part) for row in rows for part in parts])
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=recipe.hidden_size,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        num_key_value_heads=recipe.heads,
        intermediate_size=recipe.intermediate_size,
        max_position_embeddings=recipe.context_tokens,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        return Qwen2ForCausalLM(config).eval(), tokenizer


def pretrain(recipe: Recipe, on_step: Callable[[int, int], None] | None = None):
    """Follow a recipe: return the model, its tokenizer, and a record of the losses per step and the corpus' digest.

    In each part the learning rate rises over `warmup_steps`; in the first it then falls to zero linearly, in the
    second it stays. `on_step(step, n_steps)` is called after each step.
    """
    model, tokenizer = random_model(recipe.seed, recipe)
    rows = public_texts(recipe.steps * recipe.rows_per_step, recipe.seed)
    plan = list(_plan(recipe, encode(tokenizer, rows, recipe.context_tokens).items))
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=recipe.weight_decay)
    model.train()
    losses = []
    for step, (batch, rate) in enumerate(plan):
        optimizer.param_groups[0]["lr"] = rate
        loss = model(**pad_batch(batch)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if on_step:
            on_step(step, len(plan))
    return model.eval(), tokenizer, {"losses": losses, "corpus_sha256": corpus_digest(rows)}


def corpus_digest(rows: pd.DataFrame) -> str:
    """Return the sha256 of a corpus, row by row, as JSON Lines."""
    return hashlib.sha256(rows.to_json(orient="records", lines=True).encode()).hexdigest()


def save(folder: Path, recipe: Recipe, model, tokenizer, record: dict) -> None:
    """Write a preset's folder: bf16 safetensors, configuration, tokenizer, and `manifest.json` with the recipe."""
    folder.mkdir(parents=True, exist_ok=True)
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    manifest = {
        "recipe": asdict(recipe),
        "parameters": model.num_parameters(),
        "corpus": "fedmem.synthetic.public_texts",
        "corpus_sha256": record["corpus_sha256"],
        "loss_per_token": {
            "rows seen once, last 100 steps": _mean(record["losses"][: recipe.steps][-100:]),
            "rows rehearsed, last 20 steps": _mean(record["losses"][recipe.steps :][-20:]),
        },
        "versions": {"python": platform.python_version()} | {name: version(name) for name in PACKAGES},
    }
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n")


def main(arguments: list[str] | None = None) -> None:
    """Build a preset from its recipe: `python -m fedmem.presets tiny-qwen2 [--folder FOLDER]`."""
    parser = argparse.ArgumentParser(prog="python -m fedmem.presets", description=main.__doc__)
    parser.add_argument("name", choices=sorted(RECIPES))
    parser.add_argument("--folder", type=Path, help="where to write it (default: the package's data folder)")
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(1)  # the same bytes on a machine however many cores it has
    recipe = RECIPES[chosen.name]
    with tqdm(desc=chosen.name, unit="step", mininterval=5) as bar:
        model, tokenizer, record = pretrain(recipe, on_step=partial(_show, bar))
    save(chosen.folder or DATA / chosen.name, recipe, model, tokenizer, record)


def _plan(recipe: Recipe, items: list[dict]) -> Iterator[tuple[list[dict], float]]:
    """Give each step's batch and learning rate."""
    size, warmup = recipe.rows_per_step, recipe.warmup_steps
    for step in range(recipe.steps):
        share = min((step + 1) / warmup, (recipe.steps - step) / max(1, recipe.steps - warmup), 1)
        yield items[step * size : (step + 1) * size], share * recipe.learning_rate
    draw = random.Random(recipe.seed)
    step = 0
    for _ in range(recipe.rehearsals):
        order = draw.sample(range(recipe.rehearsed_rows), recipe.rehearsed_rows)
        for begin in range(0, len(order), size):
            step += 1
            yield [items[row] for row in order[begin : begin + size]], min(step / warmup, 1) * recipe.learning_rate


def _show(bar: tqdm, step: int, n_steps: int) -> None:
    bar.total = n_steps
    bar.update()


def _mean(losses: list[float]) -> float | None:
    return round(sum(losses) / len(losses), 4) if losses else None


if __name__ == "__main__":
    main()
