"""One piece of one weight: read, decode, quantize, pack, in buffers that are used again.

A weight is cut into pieces of whole rows, about ``PIECE_BYTES`` of source each, so that memory depends neither on the
checkpoint nor on its largest matrix. A thread works on one piece:

    read rows (uint8) → tiles of TILE_BYTES of float32: decode → round → pack            all in this thread's scratch

Tiles stay in the second-level cache; between the disk and the packed words no weight goes through main memory twice.
Pieces of a weight are independent, so any number of threads presses the same bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import xxhash

from moepress.convert.decide import FP8_KINDS, Decision
from moepress.convert.kv_press import fold_part, fold_rows
from moepress.errors import FormatError, QuantizeError
from moepress.formats.fp8 import check_scale, decode_band, decode_e8m0, decode_fp8
from moepress.formats.int4 import pack_int4
from moepress.formats.reader import TensorReader
from moepress.formats.scale_layout import rows_and_columns_per_scale
from moepress.formats.tensor_bytes import torch_dtype
from moepress.quantize.fidelity import Fidelity
from moepress.quantize.grid import Grid
from moepress.quantize.rtn import rtn_band
from moepress.recipe import Recipe

PIECE_BYTES = 16 << 20
TILE_BYTES = 1 << 20
ROW_STEP = 128
"""Pieces and tiles end on multiples of this, the height of an FP8 block."""

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
    ``fidelity`` is None where nothing was rounded.
    """

    outputs: tuple[Bytes, ...]
    digest: str
    fidelity: Fidelity | None


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
    rows, columns = _matrix(stored.shape)
    row_bytes = max(1, columns * stored.parts["weight"].nbytes // max(1, rows * columns))
    step = max(ROW_STEP, PIECE_BYTES // row_bytes // ROW_STEP * ROW_STEP)
    for first in range(0, rows, step):
        yield Piece(decision, first, min(first + step, rows))


def press(piece: Piece, reader: TensorReader, recipe: Recipe, scratch: Scratch) -> Pressed:
    """Presses one piece. Safe to call from several threads, each with its own scratch.

    Raises:
        FormatError: FP8 codes or scales that cannot be right, named.
        QuantizeError: NaN or infinity in a weight that is to be quantized, named.
    """
    if piece.decision.action == "keep":
        return _keep(piece, reader)
    if piece.decision.action == "bf16":
        return _to_bf16(piece, reader, scratch)
    return _quantize(piece, reader, recipe, scratch)


def _quantize(piece: Piece, reader: TensorReader, recipe: Recipe, scratch: Scratch) -> Pressed:
    stored = piece.decision.stored
    rows, columns = piece.last - piece.first, stored.shape[1]
    grid = Grid(recipe.weights.num_bits, recipe.weights.group_size)
    packed = np.empty((rows, (columns + 7) // 8), np.int32)
    scales = np.empty((rows, grid.groups(columns)), np.uint16)
    source = _Source(piece, reader, scratch)
    fidelity = Fidelity()
    for first, last in _tiles(rows, columns):
        values = source.tile(first, last)
        codes = scratch.take("codes", (last - first, columns), np.int8)
        try:
            sums = rtn_band(values, codes, scales[first:last], grid, recipe.weights.scale)
        except QuantizeError as error:
            place = f"{stored.name}, rows {piece.first + first} to {piece.first + last}"
            raise QuantizeError(error.what, where=place, hint=error.hint) from error
        fidelity += Fidelity(*sums)
        pack_int4(torch.from_numpy(codes), out=torch.from_numpy(packed[first:last]))
    return Pressed((_bytes(packed), _bytes(scales)), source.digest, fidelity)


def _to_bf16(piece: Piece, reader: TensorReader, scratch: Scratch) -> Pressed:
    """FP8 → float32 → BF16, rounded once, half to even."""
    rows, columns = piece.last - piece.first, piece.decision.stored.shape[1]
    out = torch.empty((rows, columns), dtype=torch.bfloat16)
    source = _Source(piece, reader, scratch)
    for first, last in _tiles(rows, columns):
        values = torch.from_numpy(source.tile(first, last))
        if piece.decision.fold is not None:
            fold_rows(values, piece.first + first, piece.decision.fold, piece.decision.stored.name)
        out[first:last].copy_(values)
    return Pressed((_bytes(out.view(torch.int16).numpy()),), source.digest, None)


def _keep(piece: Piece, reader: TensorReader) -> Pressed:
    """Bytes as they are. Two things are looked at on the way: NaN codes in FP8, and E8M0 scales, which become float32."""
    stored = piece.decision.stored
    ref = stored.parts[piece.part]
    data = np.empty(piece.last - piece.first, np.uint8)
    reader.read_into(ref, data, offset=piece.first)
    digest = xxhash.xxh3_128_hexdigest(data.data)
    if stored.kind in FP8_KINDS and piece.part == "weight":
        bad = int(np.count_nonzero((data & 0x7F) == 0x7F))
        if bad:
            raise FormatError(f"{bad} FP8 codes are NaN (0x7F or 0xFF)", where=stored.name, hint=NAN_HINT)
    if stored.scale_encoding == "e8m0" and piece.part == "scale":
        data = _bytes(decode_e8m0(torch.from_numpy(data), name=ref.name).numpy())
    if piece.decision.fold is not None and piece.part == ("scale" if stored.kind in FP8_KINDS else "weight"):
        data = _folded(piece, data)
    return Pressed((data,), digest, None)


def _folded(piece: Piece, data: Bytes) -> Bytes:
    """A kept piece with a KV scale in it: the exponents of its numbers change, and nothing else."""
    stored, fold = piece.decision.stored, piece.decision.fold
    ref = stored.parts[piece.part]
    as_float32 = stored.scale_encoding == "e8m0" and piece.part == "scale"
    flat = torch.from_numpy(data).view(torch.float32 if as_float32 else torch_dtype(ref.dtype))
    first = piece.first * math.prod(ref.shape) // max(1, ref.nbytes)
    assert fold is not None  # noqa: S101 (asked by the caller)
    return _bytes(fold_part(flat, first, stored, piece.part, fold).view(torch.uint8).numpy())


class _Source:
    """The float32 values of a piece, tile by tile, from however they are stored."""

    def __init__(self, piece: Piece, reader: TensorReader, scratch: Scratch) -> None:
        self._piece, self._scratch = piece, scratch
        stored = self._stored = piece.decision.stored
        rows, columns = piece.last - piece.first, stored.shape[1]
        weight = stored.parts["weight"]
        row_bytes = weight.nbytes // max(1, stored.shape[0])
        raw = scratch.take("raw", (rows, row_bytes), np.uint8)
        reader.read_into(weight, raw.reshape(-1), offset=piece.first * row_bytes)
        digest = xxhash.xxh3_128(raw.data)
        self._codes = torch.from_numpy(raw).view(torch_dtype(weight.dtype)).view(rows, columns)
        self._scale: torch.Tensor | None = None
        if stored.kind in FP8_KINDS:
            scale = reader.tensor(stored.parts["scale"])
            digest.update(scale.reshape(-1).view(torch.uint8).numpy().data)
            self._scale = (
                decode_e8m0(scale, name=stored.parts["scale"].name)
                if stored.scale_encoding == "e8m0"
                else scale.float()
            )
            check_scale(self._scale, name=stored.name)
            self._block = rows_and_columns_per_scale(_matrix(stored.shape), tuple(self._scale.shape), stored.block)
            self._has_zero_scales = bool((self._scale == 0).any())
            if self._scale.ndim < 2:
                self._scale = self._scale.reshape(-1, 1)
        self.digest = digest.hexdigest()

    def tile(self, first: int, last: int) -> np.ndarray[Any, np.dtype[np.float32]]:
        """Rows of the piece as float32 [last − first, C], in a buffer that the next call overwrites."""
        stored = self._stored
        out = torch.from_numpy(self._scratch.take("values", (last - first, stored.shape[1]), np.float32))
        codes = self._codes[first:last]
        if self._scale is None:
            out.copy_(codes)
            bad = 0
        elif self._has_zero_scales:  # rare: every code under a zero scale has to be looked at
            place = {"first_row": self._piece.first + first, "rows": stored.shape[0]}
            decode_fp8(codes, self._scale, block=self._block, out=out, name=stored.name, **place)
            bad = 0
        else:
            bad = decode_band(codes, self._scale, *self._block, self._piece.first + first, out)
        if bad:
            raise FormatError(f"{bad} FP8 codes are NaN (0x7F or 0xFF)", where=stored.name, hint=NAN_HINT)
        values: np.ndarray[Any, np.dtype[np.float32]] = out.numpy()
        return values


def _tiles(rows: int, columns: int) -> Iterator[tuple[int, int]]:
    step = max(8, TILE_BYTES // (4 * max(1, columns)) // 8 * 8)
    for first in range(0, rows, step):
        yield first, min(first + step, rows)


def _matrix(shape: tuple[int, ...]) -> tuple[int, int]:
    return (shape[0], shape[1]) if len(shape) == 2 else (1, math.prod(shape))


def _bytes(array: np.ndarray[Any, Any]) -> Bytes:
    return array.reshape(-1).view(np.uint8)
