"""Decoding: how the next token is chosen, exactly as configured and from random noise that depends on the prompt.

A `Decoding` holds the settings that are in effect. Its processors, passed to transformers' `generate`, leave one token
per row. So `generate` always takes the likeliest token, and its own or a checkpoint's sampling settings have no effect.
This module works on logits and keys; it does not depend on models, tokenizers or texts.
"""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

import numpy as np
import torch
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from fedmem.config.stages import GenerateConfig

STRATEGIES = get_args(GenerateConfig.model_fields["decoding"].annotation)


class DecodingError(ValueError):
    """A decoding setting out of range; the message says which, what it got and what is expected."""


@dataclass(frozen=True)
class Decoding:
    """The settings in effect for choosing the next token; the prefixes table records its `str()`.

    None means off. Greedy takes the likeliest token. All others draw from softmax(logits / temperature): temperature
    from all tokens, top_k from the `top_k` likeliest, top_p from the fewest likeliest whose probability mass reaches
    `top_p` (computed after the division by the temperature, as in transformers). Build it with `Decoding.of` or
    `Decoding.from_config`.
    """

    strategy: str
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    remark: str = ""

    @classmethod
    def of(cls, decoding: str, temperature: float = 1.0, top_k: int | None = None, top_p: float | None = None):
        """Return the settings of a strategy; arguments that have no effect under it are ignored.

        decoding: a name in STRATEGIES. temperature: ≥ 0; 0 is greedy, with a remark in the record.
        top_k: a whole number ≥ 1, for decoding top_k. top_p: 0 < top_p ≤ 1, for decoding top_p.
        Raises DecodingError when a value that has an effect is out of range.
        """
        if decoding not in STRATEGIES:
            raise DecodingError(f"decoding: got {decoding!r}; expected one of {', '.join(STRATEGIES)}")
        if decoding == "greedy":
            return cls("greedy")
        if not _is_number(temperature) or temperature < 0:
            raise DecodingError(f"temperature: got {temperature!r}; expected a number ≥ 0 (0 is greedy)")
        if decoding == "top_k" and (not isinstance(top_k, int) or isinstance(top_k, bool) or top_k < 1):
            raise DecodingError(f"top_k: got {top_k!r}; expected a whole number ≥ 1")
        if decoding == "top_p" and (not _is_number(top_p) or not 0 < top_p <= 1):
            raise DecodingError(f"top_p: got {top_p!r}; expected a number in (0, 1]")
        # a draw would divide by 0; the limit of softmax(logits / t) is the likeliest token
        if temperature == 0:
            return cls("greedy", remark=f"{decoding} at temperature 0")
        kept = {"top_k": top_k} if decoding == "top_k" else {"top_p": float(top_p)} if decoding == "top_p" else {}
        return cls(decoding, float(temperature), **kept)

    @classmethod
    def from_config(cls, config: GenerateConfig):
        """Return the settings of a generate stage's parameters, as `of` does."""
        return cls.of(config.decoding, config.temperature, config.top_k, config.top_p)

    def __str__(self) -> str:
        settings = {"temperature": self.temperature, "top_k": self.top_k, "top_p": self.top_p}
        shown = [f"{name}={'off' if value is None else value}" for name, value in settings.items()]
        remark = f" ({self.remark})" if self.remark else ""
        return f"{self.strategy}{remark}: {' '.join(shown)} repetition_penalty=off"

    def processors(self, prompts: Sequence[Sequence[int]], seed: int, steps: int, width: int, device=None):
        """Return the LogitsProcessorList that decodes a batch of prompts.

        prompts: the token ids of each row, without padding. seed: the decode seed. steps: the largest number of new
        tokens. width: length of the batch, which is padded on the left, in tokens. device: of the logits; None: CPU.
        Temperature is applied before top_k and top_p, as in transformers.
        """
        if self.strategy == "greedy":
            return LogitsProcessorList()
        warpers: list[LogitsProcessor] = [TemperatureLogitsWarper(self.temperature)]
        if self.top_k is not None:
            warpers.append(TopKLogitsWarper(self.top_k))
        if self.top_p is not None:
            warpers.append(TopPLogitsWarper(self.top_p))
        keys = torch.from_numpy(np.stack([_keys(prompt, seed, steps) for prompt in prompts]))
        return LogitsProcessorList([*warpers, Draw(keys.to(device), width)])


class Draw(LogitsProcessor):
    """Draws each row's next token by the Gumbel-max rule, with noise that belongs to the row, the step and the token.

    argmax(logit + Gumbel noise) is an exact draw from softmax(logits) (Gumbel 1954; Maddison et al. 2014, section 2).
    The noise is the SplitMix64 stream (Steele et al. 2014) of the seed `keys[row, step]`, token i taking its i-th
    number. No generator state is shared, so the result does not depend on batch, order or device. keys: int64 tensor of
    shape (rows, steps). width: length of the padded prompts, in tokens.
    """

    def __init__(self, keys: torch.Tensor, width: int):
        self.keys = keys
        self.width = width

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        step = input_ids.shape[1] - self.width
        # in double, as the noise is: rounding to fp32 would make ties and so bias the draw
        chosen = (scores.double() + gumbel(self.keys[:, step], scores.shape[1])).argmax(dim=-1, keepdim=True)
        # all other tokens at −∞: whatever `generate` does next, it can only take the chosen one
        return torch.full_like(scores, -torch.inf).scatter_(1, chosen, 0.0)


def gumbel(seeds: torch.Tensor, n_tokens: int) -> torch.Tensor:
    """Return standard Gumbel noise, float64 of shape (rows, n_tokens), from the SplitMix64 streams of int64 `seeds`."""
    counter = torch.arange(1, n_tokens + 1, device=seeds.device)
    uniform = (_shifted(splitmix64(seeds[:, None], counter), 12).double() + 0.5) / 2.0**52  # strictly inside (0, 1)
    return -(-uniform.log()).log()


def splitmix64(seeds: torch.Tensor, counter: torch.Tensor) -> torch.Tensor:
    """Return the `counter`-th outputs (from 1) of SplitMix64: 64-bit patterns in int64, which wraps around."""
    z = seeds + counter * -0x61C8864680B583EB  # 0x9E3779B97F4A7C15 as a signed number
    z = (z ^ _shifted(z, 30)) * -0x40A7B892E31B1A47  # 0xBF58476D1CE4E5B9
    z = (z ^ _shifted(z, 27)) * -0x6B2FB644ECCEEE15  # 0x94D049BB133111EB
    return z ^ _shifted(z, 31)


def _shifted(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Shift right and fill with zeros; torch's own shift copies the sign bit."""
    return (values >> bits) & ((1 << (64 - bits)) - 1)


def _keys(prompt: Sequence[int], seed: int, steps: int) -> np.ndarray:
    """Return one 64-bit key per step, from the decode seed and the prompt's ids only; more steps only append keys."""
    digest = hashlib.sha256(f"{seed}|{','.join(map(str, prompt))}".encode()).digest()
    return np.random.Philox(key=int.from_bytes(digest[:16], "little")).random_raw(steps).view(np.int64)


def _is_number(value) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
