"""A source on the Hub as `arrivals.Arrivals`: fetched in the order of the units, and gone after the last receipt that needed it."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from moepress.convert.arrivals import arrival_order, in_order_of_arrival, last_needed, peak_bytes
from moepress.convert.forecast.estimate import SLACK_BYTES
from moepress.convert.layout import ShardPlan
from moepress.convert.plan import ConversionPlan
from moepress.errors import PlanRefused
from moepress.formats.checkpoint import Checkpoint
from moepress.hub.arriving import Arriving

AHEAD = 4
"""Source shards fetched in front of the one in use, where they are removed behind it."""


class StreamedSource:
    """See `arrivals.Arrivals`.

    Args:
        arriving: the open source; its small files are here.
        out: the output folder, for the disk it lies on.
        delete: remove a source shard when no unit needs it any more.
    """

    def __init__(self, arriving: Arriving, out: Path, *, delete: bool) -> None:
        self._arriving, self._out, self._delete = arriving, out, delete
        self._leaving: dict[str, list[str]] = {}
        self.checkpoint: Checkpoint = arriving.checkpoint

    def begin(self, plan: ConversionPlan, todo: Sequence[ShardPlan]) -> list[ShardPlan]:
        """Order, disk, and the first requests."""
        more = _reads_again(plan)
        if self._delete and more:
            raise PlanRefused(
                f"the source's shards cannot be removed while others are pressed: {more}",
                where="--delete-source",
                hint="leave --delete-source out (shards are still pressed as they land), and remove the source after verify",
            )
        units = in_order_of_arrival(plan, todo)
        order = sorted(self.checkpoint.shards) if more else arrival_order(plan, units)
        self._leaving = last_needed(plan, units)
        self._check_space(plan, units, order)
        self._arriving.expect(order)
        return units

    def finished(self, unit: ShardPlan) -> None:
        """Removes what nobody needs any more, where that was asked for."""
        if self._delete:
            self._arriving.release(self._leaving.get(unit.name, ()))

    def _check_space(self, plan: ConversionPlan, units: list[ShardPlan], order: list[str]) -> None:
        sizes = {name: header.file_bytes for name, header in self.checkpoint.shards.items()}
        missing = self._arriving.missing_bytes(order)
        if self._delete:
            here = sum(sizes[name] for name in order) - missing
            source = max(0, peak_bytes(plan, units, sizes, delete=True, ahead=AHEAD) - here)
            output = 0
        else:
            source, output = missing, sum(unit.nbytes for unit in plan.shards)
            output -= sum(p.stat().st_size for p in self._out.glob("*.safetensors")) if self._out.is_dir() else 0
        there, place = _existing(self._arriving.folder), _existing(self._out)
        together = there.stat().st_dev == place.stat().st_dev
        for folder, needed in ((there, source + output * together), (place, 0 if together else output)):
            free = shutil.disk_usage(folder).free
            if needed and needed + SLACK_BYTES > free:
                raise PlanRefused(
                    f"source shards and output together need {needed:,} bytes at one moment and {free:,} are free",
                    where=str(folder),
                    hint="--delete-source removes shards as they are done with; a smaller output.shard_size lowers the peak"
                    if not self._delete
                    else "--set output.shard_size=1GB lowers the peak, or --source-dir on another disk",
                )


def _reads_again(plan: ConversionPlan) -> str:
    """Why the source is read more than once; empty where it is not."""
    if plan.recipe.calibrated:
        return (
            f"{plan.recipe.weights.algorithm} runs the layers, again after a stop, and the kept tensors come after them"
        )
    if plan.kv.layers and plan.kv.taken is None:
        return "KV scales are measured in a second pass over the layers (--set kv_cache.scales=none leaves them out)"
    return ""


def _existing(folder: Path) -> Path:
    folder = folder.absolute()
    while not folder.exists():
        folder = folder.parent
    return folder
