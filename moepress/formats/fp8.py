"""FP8 weights: eight bits a value, one scale for many, decoded in float32 at the moment of use.

    value[r, c] = code[r, c] × scale[r // block_rows, c // block_columns]          (codes e4m3: ±448, no infinity)

Every scale layout (`scale_layout`) is blocks of some size: one scale per channel is blocks of one row, one per tensor a
single block. The last block of a dimension is simply cut off: 576 rows in blocks of 128 are five scale rows, of which
the last covers 64, so nothing here reshapes into whole blocks. Scales may be E8M0: one byte b that stands for
2^(b − 127), 255 for NaN.

The product is rounded once, in float32: both ways here give the same bits. The compiled loop moves a code's fields into
those of a float32 and adds the difference of the biases. That is the value x of a code with an implicit leading one; a
subnormal code has none, and its value is 2x − 2^-6; the lesser of the two is right for both. No table and no subnormal
floats, so it runs in vectors at full speed, with the GIL released. The torch lines below it are its plain twin, and what
runs on a GPU.

Nothing doubtful passes in silence. NaN codes (0x7F, 0xFF) and scales that are NaN, infinite or negative are refused
with counts, because a reader that clamps or casts would hide them: torch casts infinity to 448, and compressed-tensors
turns a NaN weight into the integer 0.
"""

from __future__ import annotations

import math

import numba
import numpy as np
import torch

from moepress.errors import FormatError
from moepress.formats.fp8_scale import check_scale_values, decode_e8m0_bytes
from moepress.formats.scale_layout import rows_and_columns_per_scale

E4M3_MAX = 448.0
"""The largest finite e4m3 value."""

_SIGN_AND_FIELDS = np.int32(-0x79000000 + 0x00F00000)  # 0x87F00000
_BIAS = np.int32((127 - 7) << 23)
_SMALLEST_NORMAL = np.float32(2.0**-6)


def decode_e8m0(scale: torch.Tensor, *, name: str = "E8M0 scale") -> torch.Tensor:
    """Powers of two stored as exponent bytes, as float32.

    Args:
        scale: any shape, ``float8_e8m0fnu``, or ``uint8`` when the configuration says that bytes are E8M0.
        name: what to call the tensor in an error.

    Returns:
        float32, the same shape: 2^(byte − 127), exact also for byte 0 (2^-127, subnormal).

    Raises:
        FormatError: a byte is 255, E8M0's NaN; or another dtype.
    """
    if scale.dtype == torch.float8_e8m0fnu:
        scale = scale.view(torch.uint8)
    if scale.dtype != torch.uint8:
        raise FormatError(f"an E8M0 scale is bytes, this one is {scale.dtype}", where=name)
    return torch.from_numpy(decode_e8m0_bytes(scale.cpu().numpy(), name=name)).to(scale.device)


def check_scale(scale: torch.Tensor, *, name: str) -> None:
    """`check_scale_values` for a float32 tensor on any device."""
    check_scale_values(scale.detach().cpu().numpy(), name=name)


def decode_fp8(
    codes: torch.Tensor,
    scale: torch.Tensor,
    *,
    block: tuple[int, int] | None,
    out: torch.Tensor | None = None,
    first_row: int = 0,
    rows: int | None = None,
    name: str = "FP8 weight",
) -> torch.Tensor:
    """Decode a weight, or a band of its rows, to float32.

    Args:
        codes: ``[r, C]`` float8_e4m3fn: the whole weight or rows ``first_row .. first_row + r`` of it.
        scale: the scale of the *whole* weight: ``[ceil(R/block_rows), ceil(C/block_columns)]`` with ``block``; without,
            ``[R, 1]``, ``[R]``, ``[1]`` or ``[]``. float32, bfloat16, float16 or float8_e8m0fnu; any device.
        block: declared rows and columns per scale, or None.
        out: float32 ``[r, C]``, contiguous, filled and returned; a reused buffer. Allocated when None.
        first_row: row of the whole weight that ``codes`` begins with. Need not lie on a block's edge.
        rows: R, rows of the whole weight; ``first_row + r`` when None.
        name: what to call the weight in an error.

    Returns:
        float32 ``[r, C]``, on the device of ``codes``.

    Raises:
        FormatError: NaN codes; scales that are NaN, infinite, negative, or zero under codes that are not; a scale whose
            shape does not fit.
    """
    if codes.dtype != torch.float8_e4m3fn or codes.ndim != 2:
        raise FormatError(
            f"expected float8_e4m3fn of two dimensions, got {codes.dtype} {list(codes.shape)}", where=name
        )
    band, columns = codes.shape
    rows = first_row + band if rows is None else rows
    if first_row + band > rows:
        raise FormatError(
            f"rows {first_row} to {first_row + band} were asked for of a weight that has {rows}", where=name
        )
    try:
        block_rows, block_columns = rows_and_columns_per_scale((rows, columns), tuple(scale.shape), block)
    except FormatError as error:
        raise FormatError(error.what, where=name) from error
    scale = decode_e8m0(scale, name=name) if scale.dtype == torch.float8_e8m0fnu else scale.to(torch.float32)
    check_scale(scale, name=name)  # where it lies, which is the host as a rule: looking must not wait for a GPU
    has_zeros = bool((scale == 0).any())
    scale = scale.to(codes.device)
    scale = scale.reshape(-1, 1) if scale.ndim < 2 else scale
    if out is None:
        out = torch.empty(codes.shape, dtype=torch.float32, device=codes.device)
    elif out.dtype != torch.float32 or out.shape != codes.shape or not out.is_contiguous():
        raise FormatError(f"the buffer must be contiguous float32 {list(codes.shape)}", where=name)

    decode = decode_band if codes.device.type == "cpu" else decode_band_plain
    not_a_number = decode(codes, scale, block_rows, block_columns, first_row, out)
    if not_a_number:
        raise FormatError(
            f"{not_a_number} of {codes.numel()} FP8 codes are NaN (0x7F or 0xFF)",
            where=name,
            hint="the exporter cast without clamping, or the file is damaged; download the checkpoint again",
        )
    if has_zeros:
        _check_zero_scales(codes, scale, block_rows, block_columns, first_row, name)
    return out


def decode_band(
    codes: torch.Tensor, scale: torch.Tensor, block_rows: int, block_columns: int, first_row: int, out: torch.Tensor
) -> int:
    """The compiled loop on CPU tensors; shapes as in `decode_fp8`, ``scale`` 2-D float32. Returns the NaN count."""
    return int(
        _decode_loop(
            codes.contiguous().view(torch.int8).numpy(),
            scale.contiguous().numpy(),
            block_rows,
            block_columns,
            first_row,
            out.numpy(),
        )
    )


@numba.njit(cache=True, nogil=True, error_model="numpy")
def _decode_loop(codes, scale, block_rows, block_columns, first_row, out):  # type: ignore[no-untyped-def]
    bits = out.view(np.int32)
    not_a_number = np.int64(0)
    rows, columns = codes.shape
    for r in range(rows):
        row, target, values = codes[r], bits[r], out[r]
        nans = np.int32(0)
        for c in range(columns):
            is_nan = np.int32((row[c] & np.int8(0x7F)) == np.int8(0x7F))
            nans += is_nan
            fields = (np.int32(row[c]) << np.int32(20)) & _SIGN_AND_FIELDS  # copies of the sign are masked away
            target[c] = (fields + _BIAS) | is_nan * np.int32(0x7F800000)
        not_a_number += np.int64(nans)
        scale_row = (r + first_row) // block_rows
        for b in range((columns + block_columns - 1) // block_columns):
            s = scale[scale_row, b]
            part = values[b * block_columns : min(columns, (b + 1) * block_columns)]
            for c in range(part.size):
                size = abs(part[c])
                part[c] = min(size, (size + size) - _SMALLEST_NORMAL) * math.copysign(s, part[c])
    return not_a_number


def decode_band_plain(
    codes: torch.Tensor, scale: torch.Tensor, block_rows: int, block_columns: int, first_row: int, out: torch.Tensor
) -> int:
    """`decode_band` in torch operations, for any device; bit for bit the same."""
    band, columns = codes.shape
    out.copy_(codes)
    scale_row = torch.arange(first_row, first_row + band, device=codes.device) // block_rows
    row_scales = scale[scale_row]  # [r, ceil(C/block_columns)]
    whole = columns // block_columns
    if whole:
        blocks = out[:, : whole * block_columns].view(band, whole, block_columns)
        blocks.mul_(row_scales[:, :whole, None])
    if columns % block_columns:
        out[:, whole * block_columns :].mul_(row_scales[:, whole:])
    return int(torch.count_nonzero((codes.view(torch.uint8) & 0x7F) == 0x7F))


def _check_zero_scales(
    codes: torch.Tensor, scale: torch.Tensor, block_rows: int, block_columns: int, first_row: int, name: str
) -> None:
    """A scale of zero is how some encoders write a block of zeros; over other codes it wipes out weights."""
    band, columns = codes.shape
    scale_row = torch.arange(first_row, first_row + band, device=codes.device) // block_rows
    scale_column = torch.arange(columns, device=codes.device) // block_columns
    wiped = (scale == 0)[scale_row][:, scale_column] & ((codes.view(torch.uint8) & 0x7F) != 0)
    if count := int(wiped.sum()):
        raise FormatError(f"{count} nonzero FP8 codes lie under a scale of zero", where=name)


def encode_fp8_block(
    weight: torch.Tensor, *, block: tuple[int, int] = (128, 128), scale_dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor]:
    """Encode a weight in blocks, each one's largest magnitude at 448.

    The order matters: the scale is rounded to the type it is stored in *first*, and the weight divided by that, then
    clamped, then cast. Dividing by the unrounded scale leaves UE8M0 checkpoints up to twice too large.

    Args:
        weight: ``[R, C]`` float32, any R and C.
        block: rows and columns that share one scale.
        scale_dtype: float32, bfloat16, or float8_e8m0fnu (rounded up to a power of two, so nothing clips).

    Returns:
        codes ``[R, C]`` float8_e4m3fn and scale ``[ceil(R/block_rows), ceil(C/block_columns)]`` of ``scale_dtype``. A
        block of zeros gets scale 1.

    Raises:
        FormatError: the weight holds NaN or infinity.
    """
    if not bool(torch.isfinite(weight).all()):
        raise FormatError("cannot encode NaN or infinity as FP8")
    rows, columns = weight.shape
    scale_rows, scale_columns = -(-rows // block[0]), -(-columns // block[1])
    padded = torch.nn.functional.pad(
        weight.to(torch.float32), (0, scale_columns * block[1] - columns, 0, scale_rows * block[0] - rows)
    )
    largest = padded.view(scale_rows, block[0], scale_columns, block[1]).abs().amax(dim=(1, 3))
    scale = torch.where(largest > 0, largest / E4M3_MAX, 1.0)
    if scale_dtype == torch.float8_e8m0fnu:
        mantissa, exponent = torch.frexp(scale)  # scale = mantissa · 2^exponent, mantissa in [0.5, 1)
        exponent = torch.where(mantissa == 0.5, exponent - 1, exponent).clamp(-127, 127)
        stored = (exponent + 127).to(torch.uint8).view(torch.float8_e8m0fnu)
        scale = decode_e8m0(stored)
    else:
        scale = scale.clamp_min(torch.finfo(scale_dtype).tiny)
        stored = scale.to(scale_dtype)
        scale = stored.to(torch.float32)
    spread = scale.repeat_interleave(block[0], 0)[:rows].repeat_interleave(block[1], 1)[:, :columns]
    codes = (weight / spread).clamp_(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return codes, stored
