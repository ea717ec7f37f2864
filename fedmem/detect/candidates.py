"""Which pairs the detector looks at: each continuation with the suffixes of every client that resemble it most.

One index for each client's member suffixes and one for its held-out ones, so that controls displace nothing. What ranks
is handed in; knows nothing of the detector.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from fedmem.retrieval import BM25Index

CANDIDATE_COLUMNS = ["prefix_id", "prefix_client", "suffix_id", "suffix_client", "member", "rank", "bm25"]


def find_candidates(
    prefixes: pd.DataFrame, suffixes: pd.DataFrame, top_n: int = 10, index_class=BM25Index
) -> pd.DataFrame:
    """The `top_n` suffixes of each client that rank highest for each continuation, held-out suffixes apart.

    prefixes: prefix_id, client, continuation. suffixes: suffix_id, client, member, suffix.
    index_class: what ranks, with `build(texts)` and `search(queries, top_n, drop_stop_words)`; one index is built for
    each (client, member), so controls displace nothing. Stop words are dropped from queries, as in the study.
    Returns CANDIDATE_COLUMNS, rank from 1, ordered by prefix, suffix client, members first, rank. A continuation
    that finds nothing has no row.
    """
    check_columns(prefixes, ["prefix_id", "client", "continuation"], "prefixes")
    check_columns(suffixes, ["suffix_id", "client", "member", "suffix"], "suffixes")
    queries = prefixes["continuation"].tolist()
    parts = [_empty_candidates()]
    for (client, member), group in suffixes.groupby(["client", "member"], sort=True):
        hits = index_class.build(group["suffix"].tolist()).search(queries, top_n, drop_stop_words=True)
        parts.append(_candidates_of(prefixes, group, hits).assign(suffix_client=client, member=bool(member)))
    found = pd.concat(parts, ignore_index=True)
    order = np.lexsort((found["rank"], ~found["member"], found["suffix_client"], found.pop("prefix_row")))
    return found.iloc[order].reset_index(drop=True)[CANDIDATE_COLUMNS]


def _candidates_of(prefixes: pd.DataFrame, group: pd.DataFrame, hits: list[list[tuple[int, float]]]) -> pd.DataFrame:
    counts = [len(hit) for hit in hits]
    row, score = (np.array([hit[i] for found in hits for hit in found], dtype=t) for i, t in ((0, int), (1, float)))
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
    """Raise ValueError for columns that a table lacks; `name` says which table."""
    missing = [column for column in needed if column not in table.columns]
    if missing:
        raise ValueError(f"{name} lacks columns {missing}: it has {list(table.columns)}")
