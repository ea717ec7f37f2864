"""Comparisons of runs: differences with intervals and tests, reference models as controls, and spread over seeds.

Two runs that continued the same prefixes are compared prefix by prefix, others by their shares only. Input and output
are frames: the parameters and counts of runs. No folder is read.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd

from fedmem.analyze.counting import Counts, weighted_sum
from fedmem.analyze.intervals import effective_prefixes, holm, independent_difference, mcnemar, paired_difference
from fedmem.config.stages import OWNER, STAGES
from fedmem.config.vocabulary import PARTS

DIFFERENCE = ["part", "first", "second", "difference", "low", "high", "n", "paired", "more", "less", "p_value"]
SEED = "train_seed"
# Parameters that cannot change a count: those outside every stage's identity, and two that change only last bits or
# intervals. Paths are not among them: the identity holds the files' digests instead, so another path can be other data.
IDLE = {
    name for model in STAGES.values() for name, field in model.model_fields.items()
    if not field.json_schema_extra["identity"]
} - {"corpus_path", "heldout_path"} | {"torch_threads", "confidence"}  # fmt: skip
UNUSED = "–"  # replaces a value that has no effect under the run's other parameters


@dataclass(frozen=True, eq=False)
class Measured:
    """One run under one counting, prefix by prefix.

    values: prefix_id, client, intra (its own client hit), inter (share of the other clients hit), total (any hit),
    each in 0 … 1, NaN where undefined. clients: in ascending order. n: prefixes of each client. weights: {part: weight
    of each client in the aggregate}.
    """

    values: pd.DataFrame
    clients: tuple
    n: np.ndarray
    weights: dict[str, np.ndarray]

    @classmethod
    def of(cls, counts: Counts, counting: str = "paper", member: bool = True) -> Measured:
        """Build it from the counts of one run, whose matches it does not keep.

        counts: the run's counts. counting: paper, strict or verbatim. member: True counts training suffixes, False the
        held-out control.
        Raises MetricsError as `ratios.cells` does.
        """
        values = counts.prefixes[["prefix_id", "client"]].reset_index(drop=True)
        weights = {part: counts.weights_of(part) for part in PARTS}
        return cls(values.assign(**counts.by_prefix(counting, member)), counts.clients, counts.n, weights)

    def means(self, values: pd.Series) -> np.ndarray:
        """Return each client's mean of one value per prefix; NaN for a client without prefixes."""
        return values.groupby(self.values["client"]).agg("mean").reindex(list(self.clients)).to_numpy(float)

    def share(self, part: str) -> float:
        """Return an aggregate: intra, inter or total."""
        return weighted_sum(self.means(self.values[part]), self.weights[part])


def difference(first: Measured, second: Measured, confidence: float = 0.95) -> pd.DataFrame:
    """Return first − second for intra, inter and total: one row each, columns DIFFERENCE.

    first, second: the two runs, under the same counting. confidence: coverage of the intervals, in (0, 1).
    Column paired: whether both continued the same prefixes. Paired runs get Tango's interval on the prefixes that
    differ, and the exact McNemar test as p_value (for inter: the sign test of whether a prefix hits more other
    clients); more and less are the numbers of prefixes where the first has more, or less. Unpaired runs get Miettinen
    and Nurminen's interval and no test. The intervals cover the sampling of prefixes for these two trained models, not
    the randomness of training.
    """
    both = first.values.merge(second.values, on=["client", "prefix_id"], suffixes=("", "_second"))
    # a partial overlap counts as unpaired: pairing only the shared prefixes would leave out part of each run
    paired = len(both) == len(first.values) == len(second.values)
    rows = []
    for part in PARTS:
        # the merge keeps the order of the first run's prefixes, so the gap lies beside them
        found = (
            _paired(first, both[part] - both[f"{part}_second"], part, confidence)
            if paired
            else _unpaired(first, second, part, confidence)
        )
        rows.append((part, first.share(part), second.share(part), *found))
    return pd.DataFrame(rows, columns=DIFFERENCE)


def interval_method(table: pd.DataFrame) -> str:
    """Name the interval methods of a table of `difference`s, for a caption."""
    names = {True: "Tango", False: "Miettinen-Nurminen"}
    words = {True: " where two runs continued the same prefixes", False: " elsewhere"}
    found = sorted(set(table["paired"].astype(bool)), reverse=True)
    return ", ".join(names[paired] + (words[paired] if len(found) > 1 else "") for paired in found)


def intra_over_inter(run: Measured, confidence: float = 0.95) -> dict:
    """Return MR_intra − MR_inter of one run as {difference, low, high, n, paired, more, less, p_value}.

    Columns and test as in `difference`. confidence: coverage of the interval, in (0, 1).
    """
    # always paired: both shares are of the same prefixes
    found = _paired(run, run.values["intra"] - run.values["inter"], "intra", confidence)
    return dict(zip(DIFFERENCE[3:], found, strict=True))


def compare(runs: dict[str, Measured], parameters: pd.DataFrame, confidence: float = 0.95) -> pd.DataFrame:
    """Compare every two runs that differ in one parameter only.

    runs: {name: run}. parameters: one row per run (index: its name), one column per parameter.
    confidence: coverage of the intervals, in (0, 1).
    Columns: parameter, run, other, those of `difference`, and p_holm: p_value adjusted by Holm's method over all
    comparisons of one part in this table.
    """
    parts = []
    for one, other, parameter in pairs(parameters):
        if one in runs and other in runs:
            table = difference(runs[one], runs[other], confidence)
            parts.append(table.assign(parameter=parameter, run=one, other=other))
    table = _joined(parts, "parameter", "run", "other")
    # each part is a family of tests of its own
    adjusted = table.groupby("part")["p_value"].transform(lambda p: holm(p.to_numpy(float)))
    return table.assign(p_holm=adjusted.astype(float))


def pairs(parameters: pd.DataFrame) -> list[tuple[str, str, str]]:
    """Return (run, other run, parameter) for all pairs of runs that differ in one parameter only, except train_seed.

    A value that follows from another parameter (the number of the last round; μ when FedProx is compared with federated
    averaging, which has no μ) does not count as a difference. Of runs with equal `comparable_parameters`, only the
    first is used.
    """
    texts = comparable_parameters(parameters).drop_duplicates()
    differing = _differing(texts)
    single = np.triu(differing.sum(axis=2) == 1)
    found = [(texts.index[i], texts.index[j], texts.columns[differing[i, j]][0]) for i, j in np.argwhere(single)]
    return [pair for pair in found if pair[2] != SEED]


def families(texts: pd.DataFrame, parameter: str) -> list[list[str]]:
    """Return groups of runs that differ in `parameter` only, as large as possible, one run per setting.

    texts: the result of `comparable_parameters`; of equal rows, only the first is used. parameter: a column of it.
    Every run is in at least one group. A run under which another parameter has no effect (training parameters of the
    untrained run) is in the group of each of that parameter's values.
    """
    texts = texts.drop_duplicates()
    setting = texts[parameter].to_numpy(object)
    fits = ~_differing(texts.drop(columns=parameter)).any(axis=2) & (setting[:, None] != setting)
    found = {}
    # "differs in nothing else" is not transitive, since UNUSED fits every value: hence a group grown from every run
    for place in range(len(texts)):
        family = [place]
        for other in range(len(texts)):
            if fits[other, family].all():
                family.append(other)
        found[tuple(sorted(family))] = None  # a dict as an ordered set: most groups are found once per member
    return [list(texts.index[list(family)]) for family in found]


def reference(texts: pd.DataFrame, run: str, algorithm: str) -> str | None:
    """Return the reference run of `run`: the first one of that algorithm that is probed in the same way, or None.

    texts: the result of `comparable_parameters`. run: a name in its index.
    algorithm: "none" (the untrained model) or "local" (each client trained alone).
    The reference has the same model, partition, prefixes, decoding and detector; training parameters may differ.
    """
    # checkpoint_round belongs to generation, but counts the rounds of a training
    same = [name for name in texts if name == "model" or (OWNER[name] != "train" and name != "checkpoint_round")]
    for other in texts.index[texts["algorithm"] == algorithm]:
        if other != run and (texts.loc[other, same] == texts.loc[run, same]).all():
            return other
    return None


def over_references(runs: dict[str, Measured], parameters: pd.DataFrame, confidence: float = 0.95) -> pd.DataFrame:
    """Return how much more each run gives back than reference models that cannot have learnt the texts.

    runs: {name: run}. parameters: one row per run (index: its name), one column per parameter.
    confidence: coverage of the intervals, in (0, 1).
    Columns: run, reference, other (the reference's run), and those of `difference`. reference: untrained (every part),
    or local (inter only: a local model has seen its own client's rows).
    """
    tables, texts = [], comparable_parameters(parameters)
    for name, algorithm, parts in (("untrained", "none", PARTS), ("local", "local", ("inter",))):
        for run in runs:
            other = reference(texts, run, algorithm)
            if other in runs and parameters.at[run, "algorithm"] not in ("none", "local"):
                table = difference(runs[run], runs[other], confidence)
                tables.append(table[table["part"].isin(parts)].assign(run=run, reference=name, other=other))
    return _joined(tables, "run", "reference", "other")


def by_setting(summary: pd.DataFrame, parameters: pd.DataFrame, parameter: str) -> pd.DataFrame:
    """Add to a summary the columns setting (the run's value of one parameter) and line (a name for the other values).

    summary: `ratios.summary` with a column run. parameters: one row per run (index: its name), one column per
    parameter. parameter: the one that varies along a line.
    Runs that differ in this parameter only share a line (`families`), named by the other parameters that distinguish
    the lines. A run alone on its line is left out. A run on several lines has its rows once for each.
    """
    texts = comparable_parameters(parameters)
    # runs without a value (NaN) have no position on the axis; a line of such runs only is dropped
    set_ = parameters.index[parameters[parameter].notna()]
    lines = [family for family in families(texts, parameter) if len(family) > 1 and set(family) & set(set_)]
    others = pd.DataFrame([_together(texts.loc[family]) for family in lines], columns=texts.columns)
    names = map(", ".join, others[_telling(others.drop(columns=parameter))].to_numpy())
    places = [(run, name) for family, name in zip(lines, names, strict=True) for run in family if run in set_]
    table = summary.merge(pd.DataFrame(places, columns=["run", "line"]), on="run")
    return table.assign(setting=table["run"].map(parameters[parameter]))[[*summary, "setting", "line"]]


def seeds(values: pd.DataFrame, parameters: pd.DataFrame) -> pd.DataFrame:
    """Return mean and spread over train_seed of runs that differ in nothing else.

    This is the randomness of training, which intervals over prefixes do not cover.
    values: run, metric, counting, value. parameters: one row per run (index: its name), one column per parameter.
    Columns: run (the first of its seeds), metric, counting, seeds (their number), mean, sd (with n − 1), lowest,
    highest. A run with a single seed has no row; of several runs with the same seed, the first counts.
    """
    texts = comparable_parameters(parameters).drop_duplicates().drop(columns=SEED, errors="ignore")
    alike = texts.groupby(list(texts), sort=False).ngroup()
    first = {run: alike.index[alike == group][0] for run, group in alike.items()}
    table = values.assign(run=values["run"].map(first)).groupby(["run", "metric", "counting"], sort=False)["value"]
    table = table.agg(seeds="size", mean="mean", sd="std", lowest="min", highest="max").reset_index()
    return table[table["seeds"] > 1].reset_index(drop=True)


def perplexity_gap(curves: pd.DataFrame, round_: int) -> float:
    """Return the perplexity on test rows − that on training rows, at one round; NaN for a model that was not trained.

    curves: round, client, metric (train_loss, test_loss: nats per token), value, tokens. round_: number of the round.
    Losses of clients are weighted by tokens. The training loss is measured during the round, so it is slightly higher
    than at its end.
    """
    now = curves[curves["round"] == round_]
    losses = []
    for metric in ("test_loss", "train_loss"):
        rows = now[now["metric"] == metric]
        # the pooled row (client −1) counts only if no client has a row, as in the training loss of central training
        rows = rows[rows["client"] >= 0] if (rows["client"] >= 0).any() else rows
        weight = rows["tokens"].to_numpy(float)
        losses.append(np.average(rows["value"], weights=weight) if weight.sum() else np.nan)
    return float(np.exp(losses[0]) - np.exp(losses[1]))


def _telling(texts: pd.DataFrame) -> list[str]:
    """Return the columns, in order, that distinguish rows which the columns before them do not."""
    names: list[str] = []
    groups = 1
    for name in texts:
        found = texts.groupby([*names, name]).ngroups
        if found > groups:
            names, groups = [*names, name], found
    return names


def comparable_parameters(parameters: pd.DataFrame) -> pd.DataFrame:
    """Return parameters (one row per run) as strings, so that null equals null, without those that change no count.

    A value that has no effect under the run's other parameters is UNUSED. A checkpoint_round that is the run's last
    round is "last", whatever its number.
    """
    parameters = parameters[[name for name in parameters if name in OWNER and name not in IDLE]]
    texts = parameters.map(lambda value: "null" if value is None or value != value else str(value))
    if {"algorithm", "rounds", "checkpoint_round"} <= set(texts):
        last = parameters["rounds"].where(parameters["algorithm"] != "none", 0)
        texts["checkpoint_round"] = texts["checkpoint_round"].where(parameters["checkpoint_round"] != last, "last")
    unused = [[name in names for name in texts] for names in map(_unused, parameters.to_dict("records"))]
    return texts.mask(np.reshape(unused, texts.shape).astype(bool), UNUSED)


def _unused(run: dict) -> set[str]:
    """Return the parameters that have no effect under a run's other values; missing ones count as their defaults."""
    # NaN is how a frame shows a parameter that this run does not set
    run = {name: None if value != value else value for name, value in run.items()}
    names = set()
    for model in STAGES.values():
        # model_construct does not validate: values of a frame may have lost their type, and only `matters` is asked
        config = model.model_construct(**{name: run[name] for name in model.model_fields if name in run})
        names |= {name for name in model.model_fields if not config.matters(name)}
    return names


def _differing(texts: pd.DataFrame) -> np.ndarray:
    """Return a boolean array (runs, runs, parameters): whether two runs differ in a parameter that affects both.

    texts: the result of `comparable_parameters`.
    """
    values = texts.to_numpy(object)
    used = values != UNUSED
    return (values[:, None] != values) & used[:, None] & used


def _together(texts: pd.DataFrame) -> pd.Series:
    """Return the common value of each parameter, of runs that agree wherever it has an effect; UNUSED if nowhere."""
    return texts.where(texts != UNUSED).bfill().iloc[0].fillna(UNUSED)


def _joined(tables: list[pd.DataFrame], *names: str) -> pd.DataFrame:
    """Return tables of differences as one, with the columns `names` first."""
    columns = [*names, *DIFFERENCE]
    return pd.concat(tables, ignore_index=True)[columns] if tables else pd.DataFrame(columns=columns)


def _paired(run: Measured, gap: pd.Series, part: str, confidence: float) -> tuple:
    sides = [run.means(gap.mul(sign).clip(lower=0)) for sign in (1, -1)]
    value, low, high = paired_difference(*sides, run.weights[part], run.n, confidence)
    if np.isnan(value):
        return np.nan, np.nan, np.nan, len(gap), True, np.nan, np.nan, np.nan
    # shares of inter are fractions: equal ones may differ in the last bits
    more, less = int((gap > 1e-12).sum()), int((gap < -1e-12).sum())
    return float(value), float(low), float(high), len(gap), True, more, less, float(mcnemar(more, less))


def _unpaired(first: Measured, second: Measured, part: str, confidence: float) -> tuple:
    shares = [run.share(part) for run in (first, second)]
    sizes = [float(effective_prefixes(r.means(r.values[part]), r.weights[part], r.n)) for r in (first, second)]
    low, high = independent_difference(shares[0], sizes[0], shares[1], sizes[1], confidence)
    n = len(first.values) + len(second.values)
    return shares[0] - shares[1], float(low), float(high), n, False, np.nan, np.nan, np.nan
