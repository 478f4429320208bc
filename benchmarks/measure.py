"""Runs a command and says what it cost: wall and processor seconds, peak memory of the process itself."""

from __future__ import annotations

import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Cost:
    """One run. ``rss`` is the largest resident set of the process, in bytes, its file pages included."""

    wall: float
    cpu: float
    rss: int


def run(command: Sequence[str], *, env: Mapping[str, str] | None = None) -> Cost:
    """Runs ``command`` to its end; its output is shown only when it fails.

    Raises:
        RuntimeError: it failed.
    """
    started = time.monotonic()
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env={**os.environ, **(env or {})}
    )
    assert process.stdout is not None
    output = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    wall = time.monotonic() - started
    if process.returncode != 0:
        raise RuntimeError(
            f"{' '.join(command)} exited with {process.returncode}:\n{output.decode(errors='replace')[-4000:]}"
        )
    return Cost(wall, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024)


def interleaved(rounds: int, contenders: Mapping[str, Callable[[], Cost]]) -> dict[str, list[Cost]]:
    """Every contender once a round, so that a slow minute of a shared machine hits all of them."""
    costs: dict[str, list[Cost]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, once in contenders.items():
            costs[name].append(once())
    return costs


def summary(costs: Mapping[str, Sequence[Cost]]) -> dict[str, Any]:
    """Medians, and every run."""
    return {
        name: {
            "wall_median": round(statistics.median(c.wall for c in runs), 3),
            "cpu_median": round(statistics.median(c.cpu for c in runs), 3),
            "rss_max": max(c.rss for c in runs),
            "runs": [asdict(c) for c in runs],
        }
        for name, runs in costs.items()
    }


def machine() -> dict[str, Any]:
    """What it was measured on."""
    model = platform.processor()
    try:
        with Path("/proc/cpuinfo").open() as file:
            model = next(line.partition(":")[2].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    return {"processor": model, "processors": os.cpu_count(), "python": platform.python_version()}
