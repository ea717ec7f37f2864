"""What the model writes after a prefix.

Decoding is exact: only what was asked for acts, whatever the checkpoint's generation_config or the library's defaults
say, and a continuation depends on (decode seed, prompt, decoding) alone.
"""

from collections.abc import Sequence

import pandas as pd

from fedmem.generate.probes import GenerationError
from fedmem.models.config_files import context_tokens
from fedmem.models.decoding import Decoding
from fedmem.models.text_generation import write


def continue_prefixes(
    model,
    tokenizer,
    prompts: Sequence[Sequence[int]],
    decoding: Decoding,
    max_new_tokens: int,
    seed: int,
    batch_size: int,
) -> pd.DataFrame:
    """Let the model continue each prompt (token ids, as `split_inputs` gives them) until it stops.

    It stops at the tokenizer's end-of-sequence or end-of-turn token, or after `max_new_tokens` new tokens (the prompt
    does not count). Prompts are padded on the left and masked. Returns a frame with the index of `prompts` (0 … without
    one): continuation (text; special tokens left out, spaces untouched), new_tokens (without the stopping one),
    finished (whether it stopped by itself), decoding (as it took effect). A line depends on the model, `seed`, its
    prompt and `decoding`: order does not matter at all, and batch size only where the model's floats round otherwise in
    another batch and two tokens are equal to about 1e-6. Shows a progress bar.

    Raises GenerationError before any work when a prompt and its continuation exceed the model's context.
    """
    index = prompts.index if isinstance(prompts, pd.Series) else None
    prompts = [list(prompt) for prompt in prompts]
    _fits(model, prompts, max_new_tokens)
    lines = write(model, tokenizer, prompts, decoding, max_new_tokens, seed, batch_size)
    frame = pd.DataFrame(lines, columns=["continuation", "new_tokens", "finished"], index=index)
    return frame.assign(decoding=str(decoding))


def _fits(model, prompts: list[list[int]], max_new_tokens: int) -> None:
    context = context_tokens(model.config)
    longest = max(map(len, prompts), default=0)
    if max_new_tokens < 1:
        raise GenerationError(f"max_new_tokens {max_new_tokens}: allowed is a whole number ≥ 1")
    if context is not None and longest + max_new_tokens > context:
        raise GenerationError(
            f"the longest prompt has {longest} tokens (template and prefix) and max_new_tokens is {max_new_tokens}, "
            f"but the model's context holds {context}: lower max_new_tokens to at most {max(context - longest, 0)}, or "
            "lower prefix_tokens"
        )
