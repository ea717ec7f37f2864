"""The published figures, for comparison: Udsa et al., ACL 2026 short papers 56 (arXiv 2510.08750).

Shares of prefixes in 0 … 1 (the paper gives percent). Unless noted otherwise: Qwen2.5-3B, FedAvg, top-k 40, prefixes of
30 tokens, 3 rounds. No intervals were published. Another model, corpus or detector setting gives other figures, so only
order and direction can be compared, not the exact values.
"""

from __future__ import annotations

import pandas as pd

SOURCE = "Udsa et al., ACL 2026"
_TASKS = ("summarization", "dialog", "qa", "classification")

_MAIN = {  # percent: MR_intra, MR_inter, TotalCL, TotalFL
    "summarization": (0.342, 0.046, 0.558, 0.433),
    "dialog": (1.533, 1.446, 3.417, 3.992),
    "qa": (1.450, 0.813, 2.150, 2.917),
    "classification": (0.000, 0.000, 0.000, 0.000),
}
_INTRA = {  # percent: MR_intra of summarization, dialog, qa
    ("decoding", "temperature"): (0.475, 1.267, 1.283),
    ("decoding", "top_k"): (0.342, 1.533, 1.450),
    ("decoding", "top_p"): (0.525, 3.792, 2.567),
    ("prefix_tokens", 10): (0.508, 2.108, 1.525),
    ("prefix_tokens", 30): (0.342, 1.533, 1.450),
    ("prefix_tokens", 50): (0.425, 1.575, 1.242),
    ("prefix_tokens", 100): (0.208, 1.408, 1.125),
    ("algorithm", "fedavg"): (0.342, 1.533, 1.450),
    ("algorithm", "fedprox"): (0.942, 1.892, 3.675),
    ("model", "Qwen2.5-0.5B"): (0.550,),
    ("model", "Qwen2.5-1.5B"): (0.992,),
    ("model", "Qwen2.5-3B"): (0.342,),
    ("rounds", 1): (0.433,),
    ("rounds", 3): (0.342,),
    ("rounds", 5): (0.467,),
}
_INTER = {("prefix_tokens", 10): (0.188,), ("prefix_tokens", 100): (0.004,)}  # percent: MR_inter of summarization
_UTILITY = {  # as published, central and federated
    "summarization": (28.46, 29.88), "dialog": (19.40, 18.11), "qa": (26.66, 28.60), "classification": (76.30, 51.22),
}  # fmt: skip
_DIALOG = ((1.450, 1.525, 1.500), (1.150, 1.200, 1.225), (1.725, 1.550, 1.950))  # percent, prefix client in rows


def main_figures() -> pd.DataFrame:
    """The paper's main table: task, metric (mr_intra, mr_inter, mr_total of FL; mr_total of CL), algorithm, value."""
    rows = []
    for task, (intra, inter, central, federated) in _MAIN.items():
        rows += [(task, "mr_intra", "fedavg", intra / 100), (task, "mr_inter", "fedavg", inter / 100)]
        rows += [(task, "mr_total", "fedavg", federated / 100), (task, "mr_total", "central", central / 100)]
    return pd.DataFrame(rows, columns=["task", "metric", "algorithm", "value"])


def ablations() -> pd.DataFrame:
    """The ablations of one parameter each: task, parameter, setting, metric (mr_intra | mr_inter), value."""
    rows = []
    for metric, figures in (("mr_intra", _INTRA), ("mr_inter", _INTER)):
        for (parameter, setting), values in figures.items():
            # not strict: the tuples leave out the tasks without a published figure, from the end of _TASKS
            rows += [(t, parameter, setting, metric, v / 100) for t, v in zip(_TASKS, values, strict=False)]
    return pd.DataFrame(rows, columns=["task", "parameter", "setting", "metric", "value"])


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
    rows = [(j, k, value / 100) for j, line in enumerate(_DIALOG) for k, value in enumerate(line)]
    return pd.DataFrame(rows, columns=["prefix_client", "suffix_client", "ratio"])


def utility() -> pd.DataFrame:
    """The published utility (ROUGE or accuracy, in percent): task, central, federated."""
    rows = [(task, *values) for task, values in _UTILITY.items()]
    return pd.DataFrame(rows, columns=["task", "central", "federated"])
