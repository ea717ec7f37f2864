"""Types paraphrase candidates: is any sentence of the continuation a rewording of one of the suffix, and how close.

The rule of Lee et al. (WWW 2023) as the federated study uses it (Udsa et al., ACL 2026), with its quirks. The scorer of
sentence pairs and the entity finder are plain functions handed in; `paraphrase_models` has the real ones.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from math import isnan, nan
from typing import Any

from fedmem.detect.alignment import Alignment
from fedmem.detect.splitting import split_sentences

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
