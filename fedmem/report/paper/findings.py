"""The claims of the published study, each checked against a study's own runs.

A claim is a difference between two figures of one run, or of two runs that `tables.Runs` finds by their
parameters. It holds when the difference's interval lies on the claimed side of 0, does not hold when the interval lies
on the other side, and is open otherwise. All figures use paper counting, as in the published study.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pandas as pd

from fedmem.analyze.intervals import wilson
from fedmem.config.vocabulary import TASKS
from fedmem.report.comparisons import Measured, difference, intra_over_inter
from fedmem.report.paper.tables import Runs, settings

COLUMNS = ["finding", "task", "compared", "difference", "low", "high", "paired", "here"]
RAISES = (  # (claim, parameter, the setting claimed to give more, the setting claimed to give less)
    ("top-k raises MR_intra against temperature", "decoding", "top_k", "temperature"),
    ("top-p raises MR_intra against temperature", "decoding", "top_p", "temperature"),
    ("FedProx raises MR_intra against FedAvg", "algorithm", "fedprox", "fedavg"),
)
TRENDS = (("model", "no clear trend with model size"), ("rounds", "no clear trend with rounds"))


def findings(
    parameters: pd.DataFrame, measured: dict[str, Measured], cells: dict[str, pd.DataFrame], confidence: float = 0.95
) -> pd.DataFrame:
    """One row for each claim and task for which the study has the runs: columns COLUMNS.

    parameters: one row for each run (index: its name), one column for each parameter.
    measured: {run: `Measured` of paper counting}. cells: {run: the table of `ratios.cells`}.
    confidence: coverage of the intervals, between 0 and 1.
    Returns difference in −1 … 1 and here: holds | does not hold | open. The shortest prefix is compared with the
    longest, the largest model with the smallest, the last round with the first. A trend is a series whose steps all
    have the same sign and whose ends differ; with an undefined step the claim is open.
    """
    runs = Runs(parameters)
    within, between = _within(runs, measured, cells, confidence), _between(runs, measured, confidence)
    return pd.DataFrame([*within, *between, *_trends(runs, measured, confidence)], columns=COLUMNS)


def _within(runs: Runs, measured: dict, cells: dict, confidence: float) -> Iterator[dict]:
    # the published claims about intra and inter are about FedAvg
    found = {task: runs.find(task=task, algorithm="fedavg") for task in TASKS}
    found = {task: run for task, run in found.items() if run is not None}
    for task, run in found.items():
        own = intra_over_inter(measured[run], confidence)
        yield _claim("MR_intra is above MR_inter", task, f"{run}: intra − inter", own)
    for task, run in found.items():
        if (easier := _easier(cells[run], confidence)) is not None:
            yield {"finding": "some clients' suffixes come back more easily", "task": task} | easier


def _between(runs: Runs, measured: dict, confidence: float) -> Iterator[dict]:
    for task in TASKS:
        found = runs.family("algorithm", task=task)
        if {"fedavg", "central"} <= found.keys():
            words = "FL does not memorize less than CL (MR_total)"
            yield _of_two(words, task, found["fedavg"], found["central"], measured, "total", confidence)
    for words, parameter, more, less in RAISES:
        for task in TASKS:
            found = settings(runs, parameter, task)
            if {more, less} <= found.keys():
                yield _of_two(words, task, found[more], found[less], measured, "intra", confidence)
    for task in TASKS:
        found = settings(runs, "prefix_tokens", task)
        if found:
            words = "shorter prefixes raise MR_intra"
            yield _of_two(words, task, found[min(found)], found[max(found)], measured, "intra", confidence)


def _trends(runs: Runs, measured: dict, confidence: float) -> Iterator[dict]:
    for parameter, words in TRENDS:
        for task in TASKS:
            found = settings(runs, parameter, task)
            if len(found) > 2:  # two settings give a single step, which always goes one way
                order = sorted(found, key=lambda name: _size(str(name)))
                tables = [difference(measured[found[b]], measured[found[a]]) for a, b in itertools.pairwise(order)]
                steps = [table.set_index("part").at["intra", "difference"] for table in tables]
                ends = _of_two(words, task, found[order[-1]], found[order[0]], measured, "intra", confidence)
                one_way = all(step > 0 for step in steps) or all(step < 0 for step in steps)
                # the claim is that there is no trend, so a trend refutes it; it holds only if every step is known
                apart, known = ends["here"] != "open", not any(map(pd.isna, steps))
                here = "does not hold" if one_way and apart else "holds" if known and not one_way else "open"
                yield ends | {"here": here}


def _size(name: str) -> float:
    """The sort key of a setting: a model's size in billions (Qwen2.5-0.5B: 0.5), or the number itself."""
    return float(name.rpartition("-")[2].removesuffix("B"))


def _of_two(words: str, task: str, more: str, less: str, measured: dict, part: str, confidence: float) -> dict:
    row = difference(measured[more], measured[less], confidence).set_index("part").loc[part]
    return _claim(words, task, f"{more} − {less}", row.to_dict())


def _claim(words: str, task: str, compared: str, found: dict) -> dict:
    low, high = found["low"], found["high"]
    # an undefined interval (NaN) fails both comparisons and leaves the claim open
    here = "holds" if low > 0 else "does not hold" if high < 0 else "open"
    figures = {name: found[name] for name in ("difference", "low", "high", "paired")}
    return {"finding": words, "task": task, "compared": compared, **figures, "here": here}


def _easier(cells: pd.DataFrame, confidence: float) -> dict | None:
    """The client whose suffixes other clients' prefixes hit most, against the least hit one; None if all are equal."""
    rows = cells.query("counting == 'paper' and member and prefix_client != suffix_client")
    shares = rows.groupby("suffix_client")[["hits", "n"]].sum(min_count=1)
    shares = shares.assign(share=shares["hits"] / shares["n"]).dropna()
    if len(shares) < 2 or shares["share"].nunique() < 2:
        return None
    most, least = (shares.loc[place] for place in (shares["share"].idxmax(), shares["share"].idxmin()))
    # no interval of the difference: both clients are chosen by their figures, which such an interval would ignore.
    # Their own intervals must not overlap instead.
    (low, _), (_, high) = (wilson(one["share"], one["n"], confidence) for one in (most, least))
    return {
        "compared": f"client {most.name} − client {least.name}, others' prefixes",
        "difference": most["share"] - least["share"], "low": float("nan"), "high": float("nan"), "paired": None,
        "here": "holds" if low > high else "open",
    }  # fmt: skip
