"""Pieces of weights: what one thread works on at a time, and what comes of it.

A weight is cut into pieces of whole rows, about ``PIECE_BYTES`` of source each, so that memory depends neither on the
checkpoint nor on its largest matrix. Pieces of a weight are independent: any number of threads presses the same bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from moepress.convert.decide import Decision
from moepress.quantize.fidelity import Fidelity

PIECE_BYTES = 16 << 20
ROW_STEP = 128
"""Pieces end on multiples of this, the height of an FP8 block."""

NAN_HINT = "download the shard again; if the bytes are the published ones, report it to the authors"

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows ``first`` to ``last`` of a weight; for a kept weight, bytes of the stored tensor ``part``."""

    decision: Decision
    first: int
    last: int
    part: str = "weight"


@dataclass(frozen=True, slots=True)
class Pressed:
    """What a piece became: bytes for each of the weight's output tensors, in their order.

    ``digest`` is xxh3-128 of the source bytes read, to notice a source that changes under us; not a security measure.
    ``fidelity`` is None where nothing was rounded; ``device``: where it was.
    """

    outputs: tuple[Bytes, ...]
    digest: str
    fidelity: Fidelity | None
    device: str = "cpu"


class Scratch:
    """One thread's reused buffers; each grows to the largest piece it has seen."""

    def __init__(self) -> None:
        self._buffers: dict[str, np.ndarray[Any, Any]] = {}

    def take(self, name: str, shape: tuple[int, ...], dtype: Any) -> np.ndarray[Any, Any]:
        """An uninitialised array that is valid until the next ``take`` of the same name."""
        count = math.prod(shape)
        buffer = self._buffers.get(name)
        if buffer is None or buffer.size < count or buffer.dtype != dtype:
            buffer = self._buffers[name] = np.empty(count, dtype)
        return buffer[:count].reshape(shape)


def cut(decision: Decision) -> Iterator[Piece]:
    """The pieces of a weight, in the order in which their outputs are written."""
    stored = decision.stored
    if decision.action == "keep":
        for role, ref in stored.parts.items():
            step = max(PIECE_BYTES, 1)
            for first in range(0, max(ref.nbytes, 1), step):
                yield Piece(decision, first, min(first + step, ref.nbytes), role)
        return
    rows, columns = matrix_shape(stored.shape)
    row_bytes = max(1, columns * stored.parts["weight"].nbytes // max(1, rows * columns))
    step = max(ROW_STEP, PIECE_BYTES // row_bytes // ROW_STEP * ROW_STEP)
    for first in range(0, rows, step):
        yield Piece(decision, first, min(first + step, rows))


def matrix_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    """Rows and columns; a vector is one row."""
    return (shape[0], shape[1]) if len(shape) == 2 else (1, math.prod(shape))


def as_bytes(array: np.ndarray[Any, Any]) -> Bytes:
    """uint8 [nbytes] of a contiguous array, the same memory."""
    return array.reshape(-1).view(np.uint8)
