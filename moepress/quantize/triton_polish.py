"""Moving the codes of one block of columns as one Triton kernel, behind the signature of ``polish.move_codes_plain``.

One program moves the codes of a block of B columns for ``ROWS`` rows of one expert. The gradients [B, ROWS] stay in registers
for the whole block; columns are visited from the first to the last, and what a code has moved reaches the gradients of the
columns still to come,

    P[j] += h_jk · step_k    for j > k.

Division and multiply-add round as in the plain twin (div_rn, no fusion), so the codes agree.

This module imports Triton: import it only where the weights are on a CUDA device, or under TRITON_INTERPRET=1.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from moepress.quantize.grid import Grid

ROWS = 32


@triton.jit  # type: ignore[untyped-decorator]
def _move(  # type: ignore[no-untyped-def]
    gradient_at,
    h_at,
    codes_at,
    scales_at,
    steps_at,
    gains_at,
    codes_stride,
    scales_stride,
    columns,
    rows,
    width,
    qmin,
    qmax,
    BLOCK: tl.constexpr,
    LANES: tl.constexpr,
):
    """gradient, steps, gains [E, columns, rows] contiguous; h [E, columns, columns]; codes and scales with a stride per expert."""
    expert = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1) * LANES + tl.arange(0, LANES)
    column = tl.arange(0, BLOCK)
    own = expert * columns * rows
    corner = h_at + expert * columns * columns
    inside = row < rows
    sums = tl.load(
        gradient_at + own + column[:, None] * rows + row[None, :],
        mask=(column[:, None] < columns) & inside[None, :],
        other=0.0,
    )
    for k in range(columns):
        at = own + k * rows + row
        code_at = codes_at + expert * codes_stride + k * rows + row
        p = tl.sum(tl.where(column[:, None] == k, sums, 0.0), axis=0)
        s = tl.load(scales_at + expert * scales_stride + (k // width) * rows + row, mask=inside, other=1.0)
        code = tl.load(code_at, mask=inside, other=0).to(tl.float32)
        pivot = tl.load(corner + k * columns + k)
        aim = code + tl.div_rn(tl.div_rn(p, pivot), s)
        best = (tl.minimum(tl.maximum(aim, qmin), qmax) + 12582912.0) - 12582912.0  # half to even
        step = (code - best) * s
        gain = -2.0 * step * (p + 0.5 * pivot * step)
        taken = gain > 0.0
        step = tl.where(taken, step, 0.0)
        tl.store(code_at, tl.where(taken, best, code).to(tl.int8), mask=inside)
        tl.store(steps_at + at, step, mask=inside)
        tl.store(gains_at + at, tl.where(taken, gain, 0.0), mask=inside)
        factors = tl.load(corner + column * columns + k, mask=(column > k) & (column < columns), other=0.0)
        sums += factors[:, None] * step[None, :]


def move_codes_triton(
    gradient: torch.Tensor,
    h: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    width: int,
    grid: Grid,
    steps: torch.Tensor,
) -> torch.Tensor:
    """Move the codes of a block, column by column, each to the integer that is best given all the others.

    Args:
        gradient: float32 [E, B, R], contiguous; read only here.
        h: float32 [E, B, B], contiguous.
        codes: int8 [E, B, R], in and out; the last two axes contiguous.
        scales: float32 [E, G, R], the last two axes contiguous; column k uses row k // width.
        width: columns per row of ``scales``.
        grid: the bits.
        steps: float32 [E, B, R], contiguous, written: new D minus old D.

    Returns:
        float64 [E], how much the loss fell.
    """
    experts, columns, rows = gradient.shape
    gains = torch.empty_like(gradient)
    _move[(experts, triton.cdiv(rows, ROWS))](
        gradient,
        h,
        codes,
        scales,
        steps,
        gains,
        codes.stride(0),
        scales.stride(0),
        columns,
        rows,
        width,
        float(grid.qmin),
        float(grid.qmax),
        BLOCK=triton.next_power_of_2(columns),
        LANES=ROWS,
        num_warps=4,
        enable_fp_fusion=False,
    )
    return gains.sum((1, 2), dtype=torch.float64)
