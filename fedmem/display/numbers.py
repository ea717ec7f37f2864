"""Numbers as people read them: one rounding for all, percentages, and lists of names in sentences.

Rounding is half up on the decimal value: a share of 7 ∕ 16 is 43.8 %, whether it was counted or summed up from weights
and so came out as 0.43749999999999994.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from decimal import ROUND_HALF_UP, Decimal

import pandas as pd

EXACT = 12  # significant figures of a float that count; later ones are rounding noise of sums


def half_up(value: float, digits: int) -> float:
    """`value` rounded to `digits` decimals, halves away from 0. NaN and infinities are returned unchanged."""
    if not math.isfinite(value):
        return value
    decimal = Decimal(f"{value:.{EXACT}g}")
    if decimal.adjusted() > EXACT:  # no digit after its point is exact
        return value
    return float(decimal.quantize(Decimal(1).scaleb(-digits), ROUND_HALF_UP)) + 0.0  # no −0


def significant_figures(value: float, n: int = 4) -> str:
    """`value` with `n` significant figures, or all before the point: 1.5625 → "1.563", 12345.6 → "12346"."""
    if 10**n - 0.5 <= abs(value) < 10**EXACT:
        return f"{half_up(value, 0):.0f}"
    if value == 0 or not math.isfinite(value):
        return f"{value:.{n}g}"
    return f"{half_up(value, n - 1 - math.floor(math.log10(abs(value)))):.{n}g}"


def display_settings(max_rows: int = 60) -> None:
    """Give the tables of a notebook one look: floats with four significant figures, horizontal rules only.

    max_rows: longest table that is displayed whole, in rows; of a longer one, pandas shows the beginning and the end.
    """
    pd.options.display.float_format = significant_figures
    pd.options.display.html.border = 0  # the styled tables of pandas have no border either
    pd.options.display.max_rows = max_rows


def readable(table: pd.DataFrame, words: Callable[[float], str] = significant_figures) -> pd.DataFrame:
    """A table as notebooks show it: floats written by `words`, "–" where there is no value."""

    def written(value):
        missing = value is None or (isinstance(value, float) and math.isnan(value))
        return "–" if missing else words(value) if isinstance(value, float) else value

    return table.map(written)


def signed_points(value: float) -> str:
    """Format a difference of two shares as percentage points with their sign: 0.0153 → "+1.53"."""
    return f"{half_up(100 * value, 2):+.2f}"


UNDEFINED = "is not defined here"

NO_CONTROL = "there is no held-out control here, so how much of it is chance is not known"

PREFIXES_ALONE = (
    "This holds for the sampled prefixes of one trained model; how training varies shows only between seeds."
)


def percent(value: float) -> str:
    """Format a share: 0.0153 → "1.53 %". Three significant digits, at most two decimals from 0.1 % on; NaN → "n/a"."""
    return "n/a" if pd.isna(value) else f"{hundredfold(value)} %"


def points(value: float) -> str:
    """Format a difference of two shares: 0.0153 → "1.53 percentage points"; NaN → "n/a"."""
    return "n/a" if pd.isna(value) else f"{hundredfold(value)} percentage points"


def hundredfold(value: float) -> str:
    size = abs(100 * value)
    # 99.95 rounds to 100.0: no decimals from there on. Below 0.1, three decimals keep a rare hit from reading as 0.00
    digits = 0 if size == 0 or size >= 99.95 else 1 if size >= 10 else 2 if size >= 0.1 else 3
    return f"{half_up(100 * value, digits):.{digits}f}"


def quoted(runs) -> list[str]:
    """Return the names of runs in backquotes, as Markdown shows code."""
    return [f"`{run}`" for run in runs]


def listed(words: list[str]) -> str:
    """Join words with commas and "and"; of more than ten, show the first eight and the number of the others."""
    words = [str(word) for word in words]
    words = words if len(words) <= 10 else [*words[:8], f"{len(words) - 8} more"]
    return words[0] if len(words) == 1 else ", ".join(words[:-1]) + " and " + words[-1] if words else "none"
