"""The published figures, for comparison: Udsa et al., ACL 2026 short papers 56 (arXiv 2510.08750).

Shares of prefixes in 0 … 1 (the paper gives percent). Unless noted otherwise: Qwen2.5-3B, FedAvg, top-k 40, prefixes of
30 tokens, 3 rounds. No intervals were published. Another model, corpus or detector setting gives other figures, so only
order and direction can be compared, not the exact values.
"""

from __future__ import annotations

import pandas as pd

from fedmem.config.yaml_files import read
from fedmem.machine.paths import data_file

_FIGURES = read(data_file("published_figures.yaml"))
SOURCE = _FIGURES["source"]
TOTALS = {"fedavg": "federated", "central": "central"}  # algorithm: its name in the tables


def main_figures() -> pd.DataFrame:
    """The paper's main table: task, metric (mr_intra, mr_inter, mr_total of FL; mr_total of CL), algorithm, value."""
    rows = []
    for task, of in _FIGURES["main"].items():
        rows += [(task, metric, "fedavg", of[metric] / 100) for metric in ("mr_intra", "mr_inter")]
        rows += [(task, "mr_total", algorithm, of[name] / 100) for algorithm, name in TOTALS.items()]
    return pd.DataFrame(rows, columns=["task", "metric", "algorithm", "value"])


def ablations() -> pd.DataFrame:
    """The ablations of one parameter each: task, parameter, setting, metric (mr_intra | mr_inter), value."""
    rows = [
        {"task": task, "parameter": of["parameter"], "setting": of["setting"], "metric": of["metric"], "value": v / 100}
        for of in _FIGURES["ablations"]
        for task, v in of["values"].items()
    ]
    return pd.DataFrame(rows)


def points(task: str, parameter: str) -> pd.DataFrame:
    """The paper's measurements of a task for one changed parameter: setting, metric, value; empty if there are none.

    task: summarization | dialog | qa | classification. parameter: a parameter's name, such as prefix_tokens.
    """
    # a checkpoint after r rounds is the same model as a training of r rounds
    parameter = "rounds" if parameter == "checkpoint_round" else parameter
    table = ablations()
    chosen = table[(table["task"] == task) & (table["parameter"] == parameter)]
    return chosen[["setting", "metric", "value"]].reset_index(drop=True)


def dialog_matrix() -> pd.DataFrame:
    """MR(j→k) of the dialog task: prefix_client, suffix_client, ratio."""
    lines = enumerate(_FIGURES["dialog_matrix"])
    rows = [(j, k, value / 100) for j, line in lines for k, value in enumerate(line)]
    return pd.DataFrame(rows, columns=["prefix_client", "suffix_client", "ratio"])


def utility() -> pd.DataFrame:
    """The published utility (ROUGE or accuracy, in percent): task, central, federated."""
    return pd.DataFrame.from_dict(_FIGURES["utility"], orient="index").rename_axis("task").reset_index()
