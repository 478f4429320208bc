"""The work of a conversion done by Ray actors, here or on a cluster (`ray_start` places them).

Each layer goes through these phases, with the run in between:

    measure    one task, beside the others            KV scales, where they are wanted; hidden states put into shared memory
    dense      one task per batch of samples          hidden states there and back
    pooled     one task per panel of the matrix       tapped tokens put once into each machine's shared memory
    press      one task per block of experts          the same tokens
    experts    one task per run of batches            the same; weights read from the source, or back from the new shards

The run keeps activations, journal and shards' order; workers write no file but whole shards of tensors that need no
calibration. So a worker may die at any moment (Ray starts it again and asks again), and when the run itself dies, Ray's
processes go with it and the same command resumes from the receipts.

The run computes nothing of a layer itself, and reads none of its weights. torch is imported when the first layer comes.

Memory: shared memory holds the layer's tapped tokens, T · C · 4 bytes for each of the runs, and what is in flight.
What does not fit, Ray spills to disk by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray

from moepress.cluster.gather import gather_shards
from moepress.cluster.ray_start import Workers, placed_workers
from moepress.cluster.windows import answer, as_they_come, in_order
from moepress.convert.layout import ShardPlan
from moepress.convert.plan import ConversionPlan
from moepress.formats.checkpoint import Checkpoint

if TYPE_CHECKING:
    from moepress.calibration.expert_tap import RoutedTokens
    from moepress.calibration.layer_fill import ExpertBlock
    from moepress.calibration.layer_runner import OpenLayer
    from moepress.calibration.statistics import PooledMoments
    from moepress.calibration.stream import Stream
    from moepress.convert.calibrated.expert_block import LayerInputs, PressedBlock
    from moepress.convert.kv.layer_scales import LayerScales

OUTPUTS_BYTES = 2 << 30
"""Experts' outputs of one task, at most. A task loads all the layer's experts once, so few tasks are less work."""


@contextmanager
def ray_workers(wish: Workers, checkpoint: Checkpoint, plan: ConversionPlan, out: Path) -> Iterator[RayExecutor]:
    """`convert.executor.Place`: an executor whose workers end with it. Call with the journal open.

    Raises:
        PlanRefused: the cluster cannot place the workers, or they do not see the files.
    """
    with placed_workers(wish, checkpoint, plan, out) as handles:
        yield RayExecutor(handles, plan, out, gather=wish.gather, threads=wish.threads)


class RayExecutor:
    """`convert.executor.Executor` on Ray actors.

    Args:
        workers: handles of `worker.Worker` actors; where nothing is calibrated, of `shard_worker.ShardWorker`.
        plan: of the conversion.
        out: the output folder.
        gather, threads: as in `Workers`.
    """

    def __init__(
        self, workers: list[Any], plan: ConversionPlan, out: Path, *, gather: Path | None = None, threads: int = 1
    ) -> None:
        self._workers, self._plan, self._out, self._gather, self._threads = workers, plan, out, gather, threads
        self._shared_of: int | None = None
        self._shared: dict[int, tuple[Any, ...]] = {}

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
        from moepress.cluster.messages import receive_dense, send
        from moepress.quantize.side_by_side import in_windows

        routed = layer.allocate_routed(stream)

        def ask(worker: Any, batches: Sequence[tuple[int, int]]) -> Any:
            read = [layer.read_batch(stream, *batch) for batch in batches]
            sent = [(send(hidden), send(real), None if topk is None else send(topk)) for hidden, real, topk in read]
            return worker.dense.remote(layer.index, sent)

        def what(batches: Sequence[tuple[int, int]]) -> str:
            return f"layer {layer.index}, samples {batches[0][0]}..{batches[-1][1] - 1}"

        asked = list(in_windows(layer.dense_batches(stream), self._threads))
        for batches, made in in_order(self._workers, ask, asked, what):
            for (start, _), batch in zip(batches, made, strict=True):
                layer.write_batch(stream, routed, start, receive_dense(batch))
        return routed

    def measure(self, layer: OpenLayer, stream: Stream) -> Callable[[], LayerScales]:
        from moepress.cluster.messages import send

        hidden = stream.hidden.read(0, len(stream.hidden))
        topk = None if stream.topk is None else send(stream.topk.read(0, len(stream.topk)))
        reference = self._workers[-1].measure.remote(layer.index, ray.put(send(hidden)), send(stream.lengths), topk)

        def scales() -> LayerScales:
            found: LayerScales = answer(reference, f"layer {layer.index}, KV scales")
            return found

        return scales

    def pooled(self, layer: OpenLayer, ours: RoutedTokens, source: RoutedTokens | None) -> PooledMoments:
        import torch

        from moepress.calibration.statistics import finished_pool
        from moepress.cluster.messages import receive
        from moepress.quantize.hessian import panels
        from moepress.quantize.side_by_side import in_windows

        mine = self._share(layer, ours)
        theirs = () if source is None else self._share(layer, source)

        def ask(worker: Any, some: Sequence[int]) -> Any:
            return worker.pooled.remote(layer.index, some, *mine, *(() if some else theirs))

        hidden = ours.x.shape[1]
        gram, cross = torch.zeros(hidden, hidden), None
        asked: list[Sequence[int]] = [*([] if source is None else [()]), *in_windows(panels(hidden), self._threads)]
        for some, made in in_order(self._workers, ask, asked, lambda _: f"layer {layer.index}, second moments"):
            if not some:
                cross = receive(made[0])
                continue
            for panel, rows in zip(some, map(receive, made), strict=True):
                gram[panel : panel + len(rows), panel:] = rows
        return finished_pool(len(ours), gram, cross)

    def press(
        self,
        layer: OpenLayer,
        stream: Stream | None,
        inputs: LayerInputs,
        take: Callable[[PressedBlock], None],
        written: Callable[[], None],
    ) -> None:
        from moepress.cluster.messages import SentInputs

        small = ray.put(SentInputs.of(inputs))
        ours = self._share(layer, inputs.ours)
        source = () if inputs.source is None else self._share(layer, inputs.source)
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
            written()
            self._add(layer, stream, inputs.ours, True, held)

    def experts(
        self, layer: OpenLayer, stream: Stream, routed: RoutedTokens, finished: Callable[[range], ExpertBlock] | None
    ) -> None:
        if finished is not None and self._gather is not None:
            layer.experts(stream, routed, finished)
        else:
            self._add(layer, stream, routed, finished is not None, [])

    def _add(self, layer: OpenLayer, stream: Stream, routed: RoutedTokens, finished: bool, blocks: list[Any]) -> None:
        from moepress.cluster.messages import receive, send

        tokens = self._share(layer, routed)
        norm = None if routed.divisor is None else send(routed.divisor)

        def ask(worker: Any, batches: list[tuple[int, int]]) -> Any:
            ranges = [(stream.first_token(start), stream.first_token(stop)) for start, stop in batches]
            return worker.experts.remote(layer.index, ranges, norm, finished, *tokens, *blocks)

        place = f"layer {layer.index}, experts' outputs of samples"
        runs = _few_each(list(layer.batches(stream)), len(self._workers), stream.tokens * 4 * routed.x.shape[1])
        for batches, made in in_order(self._workers, ask, runs, lambda b: f"{place} {b[0][0]} to {b[-1][1] - 1}"):
            for batch, outputs in zip(batches, made, strict=True):
                layer.add_outputs(stream, *batch, receive(outputs))

    def _share(self, layer: OpenLayer, routed: RoutedTokens) -> tuple[Any, ...]:
        """References of a layer's tapped tokens, put once into shared memory and kept there until the next layer's."""
        from moepress.cluster.messages import send

        if self._shared_of != layer.index:
            self._shared_of, self._shared = layer.index, {}
        if id(routed.x) not in self._shared:
            parts = (routed.x, routed.expert, routed.weight)
            self._shared[id(routed.x)] = tuple(ray.put(send(part.read(0, len(part)))) for part in parts)
        return self._shared[id(routed.x)]


def _several_each(blocks: list[range], workers: int) -> list[range]:
    """Blocks cut again so that every worker has several to do. Where they are cut changes no byte."""
    experts = sum(len(block) for block in blocks)
    size = max(1, -(-experts // (3 * workers)))
    return [range(at, min(at + size, block.stop)) for block in blocks for at in range(block.start, block.stop, size)]


def _few_each(batches: list[tuple[int, int]], workers: int, outputs_bytes: int) -> list[list[tuple[int, int]]]:
    """Runs of batches: one for each worker, or more where their outputs would be too large. How they are cut changes no byte."""
    rounds = max(1, -(-outputs_bytes // (workers * OUTPUTS_BYTES)))
    each = -(-len(batches) // min(len(batches), workers * rounds))
    return [batches[at : at + each] for at in range(0, len(batches), each)]
