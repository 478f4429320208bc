"""The work of a conversion done by Ray actors, here or on a cluster.

    --workers N                  N worker processes of a Ray that lives and dies with this command
    --workers N --ray-address A  N workers on the cluster at A, wherever Ray places them

Each layer goes through three phases, with the run in between:

    dense      one task per batch of samples          hidden states there and back
    press      one task per block of experts          tapped tokens put once into each machine's shared memory
    experts    one task per batch of samples          with weights read from the source, or back from the new shards

The run keeps activations, journal and shards' order; workers write no file but whole shards of tensors that need no
calibration. So a worker may die at any moment (Ray starts it again and asks again), and when the run itself dies, Ray's
processes go with it and the same command resumes from the receipts.

Memory: shared memory holds the layer's tapped tokens, T · C · 4 bytes for each of the runs, and what is in flight.
What does not fit, Ray spills to disk by itself.
"""

from __future__ import annotations

import os
import secrets
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

from moepress.calibration.expert_tap import RoutedTokens
from moepress.calibration.layer_fill import ExpertBlock
from moepress.calibration.layer_runner import OpenLayer, Stream
from moepress.cluster.gather import gather_shards
from moepress.cluster.messages import SentInputs, receive, receive_dense, send, send_tokens
from moepress.cluster.windows import answer, as_they_come, in_order
from moepress.cluster.worker import Placement, Worker, WorkerStart, probe_file
from moepress.convert.calibrated.expert_block import LayerInputs, PressedBlock
from moepress.convert.layout import ShardPlan
from moepress.convert.plan import ConversionPlan
from moepress.errors import PlanRefused
from moepress.formats.checkpoint import Checkpoint

RETRIES = 4
"""How often Ray starts a worker again, and asks a question again, before the run ends."""


QUIET = {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0", "RAY_USAGE_STATS_ENABLED": "0"}
"""Ray's own lines would break the progress line; what a worker did is in its log, and what failed becomes an error of ours."""


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
def ray_workers(wish: Workers, checkpoint: Checkpoint, plan: ConversionPlan, out: Path) -> Iterator[RayExecutor]:
    """Starts or joins Ray, and the workers in it; ends them afterwards. Call with the journal open.

    Raises:
        PlanRefused: the cluster cannot place the workers, or they do not see the files.
    """
    with _signals_kept():
        _start_ray(wish)
    try:
        # held to the end: a worker that Ray starts again fetches it again
        given = [ray.put(WorkerStart(checkpoint, plan, out.resolve(), wish.threads, _device(wish)))]
        handles = _start_workers(wish, given)
        try:
            executor = RayExecutor(handles, plan, out, gather=wish.gather)
            executor.placements = _placements(handles, out, shared=wish.gather is None)
            yield executor
        finally:
            for handle in handles:
                ray.kill(handle)
    finally:
        probe_file(out).unlink(missing_ok=True)
        ray.shutdown()


class RayExecutor:
    """`convert.executor.Executor` on Ray actors.

    Args:
        workers: handles of `Worker` actors.
        plan: of the conversion.
        out: the output folder.
        gather: as in `Workers`.

    Attributes:
        placements: where the workers live.
    """

    def __init__(self, workers: list[Any], plan: ConversionPlan, out: Path, *, gather: Path | None = None) -> None:
        self._workers, self._plan, self._out, self._gather = workers, plan, out, gather
        self.placements: list[Placement] = []

    def shards(
        self,
        shards: Sequence[ShardPlan],
        plan: ConversionPlan,
        started: Callable[[ShardPlan], None],
        progress: Callable[[int], None],
    ) -> Iterator[tuple[ShardPlan, dict[str, Any]]]:
        other = None if plan is self._plan else ray.put(plan)

        def ask(worker: Any, shard: ShardPlan) -> Any:
            started(shard)
            return worker.shard.remote(shard.name, other)

        if self._gather is not None:
            receipts = gather_shards(self._workers, shards, other, self._out, self._gather, started)
        else:
            receipts = as_they_come(self._workers, ask, shards, lambda shard: shard.name)
        for shard, receipt in receipts:
            progress(sum(plan.decisions[weight.name].stored.nbytes for weight in shard.weights))
            yield shard, receipt

    def dense(self, layer: OpenLayer, stream: Stream) -> RoutedTokens | None:
        routed = layer.allocate_routed(stream)

        def ask(worker: Any, batch: tuple[int, int]) -> Any:
            hidden, real, topk = layer.read_batch(stream, *batch)
            sent = (send(hidden), send(real), None if topk is None else send(topk))
            return worker.dense.remote(layer.index, sent)

        place = f"layer {layer.index}"
        batches = list(layer.batches(stream))
        for (start, _), made in in_order(self._workers, ask, batches, lambda b: f"{place}, samples {b[0]}..{b[1] - 1}"):
            layer.write_batch(stream, routed, start, receive_dense(made))
        return routed

    def press(
        self, layer: OpenLayer, stream: Stream | None, inputs: LayerInputs, take: Callable[[PressedBlock], None]
    ) -> None:
        small = ray.put(SentInputs.of(inputs))
        ours = self._share(inputs.ours)
        source = (None, None, None) if inputs.source is None else self._share(inputs.source)
        held: list[Any] = []

        def ask(worker: Any, experts: range) -> Any:
            reference = worker.press.remote(layer.index, experts, small, *ours, *source)
            if self._gather is not None:  # workers cannot read the shards back
                held.append(reference)
            return reference

        blocks = _several_each(list(layer.expert_blocks()), len(self._workers))
        place = f"layer {layer.index}, experts"
        for _, block in in_order(self._workers, ask, blocks, lambda e: f"{place} {e.start} to {e.stop - 1}"):
            take(block.received())
        if stream is not None:
            self._add(layer, stream, inputs.ours, True, held)

    def experts(
        self, layer: OpenLayer, stream: Stream, routed: RoutedTokens, finished: Callable[[range], ExpertBlock] | None
    ) -> None:
        if finished is not None and self._gather is not None:
            layer.experts(stream, routed, finished)
        else:
            self._add(layer, stream, routed, finished is not None, [])

    def _add(self, layer: OpenLayer, stream: Stream, routed: RoutedTokens, finished: bool, blocks: list[Any]) -> None:
        def ask(worker: Any, batch: tuple[int, int]) -> Any:
            tokens = routed.read(stream.first_token(batch[0]), stream.first_token(batch[1]))
            return worker.experts.remote(layer.index, send_tokens(tokens), finished, *blocks)

        place = f"layer {layer.index}, experts' outputs of samples"
        batches = list(layer.batches(stream))
        for batch, made in in_order(self._workers, ask, batches, lambda b: f"{place} {b[0]} to {b[1] - 1}"):
            layer.add_outputs(stream, *batch, receive(made))

    def _share(self, routed: RoutedTokens) -> tuple[Any, Any, Any]:
        """A layer's tapped tokens, once in shared memory."""
        parts = (routed.x, routed.expert, routed.weight)
        x, expert, weight = (ray.put(send(part.read(0, len(part)))) for part in parts)
        return x, expert, weight


def _several_each(blocks: list[range], workers: int) -> list[range]:
    """Blocks cut again so that every worker has several to do. Where they are cut changes no byte."""
    experts = sum(len(block) for block in blocks)
    size = max(1, -(-experts // (3 * workers)))
    return [range(at, min(at + size, block.stop)) for block in blocks for at in range(block.start, block.stop, size)]


def _start_ray(wish: Workers) -> None:
    """Starts a Ray that ends with this process, or joins one.

    Raises:
        PlanRefused: it cannot be started or joined.
    """
    for name, value in QUIET.items():
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


def _start_workers(wish: Workers, given: list[Any]) -> list[Any]:
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
    actor = ray.remote(_RayWorker).options(
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


class _RayWorker(Worker):
    """A worker that fetches what it works on, also when Ray starts it again."""

    def __init__(self, number: int, given: list[Any]) -> None:
        super().__init__(number, ray.get(given[0]))


def _environment(threads: int) -> dict[str, str]:
    """What must be set before a worker loads torch: the same sums for any number of threads, and threads that sleep."""
    return {"MKL_CBWR": "AUTO,STRICT", "OMP_WAIT_POLICY": "passive", "OMP_NUM_THREADS": str(threads)}


def _placements(handles: list[Any], out: Path, *, shared: bool) -> list[Placement]:
    """Where the workers came to live.

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
    return found


def _device(wish: Workers) -> str:
    return "cuda" if wish.gpus else "cpu"
