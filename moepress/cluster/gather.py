"""Shards from workers that do not see the output folder: pressed on their own disks, streamed here, checked, renamed.

The receipt that comes after the bytes holds the SHA-256 that the worker wrote; the bytes that arrived must have it. Until
then they are a temporary file, which nobody takes for a shard. While one shard is being received, the other workers press
theirs.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from moepress.cluster.windows import answer
from moepress.convert.layout import ShardPlan
from moepress.errors import ConvertError
from moepress.formats.atomic import atomic_file, write_all

ATTEMPTS = 3
BUFFERED_PIECES = 8
"""Pieces that a worker may be ahead of the run, in shared memory."""


def gather_shards(
    workers: list[Any],
    shards: Sequence[ShardPlan],
    plan: Any,
    out: Path,
    scratch: Path,
    started: Callable[[ShardPlan], None],
) -> Iterator[tuple[ShardPlan, dict[str, Any]]]:
    """Every shard with its receipt, written here.

    Args:
        workers: Ray actor handles of `worker.Worker`.
        shards: without calibration.
        plan: reference of what their weights become; None = the plan that the workers were started with.
        out: the output folder, here.
        scratch: a folder on the workers' own disks.
        started: called with a shard when a worker is given it.

    Raises:
        ConvertError: bytes were lost on the way, several times.
    """
    flying: deque[tuple[ShardPlan, int, Any]] = deque()
    for number, shard in enumerate(shards):
        if len(flying) == len(workers):
            yield _received(workers, *flying.popleft(), plan, out, scratch)
        index = number % len(workers)
        started(shard)
        flying.append((shard, index, _ask(workers[index], shard, plan, scratch)))
    while flying:
        yield _received(workers, *flying.popleft(), plan, out, scratch)


def _ask(worker: Any, shard: ShardPlan, plan: Any, scratch: Path) -> Any:
    options = {"num_returns": "streaming", "_generator_backpressure_num_objects": BUFFERED_PIECES}
    return worker.shard_pieces.options(**options).remote(shard.name, plan, scratch)


def _received(
    workers: list[Any], shard: ShardPlan, index: int, pieces: Any, plan: Any, out: Path, scratch: Path
) -> tuple[ShardPlan, dict[str, Any]]:
    for attempt in range(ATTEMPTS):
        try:
            return shard, _write(pieces, shard, out)
        except _Damaged:
            pieces = _ask(workers[(index + attempt + 1) % len(workers)], shard, plan, scratch)
    raise ConvertError(
        f"{shard.name} arrived damaged {ATTEMPTS} times",
        where=str(out),
        hint="look at the network and the memory of the machines; the same command resumes",
    )


class _Damaged(Exception):
    """The bytes that came are not the bytes that were written."""


def _write(pieces: Any, shard: ShardPlan, out: Path) -> dict[str, Any]:
    digest = hashlib.sha256()
    path = out / shard.name
    with atomic_file(path) as descriptor:
        for reference in pieces:
            piece = answer(reference, shard.name)
            if isinstance(piece, dict):
                if piece["sha256"] != digest.hexdigest():
                    raise _Damaged
                return piece
            digest.update(piece)
            write_all(descriptor, memoryview(piece), path)
        raise _Damaged
