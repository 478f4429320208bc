"""A worker that is asked for layers too: the six things of `convert.executor`. Plain Python: Ray wraps this class, tests call it.

A layer is opened when it is first asked for, filled when it is first computed with, and closed when another one is. As with
shards, every answer depends on the question alone.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial

import torch

from moepress.calibration.activations import Activations, Scratch
from moepress.calibration.checkpoint_weights import CheckpointWeights
from moepress.calibration.layer_fill import ExpertBlock
from moepress.calibration.layer_runner import DenseBatch, ExpertWeights, OpenLayer
from moepress.calibration.statistics import pooled_cross, pooled_panels
from moepress.calibration.stream import Stream
from moepress.calibration.streamed_model import StreamedModel
from moepress.cluster.messages import (
    Sent,
    SentBatch,
    SentBlock,
    SentDense,
    SentInputs,
    look,
    receive,
    routed_where_it_lies,
    send,
    send_dense,
)
from moepress.cluster.shard_worker import ShardWorker, WorkerStart
from moepress.convert.calibrated.layers import read_back, run_settings
from moepress.convert.in_process import press_experts
from moepress.convert.kv.layer_scales import LayerScales
from moepress.convert.kv.scales import measure_layer
from moepress.quantize.products import products_in


class Worker(ShardWorker):
    """One worker process of a conversion that reads calibration text. Arguments as `ShardWorker`."""

    def __init__(self, number: int, start: WorkerStart) -> None:
        super().__init__(number, start)
        torch.set_num_threads(start.threads)
        self._model: StreamedModel | None = None
        self._layer = ExitStack()
        self._open: OpenLayer | None = None

    def dense(self, index: int, batches: Sequence[SentBatch]) -> list[SentDense]:
        """A layer's dense part for some batches of samples, a thread each."""

        def one(batch: SentBatch) -> DenseBatch:
            hidden, real, topk = batch
            return layer.dense_batch(receive(hidden), receive(real), None if topk is None else receive(topk))

        with self._logged(f"layer {index} dense, {sum(len(hidden.bits) for hidden, _, _ in batches)} samples"):
            layer = self._layer_at(index)
            return [send_dense(made) for _, made in layer.side_by_side(one, batches)]

    def press(self, index: int, experts: range, small: SentInputs, *tokens: Sent) -> SentBlock:
        """Quantizes a block of a layer's experts.

        Args:
            small: the layer's inputs without their tokens.
            tokens: (x, expert, weight) of the run being quantized, and of the source run if there is one; in shared memory.
        """
        with self._logged(f"layer {index} experts {experts.start}..{experts.stop - 1}"):
            layer = self._layer_at(index)
            inputs = small.with_tokens(tokens[:3], tokens[3:], self.start.device)
            weights = layer.load_experts(experts, dtype=torch.float32)
            return SentBlock.of(press_experts(layer, weights, inputs, self.start.plan.recipe))

    def experts(
        self,
        index: int,
        ranges: Sequence[tuple[int, int]],
        norm: Sent | None,
        finished: bool,
        x: Sent,
        expert: Sent,
        weight: Sent,
        *blocks: SentBlock,
    ) -> list[Sent]:
        """What the routed experts add to batches of a layer's tokens, [t, C] float32 each.

        Args:
            ranges: (first, last) token of each batch.
            norm: as in `SentInputs`.
            finished: with the new integers, not with the source's weights.
            x, expert, weight: tokens of the whole layer, in shared memory.
            blocks: the new integers; () = they are in the output's shards.
        """
        with self._logged(f"layer {index} experts' outputs, {sum(last - first for first, last in ranges)} tokens"):
            layer = self._layer_at(index)
            routed = routed_where_it_lies((x, expert, weight), num_experts=0, norm=norm)
            weights = self._finished(index, blocks) if finished else None
            batches = [routed.read(first, last) for first, last in ranges]
            return [send(made) for made in layer.experts_batches(batches, weights)]

    def pooled(self, index: int, panels: Sequence[int], *tokens: Sent) -> list[Sent]:
        """Panels of the second moments of all of a layer's tokens, or (no ``panels``) their cross moments.

        Args:
            tokens: (x, expert, weight) of the run being quantized, and of the source run for cross moments; in shared memory.
        """
        what = f"moments from {panels[0]}" if panels else "cross moments"
        with self._logged(f"layer {index} {what}"), products_in(self.start.plan.recipe.calibration.precision):
            ours, device = routed_where_it_lies(tokens[:3], num_experts=0, norm=None), self.start.device
            if panels:
                return [send(made) for made in pooled_panels(ours, panels, device=device)]
            theirs = routed_where_it_lies(tokens[3:], num_experts=0, norm=None)
            return [send(pooled_cross(ours, theirs, device=device))]

    def measure(self, index: int, hidden: Sent, lengths: Sent, topk: Sent | None) -> LayerScales:
        """KV scales of a layer, whose inputs of all samples lie in shared memory."""
        with self._logged(f"layer {index} KV scales"):
            carried = None if topk is None else Activations.elsewhere(look(topk))
            stream = Stream(Activations.elsewhere(look(hidden)), receive(lengths), carried)
            return measure_layer(self._layer_at(index), stream, self.start.plan)

    def close(self) -> None:
        self._layer.close()
        super().close()

    def _finished(self, index: int, blocks: Sequence[SentBlock]) -> ExpertWeights:
        if not blocks:
            return partial(read_back, self.start.out, self.start.plan, index)

        def weights(experts: range) -> ExpertBlock:
            parts = [block.received().dequantized() for block in blocks if block.experts.start in experts]
            gate_up, down = (torch.cat([getattr(p, name) for p in parts]) for name in ("gate_up", "down"))
            return ExpertBlock(experts.start, gate_up, down)

        return weights

    def _layer_at(self, index: int) -> OpenLayer:
        if self._open is None or self._open.index != index:
            self._layer.close()
            if self._model is None:
                # as many workers as the machine has room for
                beside = max(1, (os.cpu_count() or 1) // self.start.threads)
                settings = run_settings(
                    self.start.checkpoint, self.start.plan, device=self.start.device, processes=beside
                )
                weights = self._stack.enter_context(
                    CheckpointWeights(self.start.checkpoint, ahead_bytes=settings.ahead_bytes, device=self.start.device)
                )
                scratch = self._stack.enter_context(Scratch(self.start.out, memory_bytes=1 << 62))
                self._model = StreamedModel(self.start.checkpoint.config, weights, scratch, settings)
            self._open = self._layer.enter_context(self._model.open_layer(index))
        return self._open
