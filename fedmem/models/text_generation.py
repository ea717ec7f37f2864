"""Generates text after prompts with a causal language model, using only the requested decoding.

Prompts are lists of token ids. The module does not depend on their purpose or on the use of the text.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from tqdm import tqdm
from transformers import GenerationConfig

from fedmem.models.decoding import Decoding
from fedmem.models.examples import render

REPLACEMENT = "\ufffd"  # a decoder writes it for the bytes of an incomplete character


class Written(NamedTuple):
    """A continuation: its text, its number of tokens without the stop token, and whether it ended with a stop token."""

    text: str
    new_tokens: int
    finished: bool


def write(
    model,
    tokenizer,
    prompts: Sequence[Sequence[int]],
    decoding: Decoding,
    max_new_tokens: int,
    seed: int,
    batch_size: int,
    doing: str = "continue",
    unit: str = "prefix",
) -> list[Written]:
    """Continue each prompt until a stop token; returns one `Written` per prompt, in the order of the prompts.

    model: a causal language model; it generates on its own device and keeps its mode and generation_config.
    tokenizer: the model's; it gives the stop tokens and decodes the text.
    prompts: lists of token ids. They are padded on the left and masked.
    decoding: the strategy with its parameters.
    max_new_tokens: limit of new tokens, ≥ 1; generation ends there or at one of `stop_ids`.
    seed: seeds the draws; each prompt has its own stream.
    batch_size: prompts at a time, ≥ 1.
    doing, unit: name of the progress bar, and of what it counts.

    The text depends on the model, `seed`, the prompt and `decoding`. The order of the prompts has no effect. The batch
    size has one only where two tokens' scores are equal to about 1e-6 and round differently in another batch.
    """
    prompts, stops = [list(prompt) for prompt in prompts], stop_ids(tokenizer)
    # Longest first: little padding, and the batch that needs most memory comes first. Ties by the ids, so that the
    # order of the prompts has no effect.
    order = sorted(range(len(prompts)), key=lambda i: (-len(prompts[i]), prompts[i]))
    written: dict[int, Written] = {}
    with _plain(model), tqdm(total=len(prompts), desc=doing, unit=unit, mininterval=1) as bar:
        for first in range(0, len(order), batch_size):
            places = order[first : first + batch_size]
            batch = [prompts[i] for i in places]
            ids = _generate(model, tokenizer, batch, decoding, max_new_tokens, seed, stops)
            for place, new in zip(places, ids, strict=True):
                written[place] = _ended(tokenizer, prompts[place], new, stops)
            bar.update(len(places))
    return [written[i] for i in range(len(prompts))]


def stop_ids(tokenizer) -> list[int]:
    """The ids that end a text: end of sequence, and the token that the chat template puts after a user's words."""
    example = render(tokenizer, {"input": "a", "instruction": "", "output": "a"})
    after = tokenizer(example.text[example.input_span[1] :], add_special_tokens=False)["input_ids"]
    special = {token for token, added in tokenizer.added_tokens_decoder.items() if added.special}
    end_of_turn = next((token for token in after if token in special), tokenizer.eos_token_id)
    return sorted({tokenizer.eos_token_id, end_of_turn})


def decode(tokenizer, ids: list[int], skip_special_tokens: bool = True) -> str:
    """The text of token ids.

    tokenizer: the model's. ids: token ids. skip_special_tokens: whether to leave special tokens out of the text.
    """
    # clean_up_tokenization_spaces removes spaces before punctuation: the text would differ from the training text
    return tokenizer.decode(ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False)


@contextmanager
def _plain(model) -> Iterator[None]:
    """Put the model in eval mode and remove its generation_config, from which `generate` fills unset parameters."""
    # peft copies the outer model's generation_config to the model that it wraps, and leaves it there
    wrapped = [model, *([model.get_base_model()] if hasattr(model, "get_base_model") else [])]
    kept, training = [part.generation_config for part in wrapped], model.training
    model.generation_config = GenerationConfig()
    model.eval()
    try:
        yield
    finally:
        for part, own in zip(wrapped, kept, strict=True):
            part.generation_config = own
        model.train(training)


@torch.inference_mode()
def _generate(model, tokenizer, batch, decoding: Decoding, steps: int, seed: int, stops: list[int]) -> list[list[int]]:
    """The new ids of each prompt in a batch; after a stop token `generate` fills up with padding."""
    width = max(map(len, batch))
    pad = stops[0] if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    ids = torch.tensor([[pad] * (width - len(prompt)) + prompt for prompt in batch], device=model.device)
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in batch], device=model.device)
    # Any draw is made by the processors, which leave one token; `generate` itself only takes the most likely one.
    config = GenerationConfig(
        max_new_tokens=steps, do_sample=False, num_beams=1, use_cache=True, eos_token_id=stops, pad_token_id=pad
    )
    processors = decoding.processors(batch, seed, steps, width, model.device)
    output = model.generate(input_ids=ids, attention_mask=mask, generation_config=config, logits_processor=processors)
    return output[:, width:].tolist()


def _ended(tokenizer, prompt: list[int], new: list[int], stops: list[int]) -> Written:
    """The continuation that the new ids up to the first stop token give.

    The ids are decoded together with the prompt, because some tokenizers drop a space at the start of a decoded text.
    """
    end = next((n for n, token in enumerate(new) if token in stops), None)
    new = new[:end]
    before, both = decode(tokenizer, prompt), decode(tokenizer, prompt + new)
    text = both[len(before) :] if both.startswith(before) else decode(tokenizer, new)
    if end is None:
        text = text.rstrip(REPLACEMENT)  # the token limit may fall inside a character
    return Written(text, len(new), end is not None)
