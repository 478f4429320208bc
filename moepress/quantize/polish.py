"""Polishing: coordinate descent on codes and scales after GPTQ, while the loss falls.

GPTQ never looks back: a column is rounded once, knowing only the columns before it. Here every group's scale is
refitted in closed form and every code may move to the integer that is best given all the others. With D = W − Q s and
P = D (H + δI), one step in one row changes the loss tr(D (H + δI) Dᵀ) by

    scale of a group by t    −2 t Σ_k q_k P_k + t² Σ_jk q_j h_jk q_k    best t = Σ q P / Σ q h q, s + t rounded to BF16
    code of a column by i    −2 i s P_k + (i s)² h_kk                   best i = P_k / (h_kk s), rounded to an integer

and is taken only when that is negative: a pass cannot raise the loss. One matrix product gives P for 256 columns. First one
half, then the other has its scales refitted and its codes moved; D, and the second half's P, are kept up to date. The layout is
[expert, column, row], as in gptq_batched.py; the sequential part is ``move_codes_plain`` here or the compiled
polish_kernel.py, interchangeable.

One pass is R C² multiply-adds, twice GPTQ's own sweep; the first two bring most of what there is. A group wider than a
block of columns keeps its scale.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from moepress.quantize.grid import SMALLEST_SCALE, Grid
from moepress.quantize.polish_kernel import move_codes, refit_group

MoveCodes = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int, Grid, torch.Tensor], torch.Tensor]
Refit = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, Grid], tuple[torch.Tensor, torch.Tensor]]

_OUTER, _BLOCK = 256, 128
_WORTH = 1e-3


def move_codes_plain(
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
        gradient: float32 [E, B, R], P of the block's columns; overwritten.
        h: float32 [E, B, B], the block of H + δI.
        codes: int8 [E, B, R], in and out.
        scales: float32 [E, G, R]; column k uses row k // width.
        width: columns per row of ``scales``.
        grid: the bits.
        steps: float32 [E, B, R], written: new D minus old D.

    Returns:
        float64 [E], how much the loss fell.
    """
    fell = torch.zeros(len(gradient), dtype=torch.float64, device=gradient.device)
    for k in range(gradient.shape[1]):
        s, p, pivot, code = scales[:, k // width], gradient[:, k], h[:, k, k, None], codes[:, k].float()
        best = (code + p / pivot / s).clamp(grid.qmin, grid.qmax).round()
        step = (code - best) * s
        gain = -2 * step * (p + 0.5 * pivot * step)
        codes[:, k] = torch.where(gain > 0, best, code).to(torch.int8)
        steps[:, k] = torch.where(gain > 0, step, 0.0)
        fell += gain.clamp_min(0).double().sum(1)
        gradient[:, k + 1 :] += h[:, k + 1 :, k, None] * steps[:, k, None]
    return fell


def move_codes_compiled(
    gradient: torch.Tensor,
    h: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    width: int,
    grid: Grid,
    steps: torch.Tensor,
) -> torch.Tensor:
    """``move_codes_plain`` on the CPU, expert by expert; the last two axes of every argument must be contiguous."""
    limits = (np.float32(grid.qmin), np.float32(grid.qmax))
    each = zip(gradient.numpy(), h.numpy(), codes.numpy(), scales.numpy(), steps.numpy(), strict=True)
    return torch.tensor(
        [move_codes(p, own, q, s, width, limits, step) for p, own, q, s, step in each], dtype=torch.float64
    )


def polish(
    target: torch.Tensor,
    hessian: torch.Tensor,
    shift: torch.Tensor,
    loss: torch.Tensor,
    passes: int,
    grid: Grid,
    codes: torch.Tensor,
    scales: torch.Tensor,
    moves: Moves | None = None,
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Lower the loss of every expert's codes and scales in place.

    Args:
        target: float32 [E, C, R], contiguous; read only.
        hessian: float32 [E, C, C] or [1, C, C], symmetric, undamped; read only.
        shift: float64 [E], δ, added to its diagonal.
        loss: float64 [E], tr(D (H + δI) Dᵀ) of the codes and scales as they come in.
        passes: most passes, at least 1; it stops earlier when a pass takes less than a thousandth off the sum.
        grid: bits.
        codes: int8 [E, C, R], contiguous, in and out.
        scales: float32 [E, G, R], contiguous, in and out; values stay BF16 numbers.
        moves: what refits a block's scales and moves its codes; plain torch when not given.

    Returns:
        Loss after and Σ D² after, float64 [E], and the passes made.
    """
    moves = moves or PLAIN
    delta = shift.float()
    left = target - codes * scales.repeat_interleave(target.shape[1] // scales.shape[1], 1)
    done = 0
    while done < passes:
        before, done = loss, done + 1
        for start in range(0, target.shape[1], _OUTER):
            loss = loss - _polish_columns(start, hessian, delta, left, codes, scales, grid, moves)
        if float((before - loss).sum()) < _WORTH * float(loss.sum()):
            break
    return loss, left.square_().sum((1, 2), dtype=torch.float64), done


def _polish_columns(
    first: int,
    hessian: torch.Tensor,
    delta: torch.Tensor,
    left: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    grid: Grid,
    moves: Moves,
) -> torch.Tensor:
    """Once through ``_OUTER`` columns from ``first`` on; ``left`` is D, kept up to date. How much the loss fell, [E]."""
    experts, columns, _ = left.shape
    width, stop = columns // scales.shape[1], min(first + _OUTER, columns)
    gradient = torch.bmm(hessian[:, first:stop].expand(experts, -1, -1), left)
    gradient.addcmul_(left[:, first:stop], delta[:, None, None])
    fell = torch.zeros_like(delta, dtype=torch.float64)
    for start in range(first, stop, _BLOCK):
        end = min(start + _BLOCK, stop)
        block = slice(start, end)
        own = gradient[:, start - first : end - first].contiguous()
        corner = hessian[:, block, block].repeat(experts // len(hessian), 1, 1)
        corner.diagonal(dim1=1, dim2=2).add_(delta[:, None])
        steps, which = torch.empty_like(own), scales[:, start // width : (end - 1) // width + 1]
        refitted = None
        if width <= _BLOCK:
            refitted, by_scales = moves.refit(own, corner, codes[:, block], which, grid)
            fell += by_scales
        fell += moves.codes(own, corner, codes[:, block], which, min(width, columns), grid, steps)
        if refitted is not None:
            steps += refitted
        left[:, block] += steps
        if end < stop:
            gradient[:, end - first :].baddbmm_(hessian[:, end:stop, block].expand(experts, -1, -1), steps)
    return fell


def refit_plain(
    gradient: torch.Tensor, h: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, grid: Grid
) -> tuple[torch.Tensor, torch.Tensor]:
    """Refit the scales of a block that holds its groups whole.

    Args:
        gradient: float32 [E, B, R], P; kept up to date.
        h: float32 [E, B, B]; codes: int8 [E, B, R].
        scales: float32 [E, g, R], in and out.
        grid: whether scales may be negative.

    Returns:
        The change of D [E, B, R], and how much the loss fell, float64 [E].
    """
    width = codes.shape[1] // scales.shape[1]
    change = torch.empty_like(gradient)
    fell = torch.zeros(len(gradient), dtype=torch.float64, device=gradient.device)
    for g in range(scales.shape[1]):
        mine = slice(g * width, (g + 1) * width)
        q, s = codes[:, mine].float(), scales[:, g]
        slope = (q * gradient[:, mine]).sum(1)
        bend = torch.bmm(h[:, mine, mine], q).mul_(q).sum(1)
        moved = (s + torch.where(bend > 0, slope / bend, 0.0)).to(torch.bfloat16).float()
        step = moved - s
        gain = step * (2 * slope - step * bend)
        taken = (gain > 0) & ((moved.abs() if grid.signed_scales else moved) >= SMALLEST_SCALE)
        step = torch.where(taken, step, 0.0)
        change[:, mine] = q.mul_(-step[:, None])
        gradient.baddbmm_(h[:, :, mine], change[:, mine])
        s += step
        fell += torch.where(taken, gain, 0.0).sum(1, dtype=torch.float64)
    return change, fell


def refit_compiled(
    gradient: torch.Tensor, h: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, grid: Grid
) -> tuple[torch.Tensor, torch.Tensor]:
    """``refit_plain`` on the CPU, expert by expert; sums over a group's columns go in their order."""
    width = codes.shape[1] // scales.shape[1]
    change = torch.empty_like(gradient)
    fell = []
    for e in range(len(gradient)):
        gained = 0.0
        for g in range(scales.shape[1]):
            mine = slice(g * width, (g + 1) * width)
            products = torch.mm(h[e, mine, mine], codes[e, mine].float())
            gained += refit_group(
                gradient[e, mine].numpy(),
                products.numpy(),
                codes[e, mine].numpy(),
                scales[e, g].numpy(),
                change[e, mine].numpy(),
                grid.signed_scales,
            )
            gradient[e].addmm_(h[e, :, mine], change[e, mine])
        fell.append(gained)
    return change, torch.tensor(fell, dtype=torch.float64)


@dataclass(frozen=True, slots=True)
class Moves:
    """The two kinds of steps of a pass, in one of their forms."""

    refit: Refit
    codes: MoveCodes


PLAIN = Moves(refit_plain, move_codes_plain)
COMPILED = Moves(refit_compiled, move_codes_compiled)
