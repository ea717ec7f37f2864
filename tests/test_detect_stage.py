"""The stage: candidates per client, matches, workers, and what `explain` shows."""

import os
from typing import NamedTuple

import numpy as np
import pandas as pd
import pytest

from fedmem.detect import Alignment, DetectorError, PanDetector, find_candidates, find_matches
from fedmem.detect import matches as detect_matches
from fedmem.detect.candidates import CANDIDATE_COLUMNS
from fedmem.detect.matches import MATCH_COLUMNS, Texts, _blocks, _covered
from fedmem.detect.pan import preparing
from fedmem.detect.pan.explain import explain
from fedmem.detect.pan.preparing import prepare
from fedmem.display.private_text import MASK, side_by_side

SUBJECTS = ["engineers", "painters", "gardeners", "surgeons", "librarians", "mechanics", "pilots", "teachers"]
VERBS = ["repaired", "photographed", "described", "abandoned", "catalogued", "polished", "measured", "borrowed"]
OBJECTS = ["telescopes", "violins", "orchards", "engines", "manuscripts", "bridges", "harbours", "lanterns"]
PLACES = ["Oslo", "Rome", "Lima", "Cairo", "Quito", "Delhi", "Perth", "Tunis"]


def story(seed: int, sentences: int = 6) -> str:
    """Sentences of eight counted words, hardly two alike."""
    draw = np.random.default_rng(seed)
    made = []
    for number in range(sentences):
        a, b, c, d = (draw.choice(words) for words in (SUBJECTS, VERBS, OBJECTS, PLACES))
        made.append(f"Number{draw.integers(10**6)} {a} {b} {draw.integers(10**6)} {c} near {d} item{number}{seed}.")
    return " ".join(made)


@pytest.fixture
def tables() -> tuple[pd.DataFrame, pd.DataFrame]:
    """Three clients, four member suffixes and one held-out each; p0 copies client 1's first, p1 a held-out one."""
    suffixes = [(f"s{client}-{i}", client, i < 4, story(100 * client + i)) for client in range(3) for i in range(5)]
    suffixes = pd.DataFrame(suffixes, columns=["suffix_id", "client", "member", "suffix"])
    texts = suffixes.set_index("suffix_id")["suffix"]
    continuations = [
        "Entirely other words open this. " + texts["s1-0"],
        texts["s2-4"] + " Entirely other words close this.",
        story(999),
        "",
        "the of and",
    ]
    prefixes = pd.DataFrame(
        {"prefix_id": [f"p{i}" for i in range(5)], "client": [0, 1, 2, 0, 1], "continuation": continuations}
    )
    return prefixes, suffixes


def test_candidates_are_ranked_for_each_client_and_held_out_apart(tables):
    prefixes, suffixes = tables
    found = find_candidates(prefixes, suffixes, top_n=2)
    assert list(found.columns) == CANDIDATE_COLUMNS
    # three continuations have words: each gets 2 members and the 1 held-out suffix of every client; the others nothing
    assert found.groupby("prefix_id").size().to_dict() == {"p0": 9, "p1": 9, "p2": 9}
    first = found[found["prefix_id"] == "p0"]
    assert list(zip(first["suffix_client"], first["member"], first["rank"], strict=True)) == [
        (client, member, rank) for client in range(3) for member, rank in ((True, 1), (True, 2), (False, 1))
    ]
    best = first[(first["suffix_client"] == 1) & first["member"]].iloc[0]
    assert (best["suffix_id"], best["rank"], best["prefix_client"]) == ("s1-0", 1, 0)
    owners = suffixes.set_index("suffix_id").loc[found["suffix_id"]]
    assert (owners["client"].to_numpy() == found["suffix_client"].to_numpy()).all()
    assert (owners["member"].to_numpy() == found["member"].to_numpy()).all()


def test_nothing_to_find_gives_empty_tables_with_the_same_columns(tables):
    prefixes, suffixes = tables
    for chosen, others in ((prefixes.iloc[3:], suffixes), (prefixes, suffixes.iloc[:0]), (prefixes.iloc[:0], suffixes)):
        candidates = find_candidates(chosen, others)
        assert list(candidates.columns) == CANDIDATE_COLUMNS
        assert candidates.empty
        matches = find_matches(candidates, prefixes, suffixes, progress=False)
        assert list(matches.columns) == MATCH_COLUMNS
        assert matches.empty


def test_planted_copies_are_the_matches_in_their_cells(tables):
    prefixes, suffixes = tables
    matches = find_matches(find_candidates(prefixes, suffixes), prefixes, suffixes, progress=False)
    assert list(matches.columns) == MATCH_COLUMNS
    rows = matches[["prefix_id", "prefix_client", "suffix_id", "suffix_client", "member", "kind"]].to_numpy().tolist()
    assert rows == [["p0", 0, "s1-0", 1, True, "verbatim"], ["p1", 1, "s2-4", 2, False, "verbatim"]]
    texts = suffixes.set_index("suffix_id")["suffix"]
    first = matches.iloc[0]
    length = len(texts["s1-0"])
    assert first["detections"] == [[0, length, 32, 32 + length]]
    assert first["matched_chars"] == length
    assert first["suffix_share"] == 1.0
    assert first["continuation_share"] == length / (length + 32)
    assert first["identical_sentence"]
    assert np.isnan(first["score"])


def test_a_copy_with_other_spaces_is_verbatim_for_every_suffix_that_holds_it(tables):
    prefixes, suffixes = tables
    text = suffixes.loc[0, "suffix"]
    copies = pd.concat([suffixes, suffixes.iloc[[0]].assign(suffix_id="copy", client=2)], ignore_index=True)
    one = prefixes.iloc[[0]].assign(
        continuation=text.replace(" ", "  \n") + " Something entirely different follows it."
    )
    matches = find_matches(find_candidates(one, copies), one, copies, progress=False)
    assert matches[["suffix_id", "suffix_client", "kind"]].to_numpy().tolist() == [
        ["s0-0", 0, "verbatim"],
        ["copy", 2, "verbatim"],
    ]


def test_matches_survive_parquet(tables, tmp_path):
    prefixes, suffixes = tables
    matches = find_matches(find_candidates(prefixes, suffixes), prefixes, suffixes, progress=False)
    matches.to_parquet(tmp_path / "matches.parquet")
    back = pd.read_parquet(tmp_path / "matches.parquet")
    assert [list(span) for span in back.loc[0, "detections"]] == matches.loc[0, "detections"]
    pd.testing.assert_frame_equal(back.drop(columns="detections"), matches.drop(columns="detections"))


def many(n: int) -> tuple[pd.DataFrame, pd.DataFrame]:
    """n prefixes and n suffixes over four clients; every third continuation carries half of some suffix."""
    suffixes = pd.DataFrame(
        [(f"s{i}", i % 4, i % 5 > 0, story(i)) for i in range(n)], columns=["suffix_id", "client", "member", "suffix"]
    )
    texts = [
        story(10_000 + i, 3) + (" " + suffixes.loc[(7 * i) % n, "suffix"][:250] if i % 3 == 0 else "") for i in range(n)
    ]
    return pd.DataFrame(
        {"prefix_id": [f"p{i}" for i in range(n)], "client": [i % 4 for i in range(n)], "continuation": texts}
    ), suffixes


def test_one_and_four_workers_give_the_same_bytes(tmp_path):
    prefixes, suffixes = many(150)
    candidates = find_candidates(prefixes, suffixes, top_n=3)
    written = []
    for workers in (1, 4):
        matches = find_matches(candidates, prefixes, suffixes, workers=workers, progress=False)
        assert len(matches) >= 50
        matches.to_parquet(tmp_path / f"{workers}.parquet")
        written.append((tmp_path / f"{workers}.parquet").read_bytes())
    assert written[0] == written[1]


def test_each_distinct_text_is_prepared_once(monkeypatch):
    prefixes, suffixes = many(60)
    prefixes = pd.concat([prefixes, prefixes.assign(prefix_id=prefixes["prefix_id"] + "x")], ignore_index=True)
    candidates = find_candidates(prefixes, suffixes)
    prepared = []
    monkeypatch.setattr(preparing, "prepare", lambda text, settings: prepared.append(text) or prepare(text, settings))
    find_matches(candidates, prefixes, suffixes, progress=False)
    assert len(candidates) > 1000
    assert sorted(prepared) == sorted({*prefixes["continuation"], *suffixes["suffix"]})


def die(block):
    os._exit(1)  # as the kernel ends a process that takes too much memory: no exception, no result


def test_a_dying_worker_is_an_error_that_says_what_to_do(monkeypatch):
    prefixes, suffixes = many(150)
    candidates = find_candidates(prefixes, suffixes, top_n=1)
    monkeypatch.setattr(detect_matches, "_work", die)
    with pytest.raises(DetectorError, match="detect_workers"):
        find_matches(candidates, prefixes, suffixes, workers=2, progress=False)


def test_blocks_hold_every_pair_once_and_few_texts(monkeypatch):
    monkeypatch.setattr(detect_matches, "CONTINUATIONS_AT_ONCE", 7)
    monkeypatch.setattr(detect_matches, "SUFFIXES_AT_ONCE", 70)
    draw = np.random.default_rng(0)
    continuations = Texts(draw.integers(0, 40, 3000), np.array([f"c{i}" for i in range(40)], dtype=object))
    suffixes = Texts(draw.integers(0, 500, 3000), np.array([f"s{i}" for i in range(500)], dtype=object))
    blocks = _blocks(continuations, suffixes, workers=1)
    assert sorted(np.concatenate([block.number for block in blocks])) == list(range(3000))
    for block in blocks:
        assert len(block.continuations) <= 7
        assert len(block.suffixes) <= 70
        for c, s, number in zip(block.c, block.s, block.number, strict=True):
            assert (block.continuations[c], block.suffixes[s]) == (continuations.text(number), suffixes.text(number))


def test_small_blocks_do_not_change_matches(monkeypatch):
    prefixes, suffixes = many(60)
    candidates = find_candidates(prefixes, suffixes)
    expected = find_matches(candidates, prefixes, suffixes, progress=False)
    monkeypatch.setattr(detect_matches, "CONTINUATIONS_AT_ONCE", 5)
    monkeypatch.setattr(detect_matches, "SUFFIXES_AT_ONCE", 64)
    shuffled = candidates.sample(frac=1, random_state=1)
    found = find_matches(shuffled, prefixes, suffixes, progress=False)
    keys = ["prefix_id", "suffix_id"]
    pd.testing.assert_frame_equal(
        found.sort_values(keys, ignore_index=True), expected.sort_values(keys, ignore_index=True)
    )


def test_typing_sets_kind_and_score_and_keeps_candidates_without_a_record(monkeypatch):
    """The stage's typing with a scorer that says what it is told; `test_detect_typing` has the real one."""
    prefixes, suffixes = many(30)
    texts = suffixes["suffix"]
    reworded = [
        ". ".join(" ".join(reversed(part.split())) for part in text.rstrip(".").split(". ")) + "." for text in texts
    ]
    prefixes = prefixes.assign(continuation=reworded)
    candidates = find_candidates(prefixes, suffixes, top_n=1)
    untyped = find_matches(candidates, prefixes, suffixes, progress=False)
    assert set(untyped["kind"]) == {"paraphrase"}

    class Classifier:
        def __init__(self, model):
            assert model == "told"

        def scores(self, pairs):
            return dict.fromkeys(pairs, told)

    monkeypatch.setattr(detect_matches, "PairClassifier", Classifier)
    monkeypatch.setattr(detect_matches, "EntityFinder", lambda model: lambda sentence: set())
    for told, kind in ((0.7, "paraphrase_high"), (0.3, "paraphrase_low"), (0.995, None)):
        typed = find_matches(candidates, prefixes, suffixes, paraphrase_model="told", progress=False)
        assert len(typed) == len(untyped)
        assert (typed["score"] == told).all()
        assert typed["kind"].isna().all() if kind is None else set(typed["kind"]) == {kind}


def test_a_missing_model_stops_before_any_comparison(tables, tmp_path, monkeypatch):
    prefixes, suffixes = tables
    monkeypatch.setattr(PanDetector, "comparer", lambda detector: pytest.fail("the work has started"))
    with pytest.raises(DetectorError, match="entity_model"):
        find_matches(
            find_candidates(prefixes, suffixes), prefixes, suffixes, PanDetector(), str(tmp_path), "no_such_model"
        )


class SameWord(NamedTuple):
    """A detector of another kind: both texts contain the word."""

    word: str
    name: str = "same word"

    def comparer(self):
        return self.compared

    def compared(self, block):
        found = []
        for c, s, number in zip(block.c, block.s, block.number, strict=True):
            suffix, continuation = block.suffixes[s], block.continuations[c]
            if self.word in suffix and self.word in continuation:
                start, at = suffix.index(self.word), continuation.index(self.word)
                span = ((start, start + len(self.word)), (at, at + len(self.word)))
                found.append((int(number), Alignment([span], [span], verbatim=True)))
        return found


@pytest.mark.parametrize("workers", [1, 2])
def test_another_detector_decides_what_matches(workers):
    prefixes, suffixes = many(150)
    candidates = find_candidates(prefixes, suffixes, top_n=3)
    matches = find_matches(candidates, prefixes, suffixes, SameWord("Lima"), workers=workers, progress=False)
    texts = candidates.merge(prefixes, on="prefix_id").merge(suffixes, on="suffix_id")
    expected = texts["continuation"].str.contains("Lima") & texts["suffix"].str.contains("Lima")
    assert len(matches) == expected.sum() > 50
    assert set(matches["kind"]) == {"verbatim"}
    assert set(matches["matched_chars"]) == {4}


def test_wrong_tables_are_named(tables):
    prefixes, suffixes = tables
    with pytest.raises(ValueError, match="suffixes lacks columns \\['member'\\]"):
        find_candidates(prefixes, suffixes.drop(columns="member"))
    candidates = find_candidates(prefixes, suffixes)
    with pytest.raises(ValueError, match="prefix_id 'p0'"):
        find_matches(candidates, prefixes.iloc[1:], suffixes, progress=False)


def test_covered_characters_count_once():
    assert _covered([(0, 10), (5, 12), (20, 21), (6, 7)]) == 13  # 0-12 and 20-21


# explaining one pair

SUFFIX = "Private words nobody may read. " + story(1)
CONTINUATION = story(1, 3) + " <b>Other</b> words follow here & there."


def test_an_explanation_shows_every_step():
    found = explain(SUFFIX, CONTINUATION, show_text=True)
    assert found.alignment.kind == "verbatim"
    assert found.units.groupby("side").size().to_dict() == {"source": 4, "suspicious": 7}
    assert found.seeds[["suspicious_unit", "source_unit"]].to_numpy().tolist() == [[1, 0], [2, 1], [3, 2]]
    assert (found.seeds["dice"] == 1).all()
    assert list(found.cases["search"]) == ["gap", "summary_gap"]
    assert found.cases.loc[0, ["suspicious_first", "suspicious_last", "source_first", "source_last"]].tolist() == [
        1,
        3,
        0,
        2,
    ]
    assert "&lt;b&gt;Other&lt;/b&gt;" in found.html
    assert "<b>" not in found.html
    assert found.sentences["text"].str.contains("Private words").any()


def test_masked_views_keep_nothing_of_the_text():
    found = explain(SUFFIX, CONTINUATION)
    shown = found.html + found.sentences.to_csv() + found.units.to_csv() + found.seeds.to_csv() + found.cases.to_csv()
    secrets = {word for word in f"{SUFFIX} {CONTINUATION}".split() if len(word) > 5}
    assert len(secrets) > 30
    assert not [word for word in secrets if word in shown]
    assert set(found.sentences["text"]) == set(found.units["text"]) == {MASK}
    assert "<mark" in found.html
    # other texts, the same view
    assert side_by_side("a" * 60, "b" * 9, [((5, 50), (0, 9))]) == side_by_side("é" * 99, "z" * 5, [((9, 70), (0, 5))])
