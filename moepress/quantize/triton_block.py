"""GPTQ's block of columns as one Triton kernel, behind the signature of ``gptq_batched.round_block_plain``.

One program rounds a block of B columns for ``ROWS`` rows of one expert. The feedback sums [B, ROWS] stay in registers
for the whole block; columns are walked from the last to the first, and each column's error is added to the sums of
those still to come,

    F[j] += D_k · U_jk    for j < k,

while weights, scales, codes and errors are read and written once, a column at a time, rows side by side. Division and
multiply-add round as in the plain twin (div_rn, no fusion), so the codes agree.

This module imports Triton: import it only where the weights are on a CUDA device, or under TRITON_INTERPRET=1.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from moepress.quantize.grid import Grid

ROWS = 32


@triton.jit  # type: ignore[untyped-decorator]
def _round_block(  # type: ignore[no-untyped-def]
    target_at,
    scales_at,
    upper_at,
    feedback_at,
    codes_at,
    errors_at,
    lost_at,
    columns,
    rows,
    qmin,
    qmax,
    BLOCK: tl.constexpr,
    LANES: tl.constexpr,
):
    """Contiguous: target, scales, feedback, codes, errors, lost [E, columns, rows]; upper [E, columns, columns]."""
    expert = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1) * LANES + tl.arange(0, LANES)
    column = tl.arange(0, BLOCK)
    own = expert * columns * rows
    corner = upper_at + expert * columns * columns
    inside = row < rows
    sums = tl.load(
        feedback_at + own + column[:, None] * rows + row[None, :],
        mask=(column[:, None] < columns) & inside[None, :],
        other=0.0,
    )
    for step in range(columns):
        k = columns - 1 - step
        at = own + k * rows + row
        feedback = tl.sum(tl.where(column[:, None] == k, sums, 0.0), axis=0)
        w = tl.load(target_at + at, mask=inside, other=0.0)
        s = tl.load(scales_at + at, mask=inside, other=1.0)
        pivot = tl.load(corner + k * columns + k)
        aim = w + feedback * tl.div_rn(1.0, pivot)
        clamped = tl.minimum(tl.maximum(tl.div_rn(aim, s), qmin), qmax)
        code = (clamped + 12582912.0) - 12582912.0  # half to even, as in rounding_kernel
        value = code * s
        error = w - value
        tl.store(codes_at + at, code.to(tl.int8), mask=inside)
        tl.store(errors_at + at, error, mask=inside)
        tl.store(lost_at + at, (aim - value) * pivot, mask=inside)
        factors = tl.load(corner + column * columns + k, mask=column < k, other=0.0)
        sums += factors[:, None] * error[None, :]


def round_block_triton(
    target: torch.Tensor, scales: torch.Tensor, upper: torch.Tensor, feedback: torch.Tensor, grid: Grid
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Round the columns of one block, last to first.

    Args:
        target: float32 [E, B, R], contiguous, the block's columns in rounding order.
        scales: float32 [E, B, R], contiguous.
        upper: float32 [E, B, B], contiguous; below its diagonal it is not read.
        feedback: float32 [E, B, R], contiguous; read only.
        grid: the bits.

    Returns:
        codes int8 [E, B, R], D float32 [E, B, R], and float64 [E]: what the block adds to tr(D (H + δI) Dᵀ).
    """
    experts, columns, rows = target.shape
    codes = torch.empty(target.shape, dtype=torch.int8, device=target.device)
    errors, lost = torch.empty_like(target), torch.empty_like(target)
    _round_block[(experts, triton.cdiv(rows, ROWS))](
        target,
        scales,
        upper,
        feedback,
        codes,
        errors,
        lost,
        columns,
        rows,
        float(grid.qmin),
        float(grid.qmax),
        BLOCK=triton.next_power_of_2(columns),
        LANES=ROWS,
        num_warps=4,
        enable_fp_fusion=False,
    )
    return codes, errors, lost.double().square_().sum((1, 2))
