"""What holds for any two texts: no exception, and the fast path's verdicts are the plain path's."""

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedmem.detect import AlignmentSettings, align
from fedmem.detect.pan.alignment import align_prepared
from fedmem.detect.pan.preparing import Prepared, words_of
from fedmem.detect.pan.seeding import UnitMatrix, similar_units
from fedmem.detect.pan.splitting import is_word, split_sentences, split_words

RELAXED = settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])

# any Unicode, and texts that have something in common: sentences of a small vocabulary, with what is awkward mixed in
ANY = st.text(max_size=200)
WORD = st.sampled_from(
    [
        "the",
        "alpha",
        "beta",
        "gamma",
        "delta's",
        "running",
        "runs",
        "cannot",
        "İstanbul",
        "e.g.",
        "3.5",
        "—",
        "“quoted”",
        "(x)",
        "ß",
        "don't",
        "\x00",
        "Dr.",
        "\xa0",
        "''",
    ]
)
SENTENCE = st.lists(WORD, min_size=1, max_size=9).map(lambda words: " ".join(words))
RELATED = st.lists(st.tuples(SENTENCE, st.sampled_from([". ", "! ", "?\n", '." ', ".\r\n\r\n", " "])), max_size=12).map(
    lambda parts: "".join(sentence + end for sentence, end in parts)
)
SETTINGS = st.builds(
    AlignmentSettings,
    suspicious_gap=st.integers(0, 4),
    source_gap=st.integers(0, 4),
    min_unit_words=st.integers(0, 4),
    drop_short_units=st.booleans(),
    tf_idf=st.booleans(),
    min_case_chars=st.integers(0, 60),
    min_verbatim_chars=st.integers(0, 60),
    seed_dice=st.floats(0, 1),
)


@RELAXED
@given(ANY, ANY)
def test_any_two_strings_can_be_aligned(suspicious, source):
    assert align(suspicious, source).kind in ("none", "verbatim", "idea", "paraphrase")


@RELAXED
@given(RELATED, RELATED, SETTINGS)
def test_detections_lie_in_the_texts_and_flags_are_consistent(suspicious, source, settings):
    found = align(suspicious, source, settings)
    assert not (found.verbatim and found.summary)
    assert bool(found.detections) == (found.kind != "none")
    for (start, end), (their_start, their_end) in found.places:
        assert 0 <= start <= end <= len(suspicious)
        assert 0 <= their_start <= their_end <= len(source)


@RELAXED
@given(st.lists(RELATED, min_size=1, max_size=6), RELATED, SETTINGS)
def test_prepared_texts_and_early_exit_never_change_a_verdict(suffixes, continuation, settings):
    prepared = Prepared(settings, capacity=2)  # so small that texts are forgotten and prepared again
    texts = [prepared.text(text) for text in suffixes]
    source = prepared.text(continuation)
    similar = UnitMatrix(texts).similar(np.arange(len(texts)), source, settings.seed_dice)
    for row, (text, suffix) in enumerate(zip(texts, suffixes, strict=True)):
        assert similar.get(row, []) == similar_units(text.units, source.units, settings.seed_dice)
        fast = align_prepared(text, source, prepared, similar.get(row, []))
        assert fast == align(suffix, continuation, settings)


@RELAXED
@given(st.one_of(ANY, RELATED))
def test_every_word_of_a_fragment_is_found_at_its_place(text):
    words = words_of(text)
    expected = [
        token
        for start, end in split_sentences(text)
        for token in split_words(text[start:end].lower())
        if is_word(token)
    ]
    assert words.tokens == expected
    assert words.original == sorted(words.original)
    for token, (start, end) in zip(words.tokens, words.original, strict=True):
        assert token in text[start:end].lower()
