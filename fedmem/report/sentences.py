"""One sentence for each question about several runs, made from their figures: what they allow one to say, and what not.

Frames in, text out; no number is typed by hand. A difference is called one only where its interval leaves 0 out.
"""

from __future__ import annotations

import pandas as pd

from fedmem.display.numbers import NO_CONTROL, PREFIXES_ALONE, UNDEFINED, listed, percent, points, quoted


def over_control(summary: pd.DataFrame, part: str, counting: str) -> str:
    """Describe which runs exceed their held-out control.

    summary: `ratios.summary` of several runs, with a column run.
    part: intra, inter or total.
    counting: paper, strict or verbatim.
    """
    rows = summary[(summary["counting"] == counting) & (summary["metric"] == f"excess_{part}")]
    known = rows.dropna(subset=["value"])
    ratios = summary[(summary["counting"] == counting) & (summary["metric"] == f"mr_{part}")]
    # a missing control and an undefined ratio both make the excess NaN; the reader needs to know which
    if known.empty and ratios["value"].notna().any():
        return f"Of MR_{part} under {counting} counting {NO_CONTROL}."
    if known.empty:
        return f"MR_{part} under {counting} counting {UNDEFINED}."
    above = known[known["low"] > 0]
    words = [f"`{row['run']}` (by {points(row['value'])})" for row in above.to_dict("records")]
    rest = [run for run in known["run"] if run not in set(above["run"])]
    parts = [f"is above its held-out control in {listed(words)}"] if words else []
    parts += (
        [f"is indistinguishable from {'it' if words else 'its held-out control'} in {listed(quoted(rest))}"]
        if rest
        else []
    )
    return f"MR_{part} under {counting} counting {'; it '.join(parts)}. {PREFIXES_ALONE}"


def intra_over_inter(found: dict[str, dict]) -> str:
    """Describe in which runs a client's own text comes back more often than other clients' text.

    found: {run: record with difference (MR_intra − MR_inter), low, high}; NaN where undefined.
    """
    known = {run: row for run, row in found.items() if not pd.isna(row["difference"])}
    above = [run for run, row in known.items() if row["low"] > 0]
    below = [run for run, row in known.items() if row["high"] < 0]
    open_ = [run for run in known if run not in above + below]
    parts = [
        f"MR_intra is above MR_inter in {listed(quoted(above))}" if above else "",
        f"below it in {listed(quoted(below))}" if below else "",
        f"the two are indistinguishable in {listed(quoted(open_))}" if open_ else "",
    ]
    text = "; ".join(part for part in parts if part)
    return f"MR_intra and MR_inter: {text}." if known and not above else f"{text or f'MR_inter {UNDEFINED}'}."


def comparison(table: pd.DataFrame, part: str = "total", level: float = 0.05) -> str:
    """Describe which runs differ after Holm's adjustment.

    table: `comparisons.compare`.
    part: intra, inter or total.
    level: significance level of p_holm, between 0 and 1.
    """
    rows = table[(table["part"] == part) & table["difference"].notna()]
    if rows.empty:
        return "No two runs differ in one parameter alone, so nothing is compared."
    tested = rows[rows["p_holm"].notna()]
    # the adjusted p-value decides, not the interval, which is not adjusted for the number of comparisons
    apart = tested[tested["p_holm"] < level]
    words = [
        f"`{row['run']}` {'+' if row['difference'] > 0 else '−'}{points(abs(row['difference']))} against "
        f"`{row['other']}`"
        for row in apart.to_dict("records")
    ]
    rest = len(tested) - len(apart)
    end = f" {rest} of {len(tested)} comparisons show no difference beyond chance." if rest else ""
    text = (
        f"after Holm's adjustment {listed(words)}."
        if words
        else "no two runs are distinguishable on the prefixes that they share."
    )
    return f"MR_{part}: {text}{end} {PREFIXES_ALONE}"


def over_reference(table: pd.DataFrame, reference: str) -> str:
    """Describe which runs exceed a reference model.

    table: `comparisons.over_references`. reference: untrained or local.
    """
    # a local model has seen its own client's rows, so it is a control between clients only
    part = "inter" if reference == "local" else "total"
    rows = table[(table["reference"] == reference) & (table["part"] == part)].dropna(subset=["difference"])
    if rows.empty:
        return f"This study has no {reference} model on the same prefixes: that control is missing here."
    above = list(rows.loc[rows["low"] > 0, "run"])
    rest = [run for run in rows["run"] if run not in above]
    parts = [f"MR_{part} is above the {reference} model's in {listed(quoted(above))}."] if above else []
    return " ".join(
        parts + ([f"Indistinguishable from the {reference} model: {listed(quoted(rest))}."] if rest else [])
    )


def suffix_clients(cells: pd.DataFrame, counting: str) -> str:
    """Describe which clients' text comes back most and least often to other clients' prompts.

    cells: `ratios.cells` of one run. counting: paper, strict or verbatim.
    """
    rows = cells[(cells["counting"] == counting) & cells["member"] & (cells["prefix_client"] != cells["suffix_client"])]
    rows = rows.groupby("suffix_client")[["hits", "n"]].sum(min_count=1)  # all NaN stays NaN, not 0
    shares = (rows["hits"] / rows["n"]).dropna()
    if shares.empty:
        return f"MR between clients under {counting} counting {UNDEFINED}."
    if shares.max() == 0:
        return f"No client's text came to other clients' prompts under {counting} counting."
    return (
        f"By other clients' prompts, the text of client {shares.idxmax()} comes back most often "
        f"({percent(shares.max())}), that of client {shares.idxmin()} least ({percent(shares.min())}); if the "
        "intervals overlap, the order may be chance."
    )


def gap(table: pd.DataFrame) -> str:
    """Describe the rank correlation of perplexity gap (test against training rows) and MR_intra over runs.

    table: a row per run with gap and value (MR_intra, in 0 … 1).
    """
    # two points always correlate by ±1, and a constant gap has no ranks
    known = table.dropna(subset=["gap", "value"])
    if len(known) < 3 or known["gap"].nunique() < 2:
        return "Fewer than three runs with a perplexity gap: its relation to memorization cannot be assessed."
    rank = float(known["gap"].rank().corr(known["value"].rank()))
    return (
        f"Over {len(known)} runs the ranks of perplexity gap and MR_intra correlate by {rank:.2f}; so few runs show a "
        "direction only."
    )


def seeds(table: pd.DataFrame, metric: str = "mr_intra", counting: str = "verbatim") -> str:
    """Describe mean and standard deviation of a metric over training seeds.

    table: `comparisons.seeds`.
    metric: its name in the column metric, for example mr_intra.
    counting: paper, strict or verbatim.
    """
    rows = table[(table["metric"] == metric) & (table["counting"] == counting)].dropna(subset=["mean"])
    if rows.empty:
        return "Every run was trained once: this study says nothing about how much training itself varies."
    words = [
        f"`{row['run']}` {percent(row['mean'])} ± {percent(row['sd'])} (n = {row['seeds']} seeds)"
        for row in rows.to_dict("records")
    ]
    return f"Mean and standard deviation of {metric} over training seeds: {listed(words)}."


def clipped(parameters: pd.DataFrame) -> str:
    """Return the caveat for runs with update_clip, or an empty string without such runs.

    parameters: one row per run (index: its name). Every table and figure that shows such a run repeats the caveat.
    """
    # not every study's table of parameters has this column
    rows = parameters[parameters["update_clip"].notna()] if "update_clip" in parameters else parameters.iloc[:0]
    return f"{listed(quoted(rows.index))}: clipping and noise, no formal guarantee." if len(rows) else ""


def comparable(published: pd.DataFrame) -> str:
    """Describe whether figures here are comparable with the published ones. published: `tables.tables`."""
    rows = published[published["run"].notna()]
    if rows.empty:
        return "No run of this study corresponds to a place in the published tables."
    if rows["comparable"].all():
        return (
            "Models and kinds of corpora are the published study's; what it does not specify (who is a client, how "
            "much is trained, the temperature) is our choice, so small differences are not meaningful."
        )
    which = (
        "ours are"
        if not rows["comparable"].any()
        else f"those of {listed(quoted(dict.fromkeys(rows.loc[~rows['comparable'], 'run'])))} are"
    )
    return (
        f"Not comparable: {which} of other models and other corpora than the published ones. Compare the "
        "columns by their order and direction, not by their size."
    )


def findings(table: pd.DataFrame) -> str:
    """Describe how many of the published claims hold here. table: `findings.findings`."""
    if table.empty:
        return "This study has no runs that bear on a published finding."
    counts = table["here"].value_counts().reindex(["holds", "does not hold", "open"], fill_value=0)
    return (
        f"Of {len(table)} comparisons behind the published findings {counts['holds']} go the same way here, "
        f"{counts['does not hold']} the other way, and {counts['open']} are open: their intervals contain 0. "
        f"{PREFIXES_ALONE}"
    )
