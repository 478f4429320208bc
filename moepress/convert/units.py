"""One unit of work: one output shard, from source bytes to a receipt.

    pieces → pool of threads (press) → in order → ShardWriter → rename → receipt

The pool works a few pieces ahead of the writer and no further, so memory is bounded by the window. Pieces arrive at the
writer in the shard's order whatever thread pressed them: the bytes of a shard depend on the plan alone.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import xxhash

from moepress.convert.decide import Decision
from moepress.convert.layout import OutputTensor, ShardPlan, WeightPlan
from moepress.convert.plan import PRESS_VERSION, ConversionPlan
from moepress.convert.press import press
from moepress.convert.press.pieces import Bytes, Piece, Pressed, Scratch, cut
from moepress.formats.reader import TensorReader
from moepress.formats.writer import ShardWriter
from moepress.quantize.decision import Folded, Kept, Quantized
from moepress.quantize.fidelity import Fidelity
from moepress.quantize.grid import Grid
from moepress.recipe import Recipe

METADATA = {"format": "pt"}
"""transformers refuses shards without it."""

Given = TypeVar("Given")
Made = TypeVar("Made")
Progress = Callable[[int], None]
"""Called with source bytes as they are finished."""


class Pool:
    """Threads that press pieces, each with its own scratch buffers."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix="press")
        self._local = threading.local()

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self._executor.shutdown(wait=True, cancel_futures=True)

    def scratch(self) -> Scratch:
        if not hasattr(self._local, "scratch"):
            self._local.scratch = Scratch()
        scratch: Scratch = self._local.scratch
        return scratch

    def in_order(self, work: Callable[[Given], Made], items: Iterable[Given]) -> Iterator[tuple[Given, Made]]:
        """Results in the items' order; at most ``threads`` + 2 items are in work or waiting."""
        waiting: deque[tuple[Given, Future[Made]]] = deque()
        try:
            for item in items:
                waiting.append((item, self._executor.submit(work, item)))
                if len(waiting) > self.threads + 1:
                    done, future = waiting.popleft()
                    yield done, future.result()
            while waiting:
                done, future = waiting.popleft()
                yield done, future.result()
        finally:
            for _, future in waiting:
                future.cancel()


def run_unit(
    shard: ShardPlan,
    plan: ConversionPlan,
    reader: TensorReader,
    out: Path,
    pool: Pool,
    progress: Progress,
    device: str = "cpu",
) -> dict[str, Any]:
    """Presses a shard's weights and writes it; returns the receipt, which the caller puts into the journal.

    Args:
        device: where weights are rounded.

    Raises:
        FormatError, QuantizeError: the source cannot be right, named; nothing of this shard stays.
        ConvertError: the disk is full or refuses.
    """
    started = time.monotonic()
    decisions = [plan.decisions[weight.name] for weight in shard.weights]
    pieces = (piece for decision in decisions for piece in cut(decision))
    tensors = [(t.name, t.dtype, t.shape) for t in shard.tensors]
    records: dict[str, dict[str, Any]] = {}
    with ShardWriter(out / shard.name, tensors, METADATA) as writer:
        order = _InFileOrder(writer)
        pressing = pool.in_order(
            lambda piece: press(piece, reader, plan.recipe, pool.scratch(), device), _announced(pieces, reader)
        )
        by_name = {weight.name: weight for weight in shard.weights}
        collecting: _Weight | None = None
        for piece, pressed in pressing:
            if collecting is None or collecting.plan.name != piece.decision.stored.name:
                collecting = _Weight(by_name[piece.decision.stored.name], piece.decision)
            collecting.add(piece, pressed, order)
            progress(_source_bytes(piece))
            if collecting.complete:
                records[collecting.plan.name] = collecting.finish(plan.recipe, order)
    return make_receipt(shard, plan, writer, records, started)


def make_receipt(
    shard: ShardPlan, plan: ConversionPlan, writer: ShardWriter, records: dict[str, dict[str, Any]], started: float
) -> dict[str, Any]:
    """What the journal keeps of a finished shard.

    Args:
        writer: after its block has ended, so that the shard is durable and its SHA-256 known.
        records: by weight, what was done to it.
        started: ``time.monotonic()`` when work on the shard began.
    """
    return {
        "unit": shard.name,
        "label": shard.label,
        "plan_key": plan.key,
        "press_version": PRESS_VERSION,
        "sha256": writer.sha256,
        "file_bytes": writer.file_bytes,
        "tensors": len(shard.tensors),
        "weights": records,
        "seconds": round(time.monotonic() - started, 3),
    }


@dataclass
class _Weight:
    """A weight on its way to the file: its first tensor streams, the smaller ones wait until it is whole."""

    plan: WeightPlan
    decision: Decision
    held: list[list[Bytes]] = field(default_factory=list)
    digests: list[str] = field(default_factory=list)
    fidelity: Fidelity | None = None
    device: str = "cpu"
    done: int = 0

    def __post_init__(self) -> None:
        self.pieces = sum(1 for _ in cut(self.decision))

    @property
    def complete(self) -> bool:
        return self.done == self.pieces

    def add(self, piece: Piece, pressed: Pressed, order: _InFileOrder) -> None:
        self.done += 1
        self.digests.append(pressed.digest)
        if pressed.fidelity is not None:
            self.fidelity = (self.fidelity or Fidelity()) + pressed.fidelity
            self.device = pressed.device
        if piece.decision.action == "keep":
            position = list(piece.decision.stored.parts).index(piece.part)
            order.add(self.plan.outputs[position].name, pressed.outputs[0])
            return
        order.add(self.plan.outputs[0].name, pressed.outputs[0])
        self.held.append(list(pressed.outputs[1:]))

    def finish(self, recipe: Recipe, order: _InFileOrder) -> dict[str, Any]:
        """Hands over what was held, and returns the weight's line of the receipt."""
        if self.decision.action == "quantize":
            for part in self.held:
                order.add(self.plan.outputs[1].name, part[0])
            order.add(self.plan.outputs[2].name, np.array(self.decision.stored.shape, np.int64).view(np.uint8))
        order.check_whole(self.plan.outputs)
        reason, fold = self.decision.reason, self.decision.fold
        outcome: Quantized | Kept | Folded = Kept(reason) if fold is None else Folded(reason, fold.bands)
        where: dict[str, str] = {}
        if self.decision.action == "quantize" and self.fidelity is not None:
            weights = recipe.weights
            grid = Grid(weights.num_bits, weights.group_size, weights.signed_scales)
            outcome = Quantized(f"{weights.algorithm}-{weights.scale}", grid, self.fidelity)
            where = {"device": self.device}
        return {
            "action": self.decision.action,
            "source_xxh3": xxhash.xxh3_128_hexdigest("".join(self.digests).encode()),
            **outcome.as_json(),
            **where,
        }


class _InFileOrder:
    """Hands tensors to the writer in file order.

    A shard's order differs from the plan's only where alignment moves a tensor of an odd size to the end: such tensors
    are small, and wait here.
    """

    def __init__(self, writer: ShardWriter) -> None:
        self._writer = writer
        self._order = deque(writer.order)
        self._waiting: dict[str, list[Bytes]] = {}
        self._whole: set[str] = set()

    def add(self, name: str, data: Bytes) -> None:
        if self._order and self._order[0] == name:
            self._writer.write_chunk(name, data)
        else:
            self._waiting.setdefault(name, []).append(data)

    def check_whole(self, tensors: Iterable[OutputTensor]) -> None:
        """Marks tensors as complete and writes whatever now has its turn."""
        self._whole.update(tensor.name for tensor in tensors)
        while self._order and self._order[0] in self._whole:
            self._order.popleft()
            if self._order:
                for data in self._waiting.pop(self._order[0], []):
                    self._writer.write_chunk(self._order[0], data)


def _announced(pieces: Iterable[Piece], reader: TensorReader) -> Iterator[Piece]:
    """The same pieces; the disk begins with each as it enters the pool's queue, not when a thread is free for it."""
    for piece in pieces:
        ref, rows = piece.decision.stored.parts[piece.part], slice(piece.first, piece.last)
        if piece.decision.action == "keep" and ref.shape and ref.nbytes:  # its positions are bytes
            row_bytes = ref.nbytes // ref.shape[0]
            rows = slice(piece.first // row_bytes, -(-piece.last // row_bytes))
        reader.read_ahead(ref, rows)
        yield piece


def _source_bytes(piece: Piece) -> int:
    if piece.decision.action == "keep":
        return piece.last - piece.first
    stored = piece.decision.stored
    return int(
        sum(part.nbytes for part in stored.parts.values()) * (piece.last - piece.first) / max(1, stored.shape[0])
    )
