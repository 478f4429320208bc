"""A block of one layer's experts, from what their inputs were to integers. Tensors in, tensors out.

The order follows the forward pass, so that each matrix is judged on the inputs it will really meet:

    1  AWQ (if asked): up's rows × s, down's columns ÷ s, from down's inputs; exact before rounding
    2  gate and up: Hessian of x̃ (one for both), error-aware target, GPTQ over [experts, 2·I, C]
    3  down: its inputs come out of the gate and up just quantized; Hessian, target, GPTQ over [experts, C, I]

x̃ are the inputs behind the quantized layers before, x those of the source. For experts with few tokens the Hessian is
shrunk (`quantize.hessian`); one that saw none is quantized by what its layer saw.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from moepress.calibration.expert_tap import RoutedTokens
from moepress.calibration.layer_fill import ExpertBlock
from moepress.calibration.statistics import InputMoments, PooledMoments, down_moments, gate_up_moments, slope_moments
from moepress.quantize.awq import search_down, smooth_up_down
from moepress.quantize.decision import Decision, Quantized
from moepress.quantize.error_aware import error_aware_target, layer_correction
from moepress.quantize.gptq import gptq
from moepress.quantize.grid import Grid, QuantizedWeight
from moepress.quantize.hessian import down_target, gate_up_target, shrink, shrinkage
from moepress.quantize.products import products_in
from moepress.quantize.row_metric import gate_up_metric
from moepress.quantize.rtn import measure, rtn
from moepress.quantize.side_by_side import side_by_side, width_on
from moepress.quantize.two_sided import gptq_two_sided
from moepress.recipe import Recipe


@dataclass(frozen=True)
class PressedBlock:
    """Consecutive experts, quantized.

    Attributes:
        experts: which.
        gate_up: codes int8 [B, 2·I, C] and scales.
        down: codes int8 [B, C, I] and scales.
        records: per expert and projection, the line for the receipt.
    """

    experts: range
    gate_up: QuantizedWeight
    down: QuantizedWeight
    records: Mapping[tuple[int, str], dict[str, Any]]

    def dequantized(self) -> ExpertBlock:
        """The weights that the server will compute with, float32: what the next layer's inputs are made from."""
        return ExpertBlock(self.experts.start, self.gate_up.dequantize(), self.down.dequantize())


@dataclass(frozen=True)
class LayerInputs:
    """What a layer's experts were given.

    Attributes:
        ours: tokens behind the quantized layers before, routed as they will be.
        source: the same tokens in the source run; None without error-aware targets.
        pooled: moments of all of ours.
        fisher: [C, C], how much errors of the layer's output cost the model's predictions; None = every output alike.
    """

    ours: RoutedTokens
    source: RoutedTokens | None
    pooled: PooledMoments
    fisher: torch.Tensor | None = None


def press_block(block: ExpertBlock, inputs: LayerInputs, recipe: Recipe) -> PressedBlock:
    """Quantizes a block of experts by the recipe.

    Args:
        block: the source's weights, float32.
        inputs: of the layer; behind a norm that was divided by s, gate and up are multiplied by it first.

    Raises:
        QuantizeError: weights or inputs that are not finite, named by expert.
    """
    with products_in(recipe.calibration.precision):
        return _press_block(block, inputs, recipe)


def _press_block(block: ExpertBlock, inputs: LayerInputs, recipe: Recipe) -> PressedBlock:
    grid = Grid(recipe.weights.num_bits, recipe.weights.group_size, recipe.weights.signed_scales)
    if inputs.ours.divisor is not None:
        block = replace(block, gate_up=block.gate_up * inputs.ours.divisor.to(block.gate_up.device))
    alphas: dict[int, float] = {}
    if "awq" in recipe.weights.algorithm and recipe.weights.awq.up_down:
        block, alphas = _smooth(block, inputs, grid, recipe)
    gate_up, gate_up_notes = _gate_up(block, inputs, grid, recipe)
    half_pressed = replace(block, gate_up=gate_up.dequantize())
    down, down_notes = _down(block, half_pressed, inputs, grid, recipe)
    records = {}
    for slot, expert in enumerate(block.experts):
        smoothed = {"awq_alpha": alphas[expert]} if expert in alphas else {}
        for projection in ("gate_proj", "up_proj"):
            records[expert, projection] = {"action": "quantize", **gate_up_notes[slot], **smoothed}
        records[expert, "down_proj"] = {"action": "quantize", **down_notes[slot], **smoothed}
    if "gptq" not in recipe.weights.algorithm:
        counts = inputs.ours.tokens_per_expert()
        for (expert, _), record in records.items():
            record["tokens"] = counts[expert]
    for record in records.values():
        record["device"] = "cpu" if "weighed_by" in record else block.down.device.type
    _measure_halves(block, gate_up, records)
    return PressedBlock(block.experts, gate_up, down, records)


def _smooth(
    block: ExpertBlock, inputs: LayerInputs, grid: Grid, recipe: Recipe
) -> tuple[ExpertBlock, dict[int, float]]:
    moments = down_moments(
        inputs.ours, block, router_weighted=recipe.calibration.router_weighted, device=str(block.down.device)
    )
    gate_up, down = block.gate_up.clone(), torch.empty_like(block.down)
    inner = block.down.shape[-1]

    def one(slot: int) -> float:
        hessian = _mean(moments.gram[slot], float(moments.mass[slot]))
        tokens = int(moments.tokens[slot])
        hessian = shrink(hessian, down_target(hessian, tokens, 1.0), tokens)
        found = search_down(block.down[slot], hessian, grid, scale=recipe.weights.scale)
        gate_up[slot, inner:], down[slot] = smooth_up_down(block.gate_up[slot, inner:], block.down[slot], found.scales)
        return found.alpha

    alphas = side_by_side(one, range(len(block.experts)), width_on(block.down.device))
    return ExpertBlock(block.first, gate_up, down), dict(zip(block.experts, alphas, strict=True))


def _gate_up(
    block: ExpertBlock, inputs: LayerInputs, grid: Grid, recipe: Recipe
) -> tuple[QuantizedWeight, list[dict[str, Any]]]:
    calibration = recipe.calibration
    if "gptq" not in recipe.weights.algorithm:
        return _round(block.gate_up, grid, recipe)
    pooled = _mean(inputs.pooled.gram, inputs.pooled.tokens).to(block.gate_up.device)
    if calibration.hessian == "layer":  # nothing of an expert's own: one factor and one correction for all
        counts = inputs.ours.tokens_per_expert()
        aim = _aim_by_layer(block.gate_up, pooled, inputs.pooled)
        tokens = [counts[expert] for expert in block.experts]
        return _sweep(block.gate_up, aim, pooled, _metric(block, inputs, tokens), tokens, grid, recipe)
    moments = gate_up_moments(
        inputs.ours,
        block.experts,
        source=inputs.source if calibration.error_aware else None,
        router_weighted=calibration.router_weighted,
        device=str(block.gate_up.device),
    )
    target = gate_up_target(pooled)
    _blend(moments, recipe, lambda *_: target)
    tokens = moments.tokens.tolist()
    metric = _metric(block, inputs, tokens)
    return _sweep(block.gate_up, _aim(block.gate_up, moments), moments.gram, metric, tokens, grid, recipe)


def _down(
    block: ExpertBlock, half_pressed: ExpertBlock, inputs: LayerInputs, grid: Grid, recipe: Recipe
) -> tuple[QuantizedWeight, list[dict[str, Any]]]:
    calibration = recipe.calibration
    if "gptq" not in recipe.weights.algorithm:
        return _round(block.down, grid, recipe)
    moments = down_moments(
        inputs.ours,
        half_pressed,
        source=inputs.source if calibration.error_aware else None,
        source_block=block if calibration.error_aware else None,
        router_weighted=calibration.router_weighted,
        device=str(block.down.device),
    )
    _blend(moments, recipe, lambda own, tokens: down_target(own, tokens, 1.0))
    tokens = moments.tokens.tolist()
    return _sweep(block.down, _aim(block.down, moments), moments.gram, inputs.fisher, tokens, grid, recipe)


def _metric(block: ExpertBlock, inputs: LayerInputs, tokens_each: list[int]) -> torch.Tensor | None:
    """What errors in gate and up cost, [B, 2·I, 2·I]; None where every output is alike."""
    if inputs.fisher is None:
        return None
    fisher, slopes = inputs.fisher.to(block.down.device), slope_moments(inputs.ours, block)

    def one(slot: int) -> None:  # in place of the slopes, which nobody needs any more
        slopes[slot] = gate_up_metric(slopes[slot], tokens_each[slot], block.down[slot], fisher)

    side_by_side(one, range(len(slopes)), width_on(block.down.device))
    return slopes


def _blend(moments: InputMoments, recipe: Recipe, target: Callable[[torch.Tensor, int], torch.Tensor]) -> None:
    """Each expert's sum becomes its mean, in place, shrunk towards ``target(mean, tokens)`` unless it is trusted alone."""

    def one(slot: int) -> None:
        own, tokens = _mean(moments.gram[slot], float(moments.mass[slot])), int(moments.tokens[slot])
        moments.gram[slot] = own if _trusted(recipe, tokens) else shrink(own, target(own, tokens), tokens)

    side_by_side(one, range(len(moments.tokens)), width_on(moments.gram.device))


def _trusted(recipe: Recipe, tokens: int) -> bool:
    """The recipe wants an expert's own Hessian as it is, and it has one."""
    return recipe.calibration.hessian == "expert" and tokens > 0


def _sweep(
    weight: torch.Tensor,
    aim: _Aim,
    hessians: torch.Tensor,
    metric: torch.Tensor | None,
    tokens_each: list[int],
    grid: Grid,
    recipe: Recipe,
) -> tuple[QuantizedWeight, list[dict[str, Any]]]:
    """GPTQ of [B, R, C] towards its targets.

    Args:
        hessians: means, shrunk, [B, C, C] or one [C, C] for all.
        metric: of the rows, [B, R, R] or one [R, R] for all; None = all alike.
    """
    scale, passes = recipe.weights.scale, recipe.calibration.passes
    if metric is None:
        result = gptq(aim.target, hessians, grid, scale=scale, passes=passes, source=weight)
    else:
        result = gptq_two_sided(aim.target, hessians, metric, grid, scale=scale, passes=passes, source=weight)
    columns = weight.shape[-1]
    notes = []
    for slot, (decision, tokens) in enumerate(zip(result.decisions(), tokens_each, strict=True)):
        notes.append(
            {
                **decision.as_json(),
                "method": recipe.weights.algorithm if isinstance(decision, Quantized) else decision.as_json()["method"],
                "tokens": tokens,
                "shrinkage": 0.0 if _trusted(recipe, tokens) else shrinkage(tokens, columns),
                "target_change": round(aim.changes[slot], 6),
                **({} if metric is None else {"weighed_by": "kl"}),
            }
        )
    return result.weight, notes


@dataclass(frozen=True)
class _Aim:
    """What GPTQ aims at: targets [B, R, C], and how far each is from its weight."""

    target: torch.Tensor
    changes: list[float]


def _aim(weight: torch.Tensor, moments: InputMoments) -> _Aim:
    """Error-aware targets from moments whose ``gram`` is the shrunk mean by now; the weights without cross moments.

    One BLAS thread an expert, so that the number of threads changes no bit.
    """
    if moments.cross is None:
        return _Aim(weight, [0.0] * len(weight))
    target, cross = torch.empty_like(weight), moments.cross

    def one(slot: int) -> float:
        tokens = int(moments.tokens[slot])
        aimed = error_aware_target(
            weight[slot],
            _mean(cross[slot], float(moments.mass[slot])),
            moments.gram[slot],
            tokens,
            strength=1 - shrinkage(tokens, weight.shape[-1]),  # with few tokens the correction is mostly noise
        )
        target[slot] = aimed.weight
        return aimed.change

    return _Aim(target, side_by_side(one, range(len(weight)), width_on(weight.device)))


def _aim_by_layer(weight: torch.Tensor, hessian: torch.Tensor, pooled: PooledMoments) -> _Aim:
    """Error-aware targets by one correction for all experts; ``hessian``: the mean over the layer's tokens."""
    if pooled.cross is None:
        return _Aim(weight, [0.0] * len(weight))
    cross = _mean(pooled.cross, pooled.tokens).to(weight.device)
    correction = side_by_side(lambda c: layer_correction(c, hessian, pooled.tokens), [cross], 1)[0]
    target = torch.empty_like(weight)

    def one(slot: int) -> float:
        moved = weight[slot] @ correction
        torch.add(weight[slot], moved, out=target[slot])
        return float(moved.norm() / weight[slot].norm().clamp_min(1e-30))

    return _Aim(target, side_by_side(one, range(len(weight)), width_on(weight.device)))


def _round(weight: torch.Tensor, grid: Grid, recipe: Recipe) -> tuple[QuantizedWeight, list[dict[str, Any]]]:
    rounded = rtn(weight, grid, scale=recipe.weights.scale)
    decisions: list[Decision] = [Quantized(recipe.weights.algorithm, grid, fidelity) for fidelity in rounded.fidelity]
    return rounded, [decision.as_json() for decision in decisions]


def _measure_halves(
    block: ExpertBlock, gate_up: QuantizedWeight, records: dict[tuple[int, str], dict[str, Any]]
) -> None:
    """gate and up were one matrix on the way; each gets error figures of its own."""
    inner = block.down.shape[-1]

    def one(slot: int) -> None:
        for projection, rows in (("gate_proj", slice(0, inner)), ("up_proj", slice(inner, 2 * inner))):
            fidelity = measure(
                block.gate_up[slot, rows].contiguous(),
                gate_up.codes[slot, rows].contiguous(),
                gate_up.scales[slot, rows].contiguous(),
            )
            records[block.first + slot, projection] |= fidelity.as_json()

    side_by_side(one, range(len(block.experts)), width_on(block.gate_up.device))


def _mean(total: torch.Tensor, mass: float) -> torch.Tensor:
    """Twice the mean, the Hessian of the squared error; zero where nothing was seen."""
    return total * (2 / mass) if mass > 0 else torch.zeros_like(total)
