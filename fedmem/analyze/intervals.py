"""Confidence intervals and tests for shares and their differences, with non-zero width when nothing was found.

The functions take and return numbers; they do not depend on matches or clients. The intervals cover the sampling of
prefixes for one trained model, not the variation between trainings. All of them invert a score test. They were chosen
for their coverage at shares of 0.1 to 10 % of 200 and of 4,000 prefixes (tests/test_intervals.py), where intervals from
an estimated standard error, and sums of them, collapse.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import betainc, ndtri  # scipy.stats has the same by other names, and takes a second to import


def wilson(share: ArrayLike, n: ArrayLike, confidence: float = 0.95) -> tuple[np.ndarray, np.ndarray]:
    """Compute Wilson's score interval: (p + z²/2n ± z·√(p(1−p)/n + z²/4n²)) / (1 + z²/n).

    share: shares p in 0 … 1, any shape. n: numbers of trials, >= 0, broadcast against share; not necessarily whole.
    confidence: coverage, between 0 and 1.

    Returns (low, high), of the common shape; NaN where the share is NaN or n is 0. Raises ValueError when confidence is
    not between 0 and 1.
    """
    _check_confidence(confidence)
    share, n = np.broadcast_arrays(np.asarray(share, float), np.asarray(n, float))
    low, high = np.full(share.shape, np.nan), np.full(share.shape, np.nan)
    known = np.isfinite(share) & (n > 0)
    p, per_n = share[known], ndtri((1 + confidence) / 2) ** 2 / n[known]
    middle, width = p + per_n / 2, np.sqrt(p * (1 - p) * per_n + per_n**2 / 4)
    low[known], high[known] = (middle - width) / (1 + per_n), (middle + width) / (1 + per_n)
    return np.clip(low, 0, share), np.clip(high, share, 1)  # at 0 and 1, the bound differs from the share by rounding


def effective_prefixes(shares: ArrayLike, weights: np.ndarray, n: np.ndarray) -> np.ndarray:
    """Compute how many prefixes of one client are as informative about Σ w_j · share_j as n_j of each client j.

    shares: (…, L), in 0 … 1, clients in the last axis. weights: L, sum 1. n: L, numbers of prefixes.

    If all shares were one θ, Σ w_j p_j would vary by θ(1−θ) · Σ w_j²/n_j, as from m = 1 / Σ (w_j²/n_j) prefixes (Kish
    1965). With the shares as they are it is Σ w_j² · p_j(1−p_j)/n_j, as from θ(1−θ) over this. The smaller is taken:
    the first holds at 0 hits, the second where a client of large weight leaks most. A share that averages several
    cells of a prefix, as in MR_inter, varies by at most p(1−p) (it lies in 0 … 1): conservative for it.
    Returns one number for each leading index; NaN if a client with weight has no prefixes.
    """
    return _effective(np.asarray(shares, float), 0.0, np.asarray(weights, float), np.asarray(n, float))


def paired_difference(
    more: ArrayLike, less: ArrayLike, weights: np.ndarray, n: np.ndarray, confidence: float = 0.95
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Compute Σ w_j (more_j − less_j) and its score interval, for two measurements x, y of the same prefixes.

    more, less: (…, L), in 0 … 1; for each client j, the means over its n_j prefixes of max(x − y, 0) and max(y − x, 0).
        With x and y of 0 or 1 these are the shares of discordant prefixes.
    weights: L, weights of the clients, sum 1.
    n: L, numbers of prefixes.
    confidence: coverage, between 0 and 1.

    The interval is Tango's (1998, "Equivalence test and confidence interval for the difference in proportions for the
    paired-sample design"): its width is not 0 where nothing, or little, was found. Clients are combined as in
    `effective_prefixes`. Differences between 0 and 1 vary less than those of 0 and 1, so the interval is conservative
    for them. Returns (value, low, high), one for each leading index; NaN where a client with weight has no prefixes.
    Raises ValueError when confidence is not between 0 and 1.
    """
    more, less = np.asarray(more, float), np.asarray(less, float)
    weights, n = np.asarray(weights, float), np.asarray(n, float)
    m = _effective(more, less, weights, n)
    held = weights > 0
    with np.errstate(invalid="ignore"):
        plus, minus = (np.sum(part[..., held] * weights[held], axis=-1) for part in (more, less))
    low, high = tango(plus * m, minus * m, m, confidence)
    value = np.where(np.isfinite(m), plus - minus, np.nan)
    return value, np.fmin(low, value), np.fmax(high, value)  # a bound may miss the value by rounding


def tango(more: ArrayLike, less: ArrayLike, n: ArrayLike, confidence: float = 0.95) -> tuple[np.ndarray, np.ndarray]:
    """Compute Tango's (1998) score interval of (more − less) / n for n pairs.

    more, less: numbers of pairs that differ in either direction, >= 0. n: numbers of pairs. All are broadcast against
        each other, and are not necessarily whole.
    confidence: coverage, between 0 and 1.

    The interval contains all δ that the score test (more − less − nδ) / √(n(2q + δ − δ²)) does not reject, where q is
    the maximum-likelihood share of `less` under δ. Returns (low, high); NaN where a number is NaN or n is 0. Raises
    ValueError when confidence is not between 0 and 1.
    """
    _check_confidence(confidence)
    more, less, n = np.broadcast_arrays(*(np.asarray(part, float) for part in (more, less, n)))
    known = np.isfinite(more) & np.isfinite(less) & (n > 0)
    low, high = np.full(n.shape, np.nan), np.full(n.shape, np.nan)
    if known.any():
        b, c, total, z = more[known], less[known], n[known], ndtri((1 + confidence) / 2)
        high[known] = _last_accepted(lambda delta: _tango_score(b, c, total, delta) >= -z, (b - c) / total)
        # the interval is symmetric: its lower end is minus the upper end of the exchanged measurements
        low[known] = -_last_accepted(lambda delta: _tango_score(c, b, total, delta) >= -z, (c - b) / total)
    return low, high


def independent_difference(
    first: ArrayLike, n_first: ArrayLike, second: ArrayLike, n_second: ArrayLike, confidence: float = 0.95
) -> tuple[np.ndarray, np.ndarray]:
    """Compute the score interval (Miettinen and Nurminen 1985) of first − second, shares of independent prefixes.

    first, second: shares in 0 … 1. n_first, n_second: numbers of prefixes, or of effective ones. All are broadcast
        against each other.
    confidence: coverage, between 0 and 1.

    Returns (low, high); NaN where a share is undefined or a number is 0. Raises ValueError when confidence is not
    between 0 and 1.
    """
    # not statsmodels' interval: it raises when a share is 0, and its bounds are not where the score is ±z
    _check_confidence(confidence)
    parts = np.broadcast_arrays(*(np.asarray(part, float) for part in (first, n_first, second, n_second)))
    p, m, q, n = parts
    known = np.isfinite(p) & np.isfinite(q) & (m > 0) & (n > 0)
    low, high = np.full(p.shape, np.nan), np.full(p.shape, np.nan)
    if known.any():
        z, (p, m, q, n) = ndtri((1 + confidence) / 2), (part[known] for part in parts)
        high[known] = _last_accepted(lambda delta: _independent_score(p, m, q, n, delta) >= -z, p - q)
        low[known] = -_last_accepted(lambda delta: _independent_score(q, n, p, m, delta) >= -z, q - p)
    return low, high


def mcnemar(more: ArrayLike, less: ArrayLike) -> np.ndarray:
    """Compute the two-sided p-value of McNemar's exact test: two measurements of the same prefixes hit equally often.

    more, less: numbers of discordant prefixes in either direction, >= 0. Under the hypothesis, both directions are
        equally likely (binomial with ½).

    Returns 1 without discordant prefixes, NaN where a number is NaN.
    """
    more, less = np.broadcast_arrays(np.asarray(more, float), np.asarray(less, float))
    fewer = np.minimum(more, less)
    p_value = 2 * betainc(more + less - fewer, fewer + 1, 0.5)  # distribution function of the binomial at `fewer`
    return np.where(np.isnan(more + less), np.nan, np.minimum(p_value, 1))


def holm(p_values: ArrayLike) -> np.ndarray:
    """Adjust the p-values of one table by Holm's method (1979); NaN stays NaN and is not counted.

    The i-th smallest of m is multiplied by m + 1 − i; the result is at least that of every smaller p-value, at most 1.
    """
    p_values = np.asarray(p_values, float)
    adjusted, ranked = np.full(p_values.shape, np.nan), np.argsort(p_values, axis=None)  # NaN last
    ranked = ranked[: np.isfinite(p_values).sum()]
    steps = p_values.flat[ranked] * np.arange(len(ranked), 0, -1)
    adjusted.flat[ranked] = np.minimum(np.maximum.accumulate(steps), 1)
    return adjusted


def _last_accepted(accepts: Callable[[np.ndarray], np.ndarray], value: np.ndarray) -> np.ndarray:
    """Return the largest difference, from `value` to 1, that a score test accepts, by bisection: it changes once."""
    inside, outside = np.array(value), np.ones_like(value)
    for _ in range(60):  # halves an interval of at most 2 to below the spacing of doubles near 1
        middle = (inside + outside) / 2
        accepted = accepts(middle)
        inside, outside = np.where(accepted, middle, inside), np.where(accepted, outside, middle)
    return inside


def _independent_score(p: np.ndarray, m: np.ndarray, q: np.ndarray, n: np.ndarray, delta: np.ndarray) -> np.ndarray:
    """Return (p − q − δ) over its standard error at the maximum-likelihood shares that differ by δ.

    The closed form of the cubic equation is that of Farrington and Manning (1990).
    """
    theta = n / m
    a, b = 1 + theta, -(1 + theta + p + theta * q + delta * (theta + 2))
    c, d = delta**2 + delta * (2 * p + theta + 1) + p + theta * q, -p * delta * (1 + delta)
    v = b**3 / (27 * a**3) - b * c / (6 * a**2) + d / (2 * a)
    u = np.copysign(np.sqrt(np.maximum(b**2 / (9 * a**2) - c / (3 * a), 0)), v)
    with np.errstate(divide="ignore", invalid="ignore"):
        turn = (np.pi + np.arccos(np.clip(np.where(u == 0, 0, v / u**3), -1, 1))) / 3
    # rounding may put the root outside the range in which both shares are in 0 … 1
    likely = np.clip(2 * u * np.cos(turn) - b / (3 * a), np.maximum(delta, 0), np.minimum(1 + delta, 1))
    variance = likely * (1 - likely) / m + (likely - delta) * (1 - likely + delta) / n
    return _ratio(p - q - delta, np.sqrt(np.maximum(variance * (m + n) / (m + n - 1), 0)))


def _tango_score(b: np.ndarray, c: np.ndarray, n: np.ndarray, delta: np.ndarray) -> np.ndarray:
    # q solves a quadratic equation: the maximum-likelihood share of pairs of the direction c
    linear = (2 * n - b + c) * delta - b - c
    root = np.sqrt(np.maximum(linear**2 + 8 * n * c * delta * (1 - delta), 0))
    q = (root - linear) / (4 * n)
    return _ratio(b - c - n * delta, np.sqrt(np.maximum(n * (2 * q + delta * (1 - delta)), 0)))


def _ratio(difference: np.ndarray, error: np.ndarray) -> np.ndarray:
    with np.errstate(divide="ignore", invalid="ignore"):
        score = difference / error
    return np.where(np.isnan(score), 0.0, score)  # 0/0 occurs only at the value itself, where nothing varies


def _effective(plus: np.ndarray, minus: np.ndarray | float, weights: np.ndarray, n: np.ndarray) -> np.ndarray:
    """Return the effective prefixes of Σ w_j (plus_j − minus_j), for measurements in −1 … 1 with these parts' means."""
    held = weights > 0
    plus, minus = plus[..., held], np.broadcast_to(minus, plus.shape)[..., held]
    weights, n = weights[held], n[held]
    if not len(n) or (n == 0).any():
        return np.full(plus.shape[:-1], np.nan)
    alike = 1 / np.sum(weights**2 / n)
    together = np.sum(weights * (plus + minus), axis=-1) - np.sum(weights * (plus - minus), axis=-1) ** 2
    apart = np.sum(weights**2 * (plus + minus - (plus - minus) ** 2) / n, axis=-1)
    with np.errstate(divide="ignore", invalid="ignore"):
        m = np.where(apart > 0, np.minimum(alike, together / apart), alike)
    return np.where(np.isfinite(plus).all(axis=-1) & np.isfinite(minus).all(axis=-1), m, np.nan)


def _check_confidence(confidence: float) -> None:
    if not 0 < confidence < 1:
        raise ValueError(f"confidence: got {confidence}; expected a number between 0 and 1, for example 0.95")
