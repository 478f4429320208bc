"""How many are still together after t steps: Kaplan–Meier, with Greenwood's interval.

    S(t) = Π over u ≤ t of (1 − d_u / r_u)      d_u: partings at step u, r_u: pairs still together and still going before it

A pair that ended without parting (both texts stopped, or the token limit came) is censored there: it says something about
the steps before, nothing about those after. The interval is Greenwood's on the log(−log) scale, so it stays within 0 to 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any


@dataclass(frozen=True)
class Curve:
    """A survival curve.

    Attributes:
        positions: steps at which it falls, counted from 1.
        surviving, low, high: share still together after each of them, and its interval.
        events: pairs that parted.
        pairs: all of them.
        last: the longest anybody was watched, in steps.
    """

    positions: tuple[int, ...]
    surviving: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]
    events: int
    pairs: int
    last: int

    def at(self, position: int) -> float:
        """Share still together after this many steps."""
        share = 1.0
        for step, value in zip(self.positions, self.surviving, strict=True):
            if step > position:
                break
            share = value
        return share

    @property
    def median(self) -> int | None:
        """First step after which at most half are together; None when more than half never parted."""
        return next(
            (step for step, share in zip(self.positions, self.surviving, strict=True) if share <= 0.5 + 1e-12), None
        )

    @property
    def restricted_mean(self) -> float:
        """Mean steps together, counted up to `last`: the area under the curve."""
        area, share, before = 0.0, 1.0, 0
        for step, value in zip(self.positions, self.surviving, strict=True):
            area, share, before = area + share * (step - before), value, step
        return area + share * (self.last - before)

    def as_json(self) -> dict[str, Any]:
        return {
            "pairs": self.pairs,
            "diverged": self.events,
            "median": self.median,
            "restricted_mean": self.restricted_mean,
            "positions": list(self.positions),
            "surviving": list(self.surviving),
            "low": list(self.low),
            "high": list(self.high),
        }


def kaplan_meier(steps: Sequence[int], parted: Sequence[bool], *, confidence: float) -> Curve:
    """The curve of pairs that parted at, or were watched until, a step.

    Args:
        steps: per pair, the step (from 1) at which it parted, or its last step; 0 = never watched.
        parted: per pair, whether it parted there.
        confidence: of the pointwise interval, e.g. 0.95.
    """
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    share, greenwood = 1.0, 0.0
    positions, surviving, low, high = [], [], [], []
    for step in sorted({s for s, event in zip(steps, parted, strict=True) if event}):
        at_risk = sum(s >= step for s in steps)
        events = sum(s == step and event for s, event in zip(steps, parted, strict=True))
        share *= 1 - events / at_risk
        if at_risk > events:
            greenwood += events / (at_risk * (at_risk - events))
        positions.append(step)
        surviving.append(share)
        if 0 < share < 1:
            log = math.log(share)
            width = z * math.sqrt(greenwood) / abs(log)
            low.append(math.exp(log * math.exp(width)))
            high.append(math.exp(log * math.exp(-width)))
        else:
            low.append(share)
            high.append(share)
    return Curve(
        tuple(positions),
        tuple(surviving),
        tuple(low),
        tuple(high),
        sum(parted),
        len(steps),
        max(steps, default=0),
    )
