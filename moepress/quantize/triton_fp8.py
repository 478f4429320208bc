"""Block-FP8 weights straight to packed INT4 as one Triton kernel: decode, round to nearest, pack. One read, one write.

    w = code · scale of its block        s = bf16(max|w| / 7.5) of its group        q = clamp(round(w / s), −8, 7)
    word[r, j] = Σ_k (q[r, 8 j + k] + 8) · 16^k                      as compressed-tensors packs

One program takes one group of one row: its codes are decoded in registers, and only the packed word and the scale leave. A
weight costs 1 byte read, half a byte and 2 / group bytes written, so the kernel is bound by memory, and a GPU's copy of a
checkpoint by PCIe. `fp8_to_int4.press_fp8_plain` is the same in torch; both give the bits of `rtn` with ``max`` scales.

Groups must not straddle the blocks of the FP8 scales (128 columns: groups of 32, 64 and 128 never do), and fill words.

This module imports Triton: import it only where the weights are on a CUDA device, or under TRITON_INTERPRET=1.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from moepress.quantize.grid import Grid

ROWS = 16


@triton.jit  # type: ignore[untyped-decorator]
def _press(  # type: ignore[no-untyped-def]
    codes_at,
    blocks_at,
    packed_at,
    scales_at,
    rows,
    columns,
    block_rows,
    block_columns,
    blocks_per_row,
    half_range,
    qmin,
    qmax,
    WIDTH: tl.constexpr,
    LANES: tl.constexpr,
):
    """codes uint8 [rows, columns]; blocks float32 [ceil(rows/br), ceil(columns/bc)]; packed int32; scales bfloat16."""
    row = tl.program_id(0).to(tl.int64) * LANES + tl.arange(0, LANES)
    group = tl.program_id(1)
    inside = row < rows
    groups = columns // WIDTH
    word = tl.arange(0, WIDTH // 8)
    nibble = tl.arange(0, 8)
    column = group * WIDTH + word[:, None] * 8 + nibble[None, :]
    code = tl.load(
        codes_at + row[:, None, None] * columns + column[None, :, :], mask=inside[:, None, None], other=0
    ).to(tl.int32)
    # e4m3's fields shifted into those of a float32 are the value but for 2^120, subnormals too (formats.fp8)
    value = (((code & 0x80) << 24) | ((code & 0x7F) << 20)).to(tl.float32, bitcast=True) * 1.329227995784916e36
    block = tl.load(
        blocks_at + (row // block_rows) * blocks_per_row + (group * WIDTH) // block_columns, mask=inside, other=0.0
    )
    w = value * block[:, None, None]
    peak = tl.max(tl.max(tl.abs(w), axis=2), axis=1)
    bits = tl.div_rn(peak, half_range).to(tl.int32, bitcast=True)
    s = (((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) << 16).to(tl.float32, bitcast=True)  # to BF16, half to even
    s = tl.where(s < 1.1754943508222875e-38, 0.0078125, s)  # grid.SMALLEST_SCALE, grid.ZERO_GROUP_SCALE
    aim = tl.div_rn(w, s[:, None, None] + tl.zeros_like(w))
    q = (tl.minimum(tl.maximum(aim, qmin), qmax) + 12582912.0) - 12582912.0  # half to even
    words = tl.sum((q.to(tl.int32) + 8) << (4 * nibble)[None, None, :], axis=2)
    tl.store(
        packed_at + row[:, None] * (columns // 8) + group * (WIDTH // 8) + word[None, :], words, mask=inside[:, None]
    )
    tl.store(scales_at + row * groups + group, s.to(tl.bfloat16), mask=inside)


def press_fp8_triton(
    codes: torch.Tensor, blocks: torch.Tensor, block: tuple[int, int], grid: Grid
) -> tuple[torch.Tensor, torch.Tensor]:
    """FP8 to packed INT4 with ``max`` scales.

    Args:
        codes: float8_e4m3fn [R, C], contiguous; NaN codes must have been refused.
        blocks: float32 [ceil(R / block rows), ceil(C / block columns)], contiguous, finite, not negative.
        block: rows and columns per FP8 scale; its columns are a multiple of the group.
        grid: four bits; groups of a power of two of columns that fill them.

    Returns:
        packed int32 [R, C / 8] and scales bfloat16 [R, G].
    """
    rows, columns = codes.shape
    width = grid.width(columns)
    packed = torch.empty(rows, columns // 8, dtype=torch.int32, device=codes.device)
    scales = torch.empty(rows, columns // width, dtype=torch.bfloat16, device=codes.device)
    _press[(triton.cdiv(rows, ROWS), columns // width)](
        codes.view(torch.uint8),
        blocks,
        packed,
        scales,
        rows,
        columns,
        block[0],
        block[1],
        blocks.shape[1],
        float(grid.half_range),
        float(grid.qmin),
        float(grid.qmax),
        WIDTH=width,
        LANES=ROWS,
        num_warps=4,
        enable_fp_fusion=False,
    )
    return packed, scales
