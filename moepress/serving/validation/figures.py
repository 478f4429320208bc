"""A figure: a number with its unit, and what it was made of when it was measured more than once.

The value is the median of the runs: one run that met a busy machine moves a mean, and the fastest run is nobody's
experience. The spread goes with it, because a ratio of two figures is worth no more than that.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from moepress.formats.sizes import GIB


@dataclass(frozen=True)
class Figure:
    """One measured or computed number.

    Attributes:
        value: in `unit`; the median of `runs` where there are any.
        unit: ``GiB``, ``tok/s``, ``ms``, ``tokens``, ``B``, ``nats/token``, ``×``, ``s``, ``1`` for a share.
        runs: single measurements, in the order they were taken.
    """

    value: float
    unit: str
    runs: tuple[float, ...] = ()

    @classmethod
    def of(cls, runs: Sequence[float], unit: str) -> Figure:
        """From one or more measurements."""
        return cls(statistics.median(runs), unit, tuple(runs))

    @property
    def spread(self) -> float:
        """(largest − smallest) / median; 0 for a single run."""
        return (max(self.runs) - min(self.runs)) / self.value if len(self.runs) > 1 and self.value else 0.0

    def as_json(self) -> dict[str, Any]:
        data: dict[str, Any] = {"value": self.value, "unit": self.unit}
        if len(self.runs) > 1:
            data |= {"min": min(self.runs), "max": max(self.runs), "runs": list(self.runs)}
        return data


def ratio(mine: Figure, theirs: Figure) -> Figure:
    """Mine over theirs, round by round: what disturbed a round disturbed both sides of it."""
    return Figure.of([one / other for one, other in zip(mine.runs, theirs.runs, strict=False)], "×")


def gib(count: float) -> Figure:
    """Bytes as GiB."""
    return Figure(count / GIB, "GiB")


def json_or_none(value: Any) -> Any:
    """``value.as_json()``, or None for None."""
    return None if value is None else value.as_json()
