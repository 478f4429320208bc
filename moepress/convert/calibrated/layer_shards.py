"""The output shards of one layer, written while its experts come in ascending order.

LayerShards.add(name, tensors, record)      the next weight of the plan; a full shard is closed and gets its receipt
LayerShards.add_behind(weights)             the next ones, written by a thread while something else is computed (`one_behind`)
LayerShards.written()                       waits for that thread: what was added is in the files, and full shards are durable
matrices(block)                             the weights of a pressed block, in the order of the shard
packed(name, codes, scales)                 the three tensors of a quantized weight
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from moepress.calibration.side_stream import SideStream
from moepress.convert.calibrated.expert_block import PressedBlock
from moepress.convert.calibrated.one_behind import OneBehind
from moepress.convert.journal import Journal
from moepress.convert.layout import ShardPlan
from moepress.convert.plan import ConversionPlan
from moepress.convert.units import METADATA, make_receipt
from moepress.convert.watcher import Watcher
from moepress.formats.int4 import pack_int4
from moepress.formats.writer import ShardWriter

Tensors = Sequence[tuple[str, Any]]
"""A weight's tensors as they are written: (name, torch tensor of any device or numpy array)."""


class LayerShards:
    """Writes the shards of one layer, one after the other. A context manager: leaving it early leaves no half shard.

    Args:
        shards: of the layer, in order.
        watcher: told about every finished shard.
        device: where tensors that are written behind come from.
    """

    def __init__(
        self, shards: list[ShardPlan], plan: ConversionPlan, journal: Journal, watcher: Watcher, *, device: str = "cpu"
    ) -> None:
        self._queue = list(shards)
        self._behind: OneBehind[list[dict[str, Any]]] = OneBehind()
        self._copies = SideStream(device)
        self._plan, self._journal, self._watcher = plan, journal, watcher
        self._writer: ShardWriter | None = None
        self._records: dict[str, dict[str, Any]] = {}
        self._started = time.monotonic()

    def __enter__(self) -> LayerShards:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        try:
            if error is None:
                self.written()
        except BaseException as failed:
            kind, error, trace = type(failed), failed, failed.__traceback__
            raise
        finally:
            self._behind.abandon()
            if self._writer is not None:
                self._writer.__exit__(kind, error, trace)
                self._writer = None

    def add(self, name: str, tensors: Iterable[tuple[str, Any]], record: dict[str, Any]) -> None:
        """Writes a weight's tensors (name, data); a shard that is full is closed, and gets its receipt."""
        self.written()
        self._tell([self._write(name, tensors, record)])

    def add_behind(self, weights: Iterable[tuple[str, Tensors, dict[str, Any]]]) -> None:
        """Weights with their tensors and records, written while the caller goes on; they belong to the thread until then.

        Raises: what writing the ones before raised.
        """
        coming = [
            (
                name,
                [(part, self._copies.here(data) if isinstance(data, torch.Tensor) else data) for part, data in tensors],
                record,
            )
            for name, tensors, record in weights
        ]

        def write() -> list[dict[str, Any]]:
            receipts = []
            for name, tensors, record in coming:
                here = ((part, data() if callable(data) else data) for part, data in tensors)
                receipts.append(self._write(name, here, record))
            return [receipt for receipt in receipts if receipt]

        self._tell(self._behind.hand_over(write))

    def written(self) -> None:
        """Waits until everything that was added is in the files.

        Raises: what writing it raised.
        """
        self._tell(self._behind.done())

    def _tell(self, receipts: Iterable[dict[str, Any]] | None) -> None:
        for receipt in filter(None, receipts or ()):
            self._watcher.unit_done(receipt)

    def _write(self, name: str, tensors: Iterable[tuple[str, Any]], record: dict[str, Any]) -> dict[str, Any]:
        """Returns the receipt of a shard that is full with this, else an empty one."""
        if self._writer is None:
            self._open()
        assert self._writer is not None  # noqa: S101 (opened above)
        for tensor, data in tensors:
            self._writer.write(tensor, data)
        self._records[name] = record
        return self._close() if len(self._records) == len(self._queue[0].weights) else {}

    def _open(self) -> None:
        shard = self._queue[0]
        self._writer = ShardWriter(
            self._journal.out / shard.name, [(t.name, t.dtype, t.shape) for t in shard.tensors], METADATA
        )
        self._writer.__enter__()
        self._records = {}
        self._started = time.monotonic()

    def _close(self) -> dict[str, Any]:
        shard, writer = self._queue.pop(0), self._writer
        assert writer is not None  # noqa: S101 (closed once, after it was opened)
        self._writer = None
        writer.__exit__(None, None, None)
        receipt = make_receipt(shard, self._plan, writer, self._records, self._started)
        self._journal.write_receipt(shard.name, receipt)
        return receipt


def matrices(block: PressedBlock) -> Iterator[tuple[int, str, torch.Tensor, torch.Tensor]]:
    """(expert, projection, codes int8 [R, C], scales bfloat16 [R, G]) in the order of the shard."""
    inner = block.down.codes.shape[-1]
    for slot, expert in enumerate(block.experts):
        for projection, rows in (("gate_proj", slice(0, inner)), ("up_proj", slice(inner, 2 * inner))):
            yield (
                expert,
                projection,
                block.gate_up.codes[slot, rows].contiguous(),
                block.gate_up.scales[slot, rows].contiguous(),
            )
        yield expert, "down_proj", block.down.codes[slot], block.down.scales[slot]


def packed(name: str, codes: torch.Tensor, scales: torch.Tensor) -> Tensors:
    """The three tensors of a quantized weight, in the order of the shard; on the device of its codes."""
    return [
        (f"{name}_packed", pack_int4(codes)),
        (f"{name}_scale", scales),
        (f"{name}_shape", np.array(codes.shape, np.int64)),
    ]
