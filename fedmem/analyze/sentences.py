"""One sentence for each question about one run, made from its figures: what they allow one to say, and what not.

Frames in, text out; no number is typed by hand. A difference is called one only where its interval leaves 0 out.
"""

from __future__ import annotations

import pandas as pd

from fedmem.display.numbers import NO_CONTROL, UNDEFINED, hundredfold, percent, points

WORDS = {"intra": "a client's own text", "inter": "another client's text", "total": "anybody's text"}


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
    interval = f"{hundredfold(excess['low'])} to {hundredfold(excess['high'])}"
    text += f", {percent(control['value'])} match held-out text; the excess is {points(excess['value'])} ({interval}): "
    return text + _verdict(excess, "more than chance explains", "fewer than chance explains", "not told from chance")


def excess_cells(table: pd.DataFrame, counting: str, confidence: float = 0.95) -> str:
    """How many pairs of clients show more than their control, after Holm. table: `ratios.excess`."""
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
    """What share of the texts can be matched at all. table: `extracted_text.measurable`."""
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
    """Which kinds make up the total. table: `ratios.kinds`."""
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
    """How many characters came back. table: `extracted_text.extracted`, of verbatim counting."""
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
    """Whether the estimate still moves with more suffixes. table: `sample_size.ratio_by_sample_size`."""
    rows = table[table["metric"] == "mr_total"].set_index(["fewer", "share"])["value"]
    half, full = rows["suffixes", 0.5], rows["suffixes", 1.0]
    if pd.isna(full):
        return f"MR_total {UNDEFINED}."
    if full == 0:
        return "Nothing matched, on any part of the sample."
    grows = full - half > 0.1 * full
    moving = "still rises: it is a lower bound of what all suffixes would give" if grows else "hardly rises any more"
    return f"With half of the suffixes MR_total would be {percent(half)}, with all {percent(full)}: it {moving}."


def _verdict(row: pd.Series, above: str, below: str, neither: str) -> str:
    if pd.isna(row["low"]):
        return f"{neither}."
    return f"{above if row['low'] > 0 else below if row['high'] < 0 else neither}."
