"""What every engine's indices have in common. An index ranks the texts that it was built from and answers with rows."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from fedmem.retrieval.tokens import query_terms, strings

K1 = 1.2

B = 0.75

Hits = list[tuple[int, float]]  # (row, score), best first


class Index(ABC):
    """Texts that can be searched: the interface of every engine's indices."""

    @abstractmethod
    def __len__(self) -> int:
        """Number of texts, those without a token included."""

    @abstractmethod
    def search_terms(self, queries: Iterable[Mapping[str, int]], top_n: int) -> list[Hits]:
        """As `search`, for queries prepared by `query_terms`, so that many indices share one tokenisation."""

    def search(self, queries: Sequence[str], top_n: int, drop_stop_words: bool = False) -> list[Hits]:
        """The best rows for each query as (row, score), best first; equal scores are ordered by row.

        queries: strings, of which the first 1,024 distinct tokens count. top_n: maximum number of hits for each query,
        at least 1. drop_stop_words: remove English stop words from the queries.

        Only texts that share a token with the query are hits (score > 0). There may be fewer than `top_n`, and there
        are none for an empty query, a query of stop words only, or an index without texts. Raises ValueError for
        `top_n` below 1 and TypeError for a query that is not a string.
        """
        return self.search_terms([query_terms(query, drop_stop_words) for query in strings(queries, "queries")], top_n)


class Engine(Protocol):
    """A maker of indices; `open_engine` returns one."""

    def index(self, texts: Iterable[str], label: str = "texts") -> AbstractContextManager[Index]:
        """An index of `texts` that exists while the context is open; `label` is part of its name on a server."""

    def check(self) -> dict[str, Any]:
        """Check that the engine works and return its description; the error that it raises says what to do."""
