"""AWQ for experts: move difficulty from a weight's important columns to where it costs nothing.

A column that large activations meet is scaled up before rounding, so that its relative error shrinks, and its input
is scaled down by the same factor in whatever comes before:

    inside an expert    down(silu(gate x) · up x):     up's rows × s,      down's columns ÷ s        (s [I])
    norm → consumers    W (norm(x)):                   norm's weight ÷ s,  all consumers' columns × s (s [C])

Both are exact until something is rounded. The first touches one expert and no other tensor, and scaling a row of up
by s leaves its rounding errors as they were (its scales grow with it): so only down has to be measured. In the second
every reader of the norm is a consumer: router, shared expert, all experts. Norm, router and shared expert are stored in
BF16, so there the s are rounded to powers of two, and lose no bit.

s = (m / sqrt(max m · min m))^α for a norm, and the inverse for up → down, so that both times the rounded weight grows
where its input m, the channel's root mean square, is large. α goes from 0 to 0.95 in steps of 0.05; the one that loses
least in tr(D H Dᵀ) after rounding to nearest is taken (Lin et al., arXiv:2306.00978). The identity is measured first:
when even that is not a finite number the statistics are broken, and that is an error, never a result.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from moepress.errors import QuantizeError
from moepress.quantize.grid import Grid, Scale
from moepress.quantize.rtn import rtn
from moepress.quantize.side_by_side import one_blas_thread, side_by_side, width_on

ALPHAS = tuple(step / 20 for step in range(20))
ROWS_MEASURED = 512


@dataclass(frozen=True, slots=True)
class Smoothing:
    """The scales that were found.

    Args:
        scales: float32 [channels], positive; all 1 when nothing beat the identity.
        alpha: the exponent; 0 is the identity.
        loss: the measured loss with these scales.
        identity_loss: the measured loss without any.
        not_finite: candidates whose loss was not a finite number, passed over.
    """

    scales: torch.Tensor
    alpha: float
    loss: float
    identity_loss: float
    not_finite: int


def activation_magnitude(hessian: torch.Tensor) -> torch.Tensor:
    """Root mean square of each input channel, up to a common factor, from H's diagonal: float32 [C]."""
    return hessian.diagonal().clamp_min(0).sqrt()


def candidate_scales(magnitude: torch.Tensor, alpha: float) -> torch.Tensor:
    """(m / sqrt(max m · min m))^α, float32 [C]; channels that were never active count as the least active one.

    Args:
        magnitude: float32 [C], not negative.
        alpha: 0 for the identity.
    """
    active = magnitude[magnitude > 0]
    if alpha == 0 or len(active) == 0:
        return torch.ones_like(magnitude)
    least, most = active.min(), active.max()
    return (magnitude.clamp_min(least) / (least.sqrt() * most.sqrt())).pow(alpha)


def smooth_up_down(up: torch.Tensor, down: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """up's rows × s and down's columns ÷ s.

    Args:
        up: float32 [I, C].
        down: float32 [C, I].
        scales: float32 [I], positive.
    """
    return up * scales[:, None], down / scales


def smooth_norm(
    norm: torch.Tensor, consumers: Sequence[torch.Tensor], scales: torch.Tensor
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The norm's weight ÷ s and every consumer's columns × s.

    Args:
        norm: float32 [C], the weight that multiplies the normalised vector.
        consumers: float32 [..., R, C], everything that reads the norm's output, the router too.
        scales: float32 [C], positive.
    """
    return norm / scales, [weight * scales for weight in consumers]


def smoothed_hessian(hessian: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The Hessian of inputs that were divided by s: H / (s sᵀ).

    Args:
        hessian: float32 [C, C].
        scales: float32 [C]. For down, whose inputs grow with up's rows, pass 1 / s.
    """
    return hessian / scales[:, None] / scales


def search_down(down: torch.Tensor, hessian: torch.Tensor, grid: Grid, *, scale: Scale = "max") -> Smoothing:
    """Scales for one expert's up → down, from down's loss alone.

    Args:
        down: float32 [C, I]; ``ROWS_MEASURED`` of its rows, evenly spaced, are measured.
        hessian: float32 [I, I], of down's inputs before smoothing.
        grid: bits and group size.
        scale: how the rounding scales are made while measuring.

    Returns:
        scales [I] for ``smooth_up_down``.

    Raises:
        QuantizeError: the loss of the identity is not a finite number.
    """
    some = down[:: math.ceil(down.shape[0] / ROWS_MEASURED)]

    def loss(s: torch.Tensor) -> float:
        return _rounding_loss(some, 1 / s, hessian, grid, scale)

    return _search(activation_magnitude(hessian), loss, torch.reciprocal)


def search_norm(weight: torch.Tensor, hessian: torch.Tensor, grid: Grid, *, scale: Scale = "max") -> Smoothing:
    """Scales for a norm, from the loss of those of its consumers that will be quantized.

    Args:
        weight: float32 [R, C], rows of all of them; a few thousand tell as much as all.
        hessian: float32 [C, C], of their inputs before smoothing.
        grid: bits and group size.
        scale: how the rounding scales are made while measuring.

    Returns:
        scales [C] for ``smooth_norm``, powers of two.

    Raises:
        QuantizeError: the loss of the identity is not a finite number.
    """

    def loss(s: torch.Tensor) -> float:
        return _rounding_loss(weight, s, hessian, grid, scale)

    return _search(activation_magnitude(hessian), loss, power_of_two)


def power_of_two(s: torch.Tensor) -> torch.Tensor:
    """The nearest powers of two, on a logarithmic scale: factors that a floating-point number takes without rounding."""
    return s.log2().round().exp2()


def _rounding_loss(
    weight: torch.Tensor, factors: torch.Tensor, hessian: torch.Tensor, grid: Grid, scale: Scale
) -> float:
    """tr(D H Dᵀ) of weight · factors rounded, with the factors taken out again; NaN when it cannot be rounded."""
    scaled = weight * factors
    if not bool(scaled.isfinite().all()):
        return math.nan
    d = rtn(scaled, grid, scale=scale).dequantize().div_(factors).sub_(weight)
    return float((d @ hessian).mul_(d).sum(dtype=torch.float64))


def _search(
    magnitude: torch.Tensor, loss: Callable[[torch.Tensor], float], shape: Callable[[torch.Tensor], torch.Tensor]
) -> Smoothing:
    """The best α. ``shape`` makes scales of (m / sqrt(max m · min m))^α: inverts them, or rounds them."""
    with one_blas_thread():
        identity = loss(torch.ones_like(magnitude))
    if not math.isfinite(identity):
        raise QuantizeError(
            f"the loss before any smoothing is {identity}: the calibration statistics or the weight are not finite",
            where="awq",
            hint="look for overflow in the calibration forward pass; accumulate in float32",
        )
    best = Smoothing(torch.ones_like(magnitude), 0.0, identity, identity, 0)
    not_finite = 0
    candidates = [shape(candidate_scales(magnitude, alpha)) for alpha in ALPHAS[1:]]
    losses = side_by_side(loss, candidates, width_on(magnitude.device))
    for alpha, s, measured in zip(ALPHAS[1:], candidates, losses, strict=True):
        if not math.isfinite(measured):
            not_finite += 1
        elif measured < best.loss:
            best = Smoothing(s, alpha, measured, identity, 0)
    return Smoothing(best.scales, best.alpha, best.loss, identity, not_finite)
