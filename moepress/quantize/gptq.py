"""GPTQ for a block of experts: rounding in which every column makes up for the errors of those rounded before it.

For each expert, with weights W [R, C] and the Hessian H [C, C] of its inputs (hessian.py), find codes on the grid
that keep

    loss = tr((W − Q) H (W − Q)ᵀ) = (2/n) Σ_tokens ‖(W − Q) x‖²

small. The steps:

1. ``factorize``: columns ordered by diag(H), H + δI = UᵀU. gate and up read the same input: stack them as rows of one
   W, and one factor serves both. With one Hessian for the whole layer, one factor serves every expert.
2. Scales: the least error of each group weighted by diag(H) (``mse``), or max|w| / 7.5 (``max``). Groups are those of
   the original column order (activation order ``static``), so the file needs no g_idx.
3. Rounding from the last column to the first. The sum over columns already done is one matrix product per 256
   columns, a second one per 64 inside, and a compiled loop for what is left.
4. ``polish`` passes: scales refitted in closed form and codes moved one by one while the loss falls.

The layout is [column, row]: rows are independent, so they fill the SIMD lanes, and the column order costs nothing.
Work is R C² / 2 multiply-adds plus C³ / 6 for the factor; memory per expert at a time is 4 C² + 9 R C bytes beside
its inputs, half as much again with polishing.

An expert whose Hessian cannot be factored is rounded to nearest with searched scales, and says so in its outcome.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch

from moepress.errors import QuantizeError
from moepress.quantize.decision import Decision, Fallback, Quantized
from moepress.quantize.factor import DAMPENING_LADDER, Factor, Unfactorable, factorize
from moepress.quantize.fidelity import Fidelity
from moepress.quantize.gptq_batched import (
    RoundBlock,
    factorize_batched,
    round_block_plain,
    round_columns_batched,
    runs_triton,
    scales_batched,
)
from moepress.quantize.gptq_kernel import round_block
from moepress.quantize.grid import Grid, QuantizedWeight, Scale, usable_scales
from moepress.quantize.polish import COMPILED, PLAIN, Moves, polish, refit_plain
from moepress.quantize.products import exact_products
from moepress.quantize.rounding_kernel import group_peaks, refuse_not_finite
from moepress.quantize.rtn import measure, rtn
from moepress.quantize.scale_search import search_scales
from moepress.quantize.side_by_side import in_windows, side_by_side, width

Item = TypeVar("Item")
Prepared = TypeVar("Prepared")

_OUTER, _INNER = 256, 64


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one expert.

    Args:
        loss: tr((W − Q) H (W − Q)ᵀ) with the Hessian as given, undamped; NaN after a fallback.
        dampening_frac: the damping that was needed, as a fraction of H's mean diagonal; None after a fallback.
        passes: polish passes that lowered the loss.
        fallback: why rounding to nearest was used instead, or None.
    """

    loss: float
    dampening_frac: float | None
    passes: int
    fallback: str | None


@dataclass(frozen=True, slots=True)
class GptqResult:
    """Codes and scales of a stack of experts, and one outcome for each."""

    weight: QuantizedWeight
    outcomes: tuple[Outcome, ...]

    def decisions(self) -> tuple[Decision, ...]:
        """One decision per expert, for its receipt."""
        return tuple(
            _decision(outcome, self.weight.grid, fidelity)
            for outcome, fidelity in zip(self.outcomes, self.weight.fidelity, strict=True)
        )


def _decision(outcome: Outcome, grid: Grid, fidelity: Fidelity) -> Decision:
    if outcome.fallback is not None:
        return Fallback("gptq", "rtn", outcome.fallback, grid, fidelity)
    details = (
        ("loss", outcome.loss),
        ("dampening_frac", outcome.dampening_frac or 0.0),
        ("passes", float(outcome.passes)),
    )
    return Quantized("gptq", grid, fidelity, details)


def gptq(
    weight: torch.Tensor,
    hessian: torch.Tensor,
    grid: Grid,
    *,
    scale: Scale = "mse",
    passes: int = 0,
    ladder: Sequence[float] = DAMPENING_LADDER,
    source: torch.Tensor | None = None,
    threads: int | None = None,
) -> GptqResult:
    """Quantize a stack of experts: one by one and side by side on the CPU, as one batch elsewhere.

    Args:
        weight: float32 [E, R, C], what to aim at; read only. Rows that share an input (gate and up) belong in one R.
        hessian: float32 [E, C, C], one per expert, or [C, C], one for all of them; symmetric, read only.
        grid: bits and group size.
        scale: "mse" weighted by diag(H), or "max".
        passes: most polish passes; 0 for none.
        ladder: damping fractions to try, rising.
        source: float32 [E, R, C], what fidelity is measured against when ``weight`` is an error-aware target.
        threads: experts at once, torch's thread count when not given. Results do not depend on it.

    Raises:
        QuantizeError: shapes or types that do not fit, NaN or infinity in ``weight`` (with counts, and which expert).
    """
    _check(weight, hessian, grid)
    weight, hessian = weight.detach(), hessian.detach().contiguous()
    reference = weight if source is None else source.detach()
    if weight.device.type != "cpu":
        return _gptq_on_device(weight, hessian, grid, scale, passes, ladder, reference)
    shared = made_exactly(lambda h: factorize(h, ladder), [hessian], 1)[0] if hessian.ndim == 2 else None

    def prepare(e: int) -> tuple[torch.Tensor, Factor | Unfactorable]:
        return (hessian, shared) if shared is not None else (hessian[e], factorize(hessian[e], ladder))

    def quantize(
        aim: torch.Tensor, prepared: tuple[torch.Tensor, Factor | Unfactorable], into: QuantizedWeight
    ) -> Outcome:
        return _quantize_expert(aim, *prepared, scale, passes, into)

    return expert_by_expert(weight, reference, grid, prepare, quantize, threads)


def expert_by_expert(
    weight: torch.Tensor,
    reference: torch.Tensor,
    grid: Grid,
    prepare: Callable[[int], Prepared],
    quantize: Callable[[torch.Tensor, Prepared, QuantizedWeight], Outcome],
    threads: int | None,
) -> GptqResult:
    """A stack of experts on the CPU, side by side, in bands of as many as run at once.

    Args:
        weight: float32 [E, R, C], what to aim at.
        reference: float32 [E, R, C], what fidelity is measured against.
        grid: bits and group size.
        prepare: what an expert needs before it is quantized; with float32 products, since factorizations are made here.
        quantize: one expert's aim [R, C] into the codes and scales that it is given.
        threads: experts at once, torch's thread count when not given. Results do not depend on it.

    Raises:
        QuantizeError: what ``quantize`` raised, with the expert's place in the stack.
    """
    experts, rows, columns = weight.shape
    codes = torch.empty(weight.shape, dtype=torch.int8)
    scales = torch.empty(experts, rows, grid.groups(columns), dtype=torch.bfloat16)
    at_once = threads or width()

    def one(e: int, prepared: Prepared) -> tuple[Outcome, Fidelity]:
        into = QuantizedWeight(codes[e], scales[e], grid, ())
        try:
            outcome = quantize(weight[e].contiguous(), prepared, into)
        except QuantizeError as error:
            raise QuantizeError(error.what, where=f"expert {e} of the stack", hint=error.hint) from error
        return outcome, measure(reference[e].contiguous(), codes[e], scales[e])

    done = []
    for some in in_windows(
        range(experts), at_once
    ):  # all of one kind of product at a time: the switch is the process's
        prepared = made_exactly(prepare, some, at_once)
        done += side_by_side(lambda each: one(*each), list(zip(some, prepared, strict=True)), at_once)
    fidelity = tuple(each for _, each in done)
    return GptqResult(QuantizedWeight(codes, scales, grid, fidelity), tuple(outcome for outcome, _ in done))


def made_exactly(make: Callable[[Item], Prepared], items: Sequence[Item], threads: int) -> list[Prepared]:
    """`side_by_side` with float32 products: one BLAS thread each, so that the number of threads changes no bit."""
    with exact_products():
        return side_by_side(make, items, threads)


def _check(weight: torch.Tensor, hessian: torch.Tensor, grid: Grid) -> None:
    if weight.ndim != 3 or weight.dtype != torch.float32 or hessian.dtype != torch.float32:
        raise QuantizeError(
            f"GPTQ takes float32 weights [E, R, C] and a float32 Hessian, not {weight.dtype} {list(weight.shape)} and "
            f"{hessian.dtype} {list(hessian.shape)}",
            where="gptq",
        )
    experts, _, columns = weight.shape
    if hessian.shape not in ((columns, columns), (experts, columns, columns)):
        raise QuantizeError(
            f"weights {list(weight.shape)} need a Hessian {[columns, columns]} or {[experts, columns, columns]}, "
            f"not {list(hessian.shape)}",
            where="gptq",
        )
    grid.width(columns)


def _gptq_on_device(
    weight: torch.Tensor,
    hessian: torch.Tensor,
    grid: Grid,
    scale: Scale,
    passes: int,
    ladder: Sequence[float],
    reference: torch.Tensor,
) -> GptqResult:
    """The batched path; arguments as in ``gptq``, all on one device."""
    stacked = hessian if hessian.ndim == 3 else hessian[None]
    with exact_products():
        upper, order, shift, used = factorize_batched(stacked, ladder)
    importance = (stacked.diagonal(dim1=1, dim2=2) + shift.float()[:, None]).expand(len(weight), -1)
    scales = scales_batched(weight, importance, grid, scale)
    codes, loss, sum_sq = round_columns_batched(weight, scales, upper, order, grid, _round_block_for(weight))
    shift, used, done = shift.expand(len(weight)), used.expand(len(weight)), 0
    if passes:
        codes_t, scales_t = codes.transpose(1, 2).contiguous(), scales.transpose(1, 2).contiguous()
        target = weight.transpose(1, 2).contiguous()
        loss, sum_sq, done = polish(target, stacked, shift, loss, passes, grid, codes_t, scales_t, _moves_for(weight))
        codes, scales = codes_t.transpose(1, 2).contiguous(), scales_t.transpose(1, 2).contiguous()
    stored = scales.to(torch.bfloat16)
    undamped: list[float] = (loss - shift * sum_sq).tolist()
    outcomes = []
    for e, dampening_frac in enumerate(used.tolist()):
        if math.isnan(dampening_frac):
            plain = rtn(weight[e], grid, scale="mse")
            codes[e], stored[e] = plain.codes, plain.scales
            reason = f"the Hessian cannot be factored with damping {', '.join(map(str, ladder))} of its mean diagonal"
            outcomes.append(Outcome(math.nan, None, 0, reason))
        else:
            outcomes.append(Outcome(max(undamped[e], 0.0), dampening_frac, done, None))
    fidelity = tuple(measure(w, q, s) for w, q, s in zip(reference, codes, stored, strict=True))
    return GptqResult(QuantizedWeight(codes, stored, grid, fidelity), tuple(outcomes))


def _round_block_for(weight: torch.Tensor) -> RoundBlock:
    """The fused kernel where it can run, imported there alone."""
    if not runs_triton(weight):
        return round_block_plain
    from moepress.quantize.triton_block import round_block_triton

    return round_block_triton


def _moves_for(weight: torch.Tensor) -> Moves:
    if not runs_triton(weight):
        return PLAIN
    from moepress.quantize.triton_polish import move_codes_triton

    return Moves(refit_plain, move_codes_triton)


def _quantize_expert(
    weight: torch.Tensor,
    hessian: torch.Tensor,
    factor: Factor | Unfactorable,
    scale: Scale,
    passes: int,
    into: QuantizedWeight,
) -> Outcome:
    """One expert into the codes [R, C] and scales [R, G] of ``into``."""
    if isinstance(factor, Unfactorable):
        rtn(weight, into.grid, scale="mse", out=into)
        return Outcome(math.nan, None, 0, factor.reason)
    target = weight.t().contiguous()
    scales = expert_scales(weight, factor.diagonal, into.grid, scale).t().contiguous()
    codes = torch.empty(target.shape, dtype=torch.int8)
    damped_loss, sum_sq, done = *round_columns(target, scales, factor, into.grid, codes), 0
    if passes:
        shift, before = torch.tensor([factor.shift]).double(), torch.tensor([damped_loss]).double()
        after, left, done = polish(
            target[None],
            hessian[None],
            shift,
            before,
            passes,
            into.grid,
            codes[None],
            scales[None],
            COMPILED,
        )
        damped_loss, sum_sq = after.item(), left.item()
    into.codes.copy_(codes.t())
    into.scales.copy_(scales.t())
    return Outcome(max(damped_loss - factor.shift * sum_sq, 0.0), factor.dampening_frac, done, None)


def expert_scales(weight: torch.Tensor, importance: torch.Tensor, grid: Grid, scale: Scale) -> torch.Tensor:
    """Scales of one expert before rounding.

    Args:
        weight: float32 [R, C], contiguous.
        importance: float32 [C], how much an error in each column costs: the damped diagonal of H.
        grid: bits and group size.
        scale: "mse" for the least weighted error, "max" for max|w| / half range.

    Returns:
        float32 [R, G], every value a BF16 number.

    Raises:
        QuantizeError: NaN or infinity in ``weight``.
    """
    rows, columns = weight.shape
    width = grid.width(columns)
    groups = weight.view(-1, width).numpy()
    peaks = np.empty(groups.shape[0], np.float32)
    refuse_not_finite(*group_peaks(groups.view(np.int32), peaks.view(np.int32)), weight.numel())
    if scale == "max":
        found = usable_scales(torch.from_numpy(peaks) / grid.half_range)
    else:
        h = importance.contiguous().view(-1, width).numpy()
        found = torch.from_numpy(search_scales(groups, h, peaks, columns // width, grid))
    return found.view(rows, columns // width)


def round_columns(
    target: torch.Tensor, scales: torch.Tensor, factor: Factor, grid: Grid, codes: torch.Tensor
) -> tuple[float, float]:
    """GPTQ's sweep over the columns of one expert.

    Args:
        target: float32 [C, R], contiguous; read only.
        scales: float32 [G, R], contiguous.
        factor: of the expert's damped Hessian.
        grid: bits and group size.
        codes: int8 [C, R], written.

    Returns:
        tr(D (H + δI) Dᵀ) and Σ D², D = target − codes · scales.
    """
    columns, rows = target.shape
    order = factor.order.numpy()
    groups = order // (columns // scales.shape[0])
    limits = (np.float32(grid.qmin), np.float32(grid.qmax))
    errors = torch.empty(columns, rows)
    feedback = torch.empty(min(_OUTER, columns), rows)
    loss = sum_sq = 0.0
    for stop in range(columns, 0, -_OUTER):
        start = max(stop - _OUTER, 0)
        sums = feedback[: stop - start]
        if stop < columns:
            torch.mm(factor.upper[start:stop, stop:], errors[stop:], out=sums)
        else:
            sums.zero_()
        for end in range(stop, start, -_INNER):
            begin = max(end - _INNER, start)
            inner = sums[begin - start : end - start]
            if end < stop:
                inner.addmm_(factor.upper[begin:end, end:stop], errors[end:stop])
            block_loss, block_sum_sq = round_block(
                target.numpy(),
                order[begin:end],
                groups[begin:end],
                scales.numpy(),
                factor.upper[begin:end, begin:end].contiguous().numpy(),
                inner.numpy(),
                limits,
                codes.numpy(),
                errors[begin:end].numpy(),
            )
            loss, sum_sq = loss + block_loss, sum_sq + block_sum_sq
    return loss, sum_sq
