"""Amount of extracted text: characters of each client, the longest runs, and the rows that prompts extract.

A memorization ratio counts prefixes; these tables count text, from the spans that the detector marked. They contain
numbers and row ids only.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from fedmem.analyze.counting import is_match, require_columns
from fedmem.config.vocabulary import POOLED

SPAN_COLUMNS = ["prefix_id", "prefix_client", "suffix_id", "suffix_client", "member", "kind", "detections"]


def extracted(matches: pd.DataFrame, suffixes: pd.DataFrame, counting: str = "verbatim") -> pd.DataFrame:
    """Count the characters of each client's sampled suffixes that were extracted, by membership and prefix client.

    matches: the detect stage's table, with detections.
    suffixes: DataFrame with suffix_id, client, member, suffix (the string).
    counting: paper, strict or verbatim.

    Returns a DataFrame with suffix_client, member, prefix_client (−1: all clients' prefixes together), chars (extracted
    characters, each once, however often it was extracted), available (all characters of the client's sampled suffixes
    of that membership), share (chars / available, 0 … 1), longest (characters of the longest passage; under verbatim
    counting a run of equal words; 0 without any). Raises MetricsError when a column is missing or counting is unknown.
    """
    require_columns(matches, SPAN_COLUMNS, "matches")
    require_columns(suffixes, ["suffix_id", "client", "member", "suffix"], "suffixes")
    counted = matches[is_match(matches, counting)]
    lengths = suffixes["suffix"].str.len()
    available = lengths.groupby([suffixes["client"], suffixes["member"].astype(bool)]).sum()
    clients = sorted(set(suffixes["client"]))
    spans = {who: _by_suffix(part) for who, part in counted.groupby("prefix_client")}
    spans[POOLED] = _by_suffix(counted)  # not a sum over clients: their spans overlap
    owner = suffixes.drop_duplicates("suffix_id").set_index("suffix_id")[["client", "member"]]
    rows = []
    for prefix_client in [POOLED, *clients]:
        found = _sums(spans.get(prefix_client, {}), owner)
        for (client, member), total in available.items():
            chars, longest = found.get((client, member), (0, 0))
            rows.append((client, member, prefix_client, chars, int(total), chars / total if total else np.nan, longest))
    columns = ["suffix_client", "member", "prefix_client", "chars", "available", "share", "longest"]
    return pd.DataFrame(rows, columns=columns).sort_values(columns[:3], ignore_index=True)


def by_row(matches: pd.DataFrame, suffixes: pd.DataFrame, counting: str = "verbatim") -> pd.DataFrame:
    """List the extracted rows, most often extracted first, with the numbers of prefixes and clients that extract them.

    matches: the detect stage's table, with detections. suffixes: DataFrame with suffix_id, row_id.
    counting: paper, strict or verbatim.

    Returns a DataFrame with row_id, suffix_client, member, prefixes (that match the row), own (those of the row's own
    client), others (of other clients), clients (number of clients with such prefixes), longest (characters of the
    longest passage). Raises MetricsError when counting is unknown.
    """
    counted = matches[is_match(matches, counting)].merge(suffixes[["suffix_id", "row_id"]], on="suffix_id")
    counted = counted.assign(
        longest=[max((end - start for start, end, *_ in spans), default=0) for spans in counted["detections"]],
        at_home=counted["prefix_client"] == counted["suffix_client"],
    )
    # a pair of prefix and row counts once, with its longest passage
    once = counted.sort_values("longest", ascending=False).drop_duplicates(["prefix_client", "prefix_id", "row_id"])
    table = once.groupby(["row_id", "suffix_client", "member"], as_index=False).agg(
        prefixes=("prefix_id", "size"), own=("at_home", "sum"), clients=("prefix_client", "nunique"),
        longest=("longest", "max"),
    )  # fmt: skip
    table = table.assign(others=table["prefixes"] - table["own"])
    # row_id breaks ties, so that the order does not depend on the order of the matches
    table = table.sort_values(["prefixes", "longest", "row_id"], ascending=[False, False, True], ignore_index=True)
    return table[["row_id", "suffix_client", "member", "prefixes", "own", "others", "clients", "longest"]]


def _by_suffix(matches: pd.DataFrame) -> dict:
    """Return {suffix_id: extracted spans (start, end)}."""
    spans: dict = {}
    for suffix, detections in zip(matches["suffix_id"], matches["detections"], strict=True):
        spans.setdefault(suffix, []).extend((int(start), int(end)) for start, end, *_ in detections)
    return spans


def _sums(spans: dict, owner: pd.DataFrame) -> dict:
    """Return {(client, member): (extracted characters, characters of the longest passage)}."""
    sums: dict = {}
    clients, members = owner["client"].to_dict(), owner["member"].to_dict()
    for suffix, found in spans.items():
        key = (clients[suffix], bool(members[suffix]))
        chars, longest = sums.get(key, (0, 0))
        sums[key] = (chars + _union(found), max(longest, *(end - start for start, end in found)))
    return sums


def _union(spans: list[tuple[int, int]]) -> int:
    total, reached = 0, 0  # spans overlap: many prefixes extract the same passage
    for start, end in sorted(spans):
        total += max(0, end - max(start, reached))
        reached = max(reached, end)
    return total
