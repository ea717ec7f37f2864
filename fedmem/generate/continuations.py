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
    """Let the model continue each prompt until the end-of-sequence or end-of-turn token, or max_new_tokens.

    model, tokenizer: a causal language model and its tokenizer.
    prompts: sequences of token ids, as in `split_inputs`; padded on the left and masked.
    decoding: how tokens are chosen.
    max_new_tokens: largest number of new tokens, >= 1, without the prompt.
    seed: seed of the sampling; greedy decoding ignores it.
    batch_size: prompts per batch, >= 1.

    Returns a DataFrame with the index of `prompts` (a list gets 0, 1, …): continuation (string without special tokens,
    spaces unchanged), new_tokens (without the stop token), finished (whether a stop token was generated), decoding (the
    settings in effect). A line depends on the model, `seed`, its prompt and `decoding`; it does not depend on the
    order, and on the batch size only when the model's floats round differently in another batch and the scores of two
    tokens are equal to about 1e-6. Shows a progress bar.

    Raises GenerationError, before any work, when max_new_tokens is below 1 or a prompt and its continuation exceed the
    model's context.
    """
    index = prompts.index if isinstance(prompts, pd.Series) else None
    prompts = [list(prompt) for prompt in prompts]
    _fits(model, prompts, max_new_tokens)
    lines = write(model, tokenizer, prompts, decoding, max_new_tokens, seed, batch_size)
    frame = pd.DataFrame(lines, columns=["continuation", "new_tokens", "finished"], index=index)
    return frame.assign(decoding=str(decoding))


def _fits(model, prompts: list[list[int]], max_new_tokens: int) -> None:
    context = context_tokens(model.config)
    # checked for the longest prompt before any work: beyond its context a model fails, or writes nonsense
    longest = max(map(len, prompts), default=0)
    if max_new_tokens < 1:
        raise GenerationError(f"max_new_tokens: got {max_new_tokens}; expected a whole number ≥ 1")
    if context is not None and longest + max_new_tokens > context:
        raise GenerationError(
            f"the longest prompt has {longest} tokens (template and prefix) and max_new_tokens is {max_new_tokens}, "
            f"but the model's context holds {context}: lower max_new_tokens to at most {max(context - longest, 0)}, or "
            "lower prefix_tokens"
        )
