"""How one row becomes one training example: the text and the token ids that training sees, and batches of them.

A row is a mapping with input, instruction and output. Where it comes from does not matter here.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from jinja2 import TemplateError

from fedmem.models.config_files import ModelError

IGNORED = -100  # the label that the cross-entropy of transformers ignores

SENTINEL = "\u2402content\u2403"  # placeholder for the user's content, to find its place in the template

TEMPLATE_DATE = "1 Jan 2025"  # some templates print today's date; a fixed date keeps results reproducible


@dataclass(frozen=True)
class Example:
    """One training example as text, with the positions of its parts in characters.

    text: the full text. input_span: (start, end) of the measured private text.
    response_start: where the assistant's turn begins (the output and the end of turn follow).
    """

    text: str
    input_span: tuple[int, int]
    response_start: int


class Examples(torch.utils.data.Dataset):
    """Encoded rows: item i is a dict of equally long lists `input_ids`, `attention_mask`, `labels`.

    items: these dicts. n_truncated: the number of rows that `max_tokens` cut.
    """

    def __init__(self, items: list[dict[str, list[int]]], n_truncated: int):
        self.items = items
        self.n_truncated = n_truncated

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        return self.items[index]


def template_start(tokenizer) -> str:
    """Return the text before every row's input: the chat template up to the beginning of the user's content.

    Without a template, this is the text of the begin-of-sequence token if the tokenizer adds one, else "". A prompt is
    this text followed by a prefix, encoded with `add_special_tokens=False`.
    """
    if tokenizer.chat_template:
        return _chat(tokenizer, [{"role": "user", "content": SENTINEL}]).partition(SENTINEL)[0]
    return tokenizer.bos_token if _adds_bos(tokenizer) else ""


def render(tokenizer, row) -> Example:
    """Return one row (a mapping with input, instruction, output) as the text that training uses.

    User turn: the input, a blank line, the instruction if there is one; assistant turn: the output; end of turn.
    Without a chat template, the parts are joined by blank lines, and the end-of-sequence token follows.
    White space around each part is removed, as chat templates do. Raises ModelError when the template fails or alters
    the input.
    """
    given, instruction, output = (_text(row[key]) for key in ("input", "instruction", "output"))
    content = f"{given}\n\n{instruction}" if instruction else given
    start = template_start(tokenizer)
    if tokenizer.chat_template:
        user = [{"role": "user", "content": content}]
        prompt = _chat(tokenizer, user, add_generation_prompt=True)
        text = _chat(tokenizer, [*user, {"role": "assistant", "content": output}])
        # some templates render a finished turn differently from the generation prompt
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
    """Encode rows as training examples.

    tokenizer: a fast tokenizer from `load_tokenizer`.
    rows: a frame, or a sequence of mappings, with input, instruction and output.
    max_tokens: the length in tokens at which an example is cut, ≥ 2.
    loss_on: all (every token is a label; a token without a label is not learnt) or response (only the assistant's
        turn).
    Labels include each end-of-sequence token; padding is added later (see `pad_batch`). Raises ModelError for an
    unknown `loss_on`, and for a row without any label.
    """
    if loss_on not in ("all", "response"):
        raise ModelError(f"loss_on: got {loss_on!r}; expected 'all' or 'response'")
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
                f"row {number} (counted from 0): no label is left after the cut at {max_tokens} tokens with "
                f"loss_on={loss_on!r}; raise max_tokens above {len(encoded['input_ids'])} or set loss_on='all'"
            )
        items.append({"input_ids": ids, "attention_mask": [1] * len(ids), "labels": labels})
    return Examples(items, n_truncated)


def pad_batch(examples: Iterable[Mapping[str, Sequence[int]]]) -> dict[str, torch.Tensor]:
    """Pad examples of different lengths to one batch: input_ids, labels, attention_mask, each (rows × longest).

    The mask is computed from the lengths, never from a token id, and no label is dropped because of its id: if the
    padding token is also the end-of-text token, the real one at the end of a text is still learnt. The id that fills
    the input has therefore no effect.
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
    return value.strip() if isinstance(value, str) else ""  # a missing instruction is NaN in a frame


def _chat(tokenizer, messages, add_generation_prompt: bool = False) -> str:
    try:
        return tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=add_generation_prompt, date_string=TEMPLATE_DATE
        )
    except (TemplateError, TypeError, ValueError) as error:  # a template's own raise_exception is a TemplateError
        where = tokenizer.name_or_path
        file = "chat_template.jinja" if (Path(where) / "chat_template.jinja").is_file() else "tokenizer_config.json"
        roles = ", ".join(message["role"] for message in messages)
        raise ModelError(
            f"model {where!r}: its chat template ({file}) fails for a conversation of {roles} "
            f"({type(error).__name__}: {error}); give a template that accepts one user turn and one assistant turn"
        ) from error


def _adds_bos(tokenizer) -> bool:
    # tried out, because a tokenizer may define the token without adding it
    return tokenizer.bos_token_id is not None and tokenizer("")["input_ids"][:1] == [tokenizer.bos_token_id]
