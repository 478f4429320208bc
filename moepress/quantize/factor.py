"""The triangular factor that tells GPTQ how later columns make up for earlier ones.

    H + δ I, columns ordered by rising diagonal  =  UᵀU,  U upper triangular

Columns are rounded from the last (largest diagonal, where an error costs most, so it goes first while every other
column can still make up for it) to the first. With D = W − Q the loss splits into one square per column,

    tr(D (H + δI) Dᵀ) = Σ_k U_kk² ‖D_k + Σ_{j>k} D_j U_kj / U_kk‖²

so column k should be rounded at w_k + Σ_{j>k} D_j U_kj / U_kk. This is GPTQ: the textbook form needs the Cholesky
factor of H⁻¹, which costs three factorizations' work; this one needs a third of that, never inverts, and its loss
comes for free. (Frantar et al., arXiv:2210.17323; the equivalence is Chee et al., arXiv:2307.13304, theorem 6.)

Damping: δ is a fraction of the mean diagonal, 0.01 first, then 0.1 and 1.0 when the matrix is still not positive
definite in float32. A column that no token excited (diagonal 0) has δ, so it is rounded to nearest. What was used is
recorded; when nothing helps the answer is an ``Unfactorable`` with its reason, never the identity.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from moepress.quantize.gptq_kernel import count_not_finite, gather_upper

DAMPENING_LADDER = (0.01, 0.1, 1.0)
_PANEL = 256


@dataclass(frozen=True, slots=True)
class Factor:
    """U and the order it belongs to.

    Args:
        upper: float32 [C, C]; on and above the diagonal it is U, below it holds no meaning.
        order: int64 [C]; row and column i of U belong to column ``order[i]`` of the weight.
        diagonal: float32 [C], the diagonal of H + δI in the weight's own order: how much each column matters.
        shift: δ, in H's units.
        dampening_frac: δ over H's mean diagonal.
    """

    upper: torch.Tensor
    order: torch.Tensor
    diagonal: torch.Tensor
    shift: float
    dampening_frac: float


@dataclass(frozen=True, slots=True)
class Unfactorable:
    """Why there is no factor, with the numbers."""

    reason: str


def factorize(hessian: torch.Tensor, ladder: Sequence[float] = DAMPENING_LADDER) -> Factor | Unfactorable:
    """Factor one Hessian on the CPU.

    A blocked Cholesky: panels of 256 rows, the work in matrix products. About twice as fast as LAPACK's own on one
    thread at 2,048 columns, and it stops at the first panel that fails.

    Args:
        hessian: float32 [C, C], symmetric, both triangles filled; read only. Its scale does not matter to the codes.
        ladder: damping fractions to try, rising.
    """
    columns = hessian.shape[0]
    diagonal = hessian.diagonal()
    nans, infinities = count_not_finite(hessian.view(torch.int32).numpy())
    if nans or infinities:
        return Unfactorable(f"{nans:,} NaN and {infinities:,} infinite values among the Hessian's {hessian.numel():,}")
    mean = float(diagonal.double().mean())
    if not mean > 0:
        return Unfactorable(f"the Hessian's mean diagonal is {mean:g}: no calibration token reached these inputs")
    order = torch.argsort(diagonal, stable=True)
    upper = torch.empty(columns, columns)
    for dampening_frac in ladder:
        shift = dampening_frac * mean
        gather_upper(hessian.numpy(), order.numpy(), shift, upper.numpy())
        if _cholesky_in_place(upper):
            return Factor(upper, order, diagonal + shift, shift, dampening_frac)
    return Unfactorable(
        f"the Hessian is not positive definite with damping {', '.join(map(str, ladder))} of its mean diagonal {mean:g}"
    )


def _cholesky_in_place(matrix: torch.Tensor) -> bool:
    """Upper triangle of float32 [C, C] into U with UᵀU = matrix; False when it is not positive definite."""
    columns = matrix.shape[0]
    for start in range(0, columns, _PANEL):
        stop = min(start + _PANEL, columns)
        panel = matrix[start:stop, start:]
        if start:
            panel.addmm_(matrix[:start, start:stop].t(), matrix[:start, start:], alpha=-1)
        corner, info = torch.linalg.cholesky_ex(panel[:, : stop - start], upper=True)
        if info.item() != 0 or not bool(corner.isfinite().all()):
            return False
        panel[:, : stop - start] = corner
        if stop < columns:
            panel[:, stop - start :] = torch.linalg.solve_triangular(corner.t(), panel[:, stop - start :], upper=False)
    return True
