"""The scale of a group that loses least, instead of the one that just covers its largest weight.

    s* = argmin_s Σ_j h_j (w_j − s · clamp(round(w_j / s)))²,      s among bf16(max|w| / d)

The seventeen divisors d run from 0.9 to 1.6 times the range, dense where the best one of Gaussian, Laplace and FP8
weights falls (70 to 90 % of all groups between 0.93 and 1.2). Against max/7.5 this takes 15 to 19 % off the squared
error of 4-bit rounding; an exhaustive search takes one more. Clipping a group's largest weight a little pays for
finer steps for all others.

**A source that was on a grid passes exactly.** Checkpoints trained on INT4 hold q · s with q in −7 … 7, and dividing
their maximum by 7.5 or 8 misses the grid. 7 and 8 are among the divisors, so a group that holds a 7 comes back
exactly. When a row has such a group (error far below what rounding can give), the rest of its groups, whose largest
code may be anything from 1, are tried with every divisor from 1 to 8 and the BF16 neighbours of each scale: the
source may itself have been rounded to BF16.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from moepress.quantize.grid import ZERO_GROUP_SCALE, Grid, usable_scales
from moepress.quantize.rounding_kernel import Floats, Indices, Ints, Limits, search_groups

if TYPE_CHECKING:
    import torch

_SPREAD = (0.9, 0.96, 1.02, 1.04, 1.09, 1.12, 1.15, 1.18, 1.21, 1.25, 1.3, 1.36, 1.43, 1.6)


def candidate_divisors(grid: Grid) -> Floats:
    """What max|w| is divided by, float32 [17]: the ``max`` convention first, so that it wins ties."""
    half = grid.half_range
    return np.array([half, grid.qmax, grid.qmax + 1, *(half * factor for factor in _SPREAD)], np.float32)


def on_grid_divisors(grid: Grid) -> tuple[Floats, Ints]:
    """Divisors 1 … 2^(b−1), each with the scale's BF16 neighbours: float32 and int32 [3 · 2^(b−1)]."""
    divisors = np.repeat(np.arange(1, grid.qmax + 2, dtype=np.float32), 3)
    return divisors, np.tile(np.array([0, -1, 1], np.int32), grid.qmax + 1)


def on_grid_threshold(grid: Grid) -> float:
    """Error over (Σ h · max²) below which a group was on a grid: a hundredth of what rounding to this grid leaves."""
    return 2.0**-16 * 4.0 ** (4 - grid.num_bits)


def search_scales(w: Floats, h: Floats, peaks: Floats, groups_per_row: int, grid: Grid) -> Floats:
    """Least-error scales by the compiled kernel.

    Args:
        w: float32 [N, width], all groups, row after row, C-contiguous, finite.
        h: float32 [M, width], importance of each weight, not negative; group i uses row i mod M.
        peaks: float32 [N], max|w| of every group.
        groups_per_row: consecutive groups that form a row of the weight.
        grid: bits.

    Returns:
        float32 [N], newly allocated; every value a normal BF16 number, positive unless the grid has signed scales.
        Independent of how rows are split into calls.
    """
    limits = (np.float32(grid.qmin), np.float32(grid.qmax))
    scales, errors = _searched(w, h, peaks, grid, limits)
    if grid.signed_scales:  # codes of a negative scale are those of the positive one, mirrored
        mirrored, less = _searched(w, h, peaks, grid, (-limits[1], -limits[0]))
        better = less < errors
        np.copyto(scales, -mirrored, where=better)
        np.copyto(errors, less, where=better)
    again = _off_grid_groups_of_on_grid_rows(errors, peaks, h, groups_per_row, grid)
    if again.size:
        search_groups(w, h, again, peaks, *on_grid_divisors(grid), limits, scales, errors)
    return scales


def _searched(w: Floats, h: Floats, peaks: Floats, grid: Grid, limits: Limits) -> tuple[Floats, Floats]:
    """Scales > 0 and errors, float32 [N] each, with codes within ``limits``."""
    count = w.shape[0]
    scales = np.full(count, ZERO_GROUP_SCALE, np.float32)
    errors = np.full(count, np.inf, np.float32)
    divisors = candidate_divisors(grid)
    every = np.arange(count, dtype=np.int64)
    search_groups(w, h, every, peaks, divisors, np.zeros(divisors.size, np.int32), limits, scales, errors)
    return scales, errors


def _off_grid_groups_of_on_grid_rows(
    errors: Floats, peaks: Floats, h: Floats, groups_per_row: int, grid: Grid
) -> Indices:
    importance = h.sum(1, dtype=np.float64)[np.arange(errors.size) % h.shape[0]]
    on_grid = (errors <= on_grid_threshold(grid) * importance * peaks.astype(np.float64) ** 2) & (peaks > 0)
    rows = on_grid.reshape(-1, groups_per_row).any(1)
    return np.flatnonzero(np.repeat(rows, groups_per_row) & (errors > 0)).astype(np.int64)


def search_scales_plain(w: torch.Tensor, h: torch.Tensor, groups_per_row: int, grid: Grid) -> torch.Tensor:
    """The same in plain torch, on any device; agrees with ``search_scales`` bit for bit.

    Some 2,000 column steps of a few small operations each, whatever N is: give it many groups at once.

    Args:
        w: float32 [N, width], finite.
        h: float32 [M, width]; group i uses row i mod M.
        groups_per_row: consecutive groups that form a row.
        grid: bits.

    Returns:
        float32 [N] on ``w``'s device.
    """
    import torch

    peaks = w.abs().amax(-1)
    columns = w.t().contiguous()
    importance = h.repeat(w.shape[0] // h.shape[0], 1).t().contiguous()
    scales = torch.full_like(peaks, ZERO_GROUP_SCALE)
    errors = torch.full_like(peaks, torch.inf)
    divisors = torch.from_numpy(candidate_divisors(grid)).tolist()
    limits = (grid.qmin, grid.qmax)
    _try_candidates(columns, importance, peaks, [(d, 0) for d in divisors], limits, scales, errors)
    if grid.signed_scales:
        mirrored, less = torch.full_like(peaks, ZERO_GROUP_SCALE), torch.full_like(peaks, torch.inf)
        other = (-grid.qmax, -grid.qmin)
        _try_candidates(columns, importance, peaks, [(d, 0) for d in divisors], other, mirrored, less)
        scales = torch.where(less < errors, -mirrored, scales)
        errors = torch.where(less < errors, less, errors)
    weights = h.sum(1, dtype=torch.float64).repeat(len(w) // len(h))
    again = off_grid_groups_plain(errors, peaks, weights, groups_per_row, grid)
    if len(again):
        candidates = list(zip(*(array.tolist() for array in on_grid_divisors(grid)), strict=True))
        some_scales, some_errors = scales[again], errors[again]
        _try_candidates(
            columns[:, again], importance[:, again], peaks[again], candidates, limits, some_scales, some_errors
        )
        scales[again] = some_scales
    return scales


def off_grid_groups_plain(
    errors: torch.Tensor, peaks: torch.Tensor, importance: torch.Tensor, groups_per_row: int, grid: Grid
) -> torch.Tensor:
    """Groups with an error left, in rows where some group came back exactly: those to be searched again.

    Args:
        errors, peaks: float32 [N].
        importance: float64 [N], Σ h over each group.
        groups_per_row: consecutive groups that form a row.

    Returns:
        int64, indices into N.
    """
    on_grid = (errors <= importance * on_grid_threshold(grid) * peaks.double().square()) & (peaks > 0)
    rows = on_grid.view(-1, groups_per_row).any(1)
    return (rows.repeat_interleave(groups_per_row) & (errors > 0)).nonzero().flatten()


def _try_candidates(
    w: torch.Tensor,
    h: torch.Tensor,
    peaks: torch.Tensor,
    candidates: list[tuple[float, int]],
    limits: tuple[int, int],
    scales: torch.Tensor,
    errors: torch.Tensor,
) -> None:
    """Improve ``scales`` and ``errors`` [n] in place; ``w`` and ``h`` are [width, n]."""
    import torch

    for divisor, ulps in candidates:
        s = usable_scales(peaks / divisor, ulps=ulps)
        inverse = 1 / s
        error = torch.zeros_like(errors)
        for weights, importance in zip(w, h, strict=True):
            d = weights - (weights * inverse).clamp(*limits).round() * s
            error += importance * (d * d)
        better = error < errors
        scales.copy_(torch.where(better, s, scales))
        errors.copy_(torch.where(better, error, errors))
