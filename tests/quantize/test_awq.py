"""AWQ: exact before rounding, better after, and never a NaN taken for a result."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn.functional import silu

from moepress.errors import QuantizeError
from moepress.quantize.awq import (
    _search,
    candidate_scales,
    search_down,
    search_norm,
    smooth_norm,
    smooth_up_down,
    smoothed_hessian,
)
from moepress.quantize.grid import Grid
from moepress.quantize.rtn import rtn
from tests.quantize.gptq_cases import correlated_hessian, loss


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def expert(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    return (silu(x @ gate.t()) * (x @ up.t())) @ down.t()


def loud_hessian(columns: int) -> torch.Tensor:
    """A few channels far louder than the rest: what AWQ is for."""
    loud = torch.ones(columns)
    loud[:: columns // 8] = 20.0
    return correlated_hessian(columns, 4 * columns, 7) * loud * loud[:, None]


def test_smoothing_an_expert_is_exact() -> None:
    gate, up, down, x = randn(64, 32), randn(64, 32, seed=1), randn(32, 64, seed=2), randn(50, 32, seed=3)
    scales = torch.rand(64, generator=torch.Generator().manual_seed(4)) * 3 + 0.1
    before = expert(x.double(), gate.double(), up.double(), down.double())
    after = expert(x, gate, *smooth_up_down(up, down, scales))
    torch.testing.assert_close(after.double(), before, rtol=1e-4, atol=1e-3)


def test_smoothing_a_norm_is_exact_for_every_consumer() -> None:
    norm, x = randn(32).abs() + 0.5, randn(20, 32, seed=1)
    consumers = [randn(8, 32, seed=2), randn(5, 16, 32, seed=3)]
    scales = torch.rand(32, generator=torch.Generator().manual_seed(4)) * 3 + 0.1
    smoothed, moved = smooth_norm(norm, consumers, scales)
    for before, after in zip(consumers, moved, strict=True):
        torch.testing.assert_close((x * smoothed) @ after.mT, (x * norm) @ before.mT, rtol=1e-4, atol=1e-4)


def test_smoothed_hessian_is_that_of_the_smoothed_inputs() -> None:
    x, scales = randn(100, 16), torch.rand(16) + 0.5
    torch.testing.assert_close(
        smoothed_hessian(x.t() @ x, scales), (x / scales).t() @ (x / scales), rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("group", [32, 128])
def test_search_lowers_the_loss_of_down(group: int) -> None:
    down, hessian, grid = randn(64, 256) * 0.02, loud_hessian(256), Grid(4, group)
    found = search_down(down, hessian, grid)
    _, smoothed = smooth_up_down(torch.ones(256, 8), down, found.scales)
    served = rtn(smoothed, grid).dequantize() * found.scales
    assert float(loss(down, served, hessian)) == pytest.approx(found.loss, rel=1e-4)
    assert found.loss < 0.75 * found.identity_loss
    assert found.alpha > 0
    loud, quiet = found.scales[::32], found.scales[1::32]
    assert loud.max() < quiet.min()


def test_up_rounds_to_the_same_codes_when_rows_scale_by_powers_of_two() -> None:
    """Why only down is measured: a row's scale moves into the rounding scales."""
    up = randn(64, 128)
    scales = 2.0 ** torch.randint(-3, 4, (64,), generator=torch.Generator().manual_seed(0))
    smoothed, _ = smooth_up_down(up, randn(128, 64), scales)
    assert torch.equal(rtn(up, Grid()).codes, rtn(smoothed, Grid()).codes)


def test_search_for_a_norm_finds_powers_of_two_that_lower_the_loss() -> None:
    hessian, grid = loud_hessian(256), Grid(4, 128)
    weight = randn(96, 256) * 0.02
    found = search_norm(weight, hessian, grid)
    assert found.loss < 0.75 * found.identity_loss
    assert found.scales[0] > found.scales[1]
    assert torch.equal(found.scales.log2(), found.scales.log2().round())
    _, (smoothed,) = smooth_norm(torch.ones(256), [weight], found.scales)
    served = rtn(smoothed, grid).dequantize() / found.scales
    assert float(loss(weight, served, hessian)) == pytest.approx(found.loss, rel=1e-4)


def test_identity_stays_when_nothing_beats_it() -> None:
    found = search_down(randn(16, 64), torch.eye(64), Grid(4, 32))
    assert (found.alpha, found.loss) == (0.0, found.identity_loss)
    assert (found.scales == 1).all()


def test_a_non_finite_identity_is_an_error() -> None:
    """AW-01: comparisons with NaN are false, so the identity would win in silence."""
    hessian = torch.eye(64)
    for value in (torch.nan, torch.inf):
        hessian[3, 3] = value
        with pytest.raises(QuantizeError, match="before any smoothing"):
            search_down(randn(16, 64), hessian, Grid(4, 32))


def test_candidates_that_overflow_are_passed_over_and_counted() -> None:
    """A NaN neither wins nor ends the search."""
    magnitude = torch.tensor([1.0, 2.0, 4.0])

    def measured(s: torch.Tensor) -> float:
        return math.nan if s[2] > 1.5 else 10.0 - float(s[2])

    found = _search(magnitude, measured, lambda s: s)
    assert 0 < found.not_finite < 19
    assert found.loss == pytest.approx(10.0 - float(found.scales[2]))
    assert 1.4 < found.scales[2] <= 1.5
    assert found.identity_loss == 9.0


def test_silent_channels_count_as_the_quietest() -> None:
    s = candidate_scales(torch.tensor([0.0, 1.0, 4.0]), 0.5)
    assert s[0] == s[1]
    assert s[2] == pytest.approx(2 * float(s[1]))
    assert (candidate_scales(torch.zeros(3), 0.5) == 1).all()
