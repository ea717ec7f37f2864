"""The words that several packages share, each declared once."""

from __future__ import annotations

SCHEMA = {  # the columns of a corpus
    "id": "names the row; unique in the corpus",
    "instruction": "the question or the task in words; may be empty",
    "input": "the private text that is measured; never empty",
    "output": "the answer, title, label or note; may be empty",
    "group": "a natural attribute (topic, speciality, category) that clients can be made of; may be empty",
}

TASKS = ("summarization", "dialog", "qa", "classification")

SPLITS = ("train", "test", "heldout")

COUNTINGS = ("paper", "strict", "verbatim")

KINDS = ("verbatim", "paraphrase_high", "paraphrase_low", "paraphrase", "idea")  # in order of precedence

PARTS = ("intra", "inter", "total")

POOLED = -1  # used as a client's id: all clients together
