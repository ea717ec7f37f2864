"""The words that several packages share, each declared once."""

from __future__ import annotations

TASKS = ("summarization", "dialog", "qa", "classification")

SPLITS = ("train", "test", "heldout")

COUNTINGS = ("paper", "strict", "verbatim")

KINDS = ("verbatim", "paraphrase_high", "paraphrase_low", "paraphrase", "idea")  # in order of precedence

PARTS = ("intra", "inter", "total")

POOLED = -1  # used as a client's id: all clients together
