"""Is a difference real, and is it small enough? Intervals for paired data, and the verdict they allow.

Both models answer the same prompts, so what counts are the prompts on which they differ:

    one right, one wrong    d = (c − b) / n     b: only the source right, c: only the candidate right, n: all prompts
                            Tango's score interval: δ belongs to it while |c − b − nδ| / √(n(2q̃ + δ(1 − δ))) ≤ z, where q̃ is the
                            likeliest share of "only the source" under that δ. It keeps its coverage where b and c are small
                            and stays honest where both are 0 (a bootstrap would then call the difference exactly 0).
                            McNemar's exact test: p of b against c under a fair coin.
    sums over windows       paired bootstrap of whole windows of text (tokens of one window are not independent), bias-corrected
                            and accelerated (BCa), 10,000 resamples, seeded: the same answers give the same interval.

    verdict, from one interval [low, high] and one bound:

        everything on the good side                    ACCEPT
        everything on the bad side                     REGRESSION
        the bound inside, or fewer samples than asked  NOT ENOUGH DATA

T. Tango, Statistics in Medicine 17 (1998) 891; B. Efron, JASA 82 (1987) 171.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Verdict = Literal["ACCEPT", "REGRESSION", "NOT ENOUGH DATA"]
RESAMPLES = 10_000
_BLOCK = 500  # resamples at once: [500, units] counts
_NORMAL = NormalDist()


@dataclass(frozen=True)
class Interval:
    """An estimate and its two-sided interval."""

    value: float
    low: float
    high: float
    method: str


@dataclass(frozen=True)
class McNemar:
    """Discordant prompts, and the two-sided exact p-value of their split."""

    only_source: int
    only_candidate: int
    p: float


def mcnemar(source: Sequence[bool], candidate: Sequence[bool]) -> McNemar:
    """Exact McNemar test of two answers to each prompt.

    Raises:
        ValueError: different lengths.
    """
    b = sum(s and not c for s, c in zip(source, candidate, strict=True))
    c = sum(c and not s for s, c in zip(source, candidate, strict=True))
    n, fewer = b + c, min(b, c)
    tail = sum(math.comb(n, k) for k in range(fewer + 1))
    return McNemar(b, c, min(1.0, 2 * tail / 2**n))


def tango_interval(only_source: int, only_candidate: int, prompts: int, *, confidence: float) -> Interval:
    """Score interval of the difference of two paired shares, candidate − source.

    Args:
        only_source, only_candidate: prompts that only one of them solved.
        prompts: all of them, > 0.
        confidence: e.g. 0.95, two-sided.
    """
    b, c, n = only_source, only_candidate, prompts
    z = _NORMAL.inv_cdf(0.5 + confidence / 2)
    estimate = (c - b) / n

    def statistic(delta: float) -> float:
        # likeliest share of "only the source" when the shares differ by delta: the larger root of a quadratic
        linear = -(b + c) + (2 * n - c + b) * delta
        q = (-linear + math.sqrt(max(0.0, linear * linear + 8 * n * b * delta * (1 - delta)))) / (4 * n)
        variance = n * (2 * q + delta * (1 - delta))
        gap = c - b - n * delta
        return gap / math.sqrt(variance) if variance > 0 else math.copysign(math.inf, gap) if gap else 0.0

    def edge(outer: float, target: float) -> float:
        inner = estimate
        for _ in range(80):
            middle = (inner + outer) / 2
            inner, outer = (middle, outer) if abs(statistic(middle)) <= abs(target) else (inner, middle)
        return inner

    return Interval(estimate, edge(-1.0, z), edge(1.0, z), "Tango score interval")


def bootstrap_interval(
    units: NDArray[np.float64],
    statistic: Callable[[NDArray[np.float64]], NDArray[np.float64]],
    *,
    confidence: float,
    of: str,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> Interval:
    """BCa interval of a statistic of sums over units.

    Args:
        units: [n, d] float64, what each unit adds to d sums; n >= 2.
        statistic: sums [..., d] -> values [...].
        of: what a unit is, for the method's name.
    """
    n = len(units)
    value = float(statistic(units.sum(0)))
    random = np.random.Generator(np.random.PCG64(seed))
    draws = []
    for first in range(0, resamples, _BLOCK):
        counts = random.multinomial(n, np.full(n, 1 / n), size=min(_BLOCK, resamples - first))
        draws.append(statistic(counts @ units))
    found = np.sort(np.concatenate(draws))
    method = f"paired bootstrap over {of}"
    if found[0] == found[-1]:
        return Interval(value, float(found[0]), float(found[-1]), method)
    below = (np.count_nonzero(found < value) + np.count_nonzero(found <= value)) / (2 * len(found))
    bias = _NORMAL.inv_cdf(min(max(below, 1 / len(found)), 1 - 1 / len(found)))
    without = statistic(units.sum(0) - units)
    away = without.mean() - without
    spread = float((away**2).sum())
    skew = float((away**3).sum()) / (6 * spread**1.5) if spread > 0 else 0.0
    edges = []
    for share in ((1 - confidence) / 2, (1 + confidence) / 2):
        z = bias + _NORMAL.inv_cdf(share)
        edges.append(_NORMAL.cdf(bias + z / (1 - skew * z)))
    low, high = np.quantile(found, edges)
    return Interval(value, float(low), float(high), method)


def no_event_limit(watched: float, *, confidence: float) -> float:
    """Highest rate, per unit watched, at which no event at all still has probability (1 − confidence) / 2 (Poisson)."""
    return -math.log((1 - confidence) / 2) / watched


def judge(
    interval: Interval,
    bound: float,
    *,
    better: Literal["higher", "lower"],
    samples: int,
    needed: int,
    of: str = "prompts",
) -> tuple[Verdict, str]:
    """The verdict and its reason in one sentence.

    Args:
        bound: ``better="higher"``: good at or above it; ``"lower"``: good at or below it.
        samples, needed: how many there are, and how many the recipe asks for.
    """
    good, bad = (interval.low >= bound, interval.high < bound)
    if better == "lower":
        good, bad = (interval.high <= bound, interval.low > bound)
    spread = f"[{interval.low:.4g}, {interval.high:.4g}]"
    if samples < needed:
        return "NOT ENOUGH DATA", f"{samples:,} {of}, {needed:,} are asked for"
    if good:
        return "ACCEPT", f"all of {spread} is within {bound:.4g}"
    if bad:
        return "REGRESSION", f"all of {spread} is beyond {bound:.4g}"
    return "NOT ENOUGH DATA", f"{bound:.4g} lies inside {spread}: more {of} would decide"


def worst(verdicts: Sequence[Verdict]) -> Verdict:
    """REGRESSION before NOT ENOUGH DATA before ACCEPT; nothing judged is NOT ENOUGH DATA."""
    for verdict in ("REGRESSION", "NOT ENOUGH DATA"):
        if verdict in verdicts:
            return verdict
    return "ACCEPT" if verdicts else "NOT ENOUGH DATA"


def interval_json(interval: Interval) -> dict[str, Any]:
    """``difference``, ``interval``, ``method``: as a row of the result holds them."""
    return {"difference": interval.value, "interval": [interval.low, interval.high], "method": interval.method}
