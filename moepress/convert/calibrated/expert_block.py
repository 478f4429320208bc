"""A block of one layer's experts, from what their inputs were to integers. Tensors in, tensors out.

The order follows the forward pass, so that each matrix is judged on the inputs it will really meet:

    1  AWQ (if asked): up's rows × s, down's columns ÷ s, from down's inputs; exact before rounding
    2  gate and up: Hessian of x̃ (one for both), error-aware target, GPTQ over [experts, 2·I, C]
    3  down: its inputs come out of the gate and up just quantized; Hessian, target, GPTQ over [experts, C, I]

x̃ are the inputs behind the quantized layers before, x those of the source. For experts with few tokens the Hessian is
shrunk (`quantize.hessian`); one that saw none is quantized by what its layer saw.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from moepress.calibration.expert_tap import RoutedTokens
from moepress.calibration.layer_fill import ExpertBlock
from moepress.calibration.statistics import InputMoments, PooledMoments, down_moments, gate_up_moments
from moepress.quantize.awq import search_down, smooth_up_down
from moepress.quantize.decision import Decision, Quantized
from moepress.quantize.error_aware import error_aware_target
from moepress.quantize.gptq import gptq
from moepress.quantize.grid import Grid, QuantizedWeight
from moepress.quantize.hessian import down_target, gate_up_target, shrink, shrinkage
from moepress.quantize.rtn import rtn
from moepress.quantize.side_by_side import side_by_side
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
    """

    ours: RoutedTokens
    source: RoutedTokens | None
    pooled: PooledMoments


def press_block(block: ExpertBlock, inputs: LayerInputs, recipe: Recipe) -> PressedBlock:
    """Quantizes a block of experts by the recipe.

    Args:
        block: the source's weights, float32.
        inputs: of the layer; behind a norm that was divided by s, gate and up are multiplied by it first.

    Raises:
        QuantizeError: weights or inputs that are not finite, named by expert.
    """
    grid = Grid(recipe.weights.num_bits, recipe.weights.group_size)
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
        record["device"] = block.down.device.type
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
    alphas = {}
    for slot, expert in enumerate(block.experts):
        hessian = _mean(moments.gram[slot], float(moments.mass[slot]))
        tokens = int(moments.tokens[slot])
        hessian = shrink(hessian, down_target(hessian, tokens, 1.0), tokens)
        found = search_down(block.down[slot], hessian, grid, scale=recipe.weights.scale)
        gate_up[slot, inner:], down[slot] = smooth_up_down(block.gate_up[slot, inner:], block.down[slot], found.scales)
        alphas[expert] = found.alpha
    return ExpertBlock(block.first, gate_up, down), alphas


def _gate_up(
    block: ExpertBlock, inputs: LayerInputs, grid: Grid, recipe: Recipe
) -> tuple[QuantizedWeight, list[dict[str, Any]]]:
    calibration = recipe.calibration
    if "gptq" not in recipe.weights.algorithm:
        return _round(block.gate_up, grid, recipe)
    moments = gate_up_moments(
        inputs.ours,
        block.experts,
        source=inputs.source if calibration.error_aware else None,
        router_weighted=calibration.router_weighted,
        device=str(block.gate_up.device),
    )
    pooled = _mean(inputs.pooled.gram, inputs.pooled.tokens).to(block.gate_up.device)
    hessians = pooled
    if calibration.hessian != "layer":
        target = gate_up_target(pooled)
        for slot, tokens in enumerate(moments.tokens.tolist()):
            own = _mean(moments.gram[slot], float(moments.mass[slot]))
            trusted = calibration.hessian == "expert" and tokens > 0
            moments.gram[slot] = own if trusted else shrink(own, target, tokens)
        hessians = moments.gram
    return _sweep(block.gate_up, hessians, moments, grid, recipe)


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
    for slot, tokens in enumerate(moments.tokens.tolist()):
        own = _mean(moments.gram[slot], float(moments.mass[slot]))
        trusted = calibration.hessian == "expert" and tokens > 0
        moments.gram[slot] = own if trusted else shrink(own, down_target(own, tokens, 1.0), tokens)
    return _sweep(block.down, moments.gram, moments, grid, recipe)


def _sweep(
    weight: torch.Tensor, hessians: torch.Tensor, moments: InputMoments, grid: Grid, recipe: Recipe
) -> tuple[QuantizedWeight, list[dict[str, Any]]]:
    """Error-aware targets and GPTQ for [B, R, C]; ``hessians`` are means, shrunk."""
    target, changes = weight, [0.0] * len(weight)
    if moments.cross is not None:
        target, changes = _aim(weight, hessians, moments)
    calibration = recipe.calibration
    result = gptq(target, hessians, grid, scale=recipe.weights.scale, passes=calibration.passes, source=weight)
    columns = weight.shape[-1]
    notes = []
    for slot, decision in enumerate(result.decisions()):
        tokens = int(moments.tokens[slot])
        own = calibration.hessian == "expert" and tokens > 0
        notes.append(
            {
                **decision.as_json(),
                "method": recipe.weights.algorithm if isinstance(decision, Quantized) else decision.as_json()["method"],
                "tokens": tokens,
                "shrinkage": 0.0 if own else shrinkage(tokens, columns),
                "target_change": round(changes[slot], 6),
            }
        )
    return result.weight, notes


def _aim(weight: torch.Tensor, hessians: torch.Tensor, moments: InputMoments) -> tuple[torch.Tensor, list[float]]:
    """Error-aware targets [B, R, C] and how far each is from its weight; one BLAS thread an expert, so that the number
    of threads changes no bit."""
    target = torch.empty_like(weight)

    def one(slot: int) -> float:
        assert moments.cross is not None  # noqa: S101 (asked by the caller)
        tokens = int(moments.tokens[slot])
        aimed = error_aware_target(
            weight[slot],
            _mean(moments.cross[slot], float(moments.mass[slot])),
            hessians if hessians.ndim == 2 else hessians[slot],
            tokens,
            strength=1 - shrinkage(tokens, weight.shape[-1]),  # with few tokens the correction is mostly noise
        )
        target[slot] = aimed.weight
        return aimed.change

    return target, side_by_side(one, range(len(weight)), None if weight.device.type == "cpu" else 1)


def _round(weight: torch.Tensor, grid: Grid, recipe: Recipe) -> tuple[QuantizedWeight, list[dict[str, Any]]]:
    rounded = rtn(weight, grid, scale=recipe.weights.scale)
    decisions: list[Decision] = [Quantized(recipe.weights.algorithm, grid, fidelity) for fidelity in rounded.fidelity]
    return rounded, [decision.as_json() for decision in decisions]


def _measure_halves(
    block: ExpertBlock, gate_up: QuantizedWeight, records: dict[tuple[int, str], dict[str, Any]]
) -> None:
    """gate and up were one matrix on the way; each gets error figures of its own."""
    from moepress.quantize.rtn import measure

    inner = block.down.shape[-1]
    for slot, expert in enumerate(block.experts):
        for projection, rows in (("gate_proj", slice(0, inner)), ("up_proj", slice(inner, 2 * inner))):
            fidelity = measure(
                block.gate_up[slot, rows].contiguous(),
                gate_up.codes[slot, rows].contiguous(),
                gate_up.scales[slot, rows].contiguous(),
            )
            records[expert, projection] |= fidelity.as_json()


def _mean(total: torch.Tensor, mass: float) -> torch.Tensor:
    """Twice the mean, the Hessian of the squared error; zero where nothing was seen."""
    return total * (2 / mass) if mass > 0 else torch.zeros_like(total)
