"""Retrieval against Lucene's own answers, and for texts that nobody expects."""

import json
import math
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fedmem.retrieval import bm25, open_engine
from fedmem.retrieval.bm25 import BM25Index
from fedmem.retrieval.index import Index
from fedmem.retrieval.tokens import _lower, _unicode_words, query_terms, stop_words, tokens

PUBLIC = Path(__file__).parent / "data" / "lucene_bm25.json"
any_text = st.text(st.characters(exclude_categories=()), max_size=60)  # lone surrogates included
words = st.lists(st.sampled_from(["fever", "cough", "lung", "the", "of", "’", "İ", "肺", "_"]), max_size=8).map(
    " ".join
)


def golden_agrees(path):
    golden = json.loads(path.read_text("utf-8"))
    found = BM25Index.build(golden["docs"]).search(golden["queries"], top_n=10)
    assert len(found) == len(golden["top10"]) > 0
    for hits, expected in zip(found, golden["top10"], strict=True):
        assert [row for row, _ in hits] == [row for row, _ in expected]
        # the file gives five decimals: 5e-6 is its rounding
        assert [score for _, score in hits] == pytest.approx([score for _, score in expected], rel=1e-6, abs=6e-6)
    assert {row: tokens(golden["docs"][int(row)]) for row in golden["tokens"]} == golden["tokens"]


def test_ranking_scores_and_tokens_are_lucenes_on_english(shared):
    golden_agrees(shared / "data" / "lucene_bm25.json")


def test_ranking_scores_and_tokens_are_lucenes_on_the_public_set():
    golden_agrees(PUBLIC)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Don't stop; it’s 3.14 or 1,000.", ["don't", "stop", "it’s", "3.14", "or", "1,000"]),
        ("node.js v2.2 a_b __x__ _ e-mail", ["node.js", "v2.2", "a_b", "__x__", "e", "mail"]),
        ("ratio:high 10:30 a.1 1.a a,b", ["ratio:high", "10", "30", "a", "1", "1", "a", "a", "b"]),
        ("ΑΣ İstanbul ÄRZTE", ["ασ", "istanbul", "ärzte"]),  # code point by code point: no final ς, no dotted i
        ("肺炎 ひら カタカナ 한국어 ภาษาไทย", ["肺", "炎", "ひ", "ら", "カタカナ", "한국어", "ภาษาไทย"]),
        ("שי\"ר ג' Aspirin® ™", ['שי"ר', "ג'", "aspirin", "®", "™"]),
        ("e\u0301te\u0301 x\u200dy \ud800", ["e\u0301te\u0301", "x\u200dy"]),
        ("👩\u200d👩\u200d👧👍🏽 🇩🇪🇫🇷", ["👩\u200d👩\u200d👧", "👍🏽", "🇩🇪", "🇫🇷"]),
        ("", []),
        (" \n.,!", []),
    ],
)
def test_tokens(text, expected):
    assert tokens(text) == expected


def test_long_tokens_are_split_at_255_units():
    assert [len(token) for token in tokens("a" * 600)] == [255, 255, 90]
    assert [len(token) for token in tokens("é" * 300)] == [255, 45]
    assert [len(token) for token in tokens("𝐀" * 200)] == [127, 73]  # two units each: 127 fit, 255 being odd
    # the window ends before the letter that would have joined over the full stop
    assert [len(token) for token in tokens("a" * 254 + ".b")] == [254, 1]


@given(st.text(st.characters(codec="ascii"), max_size=400))
@example("_" * 3 + "a" * 300 + ".5")
def test_the_fast_path_for_ascii_is_only_a_fast_path(text):
    assert tokens(text) == [_lower(token) for token in _unicode_words(text)]


def test_scores_by_hand():
    # 2 texts of 1 token, mean length 1: "a" is in 1 of 2, idf = ln(1 + 1.5/1.5) = ln 2;
    # tf part = 1/(1 + 1.2·(0.25 + 0.75·1/1)) = 1/2.2; the query says "a" twice: 2·ln 2/2.2 = 0.63013
    [[(row, score)]] = BM25Index.build(["b", "a"]).search(["a a"], top_n=10)
    assert row == 1
    assert score == pytest.approx(2 * math.log(2) / 2.2, rel=1e-6)


def test_a_term_in_every_text_still_scores_above_zero():
    # ln(1 + 0.5/2.5) = 0.18232, /2.2 = 0.08287 (other BM25s give 0 or less here)
    [hits] = BM25Index.build(["same", "same"]).search(["same"], top_n=5)
    assert [row for row, _ in hits] == [0, 1]
    assert [score for _, score in hits] == pytest.approx([0.08287, 0.08287], abs=1e-5)


def test_texts_without_tokens_count_nowhere():
    alone, padded = BM25Index.build(["a b", "b"]), BM25Index.build(["", "a b", "...", "b"])
    [[(_, expected)]], [[(row, score)]] = alone.search(["a"], 3), padded.search(["a"], 3)
    assert (row, score) == (1, expected)
    assert len(padded) == 4


def test_ties_go_to_the_lowest_row_even_past_the_cut():
    text = "fever of unknown origin in an adult patient with cough"
    index = BM25Index.build([f"{text} {'fever' if row % 3 == 0 else 'lung'}" for row in range(120)])
    [hits] = index.search([text], top_n=50)
    assert [row for row, _ in hits] == [*range(0, 120, 3), *(row for row in range(15) if row % 3)]  # 40 + 10


def test_near_ties_get_lucenes_own_score(monkeypatch, shared):
    golden = json.loads((shared / "data" / "lucene_bm25.json").read_text("utf-8"))
    monkeypatch.setattr(bm25, "_NEAR", 0.5)  # now nearly every hit counts as a near tie
    index = BM25Index.build(golden["docs"])
    for hits, expected in zip(index.search(golden["queries"][:12], 10), golden["top10"][:12], strict=True):
        assert [row for row, _ in hits] == [row for row, _ in expected]
        for (_, score), (_, lucenes) in zip(hits, expected, strict=True):
            # the file's rounding, and the last bit of a single-precision number (0.95 of the scores have it too)
            assert abs(score - lucenes) <= 5.1e-6 + 2.5e-7 * lucenes


def test_many_segments_change_nothing(monkeypatch, shared):
    golden = json.loads((shared / "data" / "lucene_bm25.json").read_text("utf-8"))
    whole = BM25Index.build(golden["docs"])
    monkeypatch.setattr(bm25, "_HEAP_BYTES", 15_000_000)  # tantivy's least
    texts = golden["docs"] * 6
    split = BM25Index.build(texts)
    assert split._searcher.num_segments > 1
    [first] = split.search(golden["queries"][:1], top_n=6)
    best = whole.search(golden["queries"][:1], top_n=1)[0][0][0]
    assert [row for row, _ in first] == [best + 1200 * copy for copy in range(6)]


def test_stop_words_are_dropped_from_queries_alone():
    index = BM25Index.build(["the", "the fever", "cough"])
    assert {row for row, _ in index.search(["the fever"], 3)[0]} == {0, 1}
    assert [row for row, _ in index.search(["the fever"], 3, drop_stop_words=True)[0]] == [1]
    assert index.search(["The, of AND don't", ""], 3, drop_stop_words=True) == [[], []]
    assert query_terms("The fever the Fever", drop_stop_words=True) == {"fever": 2}
    assert len(stop_words()) == 198


@settings(deadline=None, max_examples=60)
@given(
    texts=st.lists(any_text | words, max_size=8),
    queries=st.lists(any_text | words, max_size=4),
    top_n=st.integers(1, 12),
)
def test_any_unicode_is_answered(texts, queries, top_n):
    found = BM25Index.build(texts).search(queries, top_n)
    assert len(found) == len(queries)
    bags = [set(tokens(text)) for text in texts]
    for query, hits in zip(queries, found, strict=True):
        sharing = {row for row, bag in enumerate(bags) if bag & set(tokens(query))}
        assert len(hits) == min(top_n, len(sharing))  # no filler, nothing lost
        assert len({row for row, _ in hits}) == len(hits)
        assert {row for row, _ in hits} <= sharing
        assert all(score > 0 for _, score in hits)
        assert hits == sorted(hits, key=lambda hit: (-hit[1], hit[0]))


def test_prepared_queries_give_the_same():
    index, queries = BM25Index.build(["the fever", "cough of fever", "lung"]), ["the fever", "", "Lung, lung"]
    terms = [query_terms(query, drop_stop_words=True) for query in queries]
    assert index.search_terms(terms, 2) == index.search(queries, 2, drop_stop_words=True) != [[], [], []]


def test_long_queries_keep_their_first_words():
    text = "The " + " ".join(f"w{i}" for i in range(1030)) + " w1 w1"
    terms = query_terms(text, drop_stop_words=True)
    assert list(terms) == [f"w{i}" for i in range(1024)]  # stop words are dropped before the cut
    assert terms["w1"] == 3  # all occurrences count, those behind the cut too
    assert len(query_terms(text, drop_stop_words=True, max_terms=None)) == 1030
    assert list(query_terms("b a b c", max_terms=2).items()) == [("b", 2), ("a", 1)]
    assert [len(hits) for hits in BM25Index.build(["w1023", "w1024"]).search([text], 5, True)] == [1]


def test_the_embedded_engine_gives_indices():
    engine = open_engine("embedded", run="any", shards=5)
    with engine.index(["the fever", "cough"], "0-member") as index:
        assert isinstance(index, Index)
        assert [row for row, _ in index.search(["fever"], 5)[0]] == [0]
    assert engine.check() == {"engine": "embedded", "tantivy": metadata.version("tantivy")}
    # elsewhere the package is not even imported
    code = "import sys, fedmem.retrieval.bm25, fedmem.detect; sys.exit('elasticsearch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_more_hits_than_texts_may_be_asked_for():
    assert len(BM25Index.build(["a", "b a", "c"]).search(["a"], top_n=10**12)[0]) == 2


def test_same_texts_same_answers():
    texts, queries = ["fever cough", "cough", "lung fever fever"] * 5, ["fever cough lung"]
    assert BM25Index.build(texts).search(queries, 9) == BM25Index.build(texts).search(queries, 9)


def test_clear_errors():
    with pytest.raises(TypeError, match=r"texts: got one string.*\[text\]"):
        BM25Index.build("one text")
    with pytest.raises(TypeError, match="texts, row 1: got NoneType"):
        BM25Index.build(["a", None])
    with pytest.raises(TypeError, match="queries: got one string"):
        BM25Index.build(["a"]).search("a", 1)
    with pytest.raises(ValueError, match="top_n: got 0; expected a whole number ≥ 1"):
        BM25Index.build(["a"]).search(["a"], 0)
