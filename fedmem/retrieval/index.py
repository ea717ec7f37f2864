"""What every engine's indices have in common. An index ranks the texts that it was built from and answers with rows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from fedmem.retrieval.tokens import query_terms, strings

K1 = 1.2

B = 0.75

Hits = list[tuple[int, float]]  # (row, score), best first


class Index(ABC):
    """Texts that can be searched: what every engine's indices have in common."""

    @abstractmethod
    def __len__(self) -> int:
        """Number of texts, those without a token included."""

    @abstractmethod
    def search_terms(self, queries: Iterable[Mapping[str, int]], top_n: int) -> list[Hits]:
        """As `search`, for queries that `query_terms` has prepared: many indices, one tokenisation."""

    def search(self, queries: Sequence[str], top_n: int, drop_stop_words: bool = False) -> list[Hits]:
        """The `top_n` best rows for each query as (row, score), best first; equal scores by row.

        Only texts that share a token with the query are hits (score > 0), so there may be fewer than `top_n`, and none
        for an empty query, a query of stop words alone, or an index without texts. A query counts with its first 1,024
        distinct tokens. Raises ValueError for `top_n` below 1 and TypeError for a query that is no string.
        """
        return self.search_terms([query_terms(query, drop_stop_words) for query in strings(queries, "queries")], top_n)


class Engine(Protocol):
    """What makes indices; `open_engine` returns one."""

    def index(self, texts: Iterable[str], label: str = "texts") -> AbstractContextManager[Index]:
        """An index of `texts` for as long as the context lasts; `label` names it where it can be seen from outside."""

    def check(self) -> dict[str, Any]:
        """Makes sure that the engine can work and says what it is; raises an error that says what to do."""
