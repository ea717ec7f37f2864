"""The synthetic corpus: shapes of the tasks, no shared sentences, chance matches rare, public apart from private."""

import re
from collections import Counter

import pandas as pd
import pytest

from fedmem.config.parameter import ConfigError
from fedmem.config.partition import PartitionConfig
from fedmem.config.vocabulary import TASKS
from fedmem.corpus import synthetic
from fedmem.corpus.synthetic import (
    COLUMNS,
    GROUPS,
    INSTRUCTIONS,
    LABELS,
    WORDS,
    make_corpus,
    public_texts,
    sentences,
)


def corpus_sentences(rows: pd.DataFrame) -> list[str]:
    """All sentences of inputs, outputs and questions (fixed instructions and labels are not sentences of a row)."""
    texts = [*rows["input"], *rows["output"], *rows["instruction"]]
    fixed = {*LABELS, *INSTRUCTIONS.values()}
    return [sentence for text in texts if text not in fixed for sentence in sentences(text)]


@pytest.mark.parametrize("task", TASKS)
def test_rows_have_the_shape_of_their_task(task):
    rows = make_corpus(task, n_groups=3, rows_per_group=20, seed=1)
    assert list(rows.columns) == COLUMNS
    assert rows["id"].is_unique
    assert rows.groupby("group", sort=False).size().to_dict() == dict.fromkeys(list(GROUPS)[:3], 20)
    assert rows["input"].str.split().str.len().between(60, 150).all()
    assert rows["input"].map(sentences).str.len().ge(4).all()
    assert rows["instruction"].nunique() == (60 if task == "qa" else 1)
    if task == "classification":
        assert set(rows["output"]) == set(LABELS)
    else:
        assert rows["output"].str.endswith(".").all()


@pytest.mark.parametrize("task", TASKS)
def test_no_two_rows_share_a_sentence(task):
    counts = Counter(corpus_sentences(make_corpus(task, n_groups=12, rows_per_group=50, seed=3)))
    assert len(counts) > 600 * 4
    assert counts.most_common(1)[0][1] == 1


def test_a_row_depends_on_its_seed_and_number_alone():
    small = make_corpus("dialog", n_groups=2, rows_per_group=5, seed=7)
    large = make_corpus("dialog", n_groups=4, rows_per_group=9, seed=7).set_index("id")
    pd.testing.assert_frame_equal(small.set_index("id"), large.loc[small["id"]])
    other = make_corpus("dialog", n_groups=2, rows_per_group=5, seed=8)
    assert not set(small["input"]) & set(other["input"])


@pytest.mark.parametrize("task", TASKS)
def test_the_public_part_shares_no_sentence_with_private_rows(task):
    public = set(corpus_sentences(public_texts(2000, seed=0)))
    for seed in (0, 1):
        private = corpus_sentences(make_corpus(task, n_groups=12, rows_per_group=40, seed=seed))
        assert not public & set(private)
        # by construction: the digest's last bit is 1 for every private sentence and 0 for every public one
        assert all(synthetic._is_private(sentence) for sentence in private)
    assert not any(synthetic._is_private(sentence) for sentence in public)


def test_the_public_part_mixes_tasks_and_groups():
    rows = public_texts(400, seed=5)
    assert rows["id"].is_unique
    assert set(rows["group"]) == set(GROUPS)
    assert rows["output"].isin(LABELS).sum() == 100  # every fourth row is a classification


def long_runs(text: str, min_chars: int = 50) -> set[str]:
    """For each word of a text, the shortest run of whole words from there that is longer than `min_chars`."""
    spans = [match.span() for match in re.finditer(r"\S+", text)]
    ends = [end for _, end in spans]
    runs = ((start, next((end for end in ends if end - start > min_chars), None)) for start, _ in spans)
    return {text[start:end] for start, end in runs if end}


@pytest.mark.parametrize("task", TASKS)
def test_long_common_runs_hardly_ever_come_by_chance(task):
    rows = make_corpus(task, n_groups=3, rows_per_group=250, seed=11)
    owners = Counter(run for text in rows["input"] for run in long_runs(text))
    shared = sum(count * (count - 1) // 2 for count in owners.values())
    # 750 rows make 750 * 749 / 2 = 280,875 pairs; a demo looks at about 4,000 pairs, so 1 pair in 14,000 would still
    # leave less than one chance match there
    assert shared <= 20


def test_groups_differ_in_vocabulary():
    rows = make_corpus("summarization", n_groups=2, rows_per_group=60, seed=2)
    words = {group: set(" ".join(part["input"]).split()) for group, part in rows.groupby("group")}
    assert {"statins", "aorta"} <= words["cardiology"] - words["neurology"]
    own = sum(len(part) for part in GROUPS["cardiology"].values())
    assert len(words["cardiology"] - words["neurology"]) >= own  # its 36 own words, some with a stop or comma


def test_every_slot_has_enough_words():
    every = [word for own in GROUPS.values() for part in own.values() for word in part]
    assert len(set(every)) == len(every) == 12 * 36
    for slot, words in WORDS.items():
        assert len(set(words)) == len(words), slot
        assert len(words) >= (24 if slot in ("site", "finding", "treatment") else 30), slot  # 24 shared + 12 own


def test_sentences_repeat_where_asked():
    plain = make_corpus("qa", n_groups=2, rows_per_group=20, seed=4)
    repeated = make_corpus("qa", n_groups=2, rows_per_group=20, seed=4, repeated_sentences=0.25)
    changed = plain["input"] != repeated["input"]
    assert changed.sum() == 10  # 0.25 * 40
    originals = {sentence: number for number, text in enumerate(plain["input"]) for sentence in sentences(text)}
    for number in changed[changed].index:
        new = set(sentences(repeated["input"][number])) - set(sentences(plain["input"][number]))
        assert len(new) == 1
        assert originals[new.pop()] != number


def test_texts_repeat_where_asked():
    plain = make_corpus("qa", n_groups=2, rows_per_group=20, seed=4)
    copied = make_corpus("qa", n_groups=2, rows_per_group=20, seed=4, repeated_texts=0.25)
    changed = plain["input"] != copied["input"]
    assert changed.sum() == 10  # 0.25 * 40
    assert copied["input"].nunique() == 30
    assert copied[["id", "group"]].equals(plain[["id", "group"]])
    whole = plain.set_index("input")[["instruction", "output"]]
    assert copied.set_index("input")[["instruction", "output"]].equals(whole.loc[copied["input"]])


@pytest.mark.parametrize("task", TASKS)
def test_inputs_are_as_long_as_asked(task):
    words = make_corpus(task, n_groups=3, rows_per_group=30, seed=0, input_words=105)["input"].str.split().str.len()
    assert words.between(105, 150).all()  # 105 to 105 + 4/15 of it, and a sentence of at most 17 words


def test_a_corpus_for_more_clients_than_groups():
    config = PartitionConfig(partitioner="topic", n_clients=30, train_rows=4, test_rows=1, heldout_rows=4)
    # 30 clients of 4 * 9 rows: 1080 rows in 12 groups
    assert (config.source["n_groups"], config.source["rows_per_group"]) == (len(GROUPS), 90)
    with pytest.raises(ConfigError, match="expected at most that many clients, or partitioner topic"):
        PartitionConfig.create({"n_clients": len(GROUPS) + 1})


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"task": "translation"}, "summarization, dialog, qa, classification"),
        ({"n_groups": 13}, "1 to 12"),
        ({"rows_per_group": 0}, "at least 1"),
        ({"repeated_sentences": 1.5}, "0 to 1"),
        ({"repeated_texts": -0.1}, "repeated_texts: got -0.1; expected a share"),
        ({"input_words": 3}, "10 to 2000"),
    ],
)
def test_wrong_arguments_are_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        make_corpus(**({"task": "qa", "n_groups": 2, "rows_per_group": 2, "seed": 0} | wrong))
