"""Copies and boilerplate: against brute force on real text, and by hand."""

import random
import re

import numpy as np
import pandas as pd
import pytest

from fedmem.config.partition import PartitionConfig
from fedmem.config.stages import GenerateConfig
from fedmem.corpus.loading import load_corpus
from fedmem.partition import dealing, duplicates
from fedmem.partition.duplicates import PERMUTATIONS

N_ROWS = 2000


def find(rows, threshold=0.8):
    return duplicates.find(rows.rename(columns={"row_id": "id"}), threshold)


def rows_of(*texts, client=None, split=None):
    n = len(texts)
    return pd.DataFrame(
        {
            "row_id": [f"r{place}" for place in range(n)],
            "client": client or [0] * n,
            "split": split or ["train"] * n,
            "input": texts,
        }
    )


@pytest.fixture(scope="module")
def planted(shared):
    """2,000 real rows of 3 clients; 150 became exact copies (but for case and space), 600 near ones of another."""
    corpus = load_corpus("file", "summarization", path=shared / "data/summarization.jsonl").head(N_ROWS)
    wanted = dealing.quotas({"train": 0.6, "test": 0.1, "heldout": 0.3}, 3)
    rows = dealing.split(dealing.assign(corpus, wanted, PartitionConfig(partitioner="iid")), wanted)
    rng = random.Random(1)
    places = rng.sample(range(N_ROWS), 1500)
    texts = rows["input"].tolist()
    for source, target in zip(places[:750], places[750:], strict=True):
        words = texts[source].split(" ")
        if source in places[:150]:
            texts[target] = "  ".join(words).upper() if rng.random() < 0.5 else "\n".join(words)
            continue
        for place in rng.sample(range(len(words)), min(len(words), rng.randint(1, 9))):
            words[place] = rng.choice(["seldom", "nowhere", "perhaps", "altogether"])
        texts[target] = " ".join(words)
    return rows.assign(input=texts)


@pytest.fixture(scope="module")
def brute(planted):
    """Jaccard similarities of all pairs of rows, computed another way: products of sparse 3-gram counts."""
    from sklearn.feature_extraction.text import CountVectorizer

    grams = CountVectorizer(ngram_range=(3, 3), binary=True, token_pattern=r"\w+", dtype=np.float64)
    sets = grams.fit_transform(planted["input"])
    shared_grams = (sets @ sets.T).toarray()
    size = np.asarray(sets.sum(axis=1)).ravel()
    return shared_grams / (size[:, None] + size[None, :] - shared_grams)


@pytest.fixture(scope="module")
def listed(planted):
    return duplicates.pairs(find(planted), planted)


def places(listed, planted, kind):
    place = dict(zip(planted["row_id"], range(len(planted)), strict=True))
    chosen = listed[listed["kind"] == kind]
    pairs = zip(chosen["row_id"].map(place), chosen["other_id"].map(place), chosen["similarity"], strict=True)
    return {tuple(sorted((one, other))): similarity for one, other, similarity in pairs}


def test_every_exact_copy_is_found_and_nothing_else(planted, listed):
    folded = [re.sub(r"\s+", " ", text).strip().lower() for text in planted["input"]]
    equal = {(i, j) for j in range(N_ROWS) for i in range(j) if folded[i] == folded[j]}
    assert len(equal) >= 150
    assert set(places(listed, planted, "exact")) == equal


def test_near_copies_against_brute_force(planted, listed, brute):
    above = {(int(i), int(j)) for i, j in np.argwhere(np.triu(brute, 1) >= 0.8)}
    found = places(listed, planted, "near")
    exact = set(places(listed, planted, "exact"))
    wanted = above - exact
    assert len(wanted) > 300
    assert len(wanted & set(found)) >= 0.99 * len(wanted)
    assert set(found) <= above
    for pair, similarity in found.items():
        assert similarity == pytest.approx(brute[pair])
        assert similarity >= 0.8


@pytest.mark.parametrize("threshold", [0.6, 0.9, 1.0])
def test_other_thresholds_against_brute_force(planted, brute, threshold):
    found = places(duplicates.pairs(find(planted, threshold), planted), planted, "near")
    above = {(int(i), int(j)) for i, j in np.argwhere(np.triu(brute, 1) >= threshold)}
    exact = {(int(i), int(j)) for i, j in np.argwhere(np.triu(brute, 1) == 1)}
    assert set(found) <= above
    assert len((above - exact) & set(found)) >= 0.99 * len(above - exact)


def test_bands_miss_at_most_one_in_a_thousand():
    for threshold in (0.5, 0.8, 0.95, 1.0):
        bands, rows = duplicates._bands(threshold)
        assert bands * rows <= PERMUTATIONS
        assert (1 - threshold**rows) ** bands <= 1e-3


def test_copies_are_found_within_and_across_clients_and_into_held_out(planted, listed):
    owner = planted.set_index("row_id")
    for name, other in (("row_id", ""), ("other_id", "other_")):
        assert (listed[f"{other}client"].to_numpy() == owner.loc[listed[name], "client"].to_numpy()).all()
        assert (listed[f"{other}split"].to_numpy() == owner.loc[listed[name], "split"].to_numpy()).all()
    table = duplicates.counts(listed)
    assert table["pairs"].sum() == len(listed)
    for kind in ("exact", "near"):
        assert set(table.loc[table["kind"] == kind, "where"]) == {"within a client", "across clients"}
        assert "heldout and train" in set(table.loc[table["kind"] == kind, "splits"])


def test_after_dropping_nothing_is_a_copy_of_anything(planted, brute):
    left = find(planted).drop(planted.rename(columns={"row_id": "id"}))
    kept = planted.reset_index().set_index("row_id").loc[left["id"], "index"].to_numpy()
    inside = brute[np.ix_(kept, kept)]
    assert np.triu(inside, 1).max() < 0.8
    # at least one of each set of copies stays: whoever was dropped is a copy of somebody who was not
    gone = np.setdiff1d(np.arange(N_ROWS), kept)
    assert len(gone) > 300
    assert (brute[np.ix_(gone, kept)].max(axis=1) >= 0.8).all()


def test_similarity_by_hand():
    # a b c d: {abc, bcd}; a b c e: {abc, bce}; one of three. Texts of fewer than three words are alike or not
    rows = rows_of("a b c d", "A  b, c e", "a b", "A b", "b a", "?!", "...")
    table = duplicates.pairs(find(rows, 0.3), rows)
    assert table[["row_id", "other_id", "kind"]].to_numpy().tolist() == [["r2", "r3", "exact"], ["r0", "r1", "near"]]
    assert table["similarity"].tolist() == [1.0, pytest.approx(1 / 3)]


def test_the_threshold_decides():
    # 12 words, 10 runs of 3; the last word differs: 9 of 11 runs are shared, 0.818
    words = "one two three four five six seven eight nine ten eleven twelve"
    rows = rows_of(words, words.replace("twelve", "dozen"), words.upper())
    table = duplicates.pairs(find(rows, 0.81), rows)
    assert table[["row_id", "other_id", "kind"]].values.tolist() == [
        ["r0", "r2", "exact"],
        ["r0", "r1", "near"],
        ["r1", "r2", "near"],
    ]
    assert table["similarity"].tolist() == pytest.approx([1.0, 9 / 11, 9 / 11])
    assert duplicates.pairs(find(rows, 0.82), rows)["kind"].tolist() == ["exact"]


def test_matrix_by_hand():
    # client 0: x x y; client 1: x z; client 2: w
    rows = rows_of("x", "X", "y", " x", "z", "w", client=[0, 0, 0, 1, 1, 2])
    table = duplicates.matrix(duplicates.pairs(find(rows), rows), rows)
    grid = table.pivot(index="client", columns="other", values="rows")
    assert grid.to_numpy().tolist() == [[2, 2, 0], [1, 0, 0], [0, 0, 0]]
    assert table["share"].iloc[0] == pytest.approx(2 / 3)
    assert table["share"].iloc[3] == pytest.approx(1 / 2)


def test_nothing_in_common():
    rows = rows_of("alpha beta gamma delta", "one two three four", client=[0, 1])
    listed = duplicates.pairs(find(rows), rows)
    assert listed.empty
    assert list(listed.columns) == [
        "row_id", "client", "split", "other_id", "other_client", "other_split", "kind", "similarity",
    ]  # fmt: skip
    assert duplicates.matrix(listed, rows)["rows"].tolist() == [0, 0, 0, 0]
    assert duplicates.counts(listed).empty


def test_a_text_with_very_many_copies_is_listed_by_its_first(monkeypatch):
    monkeypatch.setattr(duplicates, "MANY_COPIES", 3)
    rows = rows_of("x", "x", "x", "x", "y", "y")
    listed = duplicates.pairs(find(rows), rows)
    assert listed[["row_id", "other_id"]].values.tolist() == [["r0", "r1"], ["r0", "r2"], ["r0", "r3"], ["r4", "r5"]]


def test_which_copy_stays_does_not_depend_on_the_client():
    rows = rows_of(*[str(n // 2) for n in range(400)], client=[n % 2 for n in range(400)])
    left = find(rows).drop(rows.rename(columns={"row_id": "id"}))
    assert len(left) == 200
    assert 60 < (left["client"] == 0).sum() < 140  # 100 expected, 7 standard deviation


def test_boilerplate_by_hand():
    template = "Hi, thanks for your query to Chat Doctor today"  # 9 words: 2 runs of 8
    texts = [f"{template} {name} is what you need" for name in ("rest", "ice", "tea", "air")]
    texts += [f"my {name} hurts" for name in ("knee", "ear", "hip", "toe")]
    table = duplicates.boilerplate(texts, 0.25)
    assert table.to_dict("list") == {
        "words": ["hi thanks for your query to chat doctor", "thanks for your query to chat doctor today"],
        "rows": [4, 4],
        "share": [0.5, 0.5],
    }
    assert duplicates.boilerplate(texts, 0.5).empty  # more than the share
    # 9 of 14 words; none; all
    part = duplicates.covered(pd.Series([texts[0], texts[4], template]), table)
    assert part.tolist() == [pytest.approx(9 / 14), 0.0, 1.0]


def test_boilerplate_of_one_row_or_none():
    assert duplicates.boilerplate(["one two three four five six seven eight nine"], 0.01).empty
    assert duplicates.boilerplate([], 0.05).empty


def test_boilerplate_against_counting(shared):
    corpus = load_corpus("file", "dialog", path=shared / "data/dialog.jsonl")
    counted: dict[str, int] = {}
    for text in corpus["input"]:
        words = re.findall(r"\w+", text.casefold())
        for run in {" ".join(words[place : place + 8]) for place in range(len(words) - 7)}:
            counted[run] = counted.get(run, 0) + 1
    table = duplicates.boilerplate(corpus["input"], 0.005)
    assert dict(zip(table["words"], table["rows"], strict=True)) == {
        run: rows for run, rows in counted.items() if rows > 0.005 * len(corpus)
    }
    assert len(table) > 0


def test_the_same_texts_give_the_same_bytes_in_any_order(planted):
    small = planted.head(400)
    listed = duplicates.pairs(find(small), small)
    pd.testing.assert_frame_equal(listed, duplicates.pairs(find(small), small))
    turned = small.iloc[::-1]
    again = duplicates.pairs(find(turned), turned)
    assert {frozenset(two) for two in listed[["row_id", "other_id"]].values.tolist()} == {
        frozenset(two) for two in again[["row_id", "other_id"]].values.tolist()
    }


def test_prompts_do_not_come_from_what_rows_share():
    """20 rows with one instruction: no prefix is taken from it, and rows that begin alike are counted (B48)."""
    from fedmem.generate import probes
    from fedmem.models.loading import load_model

    _, tokenizer = load_model("tiny-qwen2", "cpu")
    instruction = "If you are a doctor, please answer the medical questions based on the patient's description. " * 3
    names = [
        f"case {n} of the {n}th ward came at {n} o'clock with a cough and a fever of {n} degrees" for n in range(20)
    ]
    rows = pd.DataFrame(
        {
            "row_id": [str(n) for n in range(20)],
            "client": 0,
            "split": "train",
            "instruction": instruction,
            "input": names,
            "output": [f"Take {n} drops." for n in range(20)],
        }
    )
    texts = probes.split_inputs(rows, tokenizer, GenerateConfig(prefix_tokens=10))
    assert all(text.startswith(prefix) and prefix for text, prefix in zip(texts["input"], texts["prefix"], strict=True))
    assert texts["prefix"].nunique() == 20
    assert probes.lengths(texts)["shared_prefix"].tolist() == [0]
    alike = rows.assign(input="The patient says that since the last visit nothing at all has changed: " + rows["input"])
    table = probes.lengths(probes.split_inputs(alike, tokenizer, GenerateConfig(prefix_tokens=10)))
    assert table["shared_prefix"].tolist() == table["long_enough"].tolist()
    assert table["long_enough"].iloc[0] > 0
