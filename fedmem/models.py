"""Causal language models and their tokenizers, and how one row becomes one training example.

A model's name is a preset shipped with the package, a folder, or a hub id. This module turns a name into a loaded
model and tokenizer, and a row (input, instruction, output) into the text and the token ids that training sees.
It does not know how models are trained, averaged or decoded, nor where a corpus comes from.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from huggingface_hub.errors import StrictDataclassError
from jinja2 import TemplateError
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from fedmem.config import ConfigError, model_folder
from fedmem.model_config import TOKENIZER_FILES, flaw
from fedmem.recipes import PRESETS, digest

__all__ = [
    "Example",
    "Examples",
    "ModelError",
    "cast",
    "encode",
    "load",
    "load_tokenizer",
    "location",
    "pad_batch",
    "render",
    "template_start",
]

IGNORED = -100  # the label that the cross entropy of transformers skips
SENTINEL = "\u2402content\u2403"  # stands for the user's content while the template is taken apart
TEMPLATE_DATE = "1 Jan 2025"  # some templates print today's date: a fixed one keeps the bytes the same from day to day
PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16}


class ModelError(ValueError):
    """A model name, folder or example that cannot be used; the message says what is allowed."""


@dataclass(frozen=True)
class Example:
    """One training example as text, with the character spans of its parts.

    `input_span` covers the measured private text; `response_start` is where the assistant's turn begins (the output
    and the end of turn follow).
    """

    text: str
    input_span: tuple[int, int]
    response_start: int


class Examples(torch.utils.data.Dataset):
    """Encoded rows: item i is a dict of equally long lists `input_ids`, `attention_mask`, `labels`.

    `n_truncated` counts the rows that `max_tokens` cut.
    """

    def __init__(self, items: list[dict[str, list[int]]], n_truncated: int):
        self.items = items
        self.n_truncated = n_truncated

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        return self.items[index]


def location(name: str) -> str:
    """Return where a model lies: a preset's folder, a folder, or a hub id (`owner/name`) as it is.

    A preset that does not ship with the package is made now, unless it is kept under results already. Raises ModelError
    for anything else, and for a folder whose configuration, tokenizer or weights are missing or damaged.
    """
    try:
        folder = model_folder(name)
    except ConfigError as error:
        raise ModelError(str(error)) from None
    if folder is None and name in PRESETS:
        from fedmem import kept  # it makes models with this module

        return str(kept.ready(name)) if digest(name) else kept.reachable(name)
    return name if folder is None else str(_complete_folder(name, folder))


def load(
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
        weights = location(name) if folder is None else str(folder)
        model = _pretrained(name, weights, dtype)
        has_tokenizer = any((Path(weights) / file).is_file() for file in TOKENIZER_FILES)
        return model.to(target).eval(), load_tokenizer(weights if has_tokenizer else name)
    if not (folder / "adapter_config.json").is_file():
        raise ModelError(
            f"checkpoint {folder}: no config.json and no adapter_config.json; give a folder that save_pretrained or "
            "fedmem.adapters.save wrote"
        )
    from fedmem import adapters  # which imports this module

    model = adapters.put_on(_pretrained(name, location(name), torch.float32 if merge else dtype), folder)
    if merge:
        model = cast(adapters.merge(model), dtype)
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


def cast(model, dtype: torch.dtype):
    """Give all weights of a model this dtype, in place; return it.

    Buffers stay: `to(bfloat16)` would round the rotary frequencies, and positions with them, as no loading does.
    """
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


def load_tokenizer(name: str):
    """Load the (fast) tokenizer of a model name; a missing pad token becomes an existing one.

    The vocabulary never grows, so the model's embeddings fit as they are. Decoding never edits spaces.
    """
    where = location(name)
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


def template_start(tokenizer) -> str:
    """Return the text that precedes every row's input: the chat template up to where the user's content begins.

    Without a template it is the begin-of-sequence token's text where the tokenizer sets one, else "". A prompt is this
    followed by a prefix, encoded with `add_special_tokens=False`.
    """
    if tokenizer.chat_template:
        return _chat(tokenizer, [{"role": "user", "content": SENTINEL}]).partition(SENTINEL)[0]
    return tokenizer.bos_token if _adds_bos(tokenizer) else ""


def render(tokenizer, row) -> Example:
    """Return one row (a mapping with input, instruction, output) as the text that training sees.

    User turn: the input, a blank line, the instruction where there is one; assistant turn: the output; end of turn.
    Without a chat template the parts follow one another, a blank line between them, and the end-of-sequence token.
    White space around each part is dropped, as chat templates do. Raises ModelError when a template alters the input.
    """
    given, instruction, output = (_text(row[key]) for key in ("input", "instruction", "output"))
    content = f"{given}\n\n{instruction}" if instruction else given
    start = template_start(tokenizer)
    if tokenizer.chat_template:
        user = [{"role": "user", "content": content}]
        prompt = _chat(tokenizer, user, add_generation_prompt=True)
        text = _chat(tokenizer, [*user, {"role": "assistant", "content": output}])
        response_start = len(prompt) if text.startswith(prompt) else text.rindex(output)
    else:
        prompt = f"{start}{content}\n\n"
        text, response_start = f"{prompt}{output}", len(prompt)
    if not text.startswith(start + content):
        raise ModelError("chat template: it alters the user's content, so what is measured would not be what is learnt")
    if tokenizer.eos_token not in text[response_start:]:
        text += tokenizer.eos_token
    return Example(text, (len(start), len(start) + len(given)), response_start)


def encode(tokenizer, rows, max_tokens: int, loss_on: str = "all") -> Examples:
    """Encode rows (a frame, or a sequence of mappings) as training examples of at most `max_tokens` tokens.

    `loss_on` is all (every token is a label: what is never predicted is not learnt) or response (only the assistant's
    turn). Labels keep each end-of-sequence token; padding does not exist yet (see `pad_batch`). Raises ModelError for
    an unknown `loss_on` and for a row of which no label is left.
    """
    if loss_on not in ("all", "response"):
        raise ModelError(f"loss_on {loss_on!r}: allowed are 'all' and 'response'")
    records: Sequence = rows.to_dict("records") if hasattr(rows, "to_dict") else rows
    items, n_truncated = [], 0
    for number, row in enumerate(records):
        example = render(tokenizer, row)
        encoded = tokenizer(example.text, add_special_tokens=False, return_offsets_mapping=True)
        ids, offsets = encoded["input_ids"][:max_tokens], encoded["offset_mapping"][:max_tokens]
        n_truncated += len(encoded["input_ids"]) > max_tokens
        first = 0 if loss_on == "all" else example.response_start
        labels = [token if begin >= first else IGNORED for token, (begin, _) in zip(ids, offsets, strict=True)]
        if all(label == IGNORED for label in labels[1:]):  # the first token is never predicted
            raise ModelError(
                f"row {number} (counted from 0): {max_tokens} tokens leave nothing of it to learn from with "
                f"loss_on={loss_on!r}; raise max_tokens above {len(encoded['input_ids'])} or take loss_on='all'"
            )
        items.append({"input_ids": ids, "attention_mask": [1] * len(ids), "labels": labels})
    return Examples(items, n_truncated)


def pad_batch(examples: Iterable[Mapping[str, Sequence[int]]]) -> dict[str, torch.Tensor]:
    """Examples of different lengths as one batch: input_ids, labels, attention_mask, each (rows, longest).

    The mask comes from the lengths, never from a token id, and no label is dropped for the id it has: where the
    padding token is the end-of-text token, the real one at a text's end is still learnt. The id that fills the
    input is therefore of no account.
    """
    examples = list(examples)
    shape = len(examples), max(len(example["input_ids"]) for example in examples)
    ids, labels = torch.zeros(shape, dtype=torch.long), torch.full(shape, IGNORED)
    mask = torch.zeros(shape, dtype=torch.long)
    for row, example in enumerate(examples):
        length = len(example["input_ids"])
        ids[row, :length] = torch.as_tensor(example["input_ids"])
        labels[row, :length] = torch.as_tensor(example["labels"])
        mask[row, :length] = 1
    return {"input_ids": ids, "labels": labels, "attention_mask": mask}


def _text(value) -> str:
    return value.strip() if isinstance(value, str) else ""  # a frame's missing instruction is NaN


def _chat(tokenizer, messages, add_generation_prompt: bool = False) -> str:
    try:
        return tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=add_generation_prompt, date_string=TEMPLATE_DATE
        )
    except (TemplateError, TypeError, ValueError) as error:  # its author's raise_exception is a TemplateError too
        where = tokenizer.name_or_path
        file = "chat_template.jinja" if (Path(where) / "chat_template.jinja").is_file() else "tokenizer_config.json"
        roles = ", ".join(message["role"] for message in messages)
        raise ModelError(
            f"model {where!r}: its chat template ({file}) fails for a conversation of {roles} "
            f"({type(error).__name__}: {error}); give a template that takes one user turn and one assistant turn"
        ) from error


def _adds_bos(tokenizer) -> bool:
    return tokenizer.bos_token_id is not None and tokenizer("")["input_ids"][:1] == [tokenizer.bos_token_id]


def _complete_folder(name: str, folder: Path) -> Path:
    if said := flaw(folder):
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
