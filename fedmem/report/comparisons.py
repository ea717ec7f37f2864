"""Runs against each other: differences with intervals, tests, controls by other models, and what seeds say.

Two runs that continued the same prefixes are compared prefix by prefix, others by their shares alone. Frames in, frames
out. This module knows runs by their parameters and counts; it opens no folder.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd

from fedmem.analyze.counting import Counts
from fedmem.analyze.intervals import effective_prefixes, holm, independent_difference, mcnemar, paired_difference
from fedmem.config.stages import OWNER, STAGES
from fedmem.config.vocabulary import PARTS

DIFFERENCE = ["part", "first", "second", "difference", "low", "high", "n", "paired", "more", "less", "p_value"]
SEED = "train_seed"
# Parameters that change nothing that is counted: those that are in no stage's identity, but for paths, in whose place
# the identity has the files' digests; and two that change last bits or intervals alone.
IDLE = {
    name for model in STAGES.values() for name, field in model.model_fields.items()
    if not field.json_schema_extra["identity"]
} - {"corpus_path", "heldout_path"} | {"torch_threads", "confidence"}  # fmt: skip
UNUSED = "–"  # in the place of a value that cannot matter beside the run's others


@dataclass(frozen=True, eq=False)
class Measured:
    """One run under one counting, prefix by prefix.

    values: prefix_id, client, intra (its own client hit), inter (share of the other clients hit), total (any hit),
    each in 0 … 1, NaN where undefined. clients: client, n_train.
    """

    values: pd.DataFrame
    clients: pd.DataFrame

    @classmethod
    def of(
        cls,
        matches: pd.DataFrame,
        prefixes: pd.DataFrame,
        clients: pd.DataFrame,
        suffixes: pd.DataFrame | None = None,
        counting: str = "paper",
        member: bool = True,
    ) -> Measured:
        """Arguments and errors as in `ratios.memorization`."""
        parts = Counts(matches, prefixes, clients, suffixes).by_prefix(counting, member)
        values = prefixes[["prefix_id", "client"]].reset_index(drop=True).assign(**parts)
        return cls(values, clients.sort_values("client", ignore_index=True))

    def weights(self, part: str) -> np.ndarray:
        """How much each client counts: its training rows, in `total` its prefixes."""
        mass = self.n if part == "total" else self.clients["n_train"].to_numpy(float)
        return mass / mass.sum() if mass.sum() else mass

    @property
    def n(self) -> np.ndarray:
        """Prefixes of each client."""
        sizes = self.values.groupby("client").size()
        return sizes.reindex(self.clients["client"], fill_value=0).to_numpy(float)

    def means(self, values: pd.Series) -> np.ndarray:
        """Mean over each client's prefixes of one value a prefix; NaN where there is none."""
        return values.groupby(self.values["client"]).agg("mean").reindex(self.clients["client"]).to_numpy(float)


def difference(first: Measured, second: Measured, confidence: float = 0.95) -> pd.DataFrame:
    """first − second for intra, inter and total: a row each, columns DIFFERENCE.

    paired: whether both continued the same prefixes; then the interval is Tango's on prefixes that differ and p_value
    is exact McNemar's (for inter: the sign test of whether a prefix hits more others): more, less are the numbers of
    prefixes where the first has more, or less. Otherwise the interval is Miettinen and Nurminen's and there is no test.
    The intervals speak of sampled prefixes for these two trained models, not of training.
    """
    keys = ["client", "prefix_id"]
    both = first.values.merge(second.values, on=keys, suffixes=("", "_second"))
    paired = len(both) == len(first.values) == len(second.values)
    rows = []
    for part in PARTS:
        shares = [_share(one, part) for one in (first, second)]
        if paired:
            gap = both[part] - both[f"{part}_second"]
            rows.append((part, *shares, *_paired(Measured(both[keys], first.clients), gap, part, confidence)))
        else:
            rows.append((part, *shares, *_unpaired(first, second, part, confidence)))
    return pd.DataFrame(rows, columns=DIFFERENCE)


def interval_method(table: pd.DataFrame) -> str:
    """Whose the intervals of a table of `difference`s are, as a caption names them."""
    names = {True: "Tango", False: "Miettinen-Nurminen"}
    words = {True: " where two runs continued the same prefixes", False: " elsewhere"}
    found = sorted(set(table["paired"].astype(bool)), reverse=True)
    return ", ".join(names[paired] + (words[paired] if len(found) > 1 else "") for paired in found)


def intra_over_inter(run: Measured, confidence: float = 0.95) -> dict:
    """MR_intra − MR_inter of one run with its interval: {difference, low, high, n, more, less, p_value}, as above."""
    found = _paired(run, run.values["intra"] - run.values["inter"], "intra", confidence)
    return dict(zip(DIFFERENCE[3:], found, strict=True))


def compare(runs: dict[str, Measured], parameters: pd.DataFrame, confidence: float = 0.95) -> pd.DataFrame:
    """Every two runs that differ in one parameter alone: parameter, run, other, part, and the columns of `difference`.

    parameters: a row a run (index: its name), a column a parameter. p_holm: p_value adjusted by Holm over all
    comparisons of one part in this table.
    """
    parts = []
    for one, other, parameter in pairs(parameters):
        if one in runs and other in runs:
            table = difference(runs[one], runs[other], confidence)
            parts.append(table.assign(parameter=parameter, run=one, other=other))
    columns = ["parameter", "run", "other", *DIFFERENCE]
    table = pd.concat(parts, ignore_index=True)[columns] if parts else pd.DataFrame(columns=columns)
    adjusted = table.groupby("part")["p_value"].transform(lambda p: holm(p.to_numpy(float)))
    return table.assign(p_holm=adjusted.astype(float))


def pairs(parameters: pd.DataFrame) -> list[tuple[str, str, str]]:
    """(run, other run, parameter) of all runs that differ in one parameter alone, seeds of training apart.

    What follows from another parameter (the number of the last round, μ where FedProx is compared with federated
    averaging, which has none) is no difference of its own. Of runs that are told alike the first stands for all.
    """
    texts = comparable_parameters(parameters).drop_duplicates()
    differing = _differing(texts)
    single = np.triu(differing.sum(axis=2) == 1)
    found = [(texts.index[i], texts.index[j], texts.columns[differing[i, j]][0]) for i, j in np.argwhere(single)]
    return [pair for pair in found if pair[2] != SEED]


def families(texts: pd.DataFrame, parameter: str) -> list[list[str]]:
    """Groups of runs that differ in `parameter` alone, one run a setting and as many as there are; every run is in one.

    texts: `told`. A run to which another parameter means nothing (the untrained one: how others are trained) is in the
    group of each of that parameter's values. Of runs that are told alike the first stands for all.
    """
    texts = texts.drop_duplicates()
    setting = texts[parameter].to_numpy(object)
    fits = ~_differing(texts.drop(columns=parameter)).any(axis=2) & (setting[:, None] != setting)
    found = {}
    for place in range(len(texts)):
        family = [place]
        for other in range(len(texts)):
            if fits[other, family].all():
                family.append(other)
        found[tuple(sorted(family))] = None
    return [list(texts.index[list(family)]) for family in found]


def reference(parameters: pd.DataFrame, run: str, algorithm: str) -> str | None:
    """The run of that algorithm (none: the untrained model; local: clients apart) that probes as `run` does, or None.

    It has the same model, partition, prefixes, decoding and detector; what training needs may differ.
    """
    return _reference(comparable_parameters(parameters), run, algorithm)


def _reference(texts: pd.DataFrame, run: str, algorithm: str) -> str | None:
    same = [name for name in texts if name == "model" or (OWNER[name] != "train" and name != "checkpoint_round")]
    for other in texts.index[texts["algorithm"] == algorithm]:
        if other != run and (texts.loc[other, same] == texts.loc[run, same]).all():
            return other
    return None


def over_references(runs: dict[str, Measured], parameters: pd.DataFrame, confidence: float = 0.95) -> pd.DataFrame:
    """What each run gives back more than models that cannot have learnt it: run, reference, other, and `difference`.

    reference: untrained (every part), or local (inter alone: local models did see their own client's rows).
    """
    tables, texts = [], comparable_parameters(parameters)
    for name, algorithm, parts in (("untrained", "none", PARTS), ("local", "local", ("inter",))):
        for run in runs:
            other = _reference(texts, run, algorithm)
            if other in runs and parameters.at[run, "algorithm"] not in ("none", "local"):
                table = difference(runs[run], runs[other], confidence)
                tables.append(table[table["part"].isin(parts)].assign(run=run, reference=name, other=other))
    columns = ["run", "reference", "other", *DIFFERENCE]
    return pd.concat(tables, ignore_index=True)[columns] if tables else pd.DataFrame(columns=columns)


def by_setting(summary: pd.DataFrame, parameters: pd.DataFrame, parameter: str) -> pd.DataFrame:
    """The summary's rows with `setting`, their run's value of one parameter, and `line`, its values of the others.

    summary: `ratios.summary` with a column run. Runs that differ in the parameter alone share a line (`families`); it
    is named by the other parameters that tell the lines apart. Runs that share theirs with no other are left out, and
    a run that is in several lines is there for each.
    """
    texts = comparable_parameters(parameters)
    set_ = parameters.index[parameters[parameter].notna()]
    lines = [family for family in families(texts, parameter) if len(family) > 1 and set(family) & set(set_)]
    others = pd.DataFrame([_together(texts.loc[family]) for family in lines], columns=texts.columns)
    names = map(", ".join, others[_telling(others.drop(columns=parameter))].to_numpy())
    places = [(run, name) for family, name in zip(lines, names, strict=True) for run in family if run in set_]
    table = summary.merge(pd.DataFrame(places, columns=["run", "line"]), on="run")
    return table.assign(setting=table["run"].map(parameters[parameter]))[[*summary, "setting", "line"]]


def seeds(values: pd.DataFrame, parameters: pd.DataFrame) -> pd.DataFrame:
    """Mean and spread over train_seed, where runs differ in nothing else: what intervals over prefixes cannot say.

    values: run, metric, counting, value. Columns: run (the first of its seeds), seeds, metric, counting, mean, sd (with
    n − 1), lowest, highest. No rows where every run has one seed; of runs of one seed the first counts.
    """
    texts = comparable_parameters(parameters).drop_duplicates().drop(columns=SEED, errors="ignore")
    alike = texts.groupby(list(texts), sort=False).ngroup()
    first = {run: alike.index[alike == group][0] for run, group in alike.items()}
    table = values.assign(run=values["run"].map(first)).groupby(["run", "metric", "counting"], sort=False)["value"]
    table = table.agg(seeds="size", mean="mean", sd="std", lowest="min", highest="max").reset_index()
    return table[table["seeds"] > 1].reset_index(drop=True)


def perplexity_gap(curves: pd.DataFrame, round_: int) -> float:
    """Perplexity on test rows − perplexity on training rows, at one round; NaN for a model that was not trained.

    curves: round, client, metric (train_loss, test_loss: nats per token), value, tokens. The training loss is the
    round's own, each client's weighed by its tokens, so it is a little above what the round's end would show.
    """
    now = curves[curves["round"] == round_]
    losses = []
    for metric in ("test_loss", "train_loss"):
        rows = now[now["metric"] == metric]
        rows = rows[rows["client"] >= 0] if (rows["client"] >= 0).any() else rows
        weight = rows["tokens"].to_numpy(float)
        losses.append(np.average(rows["value"], weights=weight) if weight.sum() else np.nan)
    return float(np.exp(losses[0]) - np.exp(losses[1]))


def _telling(texts: pd.DataFrame) -> list[str]:
    """The columns, first ones first, that tell rows apart which those before them do not."""
    names: list[str] = []
    groups = 1
    for name in texts:
        found = texts.groupby([*names, name]).ngroups
        if found > groups:
            names, groups = [*names, name], found
    return names


def comparable_parameters(parameters: pd.DataFrame) -> pd.DataFrame:
    """Parameters (a row a run) as text, so that null equals null; those that change nothing are left out.

    One that cannot matter beside the run's others is UNUSED. A checkpoint_round that is the run's last round is "last",
    whatever its number.
    """
    parameters = parameters[[name for name in parameters if name in OWNER and name not in IDLE]]
    texts = parameters.map(lambda value: "null" if value is None or value != value else str(value))
    if {"algorithm", "rounds", "checkpoint_round"} <= set(texts):
        last = parameters["rounds"].where(parameters["algorithm"] != "none", 0)
        texts["checkpoint_round"] = texts["checkpoint_round"].where(parameters["checkpoint_round"] != last, "last")
    unused = [[name in names for name in texts] for names in map(_unused, parameters.to_dict("records"))]
    return texts.mask(np.reshape(unused, texts.shape).astype(bool), UNUSED)


def _unused(run: dict) -> set[str]:
    """Names of the parameters that cannot matter beside a run's others; those that it does not say have defaults."""
    run = {name: None if value != value else value for name, value in run.items()}
    names = set()
    for model in STAGES.values():
        config = model.model_construct(**{name: run[name] for name in model.model_fields if name in run})
        names |= {name for name in model.model_fields if not config.matters(name)}
    return names


def _differing(texts: pd.DataFrame) -> np.ndarray:
    """(runs, runs, parameters): whether two runs differ in a parameter that means something to both. texts: `told`."""
    values = texts.to_numpy(object)
    used = values != UNUSED
    return (values[:, None] != values) & used[:, None] & used


def _together(texts: pd.DataFrame) -> pd.Series:
    """What runs that are alike where a parameter means something to them have in common: one value a parameter."""
    return texts.where(texts != UNUSED).bfill().iloc[0].fillna(UNUSED)


def _share(run: Measured, part: str) -> float:
    weights, means = run.weights(part), run.means(run.values[part])
    return float(np.sum(weights[weights > 0] * means[weights > 0])) if (weights > 0).any() else np.nan


def _paired(pairing: Measured, gap: pd.Series, part: str, confidence: float) -> tuple:
    sides = [pairing.means(gap.mul(sign).clip(lower=0)) for sign in (1, -1)]
    value, low, high = paired_difference(*sides, pairing.weights(part), pairing.n, confidence)
    if np.isnan(value):
        return np.nan, np.nan, np.nan, len(gap), True, np.nan, np.nan, np.nan
    more, less = int((gap > 1e-12).sum()), int((gap < -1e-12).sum())
    return float(value), float(low), float(high), len(gap), True, more, less, float(mcnemar(more, less))


def _unpaired(first: Measured, second: Measured, part: str, confidence: float) -> tuple:
    shares = [_share(run, part) for run in (first, second)]
    sizes = [float(effective_prefixes(r.means(r.values[part]), r.weights(part), r.n)) for r in (first, second)]
    low, high = independent_difference(shares[0], sizes[0], shares[1], sizes[1], confidence)
    n = len(first.values) + len(second.values)
    return shares[0] - shares[1], float(low), float(high), n, False, np.nan, np.nan, np.nan
