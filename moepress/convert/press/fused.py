"""A piece in one compiled pass, where one covers it: FP8 or BF16 to INT4 by rounding, FP8 to BF16.

    max    read rows → kernel                                        scales and words come out of the same pass
    mse    read rows → tiles of float32 → scale search → kernel      with the scales found

What is not covered gives None and goes through `chain`: sources in F16 or F32, columns that are no multiple of 8, FP8
blocks whose scale is zero (every code under it has to be looked at), weights with a KV scale folded in, pieces of nothing
but zeros or of numbers beyond 10^19. The bytes are the chain's. The module does not import torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import xxhash

from moepress.convert.decide import FP8_KINDS
from moepress.convert.press.kernel import (
    Bf16Bits,
    Floats,
    Words,
    decode_fp8_rows,
    fp8_rows_to_bf16,
    press_bf16_rows,
    press_fp8_rows,
    widen_bf16_rows,
)
from moepress.convert.press.pieces import NAN_HINT, Bytes, Piece, Pressed, Scratch, as_bytes, matrix_shape
from moepress.errors import FormatError, QuantizeError
from moepress.formats.fp8_scale import check_scale_values, scale_values
from moepress.formats.reader import TensorReader
from moepress.formats.scale_layout import Block, rows_and_columns_per_scale
from moepress.quantize.fidelity import Fidelity
from moepress.quantize.grid import Grid
from moepress.quantize.rounding_kernel import group_peaks, refuse_not_finite
from moepress.quantize.scale_search import search_scales
from moepress.recipe import Recipe

SMALLEST_SUM = 1e-24
"""Squares are first added in float32. Below this, and at infinity, they have left its range, and the chain does it all."""

SEARCH_TILE_BYTES = 1 << 20
"""Of float32, for the scale search: it stays in the second-level cache."""


def fused_int4(piece: Piece, reader: TensorReader, recipe: Recipe, scratch: Scratch) -> Pressed | None:
    """A piece of an expert's matrix as packed codes and scales, or None where the pass does not cover it.

    Raises:
        FormatError: FP8 codes or scales that cannot be right, named.
        QuantizeError: NaN or infinity, named, with its rows.
    """
    stored = piece.decision.stored
    columns = stored.shape[1]
    grid = Grid(recipe.weights.num_bits, recipe.weights.group_size, recipe.weights.signed_scales)
    if grid.num_bits != 4 or columns % 8 or piece.last == piece.first:
        return None
    source = _Rows.of(piece, reader, scratch)
    if source is None:
        return None
    packed = np.empty((piece.last - piece.first, columns // 8), np.uint32)
    scales = np.empty((len(packed), grid.groups(columns)), np.uint16)
    divisor = grid.half_range
    if recipe.weights.scale == "mse":
        divisor = 0.0
        for first, last in _tiles(len(packed), columns):
            values = source.decoded(first, last, scratch)
            scales[first:last] = _searched(values, grid, _place(piece, first, last))
    sums = source.rounded(packed, scales, divisor)
    if not SMALLEST_SUM < sums.sum_sq_weight < math.inf:
        return None
    return Pressed((as_bytes(packed), as_bytes(scales)), source.digest, sums)


def fused_bf16(piece: Piece, reader: TensorReader, scratch: Scratch) -> Pressed | None:
    """A piece of an FP8 weight widened to BF16, rounded once, half to even; None where the pass does not cover it.

    Raises:
        FormatError: FP8 codes or scales that cannot be right, named.
    """
    stored = piece.decision.stored
    if piece.decision.fold is not None or stored.kind not in FP8_KINDS:
        return None
    source = _Rows.of(piece, reader, scratch)
    if source is None or source.fp8 is None:
        return None
    out = np.empty(source.raw.shape, np.uint16)
    source.refuse_nan(fp8_rows_to_bf16(source.raw.view(np.int8), source.fp8.scales, source.fp8.block, piece.first, out))
    return Pressed((as_bytes(out),), source.digest, None)


@dataclass(frozen=True, slots=True)
class _BlockScales:
    """float32 [·, ·] of the whole weight, and the rows and columns that share one."""

    scales: Floats
    block: Block


@dataclass(frozen=True, slots=True)
class _Rows:
    """A piece's rows as stored: uint8 [r, bytes of a row], in scratch memory. ``fp8`` is None for BF16."""

    piece: Piece
    raw: Bytes
    fp8: _BlockScales | None
    digest: str

    @classmethod
    def of(cls, piece: Piece, reader: TensorReader, scratch: Scratch) -> _Rows | None:
        """The rows read and digested; None for a source that the pass does not cover."""
        stored = piece.decision.stored
        weight = stored.parts["weight"]
        fp8, scale_bytes = None, None
        if stored.kind in FP8_KINDS:
            scale_bytes = reader.bytes(stored.parts["scale"])
            fp8 = _block_scales(piece, scale_bytes)
            if not fp8.scales.all():
                return None
        elif weight.dtype != "BF16":
            return None
        row_bytes = weight.nbytes // stored.shape[0]
        raw = scratch.take("raw", (piece.last - piece.first, row_bytes), np.uint8)
        reader.read_into(weight, raw.reshape(-1), offset=piece.first * row_bytes)
        digest = xxhash.xxh3_128(raw.data)
        if scale_bytes is not None:
            digest.update(scale_bytes.data)
        return cls(piece, raw, fp8, digest.hexdigest())

    def decoded(self, first: int, last: int, scratch: Scratch) -> Floats:
        """Rows ``first`` to ``last`` of the piece as float32, valid until the next call."""
        rows = self.raw[first:last]
        values: Floats = scratch.take("values", (last - first, self.piece.decision.stored.shape[1]), np.float32)
        if self.fp8 is None:
            widen_bf16_rows(rows.view(np.uint16), values.view(np.int32))
        else:
            start = self.piece.first + first
            self.refuse_nan(
                decode_fp8_rows(
                    rows.view(np.int8), self.fp8.scales, self.fp8.block, start, values, values.view(np.int32)
                )
            )
        return values

    def rounded(self, packed: Words, scales: Bf16Bits, divisor: float) -> Fidelity:
        """Fills ``packed``, and ``scales`` unless ``divisor`` is 0; gives the error sums."""
        if self.fp8 is None:
            error, energy, worst, nans, infinities = press_bf16_rows(self.raw.view(np.uint16), packed, scales, divisor)
        else:
            error, energy, worst, nans, infinities = press_fp8_rows(
                self.raw.view(np.int8), self.fp8.scales, self.fp8.block, self.piece.first, packed, scales, divisor
            )
            self.refuse_nan(nans)
        _refuse(nans, infinities, packed.size * 8, _place(self.piece, 0, len(packed)))
        return Fidelity(error, energy, worst)

    def refuse_nan(self, count: int) -> None:
        if count:
            name = self.piece.decision.stored.name
            raise FormatError(f"{count} FP8 codes are NaN (0x7F or 0xFF)", where=name, hint=NAN_HINT)


def _block_scales(piece: Piece, raw: Bytes) -> _BlockScales:
    stored = piece.decision.stored
    ref = stored.parts["scale"]
    values = scale_values(raw, ref.dtype, ref.shape, e8m0=stored.scale_encoding == "e8m0", name=ref.name)
    check_scale_values(values, name=stored.name)
    block = rows_and_columns_per_scale(matrix_shape(stored.shape), ref.shape, stored.block)
    return _BlockScales(values if values.ndim == 2 else values.reshape(-1, 1), block)


def _searched(values: Floats, grid: Grid, place: str) -> Bf16Bits:
    """Least-error scales of a tile's groups: float32 [r, C] → BF16 bits, uint16 [r, G]."""
    rows, columns = values.shape
    groups = values.reshape(-1, grid.width(columns))
    peaks = np.empty(len(groups), np.float32)
    _refuse(*group_peaks(groups.view(np.int32), peaks.view(np.int32)), values.size, place)
    found = search_scales(groups, np.ones((1, groups.shape[1]), np.float32), peaks, grid.groups(columns), grid)
    return (found.view(np.uint32) >> 16).astype(np.uint16).reshape(rows, -1)


def _refuse(nans: int, infinities: int, count: int, place: str) -> None:
    try:
        refuse_not_finite(nans, infinities, count)
    except QuantizeError as error:
        raise QuantizeError(error.what, where=place, hint=error.hint) from error


def _place(piece: Piece, first: int, last: int) -> str:
    return f"{piece.decision.stored.name}, rows {piece.first + first} to {piece.first + last}"


def _tiles(rows: int, columns: int) -> Iterator[tuple[int, int]]:
    step = max(8, SEARCH_TILE_BYTES // (4 * columns) // 8 * 8)
    for first in range(0, rows, step):
        yield first, min(first + step, rows)
