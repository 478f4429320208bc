"""What a plan needs: disk and time here. (Memory per GPU and KV tokens are `formats.sizes`, from configuration alone.)

Time is measured, not looked up: the probe presses a few real pieces of this source on this machine, reads from this disk
and writes to that one, for a second or two, and divides.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from moepress.convert.plan import ConversionPlan
from moepress.errors import PlanRefused

SLACK_BYTES = 64 << 20
"""Headers, index, receipts and side files beside the tensors."""


@dataclass(frozen=True)
class DiskNeed:
    """Bytes still to be written into the output's file system, and what is free there."""

    needed: int
    free: int
    folder: Path


def about(seconds: float) -> str:
    """An estimate of a time for people, no finer than it can be: ``about 40 s``, ``about 12 min``, ``about 3.5 h``."""
    if seconds < 1:
        return "less than a second"
    if seconds < 90:
        return f"about {seconds:.0f} s"
    return f"about {seconds / 60:.0f} min" if seconds < 5400 else f"about {seconds / 3600:.1f} h"


def disk_need(plan: ConversionPlan, out: Path, *, finished: set[str] | frozenset[str] = frozenset()) -> DiskNeed:
    """Space for the shards that are not finished yet, in the file system that will hold ``out``."""
    folder = out.absolute()
    while not folder.exists():
        folder = folder.parent
    needed = sum(shard.nbytes for shard in plan.shards if shard.name not in finished) + SLACK_BYTES
    return DiskNeed(needed, shutil.disk_usage(folder).free, folder)


def check_disk(plan: ConversionPlan, out: Path, *, finished: set[str] | frozenset[str] = frozenset()) -> None:
    """Refuses a conversion that would fill the disk, before it begins.

    Raises:
        PlanRefused: with both numbers.
    """
    need = disk_need(plan, out, finished=finished)
    if need.needed > need.free:
        raise PlanRefused(
            f"the output needs {need.needed:,} bytes and {need.free:,} are free",
            where=str(need.folder),
            hint="free some space, or choose a folder on another disk",
        )


def check_free(folder: Path, needed: int, what: str) -> None:
    """Refuses something that would fill the file system of ``folder``.

    Raises:
        PlanRefused: with both numbers.
    """
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise PlanRefused(
            f"{what} needs {needed:,} bytes and {free:,} are free",
            where=str(folder),
            hint="free some space, or choose a folder on another disk",
        )


@dataclass(frozen=True)
class TimeEstimate:
    """Seconds for the whole conversion from rates measured here, in bytes per second (source bytes; ``write``: output bytes)."""

    seconds: float
    press_rate: float
    write_rate: float
    threads: int

    @property
    def bound_by(self) -> str:
        """What the time is spent on."""
        return "the processors" if self.press_rate < self.write_rate * 2 else "the disk"


def estimate_time(plan: ConversionPlan, out: Path, *, threads: int | None = None, budget: float = 1.5) -> TimeEstimate:
    """A short measurement on this machine: presses real pieces, and writes to the output's disk.

    Args:
        budget: seconds to spend.
    """
    from moepress.convert.press import press
    from moepress.convert.press.pieces import cut
    from moepress.convert.units import Pool
    from moepress.formats.checkpoint import open_checkpoint
    from moepress.formats.reader import TensorReader

    checkpoint = open_checkpoint(plan.source)
    chosen = [d for d in plan.decisions.values() if d.action == "quantize"] or list(plan.decisions.values())
    pieces = [piece for decision in chosen[:: max(1, len(chosen) // 64)] for piece in cut(decision)]
    workers = threads or os.cpu_count() or 1
    with TensorReader(checkpoint) as reader, Pool(workers) as pool:
        press(pieces[0], reader, plan.recipe, pool.scratch())  # compiles, or loads the compiled loops
        started = time.monotonic()
        done = 0
        for piece, _ in pool.in_order(
            lambda p: press(p, reader, plan.recipe, pool.scratch()), _repeat(pieces, started + budget)
        ):
            stored = piece.decision.stored
            done += int(
                stored.nbytes
                * (piece.last - piece.first)
                / max(1, stored.shape[0] if piece.decision.action != "keep" else stored.nbytes)
            )
        press_rate = done / (time.monotonic() - started)
    write_rate = _write_rate(disk_need(plan, out).folder)
    seconds = max(plan.source_bytes / press_rate, plan.output_bytes / write_rate)
    return TimeEstimate(seconds, press_rate, write_rate, workers)


def _repeat(pieces: list, until: float):  # type: ignore[no-untyped-def,type-arg]
    while True:
        for piece in pieces:
            yield piece
            if time.monotonic() > until:
                return


def _write_rate(folder: Path, size: int = 64 << 20) -> float:
    """Bytes per second of writing and flushing a file of ``size`` bytes."""
    block = os.urandom(1 << 20) * 8
    with tempfile.TemporaryFile(dir=folder) as file:
        started = time.monotonic()
        for _ in range(size // len(block)):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        return size / (time.monotonic() - started)
