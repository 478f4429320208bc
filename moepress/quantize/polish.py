"""Polishing: coordinate descent on codes and scales after GPTQ, while the loss falls.

GPTQ never looks back: a column is rounded once, knowing only the columns before it. Here every group's scale is
    refitted in
closed form and every code may move to the integer that is best given all the others. Block after block,

    P = D (H + δI) for the block's columns (one matrix product)  →  refit its scales  →  move its codes  →  D

Each step lowers tr(D (H + δI) Dᵀ) or is not taken (polish_kernel.py), so a pass can only help the loss. One pass is 2
R C² multiply-adds, twice GPTQ's own sweep; two passes bring most of what there is. A group as wide as the row keeps
its scale.
"""

from __future__ import annotations

import numpy as np
import torch

from moepress.quantize.grid import Grid
from moepress.quantize.polish_kernel import polish_block

_BLOCK = 128
_WORTH = 1e-3


def polish(
    target: torch.Tensor,
    hessian: torch.Tensor,
    shift: float,
    loss: float,
    passes: int,
    grid: Grid,
    codes: torch.Tensor,
    scales: torch.Tensor,
) -> tuple[float, float, int]:
    """Lower the loss of one expert's codes and scales in place.

    Args:
        target: float32 [C, R], contiguous.
        hessian: float32 [C, C], symmetric; undamped.
        shift: δ, added to its diagonal.
        loss: tr(D (H + δI) Dᵀ) of the codes and scales as they come in.
        passes: most passes, at least 1; it stops earlier when a pass takes less than a thousandth off.
        grid: bits.
        codes: int8 [C, R], contiguous, in and out.
        scales: float32 [G, R], contiguous, in and out; values stay BF16 numbers.

    Returns:
        The loss after, Σ D² after, and the passes made.
    """
    columns, rows = target.shape
    width = columns // scales.shape[0]
    block = _BLOCK if width <= _BLOCK else min(_BLOCK, columns)
    refit = width <= _BLOCK
    limits = (np.float32(grid.qmin), np.float32(grid.qmax))
    left = target - codes * scales.repeat_interleave(width, 0)
    gradient, change = torch.empty(min(block, columns), rows), torch.empty(min(block, columns), rows)
    done = 0
    while done < passes:
        fell, done = 0.0, done + 1
        for start in range(0, columns, block):
            stop = min(start + block, columns)
            p = torch.mm(hessian[start:stop], left, out=gradient[: stop - start]).add_(left[start:stop], alpha=shift)
            corner = hessian[start:stop, start:stop].clone()
            corner.diagonal().add_(shift)
            which = scales[start // width : (stop - 1) // width + 1]
            moved = change[: stop - start]
            fell += polish_block(
                p.numpy(), corner.numpy(), codes[start:stop].numpy(), which.numpy(), width, refit, limits, moved.numpy()
            )
            left[start:stop] += moved
        loss -= fell
        if fell < _WORTH * loss:
            break
    return loss, float(left.square_().sum(dtype=torch.float64)), done
