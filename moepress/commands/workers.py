"""Options that spread a conversion over worker processes, here or on a Ray cluster."""

from __future__ import annotations

import importlib.util
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moepress.commands.numbers import number, whole
from moepress.errors import MoepressError

if TYPE_CHECKING:
    from moepress.convert.executor import Place

WorkerCount = Annotated[
    int | None,
    typer.Option(
        "--workers",
        metavar="N",
        parser=whole(),
        help="Worker processes, on Ray (default: this process alone). Changes no byte.",
    ),
]
RayAddress = Annotated[
    str | None,
    typer.Option(
        "--ray-address", metavar="ADDRESS", help="A running Ray cluster, or auto; without it Ray starts here."
    ),
]
WorkerThreads = Annotated[
    int, typer.Option("--worker-threads", metavar="N", parser=whole(), help="Processors of each worker.")
]
WorkerGpus = Annotated[int, typer.Option("--worker-gpus", metavar="N", parser=whole(0, 1), help="GPUs of each worker.")]
Gather = Annotated[
    Path | None,
    typer.Option(
        "--gather",
        metavar="FOLDER",
        help="Folder on each worker's own disk, where workers do not see OUT; finished shards are sent over.",
    ),
]


WaitForWorkers = Annotated[
    float,
    typer.Option(
        "--wait-for-workers",
        parser=number(0),
        metavar="SECONDS",
        help="How long to wait for workers that still join the cluster.",
    ),
]


def place_of_work(
    count: int | None, address: str | None, threads: int, gpus: int, gather: Path | None, wait: float
) -> Place | None:
    """Where the options put the work; None = this process.

    Raises:
        MoepressError: workers without Ray, or options for workers without workers.
    """
    if count is None:
        given = [name for name, value in (("--ray-address", address), ("--gather", gather)) if value is not None]
        if given:
            raise MoepressError(f"{' and '.join(given)} without workers", where=given[0], hint="add --workers N")
        return None
    if importlib.util.find_spec("ray") is None:
        raise MoepressError(
            "workers need Ray, which is not installed", where="--workers", hint="pip install 'moepress[ray]'"
        )
    from moepress.cluster.ray_executor import ray_workers
    from moepress.cluster.ray_start import Workers

    return partial(ray_workers, Workers(count, address, threads, gpus, gather, wait))
