"""What a causal language model writes after a prompt, when nothing acts but the decoding that was asked for.

Prompts are lists of token ids. This module does not know what they are prompts for, nor what is done with the text.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from tqdm import tqdm
from transformers import GenerationConfig

from fedmem.models.decoding import Decoding
from fedmem.models.examples import render

REPLACEMENT = "\ufffd"  # what a decoder writes for the bytes of an unfinished character


class Written(NamedTuple):
    """What follows a prompt: its text, its tokens without the stopping one, and whether it stopped by itself."""

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
    """Let the model write after each prompt (token ids) until it stops; one `Written` a prompt, in their order.

    It stops at one of `stop_ids`, or after `max_new_tokens` ≥ 1 new tokens. Prompts are padded on the left and masked.
    What is written depends on the model, `seed`, the prompt and `decoding`: order does not matter at all, and batch
    size only where the model's floats round otherwise in another batch and two tokens are equal to about 1e-6. `doing`
    and `unit` name the progress bar and what it counts.
    """
    prompts, stops = [list(prompt) for prompt in prompts], stop_ids(tokenizer)
    # Longest first: little padding, the largest batch at once; ties by the ids, so that order does not matter.
    order = sorted(range(len(prompts)), key=lambda i: (-len(prompts[i]), prompts[i]))
    written: dict[int, Written] = {}
    with _plain(model), tqdm(total=len(prompts), desc=doing, unit=unit, mininterval=1) as bar:
        for first in range(0, len(order), batch_size):
            places = order[first : first + batch_size]
            batch = [prompts[i] for i in places]
            for place, new in zip(
                places, _generate(model, tokenizer, batch, decoding, max_new_tokens, seed, stops), strict=True
            ):
                written[place] = _ended(tokenizer, prompts[place], new, stops)
            bar.update(len(places))
    return [written[i] for i in range(len(prompts))]


def stop_ids(tokenizer) -> list[int]:
    """Return the ids that end a text: end of sequence, and what the chat template puts after a user's words."""
    example = render(tokenizer, {"input": "a", "instruction": "", "output": "a"})
    after = tokenizer(example.text[example.input_span[1] :], add_special_tokens=False)["input_ids"]
    special = {token for token, added in tokenizer.added_tokens_decoder.items() if added.special}
    end_of_turn = next((token for token in after if token in special), tokenizer.eos_token_id)
    return sorted({tokenizer.eos_token_id, end_of_turn})


def decode(tokenizer, ids: list[int], skip_special_tokens: bool = True) -> str:
    """The text of token ids, its spaces as they are."""
    return tokenizer.decode(ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False)


@contextmanager
def _plain(model) -> Iterator[None]:
    """The model in evaluation mode and without its own generation_config, from which `generate` fills what is unset."""
    # peft hands the outer model's generation_config to the one that it wraps, and leaves it there
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
    """The new ids of each prompt in a batch, padded by whatever `generate` fills up with after a stop."""
    width = max(map(len, batch))
    pad = stops[0] if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    ids = torch.tensor([[pad] * (width - len(prompt)) + prompt for prompt in batch], device=model.device)
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in batch], device=model.device)
    # The draw is ours and deterministic, so `generate` only ever takes the likeliest of what the processors leave.
    config = GenerationConfig(
        max_new_tokens=steps, do_sample=False, num_beams=1, use_cache=True, eos_token_id=stops, pad_token_id=pad
    )
    processors = decoding.processors(batch, seed, steps, width, model.device)
    output = model.generate(input_ids=ids, attention_mask=mask, generation_config=config, logits_processor=processors)
    return output[:, width:].tolist()


def _ended(tokenizer, prompt: list[int], new: list[int], stops: list[int]) -> Written:
    """What the new ids up to the first stopping one say.

    The text is read after the prompt, as some tokenizers drop a space at the start of what they decode.
    """
    end = next((n for n, token in enumerate(new) if token in stops), None)
    new = new[:end]
    before, both = decode(tokenizer, prompt), decode(tokenizer, prompt + new)
    text = both[len(before) :] if both.startswith(before) else decode(tokenizer, new)
    if end is None:
        text = text.rstrip(REPLACEMENT)  # the limit of tokens may have fallen inside a character
    return Written(text, len(new), end is not None)
