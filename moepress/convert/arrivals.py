"""Pressing a source that is still arriving: in which order, and how much of it has to be here at once.

    source shards   s1 ─ s2 ─ s3 ─ s4 ─ …         fetched in this order
    units             ▲────▲    ▲               a unit runs when the last of its shards is here
                      experts of a layer: one or two shards      kept tensors: all the shards they are spread over

A unit needs every shard that holds a part of one of its weights: a block-FP8 weight and its scale may lie in two. Units
are run by the last shard they need, so pressing follows the download. A shard that no unit needs any more may go, if the
user said so: then the disk holds the output so far and what the widest unit spans, which is the kept tensors'; their share
is that of ``output.shard_size`` in all kept bytes, and a smaller one lowers the peak (`peak_bytes` computes it exactly).

Only rounding goes over the source once. Calibration and KV scales read layers again when a stopped run goes on, and the
kept tensors after the layers: with them a source may arrive while it is pressed, and stays until the end.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from moepress.convert.layout import ShardPlan
from moepress.convert.plan import ConversionPlan
from moepress.formats.checkpoint import Checkpoint


class Arrivals(Protocol):
    """A source of which shards come and go. ``checkpoint.path`` waits for a file that is not here yet."""

    checkpoint: Checkpoint

    def begin(self, plan: ConversionPlan, todo: Sequence[ShardPlan]) -> list[ShardPlan]:
        """Checks the disk, starts fetching, and puts the units into the order in which their shards arrive.

        Raises:
            PlanRefused, HubError: it does not fit, or the plan cannot go without the source.
        """
        ...

    def finished(self, unit: ShardPlan) -> None:
        """The unit has its receipt: shards that nobody needs any more may go."""
        ...


def shards_needed(plan: ConversionPlan, unit: ShardPlan) -> frozenset[str]:
    """Source shards that hold a part of any of the unit's weights, scales included; KV scales come from none."""
    return frozenset(ref.shard for w in unit.weights for ref in plan.decisions[w.name].stored.parts.values())


def in_order_of_arrival(plan: ConversionPlan, todo: Iterable[ShardPlan]) -> list[ShardPlan]:
    """Units by the last source shard they need; shards arrive in the order of their names."""
    return sorted(todo, key=lambda unit: (max(shards_needed(plan, unit), default=""), unit.name))


def arrival_order(plan: ConversionPlan, units: Sequence[ShardPlan]) -> list[str]:
    """Source shards in the order in which the units ask for them."""
    order: dict[str, None] = {}
    for unit in units:
        order |= dict.fromkeys(sorted(shards_needed(plan, unit)))
    return list(order)


def last_needed(plan: ConversionPlan, units: Sequence[ShardPlan]) -> dict[str, list[str]]:
    """Unit name → source shards that no later unit of the run needs."""
    last: dict[str, str] = {}
    for unit in units:
        last |= dict.fromkeys(shards_needed(plan, unit), unit.name)
    leaving: dict[str, list[str]] = {}
    for shard, name in sorted(last.items()):
        leaving.setdefault(name, []).append(shard)
    return leaving


def peak_bytes(
    plan: ConversionPlan, units: Sequence[ShardPlan], sizes: Mapping[str, int], *, delete: bool, ahead: int = 0
) -> int:
    """Most bytes of source shards and of output written by these units that are on the disk at one moment.

    Args:
        sizes: bytes of every source shard's file.
        delete: shards go when nobody needs them.
        ahead: shards that are fetched before they are needed.
    """
    order, leaving = arrival_order(plan, units), last_needed(plan, units)
    here: set[str] = set()
    output = peak = fetched = 0
    for unit in units:
        while fetched < len(order) and not shards_needed(plan, unit) <= set(order[:fetched]):
            here.add(order[fetched])
            fetched += 1
        early = set(order[fetched : fetched + ahead])
        output += unit.nbytes
        peak = max(peak, output + sum(sizes[name] for name in here | early))
        if delete:
            here -= set(leaving.get(unit.name, ()))
    return peak
