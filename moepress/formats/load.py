"""One stored weight to float32, whatever it is stored as.

    dense         the numbers themselves, widened
    fp8_*         code × scale                                   (`fp8`)
    int4_packed   (code − zero point) × scale of its group       (`int4`)
    fused_experts [experts, out, in], dense or FP8

This is the only place where a `StoredWeight` becomes numbers. It returns float32 always: decoding in bfloat16 would
round a second time. Memory is that of the result plus the codes of the rows asked for; a band of rows reads only its
bytes.

What the headers could not tell is checked here, against the tensors: NaN and infinity, scales, ``weight_shape`` against
the packed width, and the activation order.
"""

from __future__ import annotations

from typing import Protocol

import torch

from moepress.errors import FormatError
from moepress.formats.checkpoint import TensorRef
from moepress.formats.fp8 import decode_e8m0, decode_fp8
from moepress.formats.int4 import dequantize_int4, unpack_int4
from moepress.formats.storage import StoredWeight


class TensorSource(Protocol):
    """Where stored tensors come from: `reader.TensorReader`, or one that has some of them already."""

    def tensor(self, ref: TensorRef, *, pinned: bool = False) -> torch.Tensor:
        """A tensor as stored, owned by the caller."""
        ...

    def rows(self, ref: TensorRef, r0: int, r1: int, *, pinned: bool = False) -> torch.Tensor:
        """Rows ``r0`` up to ``r1`` of its first dimension."""
        ...


def load_weight(
    reader: TensorSource,
    stored: StoredWeight,
    *,
    rows: slice | None = None,
    out: torch.Tensor | None = None,
    device: str = "cpu",
) -> torch.Tensor:
    """Read and decode a weight, or some of its rows.

    Args:
        reader: of the checkpoint that ``stored`` belongs to; what it has on ``device`` already stays there.
        stored: from `resolve_storage`.
        rows: rows of the first logical dimension (of fused experts: experts); step 1. All when None.
        out: float32, contiguous, of the result's shape, on ``device``: filled and returned. Allocated when None.
        device: where to decode. What is stored travels there as it is stored, a byte a weight for FP8, and is decoded there.

    Returns:
        float32 ``[rows, in]``, or ``stored.shape`` when ``rows`` is None. The caller owns it.

    Raises:
        FormatError: NaN or infinity in the tensor or its scale, a ``weight_shape`` or ``g_idx`` that contradicts the
            packed tensor, or a buffer of another shape.
    """
    first, last = _row_range(stored, rows)
    shape = stored.shape if rows is None else (last - first, *stored.shape[1:])
    if out is None:
        out = torch.empty(shape, dtype=torch.float32, device=device)
    elif tuple(out.shape) != shape or out.dtype != torch.float32 or not out.is_contiguous():
        raise FormatError(f"the buffer must be contiguous float32 {list(shape)}", where=stored.name)
    if stored.kind == "fused_experts":
        _load_fused(reader, stored, first, last, out)
    elif stored.kind == "dense":
        _load_dense(reader, stored, first, last, out)
    elif stored.kind == "int4_packed":
        _load_packed(reader, stored, first, last, out)
    else:
        codes = _rows(reader, stored, "weight", first, last, pinned=_pinned(out)).to(out.device, non_blocking=True)
        scale = _fp8_scale(reader, stored)
        decode_fp8(codes, scale, block=stored.block, out=out, first_row=first, rows=stored.shape[0], name=stored.name)
    return out


def _row_range(stored: StoredWeight, rows: slice | None) -> tuple[int, int]:
    if rows is None:
        return 0, stored.shape[0] if stored.shape else 1
    if not stored.shape or rows.step not in (None, 1):
        raise FormatError(f"cannot take {rows} of a weight of shape {list(stored.shape)}", where=stored.name)
    first, last, _ = rows.indices(stored.shape[0])
    return first, max(first, last)


def _rows(
    reader: TensorSource, stored: StoredWeight, role: str, first: int, last: int, *, pinned: bool = False
) -> torch.Tensor:
    ref = stored.parts[role]
    return reader.rows(ref, first, last, pinned=pinned) if ref.shape else reader.tensor(ref, pinned=pinned)


def _pinned(out: torch.Tensor) -> bool:
    """Copies to a GPU run beside it from pinned memory; torch gives such memory out again only when the copy has ended."""
    return out.is_cuda


def _load_dense(reader: TensorSource, stored: StoredWeight, first: int, last: int, out: torch.Tensor) -> None:
    rows = _rows(reader, stored, "weight", first, last, pinned=_pinned(out))
    out.copy_(rows.to(out.device, non_blocking=True))
    _check_finite(out, stored.name)


def _check_finite(values: torch.Tensor, name: str) -> None:
    if not values.numel() or all(bool(end.isfinite()) for end in values.aminmax()):  # NaN, too, reaches both ends
        return
    if wrong := values.numel() - int(torch.isfinite(values).sum()):
        raise FormatError(f"{wrong} of {values.numel()} values are NaN or infinite", where=name)


def _fp8_scale(reader: TensorSource, stored: StoredWeight) -> torch.Tensor:
    scale = reader.tensor(stored.parts["scale"])
    return decode_e8m0(scale, name=stored.parts["scale"].name) if stored.scale_encoding == "e8m0" else scale


def _load_fused(reader: TensorSource, stored: StoredWeight, first: int, last: int, out: torch.Tensor) -> None:
    """Experts ``first`` to ``last`` of ``[experts, out, in]``, one at a time: codes of one expert are in memory."""
    scale = _fp8_scale(reader, stored) if "scale" in stored.parts else None
    for expert in range(first, last):
        name = f"{stored.name}[{expert}]"
        weight = reader.rows(stored.parts["weight"], expert, expert + 1, pinned=_pinned(out))[0]
        weight = weight.to(out.device, non_blocking=True)
        if scale is not None:
            weight = decode_fp8(weight, scale[expert] if scale.ndim else scale, block=stored.block, name=name)
        decoded = out[expert - first]
        decoded.copy_(weight.T if stored.transposed else weight)
        _check_finite(decoded, name)


def _load_packed(reader: TensorSource, stored: StoredWeight, first: int, last: int, out: torch.Tensor) -> None:
    parts = stored.parts
    rows, columns = stored.shape
    stated = reader.tensor(parts["shape"]).tolist()
    if stated != [rows, columns]:
        raise FormatError(
            f"weight_shape says {stated}; {list(parts['packed'].shape)} packed words and scales of shape "
            f"{list(parts['scale'].shape)} hold [{rows}, {columns}]",
            where=stored.name,
        )
    words = _rows(reader, stored, "packed", first, last, pinned=_pinned(out)).to(out.device, non_blocking=True)
    codes = unpack_int4(words, columns)
    scale = _rows(reader, stored, "scale", first, last)
    _check_finite(scale, parts["scale"].name)
    scale = scale.to(out.device)
    zero_point = None
    if "zero_point" in parts:  # packed along rows, so a band may begin inside a word
        words = reader.rows(parts["zero_point"], first // 8, -(-last // 8))
        unpacked = unpack_int4(words.T.contiguous(), words.shape[0] * 8).T
        zero_point = unpacked[first % 8 : first % 8 + last - first].to(out.device)
    g_idx = reader.tensor(parts["g_idx"]) if "g_idx" in parts else None
    if g_idx is not None:
        _check_act_order(g_idx, parts["scale"].shape[1], stored)
    g_idx = None if g_idx is None else g_idx.to(out.device)
    dequantize_int4(codes, scale, zero_point=zero_point, g_idx=g_idx, out=out)


def _check_act_order(g_idx: torch.Tensor, groups: int, stored: StoredWeight) -> None:
    """Every group has its share of columns, or some columns would be read with a scale that was never theirs."""
    columns = g_idx.numel()
    inside = bool(((g_idx >= 0) & (g_idx < groups)).all())
    if not inside or bool((torch.bincount(g_idx, minlength=groups) != columns // groups).any()):
        raise FormatError(
            f"weight_g_idx does not give each of {groups} groups {columns // groups} of the {columns} columns",
            where=stored.name,
        )
