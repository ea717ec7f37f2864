"""Generates a synthetic corpus: seeded, medical-sounding English in the formats of the four tasks.

Every sentence is a form with slots, and every slot has a list of thirty words or more. A model therefore learns the
grammar quickly, each text is unique, and a run of more than 50 characters hardly ever occurs twice by chance. A row has
a topic: its first sentence, its output and its question use the same words. Half of the sites, findings and treatments
of a group are words of that group alone. No text is copied from any source, and the statements have no meaning.

The module does not depend on clients, splits or models. The public part (for the base model) shares no sentence with
any private corpus of any seed: a digest of the sentence decides to which of the two it belongs.
"""

import random
from collections.abc import Callable
from hashlib import blake2b

import pandas as pd

from fedmem.config.vocabulary import TASKS
from fedmem.config.yaml_files import read
from fedmem.machine.paths import data_file

COLUMNS = ["id", "instruction", "input", "output", "group"]

# Sentences are added until the text reaches a length drawn from this to 4/15 more. The last sentence exceeds it: 60 to
# 90 words.
INPUT_WORDS = 60

_GRAMMAR = read(data_file("synthetic_corpus.yaml"))

WORDS = {slot: words.split() for slot, words in _GRAMMAR["words"].items()}
GROUPS = {group: {slot: words.split() for slot, words in own.items()} for group, own in _GRAMMAR["groups"].items()}
FORMS, LABELS, OUTPUTS = _GRAMMAR["forms"], _GRAMMAR["labels"], _GRAMMAR["outputs"]  # lists of sentence forms
INSTRUCTIONS, QUESTION = _GRAMMAR["instructions"], _GRAMMAR["question"]


def make_corpus(
    task: str,
    n_groups: int,
    rows_per_group: int,
    seed: int,
    repeated_sentences: float = 0.0,
    repeated_texts: float = 0.0,
    input_words: int = INPUT_WORDS,
) -> pd.DataFrame:
    """Make a private corpus: `n_groups` times `rows_per_group` rows of id, instruction, input, output, group.

    task: summarization, dialog, qa or classification.
    n_groups: number of medical groups, 1 to 12, taken in the order of GROUPS.
    rows_per_group: rows of each group, at least 1.
    seed: any integer; it decides all draws.
    repeated_sentences: share of the rows, 0 to 1, in whose input one sentence is replaced by another row's first one.
    repeated_texts: share of the rows, 0 to 1, that are copies of another row except for id and group.
    input_words: words of an input, 10 to 2000; an input has up to a half more (60 to 90 by default).

    Without repetition no two rows share a sentence of input or output. The instruction is the task's; in qa it is the
    row's own question. A row depends on the task, its group, its number in the group and the seed, not on the number
    of other rows. Raises ValueError when an argument is out of its range.
    """
    _check(task, n_groups, rows_per_group, {"sentences": repeated_sentences, "texts": repeated_texts}, input_words)
    taken: set[str] = set()
    # Each row has its own generator, so that it does not depend on the number of rows. A string seeds Random by its
    # SHA-512, which is the same in every process; hash() is not.
    rows = [
        _row(task, group, random.Random(f"{seed} {task} {group} {number}"), _is_private, taken, input_words)
        | {"id": f"{task}-{group}-{number:05d}", "group": group}
        for group in list(GROUPS)[:n_groups]
        for number in range(rows_per_group)
    ]
    _copy(rows, repeated_texts, random.Random(f"{seed} {task} copy"))
    _repeat(rows, repeated_sentences, random.Random(f"{seed} {task} repeat"))  # last: a copy would overwrite it
    return pd.DataFrame(rows, columns=COLUMNS)


def public_texts(n_rows: int, seed: int) -> pd.DataFrame:
    """Make `n_rows` public rows with the columns of `make_corpus`, the four tasks in turn, the groups drawn at random.

    They share no sentence with any row of `make_corpus`, for any pair of seeds.
    """
    draw = random.Random(f"{seed} public")
    taken: set[str] = set()
    rows = []
    for number in range(n_rows):
        group = draw.choice(list(GROUPS))
        row = _row(TASKS[number % len(TASKS)], group, draw, lambda sentence: not _is_private(sentence), taken)
        rows.append(row | {"id": f"public-{number:06d}", "group": group})
    return pd.DataFrame(rows, columns=COLUMNS)


def sentences(text: str) -> list[str]:
    """Split a synthetic text into its sentences. The forms use full stops and question marks only at sentence ends."""
    return [part.strip() for part in text.replace(".", ".\n").replace("?", "?\n").split("\n") if part.strip()]


def _row(
    task: str,
    group: str,
    draw: random.Random,
    allowed: Callable[[str], bool],
    taken: set[str],
    input_words: int = INPUT_WORDS,
) -> dict:
    """Draw one row of sentences that are `allowed` and not in `taken`, and add them to `taken`."""
    # The label is drawn for every task: dropping the draw for the others would change their corpora.
    label = draw.choice(list(LABELS))
    forms = LABELS[label] if task == "classification" else FORMS[task]
    topical = [forms[draw.randrange(len(forms))], *OUTPUTS.get(task, ()), *([QUESTION] if task == "qa" else ())]
    while True:  # redrawn as a whole, because the topical sentences must use the same words
        topic = _words(group, draw)
        first, *rest = [form.format(**topic) for form in topical]
        if all(allowed(sentence) and sentence not in taken for sentence in (first, *rest)):
            break
    body, n_words = [first], draw.randint(input_words, input_words + 4 * input_words // 15)
    while len(" ".join(body).split()) < n_words:
        sentence = draw.choice(forms).format(**_words(group, draw))
        if allowed(sentence) and sentence not in taken and sentence not in body:
            body.append(sentence)
    taken.update(body, rest)
    question = rest.pop() if task == "qa" else INSTRUCTIONS[task]
    return {"instruction": question, "input": " ".join(body), "output": " ".join(rest) or label}


def _words(group: str, draw: random.Random) -> dict[str, str]:
    """Draw a word for every slot; half of the draws for site, finding and treatment take the group's own words."""
    own = GROUPS[group]
    return {slot: draw.choice(own[slot] if slot in own and draw.random() < 0.5 else WORDS[slot]) for slot in WORDS}


def _is_private(sentence: str) -> bool:
    # A digest, because Python's hash() of a string differs from process to process.
    return blake2b(sentence.encode(), digest_size=1).digest()[0] % 2 == 1


def _copy(rows: list[dict], share: float, draw: random.Random) -> None:
    """Turn a share of the rows into copies of rows that are not copies themselves; each keeps its id and group."""
    # at least one row must remain as the original, even with a share of 1
    receivers = set(draw.sample(range(len(rows)), min(round(share * len(rows)), len(rows) - 1)))
    givers = [row for number, row in enumerate(rows) if number not in receivers]
    for number in sorted(receivers):  # the draws below must not depend on the order of a set
        rows[number] |= {key: value for key, value in draw.choice(givers).items() if key not in ("id", "group")}


def _repeat(rows: list[dict], share: float, draw: random.Random) -> None:
    """Replace, in a share of the rows, one sentence after the first by the first sentence of another row."""
    first = [sentences(row["input"])[0] for row in rows]
    for receiver in draw.sample(range(len(rows)), round(share * len(rows))):
        body = sentences(rows[receiver]["input"])
        giver = draw.choice([number for number in range(len(rows)) if number != receiver])
        # from 1: a row's first sentence holds the topic that its output repeats
        body[draw.randrange(1, len(body))] = first[giver]
        rows[receiver]["input"] = " ".join(body)


def _check(task: str, n_groups: int, rows_per_group: int, repeated: dict[str, float], input_words: int) -> None:
    if task not in TASKS:
        raise ValueError(f"task: got {task!r}; expected one of {', '.join(TASKS)}")
    if not 1 <= n_groups <= len(GROUPS):
        raise ValueError(f"n_groups: got {n_groups}; expected 1 to {len(GROUPS)}, the groups of the synthetic corpus")
    if rows_per_group < 1:
        raise ValueError(f"rows_per_group: got {rows_per_group}; expected at least 1")
    for what, share in repeated.items():
        if not 0 <= share <= 1 or (share and n_groups * rows_per_group < 2):
            raise ValueError(f"repeated_{what}: got {share}; expected a share of 0 to 1, with at least 2 rows")
    if not 10 <= input_words <= 2000:
        raise ValueError(f"input_words: got {input_words}; expected 10 to 2000")
