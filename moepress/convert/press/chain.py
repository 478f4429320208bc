"""A piece step by step, in tensors: decode, quantize or widen, pack. Every kind of source, scale and number of bits.

    read rows (uint8) → tiles of TILE_BYTES of float32: decode → round → pack            all in this thread's scratch

Tiles stay in the second-level cache; between the disk and the packed words no weight goes through main memory twice. What
`press_fused` covers it does in less time, and a test holds it to what comes out here. This module imports torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import xxhash

from moepress.convert.decide import FP8_KINDS
from moepress.convert.kv.stored_folds import fold_part, fold_rows
from moepress.convert.press.pieces import NAN_HINT, Bytes, Piece, Pressed, Scratch, as_bytes, matrix_shape
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

TILE_BYTES = 1 << 20


def quantize(piece: Piece, reader: TensorReader, recipe: Recipe, scratch: Scratch) -> Pressed:
    """Rows of an expert's matrix, rounded to nearest.

    Raises:
        FormatError: FP8 codes or scales that cannot be right, named.
        QuantizeError: NaN or infinity, named, with its rows.
    """
    stored = piece.decision.stored
    rows, columns = piece.last - piece.first, stored.shape[1]
    grid = Grid(recipe.weights.num_bits, recipe.weights.group_size, recipe.weights.signed_scales)
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
    return Pressed((as_bytes(packed), as_bytes(scales)), source.digest, fidelity)


def to_bf16(piece: Piece, reader: TensorReader, scratch: Scratch) -> Pressed:
    """FP8 → float32 → BF16, rounded once, half to even."""
    rows, columns = piece.last - piece.first, piece.decision.stored.shape[1]
    out = torch.empty((rows, columns), dtype=torch.bfloat16)
    source = _Source(piece, reader, scratch)
    for first, last in _tiles(rows, columns):
        values = torch.from_numpy(source.tile(first, last))
        if piece.decision.fold is not None:
            fold_rows(values, piece.first + first, piece.decision.fold, piece.decision.stored.name)
        out[first:last].copy_(values)
    return Pressed((as_bytes(out.view(torch.int16).numpy()),), source.digest, None)


def folded(piece: Piece, data: Bytes) -> Bytes:
    """A kept piece with a KV scale in it: the exponents of its numbers change, and nothing else."""
    stored, fold = piece.decision.stored, piece.decision.fold
    ref = stored.parts[piece.part]
    as_float32 = stored.scale_encoding == "e8m0" and piece.part == "scale"
    flat = torch.from_numpy(data).view(torch.float32 if as_float32 else torch_dtype(ref.dtype))
    first = piece.first * math.prod(ref.shape) // max(1, ref.nbytes)
    assert fold is not None  # noqa: S101 (asked by the caller)
    return as_bytes(fold_part(flat, first, stored, piece.part, fold).view(torch.uint8).numpy())


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
            self._block = rows_and_columns_per_scale(matrix_shape(stored.shape), tuple(self._scale.shape), stored.block)
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
