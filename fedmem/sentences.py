"""One sentence for each question, made from the figures: what they allow one to say, and what not.

Frames in, text out; no number is typed by hand. A difference is called one only where its interval leaves 0 out. Knows
no notebook.
"""

from __future__ import annotations

import pandas as pd

from fedmem.rounding import half_up

UNDEFINED = "is not defined here"
NO_CONTROL = "there is no held-out control here, so how much of it is chance is not known"
WORDS = {"intra": "a client's own text", "inter": "another client's text", "total": "anybody's text"}
PREFIXES_ALONE = (
    "This holds for the sampled prefixes of one trained model; how training varies shows only between seeds."
)


def percent(value: float) -> str:
    """0.0153 → "1.53 %"; three figures, and no more than two decimals."""
    return "n/a" if pd.isna(value) else f"{_hundredfold(value)} %"


def points(value: float) -> str:
    """A difference of two shares: 0.0153 → "1.53 percentage points"."""
    return "n/a" if pd.isna(value) else f"{_hundredfold(value)} percentage points"


def share(row: pd.Series | dict) -> str:
    """A value with its interval: "12.5 % (7.30 % to 20.6 %)"; row: value, low, high."""
    return f"{percent(row['value'])} ({percent(row['low'])} to {percent(row['high'])})"


def aggregate(summary: pd.DataFrame, part: str, counting: str) -> str:
    """What MR_intra, MR_inter or MR_total says beside its control."""
    rows = summary[summary["counting"] == counting].set_index("metric")
    ratio, control, excess = (rows.loc[f"{name}_{part}"] for name in ("mr", "control", "excess"))
    if pd.isna(ratio["value"]):
        return f"MR_{part} under {counting} counting {UNDEFINED}."
    text = f"Of {int(ratio['n']):,} prefixes {share(ratio)} give back {WORDS[part]} under {counting} counting"
    if pd.isna(control["value"]):
        return f"{text}; {NO_CONTROL}."
    interval = f"{_hundredfold(excess['low'])} to {_hundredfold(excess['high'])}"
    text += f", {percent(control['value'])} match held-out text; the excess is {points(excess['value'])} ({interval}): "
    return text + _verdict(excess, "more than chance explains", "fewer than chance explains", "not told from chance")


def excess_cells(table: pd.DataFrame, counting: str, confidence: float = 0.95) -> str:
    """How many pairs of clients show more than their control, after Holm. table: `metrics.excess`."""
    cells = table[table["counting"] == counting].dropna(subset=["excess"])
    if cells.empty:
        return f"No pair of clients has a defined excess under {counting} counting: a ratio or its control is missing."
    above = cells[(cells["p_holm"] < 1 - confidence) & (cells["excess"] > 0)]
    own = (above["prefix_client"] == above["suffix_client"]).sum()
    return (
        f"Of {len(cells)} pairs of clients {len(above)} show more than their control after Holm's adjustment "
        f"({own} of them a client with itself, {len(above) - own} one client's prompts and another's text); for the "
        "others nothing is shown, neither a leak nor that there is none."
    )


def measurable(table: pd.DataFrame, min_match_chars: int) -> str:
    """What share of the texts can be matched at all. table: `extraction.measurable`."""
    sums = table.groupby("text")[["long_enough", "n"]].sum()
    shares = sums["long_enough"] / sums["n"]
    least = shares.min()
    listed = ", ".join(
        f"{percent(value)} of the {text.replace('suffix', 'suffixe')}s" for text, value in shares.items()
    )
    if least >= 0.9:
        end = "a ratio of 0 would not be an artefact of short texts."
    elif least == 0:
        end = "where nothing is long enough, a ratio of 0 says nothing about memorization."
    else:
        end = "the rest can never match, so every ratio is a lower bound on what came back."
    return f"{listed} have the {min_match_chars} characters that a match needs: {end}"


def kinds(table: pd.DataFrame) -> str:
    """Which kinds make up the total. table: `metrics.kinds`."""
    total = table[(table["metric"] == "mr_total") & (table["value"] > 0)]
    if total.empty:
        return "Nothing that was trained on came back, of no kind."
    words = ", ".join(f"{percent(row['value'])} {row['kind']}" for row in total.to_dict("records"))
    untyped = (total["kind"] == "paraphrase").any()
    end = " The paraphrases are untyped candidates: an upper bound." if untyped else ""
    return f"Of all prefixes, by the first kind that a prefix shows: {words}.{end}"


def exclusions(table: pd.DataFrame, counting: str = "paper") -> str:
    """What is left of MR_total without shared passages and babble. table: `exclusions.summaries`."""
    rows = table[(table["counting"] == counting) & (table["metric"] == "mr_total")].set_index("excluded")["value"]
    raw, left = rows["nothing"], rows["shared, incoherent"]
    if pd.isna(raw):
        return f"MR_total under {counting} counting {UNDEFINED}."
    if raw == 0:
        return f"Nothing matched under {counting} counting, so there is nothing to leave out."
    parts = f"{points(raw - rows['shared'])} by shared passages, {points(raw - rows['incoherent'])} by babble"
    goes = "stays at" if percent(left) == percent(raw) else "falls to"
    return (
        f"MR_total under {counting} counting is {percent(raw)}; it {goes} {percent(left)} when both are left out "
        f"({parts}): what is left is neither copied between clients word for word, nor boilerplate, nor babble."
    )


def extracted(table: pd.DataFrame) -> str:
    """How many characters came back. table: `extraction.extracted`, of verbatim counting."""
    members = table[table["member"]]
    anybody, crossed = members[members["prefix_client"] == -1], members[members["prefix_client"] >= 0]
    crossed = crossed[crossed["prefix_client"] != crossed["suffix_client"]]
    chars, available = int(anybody["chars"].sum()), int(anybody["available"].sum())
    if not chars:
        return f"No run of words of the {available:,} characters of sampled text came back verbatim."
    longest = int(anybody["longest"].max())
    return (
        f"{chars:,} of {available:,} characters of sampled text ({percent(chars / available)}) came back verbatim, the "
        f"longest passage {longest:,} characters; {int(crossed['chars'].sum()):,} came to another client's prompts."
    )


def settling(table: pd.DataFrame) -> str:
    """Whether the estimate still moves with more suffixes. table: `settling.settle`."""
    rows = table[table["metric"] == "mr_total"].set_index(["fewer", "share"])["value"]
    half, full = rows["suffixes", 0.5], rows["suffixes", 1.0]
    if pd.isna(full):
        return f"MR_total {UNDEFINED}."
    if full == 0:
        return "Nothing matched, on any part of the sample."
    grows = full - half > 0.1 * full
    moving = "still rises: it is a lower bound of what all suffixes would give" if grows else "hardly rises any more"
    return f"With half of the suffixes MR_total would be {percent(half)}, with all {percent(full)}: it {moving}."


def over_control(summary: pd.DataFrame, part: str, counting: str) -> str:
    """Which runs are above their held-out control. summary: `metrics.summary` with a column run."""
    rows = summary[(summary["counting"] == counting) & (summary["metric"] == f"excess_{part}")]
    known = rows.dropna(subset=["value"])
    ratios = summary[(summary["counting"] == counting) & (summary["metric"] == f"mr_{part}")]
    if known.empty and ratios["value"].notna().any():
        return f"Of MR_{part} under {counting} counting {NO_CONTROL}."
    if known.empty:
        return f"MR_{part} under {counting} counting {UNDEFINED}."
    above = known[known["low"] > 0]
    words = [f"`{row['run']}` (by {points(row['value'])})" for row in above.to_dict("records")]
    rest = [run for run in known["run"] if run not in set(above["run"])]
    parts = [f"is above its held-out control in {_listed(words)}"] if words else []
    parts += (
        [f"is not told from {'it' if words else 'its held-out control'} in {_listed(_names(rest))}"] if rest else []
    )
    return f"MR_{part} under {counting} counting {'; it '.join(parts)}. {PREFIXES_ALONE}"


def intra_over_inter(found: dict[str, dict]) -> str:
    """In which runs a client's own text comes back more than others' text. found: {run: `comparisons…` record}."""
    known = {run: row for run, row in found.items() if not pd.isna(row["difference"])}
    above = [run for run, row in known.items() if row["low"] > 0]
    below = [run for run, row in known.items() if row["high"] < 0]
    open_ = [run for run in known if run not in above + below]
    parts = [
        f"MR_intra is above MR_inter in {_listed(_names(above))}" if above else "",
        f"below it in {_listed(_names(below))}" if below else "",
        f"the two are not told apart in {_listed(_names(open_))}" if open_ else "",
    ]
    text = "; ".join(part for part in parts if part)
    return f"MR_intra and MR_inter: {text}." if known and not above else f"{text or f'MR_inter {UNDEFINED}'}."


def comparison(table: pd.DataFrame, part: str = "total", level: float = 0.05) -> str:
    """Which runs differ, after Holm. table: `comparisons.compare`."""
    rows = table[(table["part"] == part) & table["difference"].notna()]
    if rows.empty:
        return "No two runs differ in one parameter alone, so nothing is compared."
    tested = rows[rows["p_holm"].notna()]
    apart = tested[tested["p_holm"] < level]
    words = [
        f"`{row['run']}` {'+' if row['difference'] > 0 else '−'}{points(abs(row['difference']))} against "
        f"`{row['other']}`"
        for row in apart.to_dict("records")
    ]
    rest = len(tested) - len(apart)
    end = f" {rest} of {len(tested)} comparisons show no difference beyond chance." if rest else ""
    text = (
        f"after Holm's adjustment {_listed(words)}."
        if words
        else "no two runs are told apart on the prefixes that they share."
    )
    return f"MR_{part}: {text}{end} {PREFIXES_ALONE}"


def over_reference(table: pd.DataFrame, reference: str) -> str:
    """How runs stand beside a control by another model. table: `comparisons.over_references`."""
    part = "inter" if reference == "local" else "total"
    rows = table[(table["reference"] == reference) & (table["part"] == part)].dropna(subset=["difference"])
    if rows.empty:
        return f"This study has no {reference} model on the same prefixes: that control is missing here."
    above = list(rows.loc[rows["low"] > 0, "run"])
    rest = [run for run in rows["run"] if run not in above]
    parts = [f"MR_{part} is above the {reference} model's in {_listed(_names(above))}."] if above else []
    return " ".join(parts + ([f"Not told from the {reference} model: {_listed(_names(rest))}."] if rest else []))


def suffix_clients(cells: pd.DataFrame, counting: str) -> str:
    """Whether some clients' suffixes are easier, whoever prompts. cells: `metrics.cells`."""
    rows = cells[(cells["counting"] == counting) & cells["member"] & (cells["prefix_client"] != cells["suffix_client"])]
    rows = rows.groupby("suffix_client")[["hits", "n"]].sum(min_count=1)
    shares = (rows["hits"] / rows["n"]).dropna()
    if shares.empty:
        return f"MR between clients under {counting} counting {UNDEFINED}."
    if shares.max() == 0:
        return f"No client's text came to other clients' prompts under {counting} counting."
    return (
        f"By other clients' prompts, the text of client {shares.idxmax()} comes back most often "
        f"({percent(shares.max())}), that of client {shares.idxmin()} least ({percent(shares.min())}); where the "
        "intervals overlap, the order may be chance."
    )


def gap(table: pd.DataFrame) -> str:
    """Whether models that fit their training rows better than test rows give back more. table: gap, mr_intra."""
    known = table.dropna(subset=["gap", "value"])
    if len(known) < 3 or known["gap"].nunique() < 2:
        return "Fewer than three runs with a perplexity gap: nothing can be said about how it goes with memorization."
    rank = float(known["gap"].rank().corr(known["value"].rank()))
    return (
        f"Over {len(known)} runs the ranks of perplexity gap and MR_intra correlate by {rank:.2f}; so few runs show a "
        "direction, no law."
    )


def seeds(table: pd.DataFrame, metric: str = "mr_intra", counting: str = "verbatim") -> str:
    """What seeds of training say."""
    rows = table[(table["metric"] == metric) & (table["counting"] == counting)].dropna(subset=["mean"])
    if rows.empty:
        return "Every run was trained once: this study says nothing about how much training itself varies."
    words = [
        f"`{row['run']}` {percent(row['mean'])} ± {percent(row['sd'])} (n = {row['seeds']} seeds)"
        for row in rows.to_dict("records")
    ]
    return f"Mean and standard deviation of {metric} over training seeds: {_listed(words)}."


def clipped(parameters: pd.DataFrame) -> str:
    """What must be said wherever runs with update_clip show; nothing without such runs. parameters: a row a run."""
    rows = parameters[parameters["update_clip"].notna()] if "update_clip" in parameters else parameters.iloc[:0]
    return f"{_listed(_names(rows.index))}: clipping and noise, no formal guarantee." if len(rows) else ""


def comparable(published: pd.DataFrame) -> str:
    """Whether our figures may be held against the published ones. published: `paper_tables.tables`."""
    rows = published[published["run"].notna()]
    if rows.empty:
        return "This study has no run in any place of the published tables."
    if rows["comparable"].all():
        return (
            "Models and kinds of corpora are the published study's; what it does not say (who is a client, how much is "
            "trained, the temperature) is our choice, so that small differences say nothing."
        )
    which = (
        "ours are"
        if not rows["comparable"].any()
        else f"those of {_listed(_names(dict.fromkeys(rows.loc[~rows['comparable'], 'run'])))} are"
    )
    return (
        f"Not comparable: {which} of other models and other corpora than the published ones. The columns stand beside "
        "each other for their order and direction, not for their size."
    )


def findings(table: pd.DataFrame) -> str:
    """How many of the published claims hold here. table: `paper_findings.findings`."""
    if table.empty:
        return "This study has no runs that say anything to a published finding."
    counts = table["here"].value_counts().reindex(["holds", "does not hold", "open"], fill_value=0)
    return (
        f"Of {len(table)} comparisons behind the published findings {counts['holds']} go the same way here, "
        f"{counts['does not hold']} the other way, and {counts['open']} are open: their intervals hold 0. "
        f"{PREFIXES_ALONE}"
    )


def _hundredfold(value: float) -> str:
    size = abs(100 * value)
    digits = 0 if size == 0 or size >= 99.95 else 1 if size >= 10 else 2 if size >= 0.1 else 3
    return f"{half_up(100 * value, digits):.{digits}f}"


def _verdict(row: pd.Series, above: str, below: str, neither: str) -> str:
    if pd.isna(row["low"]):
        return f"{neither}."
    return f"{above if row['low'] > 0 else below if row['high'] < 0 else neither}."


def _names(runs) -> list[str]:
    """Runs as a page shows names."""
    return [f"`{run}`" for run in runs]


def _listed(words: list[str]) -> str:
    """All of a few words; of more than ten the first eight, and how many more."""
    words = [str(word) for word in words]
    words = words if len(words) <= 10 else [*words[:8], f"{len(words) - 8} more"]
    return words[0] if len(words) == 1 else ", ".join(words[:-1]) + " and " + words[-1] if words else "none"
