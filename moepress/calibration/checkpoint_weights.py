"""A checkpoint on disk as a source of weights: each `load` reads the stored parts and decodes them, in float32.

Block FP8, channel FP8, packed INT4, BF16 and fused experts come out alike; ``formats.storage`` has settled which a
weight is, from the tensor and its siblings. So one forward pass runs a source and what was pressed from it.
"""

from __future__ import annotations

from collections.abc import Collection
from types import TracebackType
from typing import Self

import torch

from moepress.errors import CheckpointError
from moepress.formats.checkpoint import Checkpoint
from moepress.formats.load import load_weight
from moepress.formats.reader import TensorReader
from moepress.formats.storage import resolve_storage


class CheckpointWeights:
    """A checkpoint on disk as a `WeightSource`. A context manager: it holds open file descriptors.

    Args:
        checkpoint: from ``open_checkpoint``; must be a local folder.
        threads: reading threads.

    Raises:
        CheckpointError: a tensor of the checkpoint belongs to no weight (see ``formats.storage``).
    """

    def __init__(self, checkpoint: Checkpoint, *, threads: int = 4) -> None:
        self._stored = resolve_storage(checkpoint)
        self._reader = TensorReader(checkpoint, threads=threads)
        self._location = checkpoint.location

    def names(self) -> Collection[str]:
        return self._stored.keys()

    def load(self, name: str, rows: slice | None = None, *, device: str = "cpu") -> torch.Tensor:
        stored = self._stored.get(name)
        if stored is None:
            raise CheckpointError(f"no weight named {name}", where=self._location)
        return load_weight(self._reader, stored, rows=rows, device=device)

    def expect(self, names: Collection[str], rows: slice | None = None) -> None:
        for name in names:
            stored = self._stored.get(name)
            for ref in stored.parts.values() if stored is not None else ():
                self._reader.read_ahead(ref, rows)

    def __enter__(self) -> Self:
        self._reader.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._reader.__exit__(kind, error, trace)
