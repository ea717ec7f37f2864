"""Selects the pairs that the detector compares: each continuation with the most similar suffixes of every client.

Each client has one index of its member suffixes and one of its held-out suffixes, so that a control never displaces a
member. The caller passes the ranking engine; this module does not depend on the detector.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from tqdm import tqdm

from fedmem.retrieval.bm25 import Embedded
from fedmem.retrieval.index import Engine
from fedmem.retrieval.tokens import MAX_QUERY_TERMS, query_terms, strings, tokens

CANDIDATE_COLUMNS = ["prefix_id", "prefix_client", "suffix_id", "suffix_client", "member", "rank", "bm25"]


def find_candidates(
    prefixes: pd.DataFrame,
    suffixes: pd.DataFrame,
    top_n: int = 10,
    engine: Engine | None = None,
    max_query_terms: int = MAX_QUERY_TERMS,
    progress: bool = False,
) -> pd.DataFrame:
    """Rank each client's suffixes by BM25 for each continuation and return the `top_n` best, held-out ones separately.

    prefixes: table with prefix_id, client, continuation. suffixes: table with suffix_id, client, member, suffix.
    top_n: suffixes per continuation and index, ≥ 1.
    engine: the ranking engine, from `fedmem.retrieval.open_engine` (default: the embedded one).
    max_query_terms: number of distinct words of a query that are kept, ≥ 1; `retrieval_record` lists the queries that
    lose some.
    progress: whether to show a progress bar.

    Stop words are dropped from queries, as in the study. Returns CANDIDATE_COLUMNS, rank from 1, ordered by prefix,
    suffix client, members first, rank. A continuation without a hit has no row. Raises ValueError when a table lacks a
    column.
    """
    check_columns(prefixes, ["prefix_id", "client", "continuation"], "prefixes")
    check_columns(suffixes, ["suffix_id", "client", "member", "suffix"], "suffixes")
    engine = engine or Embedded()
    queries = [query_terms(text, True, max_query_terms) for text in strings(prefixes["continuation"], "continuations")]
    parts = [_empty_candidates()]  # it fixes the column types, also when nothing is found
    groups = suffixes.groupby(["client", "member"], sort=True)
    for (client, member), group in tqdm(groups, unit="indices", disable=not progress, mininterval=1):
        # one index at a time, which bounds memory by the largest client
        with engine.index(group["suffix"], f"{client}-{'member' if member else 'heldout'}") as index:
            hits = index.search_terms(queries, top_n)
        parts.append(_candidates_of(prefixes, group, hits).assign(suffix_client=client, member=bool(member)))
    found = pd.concat(parts, ignore_index=True)
    # lexsort takes the most significant key last; ~member puts members first
    order = np.lexsort((found["rank"], ~found["member"], found["suffix_client"], found.pop("prefix_row")))
    return found.iloc[order].reset_index(drop=True)[CANDIDATE_COLUMNS]


def retrieval_record(
    prefixes: pd.DataFrame, suffixes: pd.DataFrame, max_query_terms: int = MAX_QUERY_TERMS
) -> dict[str, Any]:
    """What is dropped before the search, and why a continuation may have no candidate; independent of the engine.

    prefixes: table with prefix_id, continuation. suffixes: table with client, member, suffix.
    max_query_terms: as for `find_candidates`.

    Returns queries (number), without_words (prefix_ids whose continuation has only stop words), cut ({prefix_id:
    distinct words} of queries longer than max_query_terms), and for each index its texts and those without_words.
    """
    # without a limit, to see the queries that exceed it
    counts = pd.Series(
        [len(query_terms(text, True, max_terms=None)) for text in prefixes["continuation"]], prefixes["prefix_id"]
    )
    blank = suffixes.assign(blank=[not tokens(text) for text in suffixes["suffix"]])
    groups = blank.groupby(["client", "member"])["blank"].agg(["size", "sum"])
    return {
        "queries": len(counts),
        "max_query_terms": max_query_terms,
        "without_words": counts.index[counts == 0].tolist(),
        "cut": counts[counts > max_query_terms].to_dict(),
        "indices": [
            {"client": client, "member": bool(member), "texts": texts, "without_words": empty}
            for (client, member), (texts, empty) in zip(groups.index.tolist(), groups.to_numpy().tolist(), strict=True)
        ],
    }


def _candidates_of(prefixes: pd.DataFrame, group: pd.DataFrame, hits: list[list[tuple[int, float]]]) -> pd.DataFrame:
    counts = [len(hit) for hit in hits]
    row, score = (np.array([hit[i] for found in hits for hit in found], dtype=t) for i, t in ((0, int), (1, float)))
    # kept for sorting by the order of the prefixes, which prefix_id does not give
    prefix_row = np.repeat(np.arange(len(prefixes)), counts)
    return pd.DataFrame(
        {
            "prefix_id": prefixes["prefix_id"].to_numpy()[prefix_row],
            "prefix_client": prefixes["client"].to_numpy()[prefix_row],
            "suffix_id": group["suffix_id"].to_numpy()[row],
            "rank": np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts) + 1,
            "bm25": score,
            "prefix_row": prefix_row,
        }
    )


def _empty_candidates() -> pd.DataFrame:
    types = {"prefix_id": "str", "prefix_client": "int64", "suffix_id": "str", "suffix_client": "int64"}
    types |= {"member": "bool", "rank": "int64", "bm25": "float64", "prefix_row": "int64"}
    return pd.DataFrame({name: pd.Series(dtype=kind) for name, kind in types.items()})


def check_columns(table: pd.DataFrame, needed: list[str], name: str) -> None:
    """Raise ValueError when a table lacks a column.

    table: the table. needed: names of the columns. name: the table's name for the message.
    """
    missing = [column for column in needed if column not in table.columns]
    if missing:
        raise ValueError(f"{name} lacks columns {missing}: it has {list(table.columns)}")
