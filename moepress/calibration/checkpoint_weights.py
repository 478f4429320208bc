"""A checkpoint on disk as a source of weights: each `load` reads the stored parts and decodes them, in float32.

Block FP8, channel FP8, packed INT4, BF16 and fused experts come out alike; ``formats.storage`` has settled which a
weight is, from the tensor and its siblings. So one forward pass runs a source and what was pressed from it.

What is expected is read in the background (`read_ahead`), if there is memory for it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from types import TracebackType
from typing import Self

import torch

from moepress.calibration.read_ahead import Part, ReadAhead
from moepress.errors import CheckpointError
from moepress.formats.checkpoint import Checkpoint
from moepress.formats.load import load_weight
from moepress.formats.reader import TensorReader
from moepress.formats.storage import StoredWeight, resolve_storage


class CheckpointWeights:
    """A checkpoint on disk as a `WeightSource`. A context manager: it holds open file descriptors.

    Args:
        checkpoint: from ``open_checkpoint``; must be a local folder.
        threads: reading threads.
        ahead_bytes: how much of what is expected may lie in memory before it is loaded; 0 = it is only announced to the kernel.
        device: where loads will be wanted.

    Raises:
        CheckpointError: a tensor of the checkpoint belongs to no weight (see ``formats.storage``).
    """

    def __init__(self, checkpoint: Checkpoint, *, threads: int = 4, ahead_bytes: int = 0, device: str = "cpu") -> None:
        self._stored = resolve_storage(checkpoint)
        self._reader = TensorReader(checkpoint, threads=threads)
        self._ahead = ReadAhead(self._reader, limit_bytes=ahead_bytes, device=device)
        self._location = checkpoint.location

    def names(self) -> Collection[str]:
        return self._stored.keys()

    def load(self, name: str, rows: slice | None = None, *, device: str = "cpu") -> torch.Tensor:
        stored = self._stored.get(name)
        if stored is None:
            raise CheckpointError(f"no weight named {name}", where=self._location)
        return load_weight(self._ahead, stored, rows=rows, device=device)

    def expect(self, names: Collection[str], rows: slice | None = None) -> None:
        known = (self._stored[name] for name in names if name in self._stored)
        self._ahead.expect(part for stored in known for part in _parts(stored, rows))

    def __enter__(self) -> Self:
        self._reader.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ahead.close()
        self._reader.__exit__(kind, error, trace)


def _parts(stored: StoredWeight, rows: slice | None) -> Iterator[Part]:
    """What `load_weight` will ask the reader for: codes and numbers travel to the device, scales and the like do not."""
    for role, ref in stored.parts.items():
        count = ref.shape[0] if ref.shape else 1
        if role == "weight" and stored.kind == "fused_experts":
            for expert in range(*(rows or slice(None)).indices(count)):
                yield Part(ref, expert, expert + 1, travels=True)
        else:
            yield Part(ref, 0, count, travels=role in ("weight", "packed"))
