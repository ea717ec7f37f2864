"""The published study's tables with a study's own figures beside them.

A run is found by its parameters, never by its name. For each cell of a table, this is the run that has the cell's
parameters and otherwise agrees with most runs of the study. For a cell of an ablation, it is one of a family of runs
that differ in that parameter only. A table exists if the study has a run for at least one of its cells. Shares and
utilities are in 0 … 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pandas as pd

from fedmem.config.parameter import ConfigError
from fedmem.config.yaml_files import read
from fedmem.display.numbers import half_up
from fedmem.machine.paths import PACKAGE
from fedmem.report.comparisons import comparable_parameters, families
from fedmem.report.paper import published as paper_published

COLUMNS = ["table", "task", "parameter", "setting", "figure", "ours", "low", "high", "paper", "run", "comparable"]
TITLES = {
    "main": "Main table",
    "decoding": "MR_intra by decoding",
    "prefix_tokens": "MR_intra by prefix length, in tokens",
    "algorithm": "MR_intra by algorithm",
    "model": "MR_intra by model size",
    "rounds": "MR_intra by communication rounds",
    "inter_prefix": "MR_inter by prefix length, in tokens",
}
MAIN = {  # figure: (metric of the summary, algorithm)
    "MR_intra": ("mr_intra", "fedavg"), "MR_inter": ("mr_inter", "fedavg"),
    "TotalCL": ("mr_total", "central"), "TotalFL": ("mr_total", "fedavg"),
}  # fmt: skip
ALIASES = {"main": "Qwen2.5-3B", "half": "Qwen2.5-1.5B", "quarter": "Qwen2.5-0.5B"}  # of bases: the paper's models
UTILITY = ("utility_rouge_l", "utility_accuracy")


class Runs:
    """The finished runs of a study, found by their parameters.

    parameters: one row for each run (index: its name), one column for each parameter, as `studies.run_table` returns.
    """

    def __init__(self, parameters: pd.DataFrame):
        self.parameters = parameters
        self._texts = comparable_parameters(parameters)
        # the most frequent value of each parameter: it decides between several runs that fit
        usual = self._texts.mode().iloc[0] if len(self._texts) else pd.Series(dtype=object)
        self._usual = (self._texts == usual).sum(axis=1)

    def find(self, **wanted) -> str | None:
        """The run with the `wanted` parameters that agrees with most runs in the others; None if there is no such run.

        wanted: {parameter: value}.
        """
        chosen = self._matching(wanted)
        return self._usual[chosen].idxmax() if len(chosen) else None

    def family(self, parameter: str, **wanted) -> dict:
        """{setting: run} of the runs with the `wanted` parameters that differ only in `parameter`.

        Of several such families, the one with the most settings; of equal ones, the one that agrees with most runs.
        """
        found = families(self._texts.loc[self._matching(wanted)], parameter)
        best = max(found, key=lambda family: (len(family), self._usual[family].mean()), default=[])
        return {self.parameters.at[run, parameter]: run for run in best}

    def _matching(self, wanted: dict) -> pd.Index:
        keep = pd.Series(True, index=self.parameters.index)
        for name, value in wanted.items():
            keep &= self.parameters[name] == value
        return self.parameters.index[keep]


def tables(parameters: pd.DataFrame, summary: pd.DataFrame, utility: dict[str, dict[str, float]]) -> pd.DataFrame:
    """The figures of the paper's tables, one row each, with the study's figure beside them: columns COLUMNS.

    parameters: one row for each run (index: its name), one column for each parameter.
    summary: the table of `ratios.summary` with a column run; `ours` is taken from paper counting.
    utility: {run: {metric: value in 0 … 1}}, as `utility.utility_of_run` returns it.
    Only tables with a run for one of their cells are returned. `ours` is NaN when the study has no run for a cell, or
    the run has no such figure.
    """
    runs = Runs(parameters)
    values = summary[summary["counting"] == "paper"].set_index(["run", "metric"])[["value", "low", "high"]]
    rows = [
        {"table": table, **place, **_ours(values, utility, run, metric), "run": run,
         "comparable": run is not None and comparable(parameters.loc[run])}
        for table, metric, run, place in [*_main(runs), *_ablations(runs)]
    ]  # fmt: skip
    found = pd.DataFrame(rows, columns=COLUMNS)
    has_runs = found.groupby(["table", "task"])["run"].transform("count") > 0
    return found[has_runs].reset_index(drop=True)


def shown(published: pd.DataFrame, table: str) -> pd.DataFrame:
    """One table as a page shows it, in percent: ours beside the paper's; rows without a run of ours are left out.

    published: the table that `tables` returns. table: a key of TITLES.
    The main table has one line for each task and one column for each figure; the others have one line for each setting
    and one column for each task.
    """
    rows = published[published["table"] == table]
    across = "figure" if table == "main" else "task"
    down = "task" if table == "main" else "setting"
    long = rows.melt([down, across], ["ours", "paper"], var_name="whose")
    wide = long.assign(value=100 * long["value"]).pivot(index=down, columns=[across, "whose"], values="value")
    # pivot sorts its labels; the paper's own order is restored
    order = pd.MultiIndex.from_product([dict.fromkeys(rows[across]), ["ours", "paper"]])
    lines = [line for line in dict.fromkeys(rows[down]) if rows.loc[rows[down] == line, "run"].notna().any()]
    return _rounded(wide.reindex(index=lines, columns=order).rename_axis(down))


def dialog_matrix(parameters: pd.DataFrame, cells: dict[str, pd.DataFrame]) -> pd.DataFrame | None:
    """MR(j→k) of the study's FedAvg dialog run with three clients beside the paper's, in percent; None without a run.

    parameters: one row for each run (index: its name). cells: {run: the table of `ratios.cells`}.
    Lines: prefix client; columns: ours and the paper's by suffix client.
    """
    run = Runs(parameters).find(task="dialog", algorithm="fedavg", n_clients=3)
    if run is None:
        return None
    own = cells[run].query("counting == 'paper' and member")
    sides = {"ours": own, "paper": paper_published.dialog_matrix()}
    grids = {
        whose: 100 * table.pivot(index="prefix_client", columns="suffix_client", values="ratio")
        for whose, table in sides.items()
    }
    return _rounded(pd.concat(grids, axis=1).rename_axis(columns=["", "suffix client"]))


def comparable(parameters: pd.Series) -> bool:
    """Whether a run uses a hub corpus and one of the paper's models; detector settings and sizes may still differ."""
    return parameters["corpus"] == "hub" and Path(str(parameters["model"])).name in ALIASES.values()


def _rounded(table: pd.DataFrame) -> pd.DataFrame:
    return table.map(lambda value: half_up(value, 3))


def _main(runs: Runs) -> Iterator[tuple[str, str | None, str | None, dict]]:
    """(table, our metric, run, place) for each cell of the main table. Metric None: utility."""
    figures = paper_published.main_figures().set_index(["task", "metric", "algorithm"])["value"]
    utility = paper_published.utility().set_index("task") / 100  # published in percent
    for task in utility.index:
        place = {"task": task, "parameter": None, "setting": None}
        for figure, (metric, algorithm) in MAIN.items():
            run = runs.find(task=task, algorithm=algorithm)
            yield "main", metric, run, place | {"figure": figure, "paper": figures[task, metric, algorithm]}
        for figure, algorithm in (("utility CL", "central"), ("utility FL", "fedavg")):
            theirs = utility.at[task, "central" if algorithm == "central" else "federated"]
            yield "main", None, runs.find(task=task, algorithm=algorithm), place | {"figure": figure, "paper": theirs}


def _ablations(runs: Runs) -> Iterator[tuple[str, str, str | None, dict]]:
    for (parameter, metric, task), rows in paper_published.ablations().groupby(
        ["parameter", "metric", "task"], sort=False
    ):
        found = settings(runs, parameter, task)
        if rows["setting"].isin(list(found)).sum() < 2:  # a single setting gives no comparison
            continue
        for row in rows.to_dict("records"):
            place = {"task": task, "parameter": parameter, "setting": str(row["setting"])}
            table = "inter_prefix" if metric == "mr_inter" else parameter
            run = found.get(row["setting"])
            yield table, metric, run, place | {"figure": metric.replace("mr", "MR"), "paper": row["value"]}


def settings(runs: Runs, parameter: str, task: str) -> dict:
    """{setting as the paper writes it: run} of one ablation; {} when there are fewer than two settings.

    runs: the study's runs. parameter: the changed parameter, as in `published.ablations`.
    task: summarization | dialog | qa | classification.
    """
    if parameter == "model":
        names = _models()
        chosen = runs.parameters[runs.parameters["task"] == task]["model"].unique()
        # a model that no base names counts under its own name, so the paper's real models are found too
        found = {names.get(m, Path(m).name): runs.find(task=task, algorithm="fedavg", model=m) for m in chosen}
        found = {name: run for name, run in found.items() if name in ALIASES.values() and run is not None}
    elif parameter == "algorithm":
        found = runs.family(parameter, task=task)
    elif parameter == "rounds":
        # checkpoints of one training and separate trainings both give a series over rounds
        both = (runs.family(name, task=task, algorithm="fedavg") for name in ("checkpoint_round", "rounds"))
        found = max(both, key=len)
    else:
        found = runs.family(parameter, task=task, algorithm="fedavg")
    return found if len(found) > 1 else {}


def _models() -> dict[str, str]:
    """{model: the paper's model that it replaces}, from the aliases of the bases in params/base."""
    places = {}
    for file in sorted((PACKAGE.parent / "params" / "base").glob("*.yaml")):
        try:
            aliases = read(file).get("models", {})
        except ConfigError:  # an unreadable base defines no aliases; running it reports the error
            continue
        for alias, model in aliases.items():  # a base may give a model parameters of its own, in a mapping
            if alias in ALIASES:
                places[model["model"] if isinstance(model, dict) else model] = ALIASES[alias]
    return places


def _ours(values: pd.DataFrame, utility: dict, run: str | None, metric: str | None) -> dict:
    if run is not None and metric is not None:
        return dict(zip(("ours", "low", "high"), values.loc[(run, metric)], strict=True))
    figures = {} if metric is not None else utility.get(run, {})
    own = next((figures[name] for name in UTILITY if name in figures), float("nan"))
    return {"ours": own, "low": float("nan"), "high": float("nan")}
