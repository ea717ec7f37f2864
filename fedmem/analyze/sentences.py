"""One sentence for each question about one run, made from its figures: what they allow one to say, and what not.

Frames in, text out; no number is typed by hand. A difference is called one only where its interval leaves 0 out.
"""

from __future__ import annotations

import pandas as pd

from fedmem.display.numbers import NO_CONTROL, UNDEFINED, hundredfold, percent, points

WORDS = {"intra": "a client's own text", "inter": "another client's text", "total": "anybody's text"}


def share(row: pd.Series | dict) -> str:
    """Format a share with its interval: "12.5 % (7.30 % to 20.6 %)". row: value, low, high, each in 0 … 1."""
    return f"{percent(row['value'])} ({percent(row['low'])} to {percent(row['high'])})"


def aggregate(summary: pd.DataFrame, part: str, counting: str) -> str:
    """Describe MR_intra, MR_inter or MR_total of one run and its excess over the held-out control.

    summary: `ratios.summary` of one run.
    part: intra, inter or total.
    counting: paper, strict or verbatim.
    Raises KeyError when the table has no rows of that part and counting.
    """
    rows = summary[summary["counting"] == counting].set_index("metric")
    ratio, control, excess = (rows.loc[f"{name}_{part}"] for name in ("mr", "control", "excess"))
    if pd.isna(ratio["value"]):
        return f"MR_{part} under {counting} counting {UNDEFINED}."
    text = f"Of {int(ratio['n']):,} prefixes {share(ratio)} give back {WORDS[part]} under {counting} counting"
    if pd.isna(control["value"]):
        return f"{text}; {NO_CONTROL}."
    interval = f"{hundredfold(excess['low'])} to {hundredfold(excess['high'])}"
    text += f", {percent(control['value'])} match held-out text; the excess is {points(excess['value'])} ({interval}): "
    return text + _verdict(
        excess, "more than chance explains", "fewer than chance explains", "indistinguishable from chance"
    )


def excess_cells(table: pd.DataFrame, counting: str, confidence: float = 0.95) -> str:
    """Describe how many pairs of clients exceed their control after Holm's adjustment.

    table: `ratios.excess` of one run.
    counting: paper, strict or verbatim.
    confidence: between 0 and 1; a cell exceeds its control if p_holm < 1 − confidence.
    """
    # a cell without a control has no excess; it must not count as one without a leak
    cells = table[table["counting"] == counting].dropna(subset=["excess"])
    if cells.empty:
        return f"No pair of clients has a defined excess under {counting} counting: a ratio or its control is missing."
    above = cells[(cells["p_holm"] < 1 - confidence) & (cells["excess"] > 0)]
    own = (above["prefix_client"] == above["suffix_client"]).sum()
    return (
        f"Of {len(cells)} pairs of clients {len(above)} show more than their control after Holm's adjustment "
        f"({own} of them a client with itself, {len(above) - own} one client's prompts and another's text); the "
        "others show neither a leak nor its absence."
    )


def measurable(table: pd.DataFrame, min_match_chars: int) -> str:
    """Describe which share of the texts is long enough to match.

    table: that of `fedmem.corpus.texts.measurable`. min_match_chars: shortest match in characters, ≥ 1.
    """
    sums = table.groupby("text")[["long_enough", "n"]].sum()
    shares = sums["long_enough"] / sums["n"]
    least = shares.min()
    listed = ", ".join(
        f"{percent(value)} of the {text.replace('suffix', 'suffixe')}s" for text, value in shares.items()
    )
    if least >= 0.9:
        end = "a ratio of 0 would not be an artefact of short texts."
    elif least == 0:
        end = "if nothing is long enough, a ratio of 0 says nothing about memorization."
    else:
        end = "the rest can never match, so every ratio is a lower bound on what came back."
    return f"{listed} have the {min_match_chars} characters that a match needs: {end}"


def kinds(table: pd.DataFrame) -> str:
    """Describe the kinds of matches that make up MR_total. table: `ratios.kinds` of one run."""
    total = table[(table["metric"] == "mr_total") & (table["value"] > 0)]
    if total.empty:
        return "Nothing of the training text came back, of any kind."
    words = ", ".join(f"{percent(row['value'])} {row['kind']}" for row in total.to_dict("records"))
    untyped = (total["kind"] == "paraphrase").any()
    end = " The paraphrases are untyped candidates: an upper bound." if untyped else ""
    return f"Of all prefixes, by the first kind that a prefix shows: {words}.{end}"


def exclusions(table: pd.DataFrame, counting: str = "paper") -> str:
    """Describe MR_total without shared passages and babble (incoherent continuations).

    table: `exclusions.summaries` of one run. counting: paper, strict or verbatim.
    """
    rows = table[(table["counting"] == counting) & (table["metric"] == "mr_total")].set_index("excluded")["value"]
    raw, left = rows["nothing"], rows["shared, incoherent"]
    if pd.isna(raw):
        return f"MR_total under {counting} counting {UNDEFINED}."
    if raw == 0:
        return f"Nothing matched under {counting} counting, so there is nothing to leave out."
    parts = f"{points(raw - rows['shared'])} by shared passages, {points(raw - rows['incoherent'])} by babble"
    # compared as printed, so that the sentence never says "falls to" the same figure
    goes = "stays at" if percent(left) == percent(raw) else "falls to"
    return (
        f"MR_total under {counting} counting is {percent(raw)}; it {goes} {percent(left)} when both are left out "
        f"({parts}): the rest is neither copied verbatim between clients, nor boilerplate, nor babble."
    )


def extracted(table: pd.DataFrame) -> str:
    """Describe how many characters of training text came back. table: `extracted_text.extracted`, verbatim counting."""
    members = table[table["member"]]
    # prefix_client −1 is the union over all prompts; summing over clients would count a passage several times
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
    """Describe whether MR_total still rises with more suffixes. table: `ratios.ratio_by_sample_size` of one
    run."""
    rows = table[table["metric"] == "mr_total"].set_index(["fewer", "share"])["value"]
    half, full = rows["suffixes", 0.5], rows["suffixes", 1.0]
    if pd.isna(full):
        return f"MR_total {UNDEFINED}."
    if full == 0:
        return "Nothing matched, on any part of the sample."
    # the second half of the suffixes adds more than a tenth of the whole
    grows = full - half > 0.1 * full
    moving = "still rises: it is a lower bound of what all suffixes would give" if grows else "hardly rises any more"
    return f"With half of the suffixes MR_total would be {percent(half)}, with all {percent(full)}: it {moving}."


def _verdict(row: pd.Series, above: str, below: str, neither: str) -> str:
    if pd.isna(row["low"]):
        return f"{neither}."
    return f"{above if row['low'] > 0 else below if row['high'] < 0 else neither}."
