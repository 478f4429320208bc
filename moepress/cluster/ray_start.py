"""Ray started here or joined somewhere, and the workers placed in it, before any work.

    --workers N                  N worker processes of a Ray that lives and dies with this command
    --workers N --ray-address A  N workers on the cluster at A, wherever Ray places them

What cannot work is found here: an address where nobody answers, a cluster without room, workers that do not see the files.
"""

from __future__ import annotations

import os
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray import cloudpickle

from moepress.cluster.shard_worker import Placement, ShardWorker, WorkerStart, probe_file
from moepress.cluster.windows import answer
from moepress.convert.plan import ConversionPlan
from moepress.errors import PlanRefused
from moepress.formats.checkpoint import Checkpoint

RETRIES = 4
"""How often Ray starts a worker again, and asks a question again, before the run ends."""


ENVIRONMENT = {
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",
}
"""Ray's own lines would break the live view; what a worker did is in its log, and what failed becomes an error of ours. And Ray
gives workers nearly the least priority: on a busy machine they would hardly run where the command itself does."""


START_SECONDS = 300.0
"""Until every worker has imported torch and looked at the files; on a busy disk that takes a minute."""


START_ATTEMPTS = 3
"""Ray gives its own node half a minute to start, which a busy machine may not keep."""


@dataclass(frozen=True)
class Workers:
    """What the user asked for.

    Attributes:
        count: worker processes.
        address: of a running Ray cluster; None starts one here that ends with this process.
        threads: processors of each worker.
        gpus: GPUs of each worker; 0 computes on processors.
        gather: folder on each worker's own disk, for outputs that workers do not see; None when they do.
        wait: seconds to wait for a cluster whose machines are still joining.
        object_store_bytes: shared memory of a Ray started here; None leaves it to Ray.
    """

    count: int
    address: str | None = None
    threads: int = 1
    gpus: int = 0
    gather: Path | None = None
    wait: float = 0.0
    object_store_bytes: int | None = None


@contextmanager
def placed_workers(wish: Workers, checkpoint: Checkpoint, plan: ConversionPlan, out: Path) -> Iterator[list[Any]]:
    """Starts or joins Ray, and the workers in it; ends them afterwards. Call with the journal open.

    Yields:
        Ray actor handles of `worker.Worker` or `shard_worker.ShardWorker`, every one of which sees the files it needs.

    Raises:
        PlanRefused: the cluster cannot place the workers, or they do not see the files.
    """
    with _signals_kept():
        _start_ray(wish)
    try:
        # Held to the end: a worker that Ray starts again fetches it again. Sent as bytes: of a reference among a worker's
        # arguments Ray warns on stderr, into the live view, that it might be gone by then.
        held = ray.put(WorkerStart(checkpoint, plan, out.resolve(), wish.threads, _device(wish)))
        calibrates = plan.recipe.calibrated or bool(plan.kv.layers)
        handles = _start_workers(wish, cloudpickle.dumps(held), calibrates=calibrates)
        _refuse_blind(handles, out, shared=wish.gather is None)
        yield handles
    finally:
        probe_file(out).unlink(missing_ok=True)
        with _stderr_closed():
            ray.shutdown()  # takes the workers along


def _start_ray(wish: Workers) -> None:
    """Starts a Ray that ends with this process, or joins one.

    Raises:
        PlanRefused: it cannot be started or joined.
    """
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if wish.address is not None:
        _reach(wish.address, wish.wait)
    for attempt in range(START_ATTEMPTS):
        try:
            if wish.address is not None:
                ray.init(address=wish.address, log_to_driver=False, logging_level="error")
                return
            ray.init(
                address="local",  # without it Ray joins whatever cluster this machine runs, also one that is just dying
                num_cpus=max(wish.count * wish.threads, 1),
                include_dashboard=False,
                log_to_driver=False,
                logging_level="error",
                object_store_memory=wish.object_store_bytes,
            )
            return
        except Exception as error:  # Ray raises bare ones, for example when its node takes more than half a minute
            ray.shutdown()
            if attempt + 1 < START_ATTEMPTS and type(error) is Exception:
                continue
            raise PlanRefused(
                f"Ray cannot be reached or started: {' '.join(str(error).split())[:400]}",
                where=wish.address or "--workers",
                hint="ray status --address ADDRESS"
                if wish.address
                else "run without --workers to convert in one process",
            ) from error


@contextmanager
def _signals_kept() -> Iterator[None]:
    """Ray takes SIGTERM for itself and ends the process on the spot; whoever runs a conversion wants to end it in order."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _stderr_closed() -> Iterator[None]:
    """Of every task that ends with its worker Ray's own threads write a line there, just before the command says how to go on."""
    sys.stderr.flush()
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def _reach(address: str, wait: float) -> None:
    """Somebody listens at a HOST:PORT address: Ray itself would try a dead one for many minutes.

    Raises:
        PlanRefused: nobody does, within the time to wait.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        return  # "auto", or a name that Ray resolves
    until = time.monotonic() + wait
    while True:
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()
            return
        except OSError as error:
            if time.monotonic() > until:
                raise PlanRefused(
                    f"no Ray cluster answers at {address}: {error.strerror or error}",
                    where="--ray-address",
                    hint="ray status, on the head, says whether it runs; --wait-for-workers SECONDS waits for it",
                ) from error
            time.sleep(1)


def _start_workers(wish: Workers, given: bytes, *, calibrates: bool) -> list[Any]:
    """The actors, once the cluster has said that it has room for them.

    Raises:
        PlanRefused: it has not.
    """
    needed = {"CPU": wish.threads, "GPU": wish.gpus}
    have = _resources(needed, wish)
    for resource, each in needed.items():
        if each * wish.count > have.get(resource, 0):
            raise PlanRefused(
                f"{wish.count} workers of {each} {resource} need {each * wish.count}; the cluster has {have.get(resource, 0):g}",
                where="--workers",
                hint="ask for fewer workers, or add machines to the cluster",
            )
    actor = _actor(calibrates=calibrates).options(
        num_cpus=wish.threads,
        num_gpus=wish.gpus,
        max_restarts=RETRIES,
        max_task_retries=RETRIES,
        runtime_env={"env_vars": _environment(wish.threads)},
        scheduling_strategy="SPREAD",
    )
    return [actor.remote(number, given) for number in range(wish.count)]


def _resources(needed: dict[str, int], wish: Workers) -> dict[str, float]:
    """What the cluster has, once that is enough or the time to wait for it is over."""
    until = time.monotonic() + wish.wait
    while True:
        have: dict[str, float] = ray.cluster_resources()
        enough = all(each * wish.count <= have.get(resource, 0) for resource, each in needed.items())
        if enough or time.monotonic() > until:
            return have
        time.sleep(1)


def _actor(*, calibrates: bool) -> Any:
    """The class that Ray starts: a worker that fetches what it works on, also when Ray starts it again.

    Made here, so that a worker imports no more than its work needs: without calibration neither torch nor transformers.
    """
    kind: type[ShardWorker] = ShardWorker
    if calibrates:
        from moepress.cluster.worker import Worker

        kind = Worker

    class _RayWorker(kind):  # type: ignore[misc, valid-type]
        def __init__(self, number: int, given: bytes) -> None:
            super().__init__(number, ray.get(cloudpickle.loads(given)))

    return ray.remote(_RayWorker)


def _environment(threads: int) -> dict[str, str]:
    """What must be set before a worker loads torch: the same sums wherever factors lie in memory, and threads that sleep."""
    return {"MKL_CBWR": "AUTO,STRICT", "OMP_WAIT_POLICY": "passive", "OMP_NUM_THREADS": str(threads)}


def _refuse_blind(handles: list[Any], out: Path, *, shared: bool) -> None:
    """Waits for the workers, and asks what they see.

    Raises:
        PlanRefused: one of them does not see the source or the output.
        ConvertError: one of them does not start.
    """
    nonce = secrets.token_hex(16) if shared else None
    if nonce is not None:
        probe_file(out).parent.mkdir(parents=True, exist_ok=True)
        probe_file(out).write_text(nonce)
    asked = [handle.place.remote(nonce) for handle in handles]
    ready, late = ray.wait(asked, num_returns=len(asked), timeout=START_SECONDS)
    if late:
        raise PlanRefused(
            f"{len(late)} of {len(asked)} workers did not start in {START_SECONDS:.0f} s: the cluster is busy with other work",
            where="--workers",
            hint="ray status shows who holds its processors; ask for fewer workers",
        )
    found: list[Placement] = [answer(reference, "starting workers") for reference in ready]
    blind = [each for each in found if each.problem]
    if blind:
        raise PlanRefused(
            f"{len(blind)} of {len(found)} workers cannot see the files: the one on {blind[0].host} {blind[0].problem}",
            where="--workers",
            hint="use a shared file system for SRC and OUT, or --gather FOLDER for outputs on the workers' own disks",
        )


def _device(wish: Workers) -> str:
    return "cuda" if wish.gpus else "cpu"
