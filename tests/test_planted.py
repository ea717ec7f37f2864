"""Planted truth: continuations with known leaks among real texts, and what the pipeline finds of them.

Three clients of 200 prefixes hold real texts of unlike fields. A harness writes for every prefix a continuation that is
the held-out text of somebody who takes part in nothing, with a leak of a known client put into it or not, at a planted
rate for every pair of clients. Retrieval, detector and counting then run as in the notebooks.
"""

import json
import re

import numpy as np
import pandas as pd
import pytest

from fedmem import detect
from fedmem.analyze import ratios
from fedmem.analyze.counting import Counts
from fedmem.detect.pan.splitting import split_sentences

CLIENTS, PREFIXES = 3, 200
RATES = np.array([[0.30, 0.05, 0.00], [0.10, 0.20, 0.015], [0.00, 0.02, 0.25]])  # prefix client in rows
PREFIX_CHARS = 120


@pytest.fixture(scope="module")
def corpus(shared):
    """Tables of real arXiv abstracts: (rows of the clients, texts of strangers)."""
    lines = (shared / "data" / "summarization.jsonl").read_text(encoding="utf-8").splitlines()
    rows = pd.DataFrame(json.loads(line) for line in lines)
    rows = rows[rows["input"].str.len() > 600].drop_duplicates("input")
    groups = rows["group"].value_counts().sort_index()
    rows = rows.sort_values(["group", "id"], ignore_index=True)
    members = rows.iloc[: CLIENTS * PREFIXES].copy()
    members["client"] = np.arange(len(members)) // PREFIXES
    strangers = rows.iloc[CLIENTS * PREFIXES :]["input"].tolist()
    assert len(strangers) >= CLIENTS * PREFIXES
    assert len(groups) > CLIENTS
    return members, strangers


def plan(rates, seed):
    """planted[j, i, k]: whether prefix i of client j leaks a text of client k; one leak a prefix, exact rates."""
    rng, planted = np.random.default_rng(seed), np.zeros((CLIENTS, PREFIXES, CLIENTS), bool)
    for j, line in enumerate(rates):
        order, start = rng.permutation(PREFIXES), 0
        for k, count in enumerate(np.round(line * PREFIXES).astype(int)):
            planted[j, order[start : start + count], k] = True
            start += count
    return planted


def suffix_of(text):
    return text[text.index(" ", PREFIX_CHARS) :]


def two_sentences(text, rng):
    """Two whole sentences of a suffix, or as many more as make 100 characters; never its broken first one."""
    spans = split_sentences(text)
    start = int(rng.integers(1, len(spans) - 1)) if len(spans) > 2 else 0
    end = next((stop for _, stop in spans[start + 1 :] if stop - spans[start][0] >= 100), len(text))
    return text[spans[start][0] : end]


def reworded(text, rng):
    """Two sentences with every seventh word swapped with its neighbour and every ninth left out."""
    words = two_sentences(text, rng).split()
    for place in range(3, len(words) - 1, 7):
        words[place], words[place + 1] = words[place + 1], words[place]
    return " ".join(word for place, word in enumerate(words) if place % 9 != 5)


def around(stranger, passage):
    """A stranger's sentences with the passage between them."""
    spans = split_sentences(stranger)
    middle = spans[len(spans) // 2][0]
    return f"{stranger[:middle].strip()} {passage.strip()} {stranger[middle:].strip()}".strip()


def write(corpus, planted, leak, seed):
    """Tables (prefixes, suffixes, clients) of continuations with `leak`s as planted; sources are drawn per leak."""
    members, strangers = corpus
    rng = np.random.default_rng(seed)
    suffixes = pd.DataFrame(
        {"suffix_id": "s-" + members["id"], "client": members["client"], "row_id": members["id"], "member": True,
         "suffix": members["input"].map(suffix_of)}
    )  # fmt: skip
    texts = [suffixes.loc[suffixes["client"] == k, "suffix"].tolist() for k in range(CLIENTS)]
    continuations = []
    for number, stranger in enumerate(strangers[: CLIENTS * PREFIXES]):
        sources = np.flatnonzero(planted[number // PREFIXES, number % PREFIXES])
        said = stranger
        for k in sources:
            said = around(said, leak(texts[k][int(rng.integers(PREFIXES))], rng))
        continuations.append(said)
    prefixes = pd.DataFrame(
        {"prefix_id": "p-" + members["id"].to_numpy(), "client": members["client"].to_numpy(),
         "row_id": members["id"].to_numpy(), "continuation": continuations}
    )  # fmt: skip
    return prefixes, suffixes, pd.DataFrame({"client": range(CLIENTS), "n_train": PREFIXES})


def measure(tables):
    """The matches of the pipeline."""
    prefixes, suffixes, _ = tables
    return detect.find_matches(detect.find_candidates(prefixes, suffixes), prefixes, suffixes, progress=False)


@pytest.fixture(scope="module")
def verbatim(corpus):
    planted = plan(RATES, seed=1)
    tables = write(corpus, planted, two_sentences, seed=1)
    return planted, tables, measure(tables)


def test_the_verbatim_matrix_is_the_planted_one(verbatim):
    planted, (prefixes, _, clients), matches = verbatim
    found = ratios.memorization(matches, prefixes, clients, "verbatim")
    np.testing.assert_array_equal(found.matrix, planted.mean(axis=1))  # 60, 10, 0 / 20, 40, 3 / 0, 4, 50 of 200
    np.testing.assert_allclose(found.matrix, RATES)
    assert found.intra == pytest.approx(np.diag(RATES).mean())
    assert found.total == pytest.approx(RATES.sum() / CLIENTS)
    cells = ratios.cells(Counts(matches, prefixes, clients)).query("member and counting == 'verbatim'")
    assert ((cells["low"] <= RATES.ravel()) & (RATES.ravel() <= cells["high"])).all()


def test_every_planted_prefix_is_found_and_no_other(verbatim):
    planted, (prefixes, _, _), matches = verbatim
    hit = matches[matches["kind"] == "verbatim"]
    place = dict(zip(prefixes["prefix_id"], range(len(prefixes)), strict=True))
    found = {(place[p], k) for p, k in zip(hit["prefix_id"], hit["suffix_client"], strict=True)}
    truth = {(j * PREFIXES + i, k) for j, i, k in np.argwhere(planted)}
    assert found == truth


def test_without_plants_nothing_is_verbatim(corpus):
    nothing = np.zeros((CLIENTS, PREFIXES, CLIENTS), bool)
    prefixes, suffixes, clients = write(corpus, nothing, two_sentences, seed=2)
    matches = measure((prefixes, suffixes, clients))
    summary = ratios.summary(Counts(matches, prefixes, clients)).query("counting == 'verbatim'").set_index("metric")
    assert (summary.loc[["mr_intra", "mr_inter", "mr_total"], "value"] == 0).all()
    assert (summary.loc[["mr_intra", "mr_inter", "mr_total"], "high"] > 0).all()


def test_with_shuffled_labels_intra_and_inter_agree(verbatim):
    _, (prefixes, _, clients), matches = verbatim
    rng = np.random.default_rng(3)
    labels = pd.Series(rng.permutation(prefixes["client"].to_numpy()), index=prefixes["prefix_id"])
    shuffled = prefixes.assign(client=labels.to_numpy())
    moved = matches.assign(prefix_client=labels.loc[matches["prefix_id"]].to_numpy())
    summary = ratios.summary(Counts(moved, shuffled, clients)).query("counting == 'verbatim'").set_index("metric")
    intra, inter = summary.loc["mr_intra"], summary.loc["mr_inter"]
    assert intra["low"] <= inter["high"]
    assert inter["low"] <= intra["high"]
    before = ratios.memorization(matches, prefixes, clients, "verbatim")
    assert before.intra > 5 * before.inter  # it was the labels


def test_lightly_reworded_leaks_are_found(corpus, record_property):
    planted = plan(RATES, seed=4)
    prefixes, suffixes, clients = write(corpus, planted, reworded, seed=4)
    matches = measure((prefixes, suffixes, clients))
    found = set(zip(matches["prefix_id"], matches["suffix_client"], strict=True))
    truth = {(prefixes["prefix_id"][j * PREFIXES + i], k) for j, i, k in np.argwhere(planted)}
    recall = len(found & truth) / len(truth)
    record_property("recall of reworded leaks", round(recall, 3))
    record_property("false positives, share of other cells", round(len(found - truth) / (planted.size - len(truth)), 4))
    assert recall >= 0.9
    assert len(found - truth) <= 0.02 * planted.size
    assert (matches["kind"] == "paraphrase").any()  # not all of them by a run that stayed whole


LENGTHS = (20, 35, 50, 60, 75, 100, 150, 200, 300)


def piece(chars):
    def cut(text, rng):
        """About so many characters from a word's beginning: whole words, just above the length."""
        words = [match.start() for match in re.finditer(r"(?<=\s)\w", text[: len(text) - chars - 30])]
        start = words[int(rng.integers(len(words)))]
        end = re.compile(r"\b(?=\W|$)").search(text, start + chars + 1).start()
        return text[start:end]

    return cut


def test_recall_by_copied_length(corpus, record_property):
    """Copies from within sentences. Below the minimum none is verbatim; above it the detector first needs a case, a
    whole sentence that is alike, so that it takes 150 characters until nearly all are found: a lower bound on leaks."""
    recall = {}
    for chars in LENGTHS:
        planted = plan(np.eye(CLIENTS) * 0.25, seed=chars)
        prefixes, suffixes, clients = write(corpus, planted, piece(chars), seed=chars)
        leaking = prefixes[planted.any(axis=2).ravel()]  # only these are looked up
        matches = measure((leaking, suffixes, clients)).query("kind == 'verbatim'")
        own = matches[matches["prefix_client"] == matches["suffix_client"]]
        recall[chars] = own["prefix_id"].nunique() / len(leaking)
        record_property(f"recall of {chars} copied characters", round(recall[chars], 3))
    assert recall[20] == recall[35] == 0
    assert list(recall.values()) == sorted(recall.values())
    assert 0 < recall[60] < recall[100]
    assert recall[100] >= 0.5
    assert all(recall[chars] >= 0.9 for chars in (150, 200, 300))
