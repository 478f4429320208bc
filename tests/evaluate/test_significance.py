"""Intervals and tests against scipy, against brute force, and against their own promise: coverage."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from scipy import optimize, stats

from moepress.evaluate.significance import Interval, bootstrap_interval, judge, mcnemar, tango_interval, worst


@pytest.mark.parametrize(("b", "c"), [(0, 0), (0, 1), (3, 0), (5, 5), (20, 9), (2, 11)])
def test_mcnemar_is_the_binomial_test(b: int, c: int) -> None:
    source = [True] * b + [False] * c + [True] * 30
    candidate = [False] * b + [True] * c + [True] * 30
    found = mcnemar(source, candidate)
    assert (found.only_source, found.only_candidate) == (b, c)
    expected = stats.binomtest(b, b + c, 0.5).pvalue if b + c else 1.0
    assert found.p == pytest.approx(expected)


def test_mcnemar_of_unequal_answers() -> None:
    with pytest.raises(ValueError):
        mcnemar([True], [True, False])


def likeliest_variance(b: int, c: int, n: int, delta: float) -> float:
    """Variance of (c − b) where the trinomial likelihood under p_c − p_b = delta is largest, found numerically."""

    def minus_log(p_b: float) -> float:
        cells = ((b, p_b), (c, p_b + delta), (n - b - c, 1 - 2 * p_b - delta))
        return -sum(count * math.log(max(share, 1e-300)) for count, share in cells if count)

    found = optimize.minimize_scalar(
        minus_log, bounds=(max(0.0, -delta), (1 - delta) / 2), method="bounded", options={"xatol": 1e-12}
    )
    return n * (2 * found.x + delta - delta * delta)


@pytest.mark.parametrize(("b", "c", "n"), [(20, 9, 300), (3, 1, 50), (1, 7, 44), (12, 12, 100), (2, 30, 64)])
@pytest.mark.parametrize("confidence", [0.9, 0.95])
def test_tango_inverts_the_score_test(b: int, c: int, n: int, confidence: float) -> None:
    """At both ends the score statistic, with its variance found by a numerical optimizer, is the normal quantile."""
    interval = tango_interval(b, c, n, confidence=confidence)
    z = stats.norm.ppf(0.5 + confidence / 2)
    assert interval.low < (c - b) / n < interval.high
    for edge in (interval.low, interval.high):
        score = (c - b - n * edge) / math.sqrt(likeliest_variance(b, c, n, edge))
        assert abs(score) == pytest.approx(z, abs=1e-3)


def test_tango_without_any_difference_still_has_a_width() -> None:
    """Of 60 equal answers nobody knows whether the next would be equal: z² / (n + z²)."""
    z = stats.norm.ppf(0.975)
    interval = tango_interval(0, 0, 60, confidence=0.95)
    assert interval.high == pytest.approx(z * z / (60 + z * z), abs=1e-6)
    assert interval.low == pytest.approx(-interval.high, abs=1e-6)


def test_tango_is_symmetric() -> None:
    one, other = tango_interval(9, 2, 80, confidence=0.95), tango_interval(2, 9, 80, confidence=0.95)
    assert (one.low, one.high) == pytest.approx((-other.high, -other.low), abs=1e-9)


@pytest.mark.parametrize(("p_b", "p_c"), [(0.02, 0.01), (0.10, 0.02), (0.05, 0.05)])
def test_tango_covers_the_truth_as_often_as_it_says(p_b: float, p_c: float) -> None:
    """Exact coverage by enumeration of every table of 80 prompts."""
    n, covered = 80, 0.0
    for b in range(n + 1):
        for c in range(n + 1 - b):
            probability = stats.multinomial.pmf([b, c, n - b - c], n, [p_b, p_c, 1 - p_b - p_c])
            if probability > 1e-7:
                interval = tango_interval(b, c, n, confidence=0.95)
                covered += probability * (interval.low <= p_c - p_b <= interval.high)
    assert 0.94 < covered < 0.99, "close to 95 %, and rather more where few prompts differ"


def test_bootstrap_is_scipys_bca() -> None:
    rng = np.random.default_rng(5)
    units = np.stack([np.full(40, 255.0), rng.gamma(2.0, 3.0, 40)], 1)
    ours = bootstrap_interval(units, lambda sums: sums[..., 1] / sums[..., 0], confidence=0.95, of="windows")
    theirs = stats.bootstrap(
        (units[:, 1] / 255,), np.mean, confidence_level=0.95, n_resamples=20_000, method="BCa", rng=rng
    ).confidence_interval
    width = theirs.high - theirs.low
    assert ours.low == pytest.approx(theirs.low, abs=0.05 * width)
    assert ours.high == pytest.approx(theirs.high, abs=0.05 * width)
    assert ours.value == pytest.approx(units[:, 1].mean() / 255)


def test_bootstrap_of_a_ratio_resamples_both_sums_together() -> None:
    """Windows of unlike length: against scipy's paired bootstrap of the same ratio."""
    rng = np.random.default_rng(1)
    tokens = rng.integers(50, 500, 30).astype(float)
    loss = tokens * rng.normal(0.02, 0.01, 30)
    ours = bootstrap_interval(
        np.stack([tokens, loss], 1), lambda s: s[..., 1] / s[..., 0], confidence=0.9, of="documents"
    )
    theirs = stats.bootstrap(
        (loss, tokens),
        lambda x, y, axis: x.sum(axis) / y.sum(axis),
        paired=True,
        confidence_level=0.9,
        n_resamples=20_000,
        rng=rng,
    ).confidence_interval
    width = theirs.high - theirs.low
    assert (ours.low, ours.high) == pytest.approx((theirs.low, theirs.high), abs=0.06 * width)


def test_the_same_answers_give_the_same_interval() -> None:
    units = np.random.default_rng(0).random((20, 2)) + 1
    first, second = (
        bootstrap_interval(units, lambda s: s[..., 1] / s[..., 0], confidence=0.95, of="windows") for _ in range(2)
    )
    assert first == second


def test_units_that_are_all_alike_have_no_spread() -> None:
    found = bootstrap_interval(np.ones((20, 2)), lambda s: s[..., 1] / s[..., 0], confidence=0.95, of="windows")
    assert (found.low, found.value, found.high) == (1, 1, 1)


@pytest.mark.parametrize(
    ("low", "high", "samples", "better", "verdict"),
    [
        (-0.01, 0.01, 500, "higher", "ACCEPT"),
        (-0.09, -0.03, 500, "higher", "REGRESSION"),
        (-0.03, 0.0, 500, "higher", "NOT ENOUGH DATA"),
        (-0.01, 0.01, 99, "higher", "NOT ENOUGH DATA"),
        (-0.09, -0.03, 99, "higher", "NOT ENOUGH DATA"),
        (-0.05, -0.02, 500, "lower", "ACCEPT"),
        (-0.01, 0.01, 500, "lower", "REGRESSION"),
    ],
)
def test_a_verdict_needs_the_whole_interval_on_one_side(
    low: float, high: float, samples: int, better: str, verdict: str
) -> None:
    interval = Interval((low + high) / 2, low, high, "")
    found, why = judge(interval, -0.02, better=better, samples=samples, needed=100)  # type: ignore[arg-type]
    assert found == verdict
    assert why


def test_a_model_that_is_as_good_is_seldom_called_worse() -> None:
    """200 pairs of equal models on 400 prompts: no REGRESSION at all, since that needs the whole interval beyond the bound."""
    random.seed(0)
    verdicts = []
    for _ in range(200):
        b, c = (sum(random.random() < 0.04 for _ in range(400)) for _ in range(2))
        interval = tango_interval(b, c, 400, confidence=0.95)
        verdicts.append(judge(interval, -0.02, better="higher", samples=400, needed=100)[0])
    assert verdicts.count("REGRESSION") <= 1
    assert "NOT ENOUGH DATA" in verdicts


def test_the_worst_verdict_counts() -> None:
    assert worst(["ACCEPT", "NOT ENOUGH DATA", "REGRESSION"]) == "REGRESSION"
    assert worst(["ACCEPT", "NOT ENOUGH DATA"]) == "NOT ENOUGH DATA"
    assert worst(["ACCEPT"]) == "ACCEPT"
    assert worst([]) == "NOT ENOUGH DATA"
