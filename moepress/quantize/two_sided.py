"""GPTQ that also knows which outputs matter: rows make up for each other's errors, as columns do.

Plain GPTQ takes every output of a weight for as important as every other, and each row for a problem of its own. What an
error does to the model's predictions is better described by a metric G of the outputs beside the Hessian H of the inputs:

    loss = tr(G D H Dᵀ),   D = W − Q [R, C],   G [R, R] (row_metric.py),   H [C, C] (hessian.py)

the Kronecker-factored curvature of the KL divergence (K-FAC; for rounding: Tseng et al., arXiv:2505.22988). With both
damped and factored, H' = UᵀU and G' = VᵀV, columns and rows by rising diagonals, the loss is one square per weight:

    Σ_kr U_kk² V_rr² (aim_kr − value_kr)²      t_k  = w_k + Σ_{j>k} D_j U_kj / U_kk         GPTQ's aim of a column
                                               aim_kr = t_kr + Σ_{q>r} a_kq V_rq / V_rr     a_kq = t_kq − value_kq

so weights are rounded from the last column and row to the first, each at its aim. Sums over what lies outside a tile of
64 × 64 are matrix products; a compiled loop does the rest. ``polish`` then refits scales and moves codes one by one
while this loss falls, as polish.py does with G = I, for 128 columns and 128 rows at a time: their P = G' D H' is two
products, and G' of the tile, which every move touches, stays in the cache.

Against plain GPTQ the work grows by R²C/2 multiply-adds for rounding and by R²C for each pass of polish, and by loops over rows
that wait for each other; memory by 3 · 4 R² bytes an expert at work. One thread, groups of 32, three passes: 5.8 s where plain
GPTQ took 2.0 at [2048, 3584], 2.6 for 0.5 at [3584, 1024]. The loops run on the processor, wherever the tensors are.

An expert whose H cannot be factored is rounded to nearest, as in gptq.py. A G that cannot be (all of it zero: nothing
that this weight does reaches the model's output) is the identity.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from moepress.errors import QuantizeError
from moepress.quantize.factor import DAMPENING_LADDER, Factor, Unfactorable, factorize
from moepress.quantize.gptq import GptqResult, Outcome, expert_by_expert, expert_scales, made_exactly
from moepress.quantize.grid import Grid, QuantizedWeight, Scale
from moepress.quantize.rtn import rtn
from moepress.quantize.two_sided_kernel import move_coupled, refit_coupled, round_tile

_TILE = 64
_BLOCK, _ROWS = 128, 128
_WORTH = 1e-3


def gptq_two_sided(
    weight: torch.Tensor,
    hessian: torch.Tensor,
    metric: torch.Tensor,
    grid: Grid,
    *,
    scale: Scale = "mse",
    passes: int = 0,
    ladder: Sequence[float] = DAMPENING_LADDER,
    source: torch.Tensor | None = None,
    threads: int | None = None,
) -> GptqResult:
    """Quantize a stack of experts, one by one and side by side.

    Args:
        weight: float32 [E, R, C], what to aim at; read only.
        hessian: float32 [E, C, C], or [C, C] for all; symmetric, read only.
        metric: float32 [E, R, R], or [R, R] for all; symmetric, positive semidefinite, its size is of no account; read only.
        grid, scale, passes, ladder, source, threads: as in ``gptq.gptq``; the ladder serves both factors.

    Returns:
        As ``gptq.gptq``, on ``weight``'s device; an outcome's loss is plain GPTQ's, tr(D H Dᵀ), to be compared with it.

    Raises:
        QuantizeError: shapes or types that do not fit, values that are not finite.
    """
    _check(weight, hessian, metric, grid)
    device = weight.device
    aims, hessian, metric = (tensor.detach().cpu().contiguous() for tensor in (weight, hessian, metric))
    reference = aims if source is None else source.detach().cpu()
    columns = made_exactly(lambda h: factorize(h, ladder), [hessian], 1)[0] if hessian.ndim == 2 else None
    rows = made_exactly(lambda g: _scaled_and_factored(g, ladder), [metric], 1)[0] if metric.ndim == 2 else None

    def prepare(e: int) -> _Sides:
        own = hessian if columns is not None else hessian[e]
        return _Sides(own, columns or factorize(own, ladder), *(rows or _scaled_and_factored(metric[e], ladder)))

    def quantize(aim: torch.Tensor, sides: _Sides, into: QuantizedWeight) -> Outcome:
        return _quantize_expert(aim, sides, scale, passes, into)

    done = expert_by_expert(aims, reference, grid, prepare, quantize, threads)
    made = done.weight
    there = QuantizedWeight(made.codes.to(device), made.scales.to(device), grid, made.fidelity)
    return GptqResult(there, done.outcomes)


def _check(weight: torch.Tensor, hessian: torch.Tensor, metric: torch.Tensor, grid: Grid) -> None:
    if weight.ndim != 3 or {weight.dtype, hessian.dtype, metric.dtype} != {torch.float32}:
        raise QuantizeError(
            f"weights [E, R, C], Hessian and metric are float32, not {weight.dtype} {list(weight.shape)}, "
            f"{hessian.dtype} and {metric.dtype}",
            where="gptq_two_sided",
        )
    experts, rows, columns = weight.shape
    for what, given, size in (("Hessian", hessian, columns), ("metric", metric, rows)):
        if given.shape not in ((size, size), (experts, size, size)):
            raise QuantizeError(
                f"weights {list(weight.shape)} need a {what} {[size, size]} or {[experts, size, size]}, "
                f"not {list(given.shape)}",
                where="gptq_two_sided",
            )
    grid.width(columns)


@dataclass(frozen=True, slots=True)
class _Sides:
    """What an expert is rounded by: H, G with a mean diagonal of 1, and their factors."""

    hessian: torch.Tensor
    columns: Factor | Unfactorable
    metric: torch.Tensor
    rows: Factor


def _quantize_expert(weight: torch.Tensor, sides: _Sides, scale: Scale, passes: int, into: QuantizedWeight) -> Outcome:
    hessian, columns, metric, rows = sides.hessian, sides.columns, sides.metric, sides.rows
    if isinstance(columns, Unfactorable):
        rtn(weight, into.grid, scale="mse", out=into)
        return Outcome(math.nan, None, 0, columns.reason)
    target = weight.t().contiguous()
    scales = expert_scales(weight, columns.diagonal, into.grid, scale).t().contiguous()
    codes = torch.empty(target.shape, dtype=torch.int8)
    left = round_both_ways(target, scales, columns, rows, into.grid, codes)
    done = 0
    if passes:
        damped, coupled = hessian.clone(), metric.clone()
        damped.diagonal().add_(columns.shift)
        coupled.diagonal().add_(rows.shift)
        done = polish_coupled(left, damped, coupled, passes, into.grid, codes, scales)
    into.codes.copy_(codes.t())
    into.scales.copy_(scales.t())
    loss = float(torch.mm(hessian, left).mul_(left).sum(dtype=torch.float64))
    return Outcome(max(loss, 0.0), columns.dampening_frac, done, None)


def _scaled_and_factored(metric: torch.Tensor, ladder: Sequence[float]) -> tuple[torch.Tensor, Factor]:
    """The metric with a mean diagonal of 1, and its factor; the identity where it has none."""
    mean = float(metric.diagonal().mean())
    if mean > 0 and math.isfinite(mean):
        scaled = metric / mean
        factor = factorize(scaled, ladder)
        if isinstance(factor, Factor):
            return scaled, factor
    identity = torch.eye(len(metric))
    factor = factorize(identity, ladder)
    if isinstance(factor, Unfactorable):
        raise QuantizeError(factor.reason, where="gptq_two_sided")
    return identity, factor


def round_both_ways(
    target: torch.Tensor, scales: torch.Tensor, columns: Factor, rows: Factor, grid: Grid, codes: torch.Tensor
) -> torch.Tensor:
    """The sweep over columns and rows of one expert.

    Args:
        target: float32 [C, R], contiguous; read only.
        scales: float32 [G, R].
        columns, rows: factors of H' and of G'.
        grid: bits and group size.
        codes: int8 [C, R], written.

    Returns:
        D = target − codes · scales, float32 [C, R].
    """
    width = len(target) // len(scales)
    upper, lower = columns.upper.triu(), rows.upper.triu().t().contiguous()
    w = target[columns.order][:, rows.order].contiguous()
    s = scales[columns.order // width][:, rows.order].contiguous()
    q, d, missed = torch.empty(w.shape, dtype=torch.int8), torch.empty_like(w), torch.empty_like(w)
    limits = (np.float32(grid.qmin), np.float32(grid.qmax))
    for stop in range(len(w), 0, -_TILE):
        here, after = slice(max(stop - _TILE, 0), stop), slice(stop, None)
        across = torch.mm(upper[here, after], d[after])
        corner = upper[here, here].contiguous()
        for end in range(w.shape[1], 0, -_TILE):
            some, below = slice(max(end - _TILE, 0), end), slice(end, None)
            down = torch.mm(missed[here, below], lower[below, some])
            tile_codes, tile_d, tile_missed = (torch.empty_like(part[here, some]) for part in (q, d, missed))
            round_tile(
                w[here, some].contiguous().numpy(),
                s[here, some].contiguous().numpy(),
                corner.numpy(),
                across[:, some].contiguous().numpy(),
                lower[some, some].contiguous().numpy(),
                down.numpy(),
                limits,
                tile_codes.numpy(),
                tile_d.numpy(),
                tile_missed.numpy(),
            )
            q[here, some], d[here, some], missed[here, some] = tile_codes, tile_d, tile_missed
    columns_back, rows_back = torch.argsort(columns.order), torch.argsort(rows.order)
    codes.copy_(q[columns_back][:, rows_back])
    return d[columns_back][:, rows_back].contiguous()


def polish_coupled(
    left: torch.Tensor,
    hessian: torch.Tensor,
    metric: torch.Tensor,
    passes: int,
    grid: Grid,
    codes: torch.Tensor,
    scales: torch.Tensor,
) -> int:
    """Lower tr(G' D H' Dᵀ) of one expert by scales refitted and codes moved, in place.

    Args:
        left: float32 [C, R], D as it comes in; kept up to date.
        hessian: float32 [C, C], H'; metric: float32 [R, R], G'; read only.
        passes: most passes; it stops earlier when one takes less than a thousandth off.
        grid: bits.
        codes: int8 [C, R]; scales: float32 [G, R]; contiguous, in and out, scales stay BF16 numbers.

    Returns:
        The passes made.
    """
    loss = float(torch.mm(torch.mm(hessian, left), metric).mul_(left).sum(dtype=torch.float64))
    done = 0
    while done < passes:
        before, done = loss, done + 1
        for start in range(0, len(left), _BLOCK):
            loss -= _polish_columns(start, left, hessian, metric, grid, codes, scales)
        if before - loss < _WORTH * loss:
            break
    return done


def _polish_columns(
    start: int,
    left: torch.Tensor,
    hessian: torch.Tensor,
    metric: torch.Tensor,
    grid: Grid,
    codes: torch.Tensor,
    scales: torch.Tensor,
) -> float:
    """Once through ``_BLOCK`` columns from ``start`` on, a tile of rows after the other. How much the loss fell."""
    columns, rows = left.shape
    width = columns // len(scales)
    block = slice(start, min(start + _BLOCK, columns))
    limits = (np.float32(grid.qmin), np.float32(grid.qmax))
    h, which = hessian[block, block].contiguous(), scales[start // width : (block.stop - 1) // width + 1]
    reached = torch.mm(hessian[block], left)
    fell = 0.0
    for first in range(0, rows, _ROWS):
        tile = slice(first, min(first + _ROWS, rows))
        gradient, g = torch.mm(reached, metric[tile].t()), metric[tile, tile].contiguous()
        q, s = codes[block, tile].contiguous(), which[:, tile].contiguous()
        change = torch.zeros_like(gradient)
        if width <= _BLOCK:
            fell += _refit_groups(gradient, h, g, q, s, grid, change)
        moved = torch.empty_like(gradient)
        fell += move_coupled(
            gradient.numpy(), h.numpy(), g.numpy(), q.numpy(), s.numpy(), min(width, columns), limits, moved.numpy()
        )
        change += moved
        codes[block, tile], which[:, tile] = q, s
        left[block, tile] += change
        reached[:, tile] += torch.mm(h, change)
    return fell


def _refit_groups(
    gradient: torch.Tensor,
    h: torch.Tensor,
    g: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    grid: Grid,
    change: torch.Tensor,
) -> float:
    """Refit the scales [groups, T] of a tile, group after group; ``gradient`` and ``change`` [B, T] are kept up to date."""
    width, fell = len(codes) // len(scales), 0.0
    for group, s in enumerate(scales):
        mine = slice(group * width, (group + 1) * width)
        products, steps = torch.mm(h[:, mine], codes[mine].float()), torch.empty_like(s)
        fell += refit_coupled(
            gradient[mine].clone().numpy(),
            products[mine].numpy(),
            g.numpy(),
            codes[mine].numpy(),
            s.numpy(),
            grid.signed_scales,
            steps.numpy(),
        )
        change[mine] -= codes[mine] * steps
        gradient -= torch.mm(products * steps, g)
    return fell
