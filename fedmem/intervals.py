"""How far a measured share may be from the true one: intervals that keep a width when nothing was found.

Numbers in, numbers out. This module knows no matches and no clients; they speak of sampling prefixes for one trained
model, and of nothing that varies between trainings.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike
from statsmodels.stats.proportion import proportion_confint


def wilson(share: ArrayLike, n: ArrayLike, confidence: float = 0.95) -> tuple[np.ndarray, np.ndarray]:
    """Wilson's score interval (low, high) for shares in 0 … 1 of n trials; NaN where the share is NaN or n is 0.

    (p + z²/2n ± z·√(p(1−p)/n + z²/4n²)) / (1 + z²/n), by statsmodels. n need not be whole.
    """
    if not 0 < confidence < 1:
        raise ValueError(f"confidence = {confidence}: allowed is a share between 0 and 1, for example 0.95")
    share, n = np.broadcast_arrays(np.asarray(share, float), np.asarray(n, float))
    low, high = np.full(share.shape, np.nan), np.full(share.shape, np.nan)
    known = np.isfinite(share) & (n > 0)
    if known.any():
        low[known], high[known] = proportion_confint(
            share[known] * n[known], n[known], alpha=1 - confidence, method="wilson"
        )
    return np.clip(low, 0, share), np.clip(high, share, 1)  # at 0 and 1 the bound is the share itself, but for rounding


def effective_prefixes(shares: np.ndarray, weights: np.ndarray, n: np.ndarray) -> float:
    """How many prefixes of one client would be as informative as n_j of each client j about Σ w_j · share_j.

    If all shares were one θ, Σ w_j p_j would vary by θ(1−θ) · Σ w_j²/n_j, as from m = 1 / Σ (w_j²/n_j) prefixes (Kish
    1965). With the shares as they are it is Σ w_j² · p_j(1−p_j)/n_j, as from θ(1−θ) over this. The smaller is taken:
    the first holds at 0 hits, the second where a client of large weight leaks most. A share that averages several
    cells of a prefix, as in MR_inter, varies by at most p(1−p) (it lies in 0 … 1): conservative for it.
    shares, weights (sum 1), n: one entry for each client. NaN if a client with weight has no prefixes.
    """
    held = weights > 0
    shares, weights, n = shares[held], weights[held], n[held]
    if not len(n) or (n == 0).any() or not np.isfinite(shares).all():
        return np.nan
    alike = 1 / np.sum(weights**2 / n)
    value = np.sum(weights * shares)
    variance = np.sum(weights**2 * shares * (1 - shares) / n)
    return float(min(alike, value * (1 - value) / variance) if variance > 0 else alike)
