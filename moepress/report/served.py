"""What `validate` saw in the booted servers, read for the page: speed at each concurrency, and measured memory.

The shape of the result is the docstring of `moepress.serving.validation`. A result that was made without a GPU is marked
``smoke``: its figures show that measuring works, no more, and are never drawn beside a GPU's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from moepress.report.memory import GpuMemory

GIB = 2**30


@dataclass(frozen=True)
class Spread:
    """A figure measured more than once: median, smallest, largest. Equal when it was measured once."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class SpeedPoint:
    """Decoding at one number of concurrent requests.

    Attributes:
        decode: tokens a second of all requests together; candidate, and baseline where there is one.
        inter_token: median milliseconds between tokens of a request.
        first_token: median milliseconds to the first token.
        ratio: candidate / baseline of `decode`.
        verdict: ``faster``, ``slower``, ``no difference``, or None.
    """

    concurrency: int
    decode: tuple[Spread, Spread | None]
    inter_token: tuple[Spread | None, Spread | None]
    first_token: tuple[Spread | None, Spread | None]
    ratio: Spread | None
    verdict: str | None


def spread(figure: Mapping[str, Any] | None) -> Spread | None:
    """A figure of the result; None stays None."""
    if figure is None:
        return None
    value = float(figure["value"])
    return Spread(value, float(figure.get("min", value)), float(figure.get("max", value)))


def speed_points(found: Mapping[str, Any] | None) -> list[SpeedPoint]:
    """The decode measurements, by concurrency; empty where speed was not asked."""
    measured = (found or {}).get("speed") or {}
    points = []
    for row in measured.get("decode") or ():
        ours, theirs = row["candidate"], row.get("baseline") or {}
        decode = spread(ours["decode"])
        if decode is None:
            continue
        points.append(
            SpeedPoint(
                concurrency=int(row["concurrency"]),
                decode=(decode, spread(theirs.get("decode"))),
                inter_token=(spread(ours.get("inter_token_p50")), spread(theirs.get("inter_token_p50"))),
                first_token=(spread(ours.get("ttft_p50")), spread(theirs.get("ttft_p50"))),
                ratio=spread(row.get("ratio")),
                verdict=row.get("verdict"),
            )
        )
    return sorted(points, key=lambda point: point.concurrency)


def measured_memory(found: Mapping[str, Any] | None) -> list[GpuMemory]:
    """What the servers said, baseline first; empty where memory was not asked."""
    measured = (found or {}).get("memory") or {}
    sides = []
    for key, side in (("baseline", "source"), ("candidate", "pressed")):
        of = measured.get(key)
        if of is None or of.get("weights") is None:
            continue
        sides.append(
            GpuMemory(
                side="source" if side == "source" else "pressed",
                origin="measured",
                weights=round(of["weights"]["value"] * GIB),
                kv_pool=round((of.get("kv_pool") or {"value": 0})["value"] * GIB),
                kv_tokens=int((of.get("kv_tokens") or {"value": 0})["value"]),
                kv_bytes_per_token=int((of.get("kv_bytes_per_token") or {"value": 0})["value"]),
            )
        )
    return sides
