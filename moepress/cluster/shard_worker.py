"""What one worker holds and is asked for where nothing is calibrated: whole shards. Plain Python: Ray wraps this class.

A worker keeps nothing that matters: the plan and the headers are given to it when it starts, and every answer depends on the
question alone. So it may die at any moment; another one, or itself started again, gives the same answer.

This module imports no torch, whose start takes longer than rounding a gigabyte.
"""

from __future__ import annotations

import os
import resource
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moepress.convert.journal import STATE_FOLDER
from moepress.convert.plan import ConversionPlan
from moepress.convert.units import Pool, run_unit
from moepress.formats.checkpoint import Checkpoint
from moepress.formats.reader import TensorReader


@dataclass(frozen=True)
class WorkerStart:
    """What a worker is given when it starts.

    Attributes:
        checkpoint, plan: of the conversion.
        out: the output folder, on a file system that the worker sees too, unless shards are gathered.
        threads: for pressing, and for torch.
        device: where layers compute.
    """

    checkpoint: Checkpoint
    plan: ConversionPlan
    out: Path
    threads: int
    device: str = "cpu"


@dataclass(frozen=True)
class Placement:
    """Where a worker lives, and whether it sees the files. ``problem`` is empty when it can work."""

    number: int
    host: str
    pid: int
    device: str
    problem: str


class ShardWorker:
    """One worker process.

    Args:
        number: from 0; names its log.
        start: what to work on.
    """

    def __init__(self, number: int, start: WorkerStart) -> None:
        self.number, self.start = number, start
        self._stack = ExitStack()
        self._reader: TensorReader | None = None
        self._pool: Pool | None = None

    def place(self, nonce: str | None) -> Placement:
        """Looks whether source and output are visible from here.

        Args:
            nonce: what the run wrote into its probe file; None when the output need not be visible.
        """
        source, probe = self.start.checkpoint.path("config.json"), probe_file(self.start.out)
        problem = ""
        if not source.exists():
            problem = f"does not see the source {source.parent}"
        elif nonce is not None:
            try:
                seen = probe.read_text()
            except OSError:
                seen = ""
            if seen != nonce:
                problem = f"does not see the output folder {self.start.out}"
        return Placement(self.number, socket.gethostname(), os.getpid(), self.start.device, problem)

    def shard(self, name: str, plan: ConversionPlan | None = None) -> dict[str, Any]:
        """Presses and writes a shard that needs no calibration; returns its receipt.

        Args:
            plan: what its weights become; None = the plan the worker was started with.
        """
        return self._press_shard(name, plan, self.start.out)

    def shard_pieces(
        self, name: str, plan: ConversionPlan | None, scratch: Path, piece_bytes: int = 64 << 20
    ) -> Iterator[Any]:
        """Presses a shard on this machine's own disk and gives its bytes in pieces, then its receipt."""
        scratch.mkdir(parents=True, exist_ok=True)
        path = scratch / name
        try:
            receipt = self._press_shard(name, plan, scratch)
            with path.open("rb") as file:
                while piece := file.read(piece_bytes):
                    yield piece
            yield receipt
        finally:
            path.unlink(missing_ok=True)

    def close(self) -> None:
        """Closes files and gives memory back."""
        self._stack.close()

    @contextmanager
    def _logged(self, what: str) -> Iterator[None]:
        """A line in this worker's log when something is done, or has failed."""
        started, outcome = time.monotonic(), "failed"
        try:
            yield
            outcome = "done"
        finally:
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
            line = (
                f"{time.strftime('%H:%M:%S')} {outcome} {what}: {time.monotonic() - started:.2f} s, peak {peak:.2f} GiB"
            )
            with log_file(self.start.out, self.number).open("a", encoding="utf-8") as log:
                log.write(line + "\n")

    def _press_shard(self, name: str, plan: ConversionPlan | None, folder: Path) -> dict[str, Any]:
        if self._reader is None or self._pool is None:
            self._reader = self._stack.enter_context(TensorReader(self.start.checkpoint))
            self._pool = self._stack.enter_context(Pool(self.start.threads))
        plan = plan or self.start.plan
        shard = next(shard for shard in plan.shards if shard.name == name)
        with self._logged(name):
            return run_unit(shard, plan, self._reader, folder, self._pool, lambda _: None, self.start.device)


def probe_file(out: Path) -> Path:
    """Where a run writes a word that its workers must be able to read."""
    return out / STATE_FOLDER / "probe"


def log_file(out: Path, number: int) -> Path:
    """A worker's log, beside the receipts; on the worker's own machine when the output is not shared."""
    path = out / STATE_FOLDER / "logs" / f"worker-{number}.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    return path
