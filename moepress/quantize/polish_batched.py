"""Polishing over [experts, columns, rows] in plain torch: the twin of the compiled CPU path, and the GPU path.

Steps and layout of polish.py with one more axis. Sums inside a block are matrix products, so they round differently
from the compiled loop: a code whose two best values lose the same to seven digits may go the other way.
"""

from __future__ import annotations

import torch

from moepress.quantize.grid import SMALLEST_SCALE, Grid

_BLOCK = 128
_WORTH = 1e-3


def polish_batched(
    target: torch.Tensor,
    hessian: torch.Tensor,
    shift: torch.Tensor,
    loss: torch.Tensor,
    passes: int,
    grid: Grid,
    codes: torch.Tensor,
    scales: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Lower the loss of every expert's codes and scales in place.

    Args:
        target: float32 [E, C, R].
        hessian: float32 [E, C, C] or [1, C, C], symmetric, undamped.
        shift: float64 [E], δ of each.
        loss: float64 [E], tr(D (H + δI) Dᵀ) as they come in.
        passes: most passes, at least 1; it stops earlier when a pass takes less than a thousandth off the sum.
        grid: bits.
        codes: int8 [E, C, R], in and out.
        scales: float32 [E, G, R], in and out.

    Returns:
        Loss after and Σ D² after, float64 [E], and the passes made.
    """
    columns = target.shape[1]
    width = columns // scales.shape[1]
    delta = shift.float()[:, None, None]
    left = target - codes * scales.repeat_interleave(width, 1)
    done = 0
    while done < passes:
        before, done = loss.sum(), done + 1
        for start in range(0, columns, _BLOCK):
            block = slice(start, min(start + _BLOCK, columns))
            rows_of_h = hessian[:, block].expand(len(target), -1, -1)
            gradient = torch.bmm(rows_of_h, left) + delta * left[:, block]
            corner = rows_of_h[:, :, block].clone()
            corner.diagonal(dim1=1, dim2=2).add_(shift.float()[:, None])
            which = scales[:, start // width : (block.stop - 1) // width + 1]
            change, fell = _polish_block(gradient, corner, codes[:, block], which, min(width, columns), grid)
            left[:, block] += change
            loss = loss - fell
        if float(before - loss.sum()) < _WORTH * float(loss.sum()):
            break
    return loss, left.double().square_().sum((1, 2)), done


def _polish_block(
    gradient: torch.Tensor, h: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, width: int, grid: Grid
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes [E, B, R] and scales [E, g, R] of one block in place; returns the change of D and the loss's fall [E]."""
    change = torch.zeros_like(gradient)
    fell = torch.zeros(len(gradient), dtype=torch.float64, device=gradient.device)
    for g in range(scales.shape[1] if width <= _BLOCK else 0):
        mine = slice(g * width, (g + 1) * width)
        fell += _refit_group(gradient, h[:, mine], codes[:, mine], scales[:, g], change, mine)
    for k in range(gradient.shape[1]):
        s = scales[:, k // width]
        p = gradient[:, k] + torch.bmm(h[:, k, None], change)[:, 0]
        pivot = h[:, k, k, None]
        code = codes[:, k].float()
        best = (code + p / pivot / s).clamp(grid.qmin, grid.qmax).round()
        step = (code - best) * s
        gain = -2 * step * (p + 0.5 * pivot * step)
        codes[:, k] = torch.where(gain > 0, best, code).to(torch.int8)
        change[:, k] += torch.where(gain > 0, step, 0.0)
        fell += torch.where(gain > 0, gain, 0.0).double().sum(1)
    return change, fell


def _refit_group(
    gradient: torch.Tensor, h: torch.Tensor, codes: torch.Tensor, s: torch.Tensor, change: torch.Tensor, mine: slice
) -> torch.Tensor:
    """One group's scales [E, R] in place; ``h`` is the group's rows of the block."""
    q = codes.float()
    slope = (q * (gradient[:, mine] + torch.bmm(h, change))).sum(1)
    bend = (q * torch.bmm(h[:, :, mine], q)).sum(1)
    moved = (s + torch.where(bend > 0, slope / bend, 0.0)).clamp_min(0).to(torch.bfloat16).float()
    step = moved - s
    gain = step * (2 * slope - step * bend)
    taken = (gain > 0) & (moved >= SMALLEST_SCALE)
    step = torch.where(taken, step, 0.0)
    change[:, mine] -= step[:, None] * q
    s += step
    return torch.where(taken, gain, 0.0).double().sum(1)
