"""GPTQ with a metric of outputs: against plain loops in float64, against itself, and against plain GPTQ."""

from __future__ import annotations

import pytest
import torch

from moepress.errors import QuantizeError
from moepress.quantize.decision import Fallback
from moepress.quantize.factor import Factor, factorize
from moepress.quantize.gptq import expert_scales, gptq
from moepress.quantize.grid import Grid, dequantize
from moepress.quantize.row_metric import gate_up_metric, swiglu_slopes
from moepress.quantize.rtn import rtn
from moepress.quantize.two_sided import gptq_two_sided, polish_coupled, round_both_ways
from tests.quantize.gptq_cases import correlated_hessian, experts, loss


def metric_loss(weight: torch.Tensor, served: torch.Tensor, hessian: torch.Tensor, metric: torch.Tensor) -> float:
    """tr(G D H Dᵀ) in float64, of one expert."""
    d = (weight - served).double()
    return float(((metric.double() @ d @ hessian.double()) * d).sum())


def factor_of(matrix: torch.Tensor) -> Factor:
    found = factorize(matrix, (0.01, 0.1, 1.0))
    assert isinstance(found, Factor)
    return found


def sequential_rounding(
    weight: torch.Tensor, scales: torch.Tensor, columns: Factor, rows: Factor, grid: Grid
) -> torch.Tensor:
    """Codes [R, C] by one Cholesky factor of the whole [RC, RC] curvature, weight after weight, in float64."""
    order = [r * weight.shape[1] + c for c in columns.order.tolist() for r in rows.order.tolist()]
    both = torch.kron(columns.upper.triu().double(), rows.upper.triu().double())  # upper of H' ⊗ G', in that order
    w, s = weight.double().reshape(-1)[order], scales.double().reshape(-1)[order]
    error, codes = torch.zeros_like(w), torch.zeros_like(w)
    for i in range(len(w) - 1, -1, -1):
        aim = w[i] + error[i + 1 :] @ both[i, i + 1 :] / both[i, i]
        codes[i] = (aim / s[i]).round().clamp(grid.qmin, grid.qmax)
        error[i] = w[i] - codes[i] * s[i]
    found = torch.empty_like(codes)
    found[order] = codes
    return found.view(weight.shape).to(torch.int8)


def test_the_sweep_is_sequential_rounding_of_the_whole_curvature() -> None:
    """Tiles, two factors and float32 against one dense factor of every weight with every other."""
    grid = Grid(4, 32)
    (weight,), (hessian,) = experts(1, 72, 96)
    columns, rows = factor_of(hessian), factor_of(correlated_hessian(72, 144, 5))
    scales = expert_scales(weight, columns.diagonal, grid, "mse")
    codes = torch.empty(96, 72, dtype=torch.int8)
    left = round_both_ways(weight.t().contiguous(), scales.t().contiguous(), columns, rows, grid, codes)
    truth = sequential_rounding(weight, scales.repeat_interleave(32, 1), columns, rows, grid)
    assert (codes.t() != truth).float().mean() < 0.02  # float32 against float64, where a weight is between two codes
    assert torch.allclose(left.t(), weight - dequantize(codes.t(), scales), atol=1e-6)


@pytest.mark.parametrize(("group", "signed"), [(32, False), (128, True)])
def test_polishing_ends_where_no_single_move_helps(group: int, signed: bool) -> None:
    """Every code by ±1 and every scale by the best step, one at a time in float64: none lowers the loss."""
    grid = Grid(4, group, signed)
    (weight,), (hessian,) = experts(1, 48, 256)
    metric = correlated_hessian(48, 96, 3)
    columns, rows = factor_of(hessian), factor_of(metric)
    scales = expert_scales(weight, columns.diagonal, grid, "mse").t().contiguous()
    codes = torch.empty(256, 48, dtype=torch.int8)
    left = round_both_ways(weight.t().contiguous(), scales, columns, rows, grid, codes)
    h, g = hessian + columns.shift * torch.eye(256), metric + rows.shift * torch.eye(48)
    before = metric_loss(left.t(), torch.zeros(48, 256), h, g)
    made = polish_coupled(left, h, g, 32, grid, codes, scales)
    assert 1 < made < 32
    d = (weight - dequantize(codes.t(), scales.t())).double()
    assert torch.allclose(left.t().double(), d, atol=1e-6)
    after = metric_loss(d, torch.zeros_like(d), h, g)
    assert after < 0.97 * before
    gradient = g.double() @ d @ h.double()
    s, q = scales.t().repeat_interleave(group, 1).double(), codes.t().double()
    bend = g.double().diagonal()[:, None] * h.double().diagonal()[None]
    for step in (-1, 1):
        change = (-2 * step * s * gradient + (step * s) ** 2 * bend).masked_fill((q + step < -8) | (q + step > 7), 0)
        assert float(change.clamp_max(0).sum()) > -2e-3 * after  # float32, and the last pass may have left a few


@pytest.mark.parametrize("group", [32, 128])
def test_beats_plain_gptq_by_a_stated_margin(group: int) -> None:
    weight, hessian = experts(2, 96, 256)
    metric = torch.stack([correlated_hessian(96, 192, seed) for seed in (7, 8)])
    for passes, share in ((0, 0.75), (3, 0.75)):
        plain = gptq(weight, hessian, Grid(4, group), passes=passes).weight.dequantize()
        both = gptq_two_sided(weight, hessian, metric, Grid(4, group), passes=passes).weight.dequantize()
        for e in range(2):
            ours, theirs = (metric_loss(weight[e], served[e], hessian[e], metric[e]) for served in (both, plain))
            assert ours < share * theirs


def test_with_the_identity_as_metric_it_is_as_good_as_plain_gptq() -> None:
    weight, hessian = experts(2, 64, 256)
    for passes, differing in ((0, 0.01), (3, 0.05)):  # scales are refitted in another order
        plain = gptq(weight, hessian, Grid(4, 32), passes=passes)
        both = gptq_two_sided(weight, hessian, torch.eye(64), Grid(4, 32), passes=passes)
        assert (plain.weight.codes != both.weight.codes).float().mean() < differing
        for one, other in zip(plain.outcomes, both.outcomes, strict=True):
            assert other.loss == pytest.approx(one.loss, rel=0.02)
        truth = loss(weight, both.weight.dequantize(), hessian)
        assert [outcome.loss for outcome in both.outcomes] == pytest.approx(truth.tolist(), rel=1e-3)


def test_threads_change_nothing() -> None:
    weight, hessian = experts(3, 80, 128)
    metric = correlated_hessian(80, 160, 2)
    one, many = (gptq_two_sided(weight, hessian, metric, Grid(), passes=2, threads=n).weight for n in (1, 3))
    assert torch.equal(one.codes, many.codes)
    assert torch.equal(one.scales, many.scales)


def test_a_metric_of_zeros_is_the_identity_and_a_hessian_of_zeros_falls_back() -> None:
    weight, hessian = experts(2, 32, 64)
    nothing = gptq_two_sided(weight, hessian, torch.zeros(32, 32), Grid(), passes=1)
    identity = gptq_two_sided(weight, hessian, torch.eye(32), Grid(), passes=1)
    assert torch.equal(nothing.weight.codes, identity.weight.codes)
    hessian[1] = 0
    done = gptq_two_sided(weight, hessian, torch.eye(32), Grid(), passes=1)
    assert isinstance(done.decisions()[1], Fallback)
    assert torch.equal(done.weight.codes[1], rtn(weight[1], Grid(), scale="mse").codes)


def test_what_does_not_fit_is_refused() -> None:
    weight, hessian = experts(2, 32, 64)
    with pytest.raises(QuantizeError, match="need a metric"):
        gptq_two_sided(weight, hessian, torch.eye(64), Grid())
    with pytest.raises(QuantizeError, match="need a Hessian"):
        gptq_two_sided(weight, hessian[:, :32, :32], torch.eye(32), Grid())
    with pytest.raises(QuantizeError, match="float32"):
        gptq_two_sided(weight, hessian, torch.eye(32).double(), Grid())
    weight[1, 3, 5] = torch.nan
    with pytest.raises(QuantizeError, match="NaN") as error:
        gptq_two_sided(weight, hessian, torch.eye(32), Grid())
    assert error.value.where == "expert 1 of the stack"


def test_the_metric_of_gate_and_up_is_how_autograd_says_errors_reach_the_output() -> None:
    """With δ drawn apart from the tokens, E[g gᵀ] of the gradients g by (gate, up) is the formula."""
    generator = torch.Generator().manual_seed(0)
    inner, hidden, tokens = 6, 5, 400_000
    pre = torch.randn(1, 2 * inner, generator=generator).repeat(tokens, 1)
    pre += 0.3 * torch.randn(tokens, 2 * inner, generator=generator)
    down = torch.randn(hidden, inner, generator=generator)
    weight = torch.rand(tokens, 1, generator=generator)
    delta = torch.randn(tokens, hidden, generator=generator) @ torch.randn(hidden, hidden, generator=generator)
    leaf = pre.clone().requires_grad_(True)
    gate, up = leaf.chunk(2, -1)
    out = weight * ((torch.nn.functional.silu(gate) * up) @ down.t())
    (gradient,) = torch.autograd.grad(out, leaf, delta)
    truth = gradient.t() @ gradient / tokens
    slopes = weight * swiglu_slopes(*pre.chunk(2, -1))
    metric = gate_up_metric(slopes.t() @ slopes, tokens, down, delta.t() @ delta / tokens)
    assert float((metric - truth).norm() / truth.norm()) < 0.02


def test_an_expert_without_tokens_has_a_metric() -> None:
    down, fisher = torch.randn(5, 4, generator=torch.Generator().manual_seed(1)), correlated_hessian(8, 20, 1)[:5, :5]
    metric = gate_up_metric(torch.zeros(8, 8), 0, down, fisher)
    assert torch.equal(metric, torch.diag(metric.diagonal()))
    assert float(metric.diagonal().min()) > 0
