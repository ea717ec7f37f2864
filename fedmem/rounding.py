"""One rounding for all figures that people read: half up on the decimal value.

A share of 7 ∕ 16 is 43.8 %, whether it was counted or summed up from weights and so came out as 0.43749999999999994.
"""

from __future__ import annotations

import math
from decimal import ROUND_HALF_UP, Decimal

EXACT = 12  # figures of a float that are taken for its value; what is behind them is noise of sums


def half_up(value: float, digits: int) -> float:
    """A number rounded to so many decimals, halves away from 0; NaN and infinities as they are."""
    if not math.isfinite(value):
        return value
    decimal = Decimal(f"{value:.{EXACT}g}")
    if decimal.adjusted() > EXACT:  # nothing behind its point is exact
        return value
    return float(decimal.quantize(Decimal(1).scaleb(-digits), ROUND_HALF_UP)) + 0.0  # no −0


def figures(value: float, n: int = 4) -> str:
    """A number with at most `n` figures, as tables show it: 0.04375 → "0.04375", 1.5625 → "1.563"."""
    if value == 0 or not math.isfinite(value):
        return f"{value:.{n}g}"
    return f"{half_up(value, n - 1 - math.floor(math.log10(abs(value)))):.{n}g}"
