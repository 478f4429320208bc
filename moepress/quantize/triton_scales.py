"""The least-error scale of every group as one Triton kernel: `scale_search.search_scales_plain` without its temporaries.

One program takes ``LANES`` groups. For each candidate scale it walks the group's columns from the first to the last and adds
up h_j (w_j − s · round(w_j / s))², the plain twin's additions in the plain twin's order, so the scales agree bit for bit.
The plain twin is two thousand small operations over all groups, each a pass through memory; here a weight is read from memory
once and from the cache sixteen times.

Rows that turn out to lie on a grid already (a source trained on INT4) are searched again with the finer candidates, by the
same kernel over those groups alone.

This module imports Triton: import it only where the weights are on a CUDA device, or under TRITON_INTERPRET=1.
"""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl

from moepress.quantize.grid import ZERO_GROUP_SCALE, Grid
from moepress.quantize.scale_search import candidate_divisors, off_grid_groups_plain, on_grid_divisors

LANES = 128


@triton.jit  # type: ignore[untyped-decorator]
def _search(  # type: ignore[no-untyped-def]
    w_at,
    h_at,
    which_at,
    peaks_at,
    divisors_at,
    ulps_at,
    scales_at,
    errors_at,
    count,
    rows,
    groups,
    candidates,
    qmin,
    qmax,
    WIDTH: tl.constexpr,
    LANES: tl.constexpr,
):
    """w [N, WIDTH]; h [E, groups, WIDTH] or [1, …]; which int64 [count], groups to search; scales, errors [N] in and out."""
    lane = tl.program_id(0).to(tl.int64) * LANES + tl.arange(0, LANES)
    inside = lane < count
    group = tl.load(which_at + lane, mask=inside, other=0)
    peak = tl.load(peaks_at + group, mask=inside, other=0.0)
    best_scale = tl.load(scales_at + group, mask=inside, other=1.0)
    best_error = tl.load(errors_at + group, mask=inside, other=0.0)
    w_row = w_at + group * WIDTH
    h_row = h_at + ((group // (rows * groups)) * groups + group % groups) * WIDTH
    for candidate in range(candidates):
        divisor = tl.load(divisors_at + candidate)
        bits = tl.div_rn(peak, divisor).to(tl.int32, bitcast=True)
        bf16 = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) + tl.load(ulps_at + candidate)  # half to even
        s = (bf16 << 16).to(tl.float32, bitcast=True)
        s = tl.where(s < 1.1754943508222875e-38, 0.0078125, s)  # grid.SMALLEST_SCALE, grid.ZERO_GROUP_SCALE
        inverse = tl.div_rn(1.0, s)
        error = tl.zeros([LANES], tl.float32)
        for j in range(WIDTH):
            w = tl.load(w_row + j, mask=inside, other=0.0)
            h = tl.load(h_row + j, mask=inside, other=0.0)
            clamped = tl.minimum(tl.maximum(w * inverse, qmin), qmax)
            d = w - ((clamped + 12582912.0) - 12582912.0) * s  # half to even, as in rounding_kernel
            error += h * (d * d)
        better = error < best_error
        best_scale = tl.where(better, s, best_scale)
        best_error = tl.where(better, error, best_error)
    tl.store(scales_at + group, best_scale, mask=inside)
    tl.store(errors_at + group, best_error, mask=inside)


def search_scales_triton(weight: torch.Tensor, importance: torch.Tensor, grid: Grid) -> torch.Tensor:
    """Least-error scales of a stack of experts.

    Args:
        weight: float32 [E, R, C], contiguous, finite.
        importance: float32 [E, C] or [1, C], not negative.
        grid: bits and group size.

    Returns:
        float32 [E, R, G], every value a positive normal BF16 number.
    """
    experts, rows, columns = weight.shape
    width = grid.width(columns)
    groups = columns // width
    w = weight.reshape(-1, width)
    h = importance.contiguous().expand(experts, -1).contiguous() if len(importance) == 1 else importance.contiguous()
    peaks = w.abs().amax(-1)
    scales, errors = torch.full_like(peaks, ZERO_GROUP_SCALE), torch.full_like(peaks, torch.inf)
    every = torch.arange(len(w), device=w.device)
    divisors = candidate_divisors(grid)
    _launch(w, h, every, peaks, divisors, np.zeros(divisors.size, np.int32), rows, groups, grid, scales, errors)
    weights_of_groups = h.view(experts, 1, groups, width).sum(-1, dtype=torch.float64).expand(-1, rows, -1).reshape(-1)
    again = off_grid_groups_plain(errors, peaks, weights_of_groups, groups, grid)
    if len(again):
        _launch(w, h, again, peaks, *on_grid_divisors(grid), rows, groups, grid, scales, errors)
    return scales.view(experts, rows, groups)


def _launch(
    w: torch.Tensor,
    h: torch.Tensor,
    which: torch.Tensor,
    peaks: torch.Tensor,
    divisors: np.ndarray[tuple[int, ...], np.dtype[np.float32]],
    ulps: np.ndarray[tuple[int, ...], np.dtype[np.int32]],
    rows: int,
    groups: int,
    grid: Grid,
    scales: torch.Tensor,
    errors: torch.Tensor,
) -> None:
    _search[(triton.cdiv(len(which), LANES),)](
        w,
        h,
        which,
        peaks,
        torch.from_numpy(divisors).to(w.device),
        torch.from_numpy(ulps).to(w.device),
        scales,
        errors,
        len(which),
        rows,
        groups,
        len(divisors),
        float(grid.qmin),
        float(grid.qmax),
        WIDTH=w.shape[1],
        LANES=LANES,
        num_warps=4,
        enable_fp_fusion=False,
    )
