"""The published study's tables with a study's own figures beside them.

A run is found by its parameters, never by its name: for each place of a table the run that is as the place says and
otherwise as most runs of the study are; for a place in an ablation, one of a family of runs that differ in that
parameter alone. A table exists where the study has a run for one of its places. Frames in, frames out; shares and
utilities in 0 … 1.
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
ALIASES = {"main": "Qwen2.5-3B", "half": "Qwen2.5-1.5B", "quarter": "Qwen2.5-0.5B"}  # a base's, the paper's
UTILITY = ("utility_rouge_l", "utility_accuracy")


class Runs:
    """The finished runs of a study, to be found by their parameters.

    parameters: a row a run (index: its name), a column a parameter, as `studies.run_table` gives them.
    """

    def __init__(self, parameters: pd.DataFrame):
        self.parameters = parameters
        self._told = comparable_parameters(parameters)
        usual = self._told.mode().iloc[0] if len(self._told) else pd.Series(dtype=object)
        self._usual = (self._told == usual).sum(axis=1)

    def find(self, **wanted) -> str | None:
        """The run with these parameters that is otherwise as most are; None without one."""
        chosen = self._matching(wanted)
        return self._usual[chosen].idxmax() if len(chosen) else None

    def family(self, parameter: str, **wanted) -> dict:
        """{setting: run} of runs with these parameters that differ in `parameter` alone.

        Of several such families the one of most settings, then the one that is otherwise as most runs are.
        """
        found = families(self._told.loc[self._matching(wanted)], parameter)
        best = max(found, key=lambda family: (len(family), self._usual[family].mean()), default=[])
        return {self.parameters.at[run, parameter]: run for run in best}

    def _matching(self, wanted: dict) -> pd.Index:
        keep = pd.Series(True, index=self.parameters.index)
        for name, value in wanted.items():
            keep &= self.parameters[name] == value
        return self.parameters.index[keep]


def tables(parameters: pd.DataFrame, summary: pd.DataFrame, utility: dict[str, dict[str, float]]) -> pd.DataFrame:
    """Every figure of the paper's tables for which the study has a run: a row each, columns COLUMNS.

    summary: `ratios.summary` with a column run; ours is paper counting. utility: {run: `utility.utility_of_run`}. ours
    is NaN
    where a table has the place and the study no run for it, or the run no such figure.
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
    """One of the tables as a page shows it, in percent: ours and the paper's in turn, and no row without ours.

    The main table has a line a task and a column a figure; the others a line a setting and a column a task.
    """
    rows = published[published["table"] == table]
    across = "figure" if table == "main" else "task"
    down = "task" if table == "main" else "setting"
    long = rows.melt([down, across], ["ours", "paper"], var_name="whose")
    wide = long.assign(value=100 * long["value"]).pivot(index=down, columns=[across, "whose"], values="value")
    order = pd.MultiIndex.from_product([dict.fromkeys(rows[across]), ["ours", "paper"]])
    lines = [line for line in dict.fromkeys(rows[down]) if rows.loc[rows[down] == line, "run"].notna().any()]
    return _rounded(wide.reindex(index=lines, columns=order).rename_axis(down))


def dialog_matrix(parameters: pd.DataFrame, cells: dict[str, pd.DataFrame]) -> pd.DataFrame | None:
    """MR(j→k) of the study's federated dialog run of three clients, and the paper's, in percent; None without one.

    cells: {run: `ratios.cells`}. Lines: prefix client; columns: ours and the paper's by suffix client.
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
    """Whether a run has a corpus of the paper's kind and one of its models; detector and sizes may still differ."""
    return parameters["corpus"] == "hub" and Path(str(parameters["model"])).name in ALIASES.values()


def _rounded(table: pd.DataFrame) -> pd.DataFrame:
    return table.map(lambda value: half_up(value, 3))


def _main(runs: Runs) -> Iterator[tuple[str, str | None, str | None, dict]]:
    """(table, metric of ours, run, place) of the main table."""
    figures = paper_published.main_figures().set_index(["task", "metric", "algorithm"])["value"]
    utility = paper_published.utility().set_index("task") / 100
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
        if rows["setting"].isin(list(found)).sum() < 2:  # one alone compares nothing
            continue
        for row in rows.to_dict("records"):
            place = {"task": task, "parameter": parameter, "setting": str(row["setting"])}
            table = "inter_prefix" if metric == "mr_inter" else parameter
            run = found.get(row["setting"])
            yield table, metric, run, place | {"figure": metric.replace("mr", "MR"), "paper": row["value"]}


def settings(runs: Runs, parameter: str, task: str) -> dict:
    """{setting as the paper has it: run} of one ablation; a single run is none."""
    if parameter == "model":
        names = _models()
        chosen = runs.parameters[runs.parameters["task"] == task]["model"].unique()
        found = {names.get(m, Path(m).name): runs.find(task=task, algorithm="fedavg", model=m) for m in chosen}
        found = {name: run for name, run in found.items() if name in ALIASES.values() and run is not None}
    elif parameter == "algorithm":
        found = runs.family(parameter, task=task)
    elif parameter == "rounds":
        both = (runs.family(name, task=task, algorithm="fedavg") for name in ("checkpoint_round", "rounds"))
        found = max(both, key=len)
    else:
        found = runs.family(parameter, task=task, algorithm="fedavg")
    return found if len(found) > 1 else {}


def _models() -> dict[str, str]:
    """{model: the paper's model in whose place it stands}, by the aliases of the bases in params/base."""
    places = {}
    for file in sorted((PACKAGE.parent / "params" / "base").glob("*.yaml")):
        try:
            aliases = read(file).get("models", {})
        except ConfigError:  # a base that cannot be read names nothing; whoever runs it is told
            continue
        for alias, model in aliases.items():
            if alias in ALIASES:
                places[model["model"] if isinstance(model, dict) else model] = ALIASES[alias]
    return places


def _ours(values: pd.DataFrame, utility: dict, run: str | None, metric: str | None) -> dict:
    if run is None:
        return dict.fromkeys(("ours", "low", "high"), float("nan"))
    if metric is not None:
        return dict(zip(("ours", "low", "high"), values.loc[(run, metric)], strict=True))
    figures = utility.get(run, {})
    own = next((figures[name] for name in UTILITY if name in figures), float("nan"))
    return {"ours": own, "low": float("nan"), "high": float("nan")}
