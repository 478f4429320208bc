"""AWQ's second half for one layer: the norm before the experts ÷ s, everything that reads it × s.

    norm' = norm / s        router' = router · s        shared gate, up' = … · s        experts' gate, up = … · s, rounded

s [C] are powers of two, so what is not rounded to integers keeps every bit of its significand: the model before rounding is
the source's, exactly, and only the experts' rounding errors move. Norm, router and shared expert are written in BF16 (F32
where they were that); a shared expert stored in FP8 is rounded to BF16 once, as by ``rest.shared_experts: bf16``, because
one scale for 128 × 128 weights has no room for a factor per column.

No file holds s: it is norm / norm', wherever it is needed again (here on resume, in ``verify``).

The calibration run keeps the source's norm, router and shared expert. Its experts see x / s, a view of the tapped tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from moepress.calibration.weights import WeightSource
from moepress.convert.decide import EXPERTS_NORM, Decision
from moepress.convert.layout import WeightPlan
from moepress.errors import QuantizeError
from moepress.quantize.awq import Smoothing, search_norm, smooth_norm
from moepress.quantize.decision import Rescaled
from moepress.quantize.grid import Grid, Scale

ROWS_MEASURED = 4096
"""Rows of all the layer's gate and up together that the search rounds for every candidate."""


@dataclass(frozen=True)
class RescaledWeight:
    """A weight that is not quantized, as it is written, and its line for the receipt."""

    name: str
    value: torch.Tensor
    record: dict[str, Any]


def find_norm_scales(
    source: WeightSource, readers: Sequence[str], hessian: torch.Tensor, grid: Grid, scale: Scale
) -> Smoothing:
    """The layer's s, from a band of rows of every expert's gate and up.

    Args:
        source: gives the experts' weights.
        readers: names of all routed experts' gate and up of the layer.
        hessian: float32 [C, C], of all the layer's tokens.
        grid, scale: how the experts will be rounded.

    Raises:
        QuantizeError: statistics that are not finite.
    """
    band = max(1, ROWS_MEASURED // len(readers))
    rows: list[torch.Tensor] = []
    device = str(hessian.device)
    for name in readers:
        first = (len(rows) * band) % 128  # bands from different places of different experts
        part = source.load(name, slice(first, first + band), device=device)
        rows.append(part if len(part) else source.load(name, slice(0, band), device=device))
    found = search_norm(torch.cat(rows), hessian, grid, scale=scale)
    return replace(found, scales=found.scales.cpu())


def rescaled_weights(
    source: WeightSource,
    plans: Sequence[WeightPlan],
    decisions: dict[str, Decision],
    found: Smoothing,
) -> Iterator[RescaledWeight]:
    """What is written in place of the norm and its readers that stay in floating point, in the plan's order.

    Raises:
        QuantizeError: a value leaves the range of its type, so that the factor would not be exact.
    """
    gain = found.loss / found.identity_loss if found.identity_loss > 0 else 1.0
    for plan in plans:
        before = source.load(plan.name).to(torch.float32 if plan.outputs[0].dtype == "F32" else torch.bfloat16)
        is_norm = plan.name.endswith(EXPERTS_NORM)
        norm, (reader,) = smooth_norm(before.float(), [before.float()], found.scales)
        after = (norm if is_norm else reader).to(before.dtype)
        again = after.float() * found.scales if is_norm else after.float() / found.scales
        if not torch.equal(again, before.float()):
            raise QuantizeError(
                f"{int((again != before.float()).sum()):,} values leave the range of {plan.outputs[0].dtype} when multiplied by "
                f"powers of two from 2^{_exponent(found.scales.min())} to 2^{_exponent(found.scales.max())}",
                where=plan.name,
                hint="--set weights.awq.norm=false",
            )
        record = {"action": "rescale", **Rescaled(decisions[plan.name].reason, found.alpha, gain).as_json()}
        yield RescaledWeight(plan.name, after, record)


def scales_between(norm: torch.Tensor, written: torch.Tensor) -> torch.Tensor:
    """s = norm / norm', float32 [C]; 1 where the norm is zero, since nothing comes out there.

    Args:
        norm, written: float32 [C], the source's and the output's.
    """
    return torch.where(norm != 0, norm / torch.where(written != 0, written, 1.0), 1.0)


def _exponent(value: torch.Tensor) -> int:
    return round(math.log2(float(value)))
