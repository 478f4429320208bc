"""GPTQ over [experts, columns, rows] in plain torch: the twin of the compiled CPU path, and the GPU path.

The same steps and the same layout as gptq.py with one more axis: all experts of a block go through every step together,
as batched factorizations and batched matrix products. What is left inside a block of columns is one function,
``round_block_plain`` here and a fused Triton kernel in triton_block.py, interchangeable:

    round(target [E, B, R], scales [E, B, R], upper [E, B, B], feedback [E, B, R], grid)
        → codes [E, B, R], errors [E, B, R], loss [E]

Memory is that of the whole batch at once, 4 · (3 C² + 4 C R) bytes per expert; the caller sizes E to the device. Only the
factorization needs more, and takes as many experts at once as what is free allows.

**Cholesky by panels.** Batched library routines are made for small matrices, and single ones leave a GPU idle at 2,048
columns. As on the CPU (factor.py), panels of 256 rows put nearly all of the C³ / 3 operations into batched matrix products;
what is left for the library is the factor of [E, 256, 256] and a triangular solve.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence

import torch

from moepress.quantize.grid import Grid, Scale, usable_scales
from moepress.quantize.rounding_kernel import refuse_not_finite
from moepress.quantize.scale_search import search_scales_plain

RoundBlock = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, Grid], tuple[torch.Tensor, torch.Tensor, torch.Tensor]
]

_BLOCK = 128
_PANEL = 256
_FACTOR_BYTES = 4 << 30
"""For experts factored at once, where nobody says what is free."""


def round_block_plain(
    target: torch.Tensor, scales: torch.Tensor, upper: torch.Tensor, feedback: torch.Tensor, grid: Grid
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Round the columns of one block, last to first; agrees with ``gptq_kernel.round_block`` bit for bit.

    Args:
        target: float32 [E, B, R], the block's columns in rounding order.
        scales: float32 [E, B, R], the scale of every weight.
        upper: float32 [E, B, B], the block of U; below its diagonal it is not read.
        feedback: float32 [E, B, R], Σ D_j U_kj over columns after the block; overwritten.
        grid: the bits.

    Returns:
        codes int8 [E, B, R], D float32 [E, B, R], and float64 [E]: what the block adds to tr(D (H + δI) Dᵀ).
    """
    codes, errors = torch.empty_like(target), torch.empty_like(target)
    loss = torch.zeros(target.shape[0], dtype=torch.float64, device=target.device)
    for k in range(target.shape[1] - 1, -1, -1):
        pivot = upper[:, k, k, None]
        aim = target[:, k] + feedback[:, k] * (1 / pivot)
        codes[:, k] = (aim / scales[:, k]).clamp(grid.qmin, grid.qmax).round()
        value = codes[:, k] * scales[:, k]
        errors[:, k] = target[:, k] - value
        feedback[:, :k] += errors[:, k, None] * upper[:, :k, k, None]
        loss += ((aim - value) * pivot).double().square().sum(1)
    return codes.to(torch.int8), errors, loss


def factorize_batched(
    hessian: torch.Tensor, ladder: Sequence[float]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Factors of a stack of Hessians, as ``factor.factorize`` makes one.

    Args:
        hessian: float32 [E, C, C], symmetric; read only.
        ladder: damping fractions, rising.

    Returns:
        upper [E, C, C]; order int64 [E, C]; shift [E]; dampening_frac [E], NaN where no damping was enough.
    """
    diagonal = hessian.diagonal(dim1=1, dim2=2)
    mean = diagonal.double().mean(1)
    order = torch.argsort(diagonal, dim=1, stable=True)
    upper = torch.eye(hessian.shape[1], device=hessian.device).repeat(len(hessian), 1, 1)
    shift, used = torch.zeros_like(mean), torch.full_like(mean, torch.nan)
    usable = hessian.isfinite().all(-1).all(-1) & (mean > 0)
    for dampening_frac in ladder:
        todo = torch.nonzero(usable & used.isnan()).flatten()
        if not len(todo):
            break
        for some in torch.split(todo, _experts_at_once(hessian)):
            rows = order[some]
            permuted = torch.gather(hessian[some], 1, rows[:, :, None].expand(-1, -1, hessian.shape[1]))
            permuted = torch.gather(permuted, 2, rows[:, None, :].expand(-1, hessian.shape[1], -1))
            permuted.diagonal(dim1=1, dim2=2).add_((dampening_frac * mean[some]).float()[:, None])
            good = cholesky_by_panels(permuted)
            upper[some[good]] = permuted[good]
            shift[some[good]] = dampening_frac * mean[some[good]]
            used[some[good]] = dampening_frac
    return upper, order, shift, used


def cholesky_by_panels(matrix: torch.Tensor) -> torch.Tensor:
    """Upper triangles of float32 [E, C, C] into U with UᵀU = matrix, in place; what is below holds no meaning.

    Returns:
        bool [E]: positive definite, and the factor finite. The others' rows are spoiled.
    """
    columns = matrix.shape[1]
    good = torch.ones(len(matrix), dtype=torch.bool, device=matrix.device)
    for start in range(0, columns, _PANEL):
        stop = min(start + _PANEL, columns)
        panel = matrix[:, start:stop, start:]
        if start:
            panel.baddbmm_(matrix[:, :start, start:stop].transpose(1, 2), matrix[:, :start, start:], alpha=-1)
        corner, info = torch.linalg.cholesky_ex(panel[:, :, : stop - start], upper=True)
        good &= (info == 0) & corner.isfinite().all(-1).all(-1)
        # a matrix that failed goes on with the identity, so that its numbers stay harmless
        corner = torch.where(good[:, None, None], corner, torch.eye(stop - start, device=matrix.device))
        panel[:, :, : stop - start] = corner
        if stop < columns:
            right = panel[:, :, stop - start :]
            right.copy_(torch.linalg.solve_triangular(corner.transpose(1, 2), right, upper=False))
    return good


def _experts_at_once(hessian: torch.Tensor) -> int:
    """Experts whose factorization, three matrices each beside its Hessian, fits half of what is free."""
    free = torch.cuda.mem_get_info(hessian.device)[0] // 2 if hessian.is_cuda else _FACTOR_BYTES
    return max(1, free // (3 * 4 * hessian.shape[1] ** 2))


def scales_batched(weight: torch.Tensor, importance: torch.Tensor, grid: Grid, scale: Scale) -> torch.Tensor:
    """Scales of every expert before rounding, as ``gptq.expert_scales`` makes one expert's.

    Args:
        weight: float32 [E, R, C].
        importance: float32 [E, C].
        grid: bits and group size.
        scale: "mse" or "max".

    Returns:
        float32 [E, R, G].
    """
    experts, rows, columns = weight.shape
    width = grid.width(columns)
    refuse_not_finite(int(weight.isnan().sum()), int(weight.isinf().sum()), weight.numel())
    if scale == "max":
        peaks = weight.reshape(experts, rows, -1, width).abs().amax(-1)
        return usable_scales(peaks / grid.half_range)
    if runs_triton(weight) and not grid.signed_scales:
        from moepress.quantize.triton_scales import search_scales_triton

        return search_scales_triton(weight.contiguous(), importance, grid)
    h = importance[:, None].expand(-1, rows, -1).reshape(-1, width)
    found = search_scales_plain(weight.reshape(-1, width), h, columns // width, grid)
    return found.reshape(experts, rows, -1)


def round_columns_batched(
    weight: torch.Tensor,
    scales: torch.Tensor,
    upper: torch.Tensor,
    order: torch.Tensor,
    grid: Grid,
    round_block: RoundBlock = round_block_plain,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """GPTQ's sweep over the columns of all experts at once.

    Args:
        weight: float32 [E, R, C]; read only.
        scales: float32 [E, R, G].
        upper: float32 [E, C, C], or [1, C, C] for one factor for all.
        order: int64 [E, C], or [1, C].
        grid: bits and group size.
        round_block: what rounds a block.

    Returns:
        codes int8 [E, R, C]; tr(D (H + δI) Dᵀ) and Σ D², float64 [E].
    """
    experts, rows, columns = weight.shape
    width = grid.width(columns)
    upper, order = upper.expand(experts, -1, -1), order.expand(experts, -1)
    target = torch.gather(weight, 2, order[:, None].expand(-1, rows, -1)).transpose(1, 2).contiguous()
    by_group = scales.transpose(1, 2).contiguous()
    codes = torch.empty(target.shape, dtype=torch.int8, device=weight.device)
    errors = torch.empty_like(target)
    loss = torch.zeros(experts, dtype=torch.float64, device=weight.device)
    for stop in range(columns, 0, -_BLOCK):
        start = max(stop - _BLOCK, 0)
        feedback = torch.bmm(upper[:, start:stop, stop:], errors[:, stop:])
        groups = (order[:, start:stop] // width)[:, :, None].expand(-1, -1, rows)
        corner = upper[:, start:stop, start:stop].contiguous()
        codes[:, start:stop], errors[:, start:stop], added = round_block(
            target[:, start:stop].contiguous(), torch.gather(by_group, 1, groups), corner, feedback, grid
        )
        loss += added
    back = torch.argsort(order, 1)
    codes = torch.gather(codes.transpose(1, 2), 2, back[:, None].expand(-1, rows, -1))
    return codes, loss, torch.linalg.vector_norm(errors, dim=(1, 2), dtype=torch.float64).square_()


def runs_triton(tensor: torch.Tensor) -> bool:
    """Fused kernels can run on this tensor. Triton comes with torch for CUDA; without it the plain twins do the same."""
    return tensor.is_cuda and importlib.util.find_spec("triton") is not None
