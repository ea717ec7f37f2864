"""What the model writes after a prefix.

Decoding is exact: only what was asked for acts, whatever the checkpoint's generation_config or the library's defaults
say, and a continuation depends on (decode seed, prompt, decoding) alone.
"""

from collections.abc import Sequence

import pandas as pd

from fedmem.config.stages import GenerateConfig
from fedmem.generate.probes import GenerationError
from fedmem.models.config_files import context_tokens
from fedmem.models.decoding import Decoding
from fedmem.models.text_generation import write


def continue_prefixes(
    model, tokenizer, prompts: Sequence[Sequence[int]], decoding: Decoding, config: GenerateConfig
) -> pd.DataFrame:
    """Let the model continue each prompt until the end-of-sequence or end-of-turn token, or max_new_tokens.

    model, tokenizer: a causal language model and its tokenizer.
    prompts: sequences of token ids, as in `split_inputs`; padded on the left and masked.
    decoding: how tokens are chosen.
    config: max_new_tokens (the largest number of new tokens, without the prompt), decode_seed (of the sampling; greedy
        decoding ignores it), generate_batch (prompts per batch).

    Returns a DataFrame with the index of `prompts` (a list gets 0, 1, …): continuation (string without special tokens,
    spaces unchanged), new_tokens (without the stop token), finished (whether a stop token was generated), decoding (the
    settings in effect). A line depends on the model, decode_seed, its prompt and `decoding`; it does not depend on the
    order, and on the batch size only when the model's floats round differently in another batch and the scores of two
    tokens are equal to about 1e-6. Shows a progress bar.

    Raises GenerationError, before any work, when a prompt and its continuation exceed the model's context.
    """
    index = prompts.index if isinstance(prompts, pd.Series) else None
    prompts = [list(prompt) for prompt in prompts]
    # checked for the longest prompt before any work: beyond its context a model fails, or writes nonsense
    if reason := config.beyond_context(context_tokens(model.config), max(map(len, prompts), default=0)):
        raise GenerationError(reason)
    new, seed, batch = config.max_new_tokens, config.decode_seed, config.generate_batch
    lines = write(model, tokenizer, prompts, decoding, new, seed, batch)
    frame = pd.DataFrame(lines, columns=["continuation", "new_tokens", "finished"], index=index)
    return frame.assign(decoding=str(decoding))
