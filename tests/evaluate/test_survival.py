"""Kaplan–Meier against scipy's survival function."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from scipy import stats

from moepress.evaluate.drift import Continuation, compare_continuations, first_divergence
from moepress.evaluate.survival import kaplan_meier


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_curve_and_its_interval_are_scipys(seed: int) -> None:
    rng = np.random.default_rng(seed)
    steps, parted = rng.integers(1, 60, 40), rng.random(40) < 0.7
    curve = kaplan_meier(steps.tolist(), parted.tolist(), confidence=0.95)
    sample = stats.CensoredData.right_censored(steps, ~parted)
    theirs = stats.ecdf(sample).sf
    assert curve.surviving == pytest.approx([float(theirs.evaluate(step)) for step in curve.positions])
    with warnings.catch_warnings(action="ignore"):  # of the last step, where nobody is left
        interval = theirs.confidence_interval(0.95, method="log-log")
    inside = [i for i, share in enumerate(curve.surviving) if 0 < share < 1]
    for ours, bound in ((curve.low, interval.low), (curve.high, interval.high)):
        expected = [float(bound.evaluate(curve.positions[i])) for i in inside]
        assert [ours[i] for i in inside] == pytest.approx(expected, abs=1e-9)


def test_what_is_cut_off_says_nothing_about_later() -> None:
    curve = kaplan_meier([2, 5, 5, 8], [True, False, False, True], confidence=0.95)
    assert curve.at(1) == 1
    assert curve.at(2) == pytest.approx(0.75)
    assert curve.at(7) == pytest.approx(0.75)
    assert curve.at(8) == 0
    assert curve.median == 8
    assert curve.restricted_mean == pytest.approx(2 + 0.75 * 6)


def test_nobody_parted() -> None:
    curve = kaplan_meier([10, 10], [False, False], confidence=0.95)
    assert (curve.median, curve.restricted_mean, curve.events) == (None, 10, 0)


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ([1, 2, 3], [1, 2, 3], (3, False)),
        ([1, 2, 3], [1, 9, 3], (2, True)),
        ([1, 2], [1, 2, 3], (3, True)),
        ([], [], (0, False)),
        ([5], [6], (1, True)),
    ],
)
def test_where_two_texts_part(one: list[int], other: list[int], expected: tuple[int, bool]) -> None:
    assert first_divergence(Continuation(one, ""), Continuation(other, "")) == expected


def test_drift_shows_the_noise_beside_the_candidate() -> None:
    source = [Continuation([1, 2, 3, 4], "a"), Continuation([1, 1, 1, 1], "b")]
    candidate = [Continuation([1, 2, 9, 4], "c"), Continuation([1, 1, 1, 1], "d")]
    drift = compare_continuations(source, candidate, source, tokens=4, confidence=0.95).as_json()
    assert (drift["candidate"]["diverged"], drift["noise"]["diverged"]) == (1, 0)
    assert drift["candidate"]["token_agreement"] == pytest.approx(7 / 8)
    assert drift["candidate"]["positions"] == [3]
    assert drift["prompts_sample"] == [{"prompt": 0, "position": 3, "source": "a", "candidate": "c"}]
