"""Intervals and tests against scipy, statsmodels and sums done by hand, and what they cover, computed exactly.

Coverage is asked at 0.1, 1 and 10 % of 200 and of 4,000 prefixes: where hits are few, most intervals fail.
"""

import itertools
import math

import numpy as np
import pytest
from scipy.optimize import minimize_scalar
from scipy.stats import binom
from statsmodels.stats.contingency_tables import mcnemar as statsmodels_mcnemar
from statsmodels.stats.proportion import proportion_confint

from fedmem.analyze.intervals import (
    effective_prefixes,
    holm,
    independent_difference,
    mcnemar,
    paired_difference,
    tango,
    wilson,
)

NAN = float("nan")
WEIGHTS = [(1 / 3, 1 / 3, 1 / 3), (0.6, 0.3, 0.1)]
MIXED = [(0.001,) * 3, (0.01,) * 3, (0.1,) * 3, (0.01, 0.001, 0.001), (0.001, 0.01, 0.01), (0, 0, 0.02)]


@pytest.mark.parametrize("hits", [0, 1, 3, 200])
def test_wilson_is_statsmodels(hits):
    low, high = wilson(hits / 200, 200)
    assert (float(low), float(high)) == pytest.approx(proportion_confint(hits, 200, method="wilson"), abs=1e-12)
    assert np.isnan(wilson([NAN, 0.5], [10, 0])).all()


def test_effective_prefixes_by_hand():
    # equal weights, equal n: 1 / (2 · 0.25/100) = 200 prefixes; weights 0.9 and 0.1: 1 / (0.81/100 + 0.01/100) = 121.95
    half, heavy = np.array([0.5, 0.5]), np.array([0.9, 0.1])
    assert effective_prefixes(np.zeros(2), half, np.array([100, 100])) == pytest.approx(200)
    assert effective_prefixes(np.zeros(2), heavy, np.array([100, 100])) == pytest.approx(100 / 0.82)
    # only the heavy one leaks, 0.2: value 0.18, 0.18·0.82 / (0.81·0.2·0.8/100) = 113.89, below 121.95
    assert effective_prefixes(np.array([0.2, 0]), heavy, np.array([100, 100])) == pytest.approx(113.8889, abs=1e-4)
    assert math.isnan(effective_prefixes(np.zeros(2), half, np.array([100, 0])))
    both = effective_prefixes(np.array([[0, 0], [0.2, 0]]), heavy, np.array([100, 100]))
    assert both == pytest.approx([121.95122, 113.88889])


# --- differences ----------------------------------------------------------------------------------------------------


def test_tango_by_hand():
    # nothing differs in 96 pairs: the score test rejects δ where nδ² = z²·δ(1 − δ), so δ = z²/(n + z²) = 0.03848
    low, high = tango(0, 0, 96)
    assert (float(low), float(high)) == pytest.approx((-3.841459 / 99.841459, 3.841459 / 99.841459), abs=1e-6)
    # no pair speaks for the second: Wilson's interval of the first's share
    assert tango(7, 0, 50)[1] == pytest.approx(proportion_confint(7, 50, method="wilson")[1], abs=1e-9)
    # all 50 differ one way: the likeliest q is (1 − δ)/2, so n(1 − δ) = z²(1 + δ) and δ = (n − z²)/(n + z²)
    assert tango(50, 0, 50) == (pytest.approx(46.158541 / 53.841459, abs=1e-6), 1)


def test_tango_bounds_are_where_the_score_test_turns():
    # at the bounds (b − c − nδ)² = z²·n(2q + δ − δ²), q solving the likelihood's equation 2nq² + Bq − cδ(1 − δ) = 0
    b, c, n, z = 9, 4, 120, 1.959964
    for delta in map(float, tango(b, c, n)):
        linear = (2 * n - b + c) * delta - b - c
        q = (-linear + math.sqrt(linear**2 + 8 * n * c * delta * (1 - delta))) / (4 * n)
        assert (b - c - n * delta) ** 2 == pytest.approx(z**2 * n * (2 * q + delta - delta**2), rel=1e-5)
    assert np.allclose(tango(c, b, n), [-bound for bound in reversed(tango(b, c, n))])


def test_tango_accepts_what_is_not_whole_and_refuses_confidence_of_95():
    low, high = tango([1.5, NAN, 1], [0.5, 1, 1], [30.5, 30, 0])
    assert low[0] < 1 / 30.5 < high[0]
    assert np.isnan([low[1:], high[1:]]).all()
    with pytest.raises(ValueError, match="confidence: got 95"):
        tango(1, 1, 10, 95)


def test_paired_difference_by_hand():
    # weights ¾ and ¼: 0.75·(0.2 − 0) + 0.25·(0 − 0.1) = 0.125
    value, low, high = paired_difference([0.2, 0], [0, 0.1], np.array([0.75, 0.25]), np.array([40, 20]))
    assert value == pytest.approx(0.125)
    assert low < value < high
    one = paired_difference([0.14], [0.02], np.array([1.0]), np.array([50]))
    assert one[1:] == (pytest.approx(tango(7, 1, 50)[0]), pytest.approx(tango(7, 1, 50)[1]))
    nothing = paired_difference([0, 0], [0, 0], np.array([0.5, 0.5]), np.array([48, 48]))
    assert (nothing[0], nothing[2]) == (0, pytest.approx(3.841459 / 99.841459, abs=1e-6))
    assert np.isnan(paired_difference([0, NAN], [0, 0], np.array([0.5, 0.5]), np.array([48, 48]))).all()
    assert np.isnan(paired_difference([0, 0], [0, 0], np.array([0.5, 0.5]), np.array([48, 0]))).all()


def score(x, m, y, n, delta):
    """Miettinen and Nurminen's statistic, the likelihood under δ maximised by search."""

    def unlikely(q):
        p = q + delta
        return -(x * np.log(p) + (m - x) * np.log(1 - p) + y * np.log(q) + (n - y) * np.log(1 - q))

    ends = (max(0, -delta) + 1e-9, min(1, 1 - delta) - 1e-9)
    q = minimize_scalar(unlikely, bounds=ends, method="bounded", options={"xatol": 1e-12}).x
    variance = (q + delta) * (1 - q - delta) / m + q * (1 - q) / n
    return (x / m - y / n - delta) / math.sqrt(variance * (m + n) / (m + n - 1))


@pytest.mark.parametrize(("x", "y"), [(15, 4), (1, 2), (49, 3)])
def test_independent_difference_inverts_the_score_test(x, y):
    # not against statsmodels' own interval, whose bounds the test as published does not meet: here ±1.96 are
    low, high = independent_difference(x / 50, 50, y / 40, 40)
    assert score(x, 50, y, 40, float(low)) == pytest.approx(1.959964, abs=1e-4)
    assert score(x, 50, y, 40, float(high)) == pytest.approx(-1.959964, abs=1e-4)


def test_independent_difference_at_nothing_and_everything():
    # 0 of 50 against 0 of 50: δ² = z²·δ(1 − δ)/50·(100/99), as only the larger share can be above 0
    z = 3.841459 * 100 / 99
    assert independent_difference(0, 50, 0, 50)[1] == pytest.approx(z / (50 + z), abs=1e-6)
    low, high = independent_difference([0, 1, 1], 50, [0, 0, 1], 40)
    assert (np.array(low) < [0, 1, 0]).all()
    assert (np.array(high) >= [1e-3, 1, 1e-3]).all()
    assert np.isnan(independent_difference(NAN, 50, 0.1, 40)).all()
    assert np.isnan(independent_difference(0.1, 0, 0.1, 40)).all()


@pytest.mark.parametrize(("more", "less"), [(1, 0), (5, 0), (8, 3), (0, 9), (30, 31)])
def test_mcnemar_is_statsmodels_exact(more, less):
    expected = statsmodels_mcnemar([[10, more], [less, 10]], exact=True).pvalue
    assert mcnemar(more, less) == pytest.approx(expected)


def test_mcnemar_and_holm_by_hand():
    assert mcnemar(5, 0) == pytest.approx(2 / 32)  # five of five heads, either way
    assert mcnemar(0, 0) == 1
    # 0.01·3 = 0.03; 0.02·2 = 0.04; 0.5·1; undefined ones are not tests
    assert holm([0.5, 0.01, NAN, 0.02]) == pytest.approx([0.5, 0.03, NAN, 0.04], nan_ok=True)
    assert np.isnan(holm([NAN])).all()


# --- coverage -------------------------------------------------------------------------------------------------------


def likely(n, p, tail=5e-6):
    return np.arange(int(binom.ppf(tail, n, p)), int(binom.ppf(1 - tail, n, p)) + 1)


@pytest.mark.parametrize("n", [200, 4000])
@pytest.mark.parametrize("p", [0.001, 0.01, 0.1])
def test_a_cells_interval_covers(n, p):
    hits = np.arange(n + 1)
    low, high = wilson(hits / n, n)
    assert binom.pmf(hits, n, p)[(low <= p) & (p <= high)].sum() >= 0.93


@pytest.mark.parametrize("n", [200, 4000])
@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("shares", MIXED)
@pytest.mark.parametrize("cells", [1, 2])  # of a prefix: its own, as in MR_intra, or two others', as in MR_inter
def test_an_aggregates_interval_covers(n, weights, shares, cells):
    # exact: every outcome of three binomials that matters, with its probability
    ranges = [likely(cells * n, p, 1e-4) for p in shares]
    steps = [max(1, len(r) // 60) for r in ranges]  # neighbouring outcomes of a wide binomial stand for each other
    chances = [
        np.add.reduceat(binom.pmf(r, cells * n, p), np.arange(0, len(r), s))
        for r, p, s in zip(ranges, shares, steps, strict=True)
    ]
    middles = [r[np.minimum(np.arange(0, len(r), s) + s // 2, len(r) - 1)] for r, s in zip(ranges, steps, strict=True)]
    outcomes = np.array(list(itertools.product(*middles))) / (cells * n)
    chance = np.prod(list(itertools.product(*chances)), axis=1)
    low, high = wilson(outcomes @ weights, effective_prefixes(outcomes, np.array(weights), np.full(3, n)))
    truth = np.dot(shares, weights)
    assert chance[(low <= truth) & (truth <= high)].sum() >= 0.93


@pytest.mark.parametrize("n", [200, 4000])
@pytest.mark.parametrize("p", [0.001, 0.01, 0.1])
@pytest.mark.parametrize("control", [0, 0.001, 0.01, 0.1])
def test_a_cells_excess_covers(n, p, control):
    # exact: b prefixes hit members alone, c the control alone, a trinomial
    only, other = p * (1 - control), control * (1 - p)
    b, c = (part.ravel() for part in np.meshgrid(likely(n, only), likely(n, other), indexing="ij"))
    chance = binom.pmf(b, n, only) * binom.pmf(c, n - b, other / (1 - only))
    low, high = tango(b, c, n)
    assert chance[(low <= p - control) & (p - control <= high)].sum() >= 0.93


@pytest.mark.parametrize("n", [200, 4000])
@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("shares", MIXED)
@pytest.mark.parametrize("control", [0, 0.001, 0.01])
def test_an_aggregates_excess_covers(n, weights, shares, control):
    # 20,000 studies of three clients each: a share of 95 % is off by less than 0.5 points
    rng, size = np.random.default_rng(7), (20_000, 3)
    only, other = np.array(shares) * (1 - control), control * (1 - np.array(shares))
    b = rng.binomial(n, only, size)
    c = rng.binomial(n - b, other / (1 - only))
    _, low, high = paired_difference(b / n, c / n, np.array(weights), np.full(3, n))
    truth = np.dot(np.array(shares) - control, weights)
    assert ((low <= truth) & (truth <= high)).mean() >= 0.93


@pytest.mark.parametrize("n", [1, 96, 4000, 360_000])
def test_no_hits_do_not_mean_no_risk(n):
    assert wilson(0, n)[1] > 0
    assert tango(0, 0, n)[1] > 0
    assert paired_difference([0.0], [0.0], np.array([1.0]), np.array([n]))[2] > 0
