"""What one worker holds, and the six things it is asked for. Plain Python: Ray wraps this class, tests call it.

A worker keeps nothing that matters: the plan and the headers are given to it when it starts, a layer is opened when it is
first asked for and closed when another one is, and every answer depends on the question alone. So it may die at any
moment; another one, or itself started again, gives the same answer.
"""

from __future__ import annotations

import os
import resource
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from moepress.calibration.activations import Activations, Scratch
from moepress.calibration.checkpoint_weights import CheckpointWeights
from moepress.calibration.layer_fill import ExpertBlock
from moepress.calibration.layer_runner import ExpertWeights, OpenLayer, Stream
from moepress.calibration.statistics import pooled_cross, pooled_panel
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
from moepress.convert.calibrated.layers import read_back, run_settings
from moepress.convert.executor import press_experts
from moepress.convert.journal import STATE_FOLDER
from moepress.convert.kv.layer_scales import LayerScales
from moepress.convert.kv.scales import measure_layer
from moepress.convert.plan import ConversionPlan
from moepress.convert.units import Pool, run_unit
from moepress.formats.checkpoint import Checkpoint
from moepress.formats.reader import TensorReader
from moepress.quantize.products import products_in


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


class Worker:
    """One worker process.

    Args:
        number: from 0; names its log.
        start: what to work on.
    """

    def __init__(self, number: int, start: WorkerStart) -> None:
        torch.set_num_threads(start.threads)
        self.number, self.start = number, start
        self._stack = ExitStack()
        self._reader: TensorReader | None = None
        self._pool: Pool | None = None
        self._model: StreamedModel | None = None
        self._layer = ExitStack()
        self._open: OpenLayer | None = None

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

    def dense(self, index: int, batch: SentBatch) -> SentDense:
        """A layer's dense part for one batch of samples."""
        hidden, real, topk = batch
        with self._logged(f"layer {index} dense, {hidden.bits.shape[0]} samples"):
            layer = self._layer_at(index)
            made = layer.dense_batch(receive(hidden), receive(real), None if topk is None else receive(topk))
            return send_dense(made)

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

    def pooled(self, index: int, panel: int | None, *tokens: Sent) -> Sent:
        """A panel of the second moments of all of a layer's tokens, or (``panel`` None) their cross moments.

        Args:
            tokens: (x, expert, weight) of the run being quantized, and of the source run for cross moments; in shared memory.
        """
        what = "cross moments" if panel is None else f"moments from {panel}"
        with self._logged(f"layer {index} {what}"), products_in(self.start.plan.recipe.calibration.precision):
            ours, device = routed_where_it_lies(tokens[:3], num_experts=0, norm=None), self.start.device
            if panel is not None:
                return send(pooled_panel(ours, panel, device=device))
            return send(pooled_cross(ours, routed_where_it_lies(tokens[3:], num_experts=0, norm=None), device=device))

    def measure(self, index: int, hidden: Sent, lengths: Sent, topk: Sent | None) -> LayerScales:
        """KV scales of a layer, whose inputs of all samples lie in shared memory."""
        with self._logged(f"layer {index} KV scales"):
            carried = None if topk is None else Activations.elsewhere(look(topk))
            stream = Stream(Activations.elsewhere(look(hidden)), receive(lengths), carried)
            return measure_layer(self._layer_at(index), stream, self.start.plan)

    def close(self) -> None:
        """Closes files and gives memory back."""
        self._layer.close()
        self._stack.close()

    def _finished(self, index: int, blocks: Sequence[SentBlock]) -> ExpertWeights:
        if not blocks:
            return partial(read_back, self.start.out, self.start.plan, index)

        def weights(experts: range) -> ExpertBlock:
            parts = [block.received().dequantized() for block in blocks if block.experts.start in experts]
            gate_up, down = (torch.cat([getattr(p, name) for p in parts]) for name in ("gate_up", "down"))
            return ExpertBlock(experts.start, gate_up, down)

        return weights

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

    def _layer_at(self, index: int) -> OpenLayer:
        if self._open is None or self._open.index != index:
            self._layer.close()
            if self._model is None:
                settings = run_settings(self.start.checkpoint, self.start.plan, device=self.start.device)
                weights = self._stack.enter_context(
                    CheckpointWeights(self.start.checkpoint, ahead_bytes=settings.ahead_bytes, device=self.start.device)
                )
                scratch = self._stack.enter_context(Scratch(self.start.out, memory_bytes=1 << 62))
                self._model = StreamedModel(self.start.checkpoint.config, weights, scratch, settings)
            self._open = self._layer.enter_context(self._model.open_layer(index))
        return self._open


def probe_file(out: Path) -> Path:
    """Where a run writes a word that its workers must be able to read."""
    return out / STATE_FOLDER / "probe"


def log_file(out: Path, number: int) -> Path:
    """A worker's log, beside the receipts; on the worker's own machine when the output is not shared."""
    path = out / STATE_FOLDER / "logs" / f"worker-{number}.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    return path
