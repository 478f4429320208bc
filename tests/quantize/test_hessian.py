"""Hessian sums, shrinkage and error-aware targets against their formulas in float64."""

from __future__ import annotations

import pytest
import torch

from moepress.errors import QuantizeError
from moepress.quantize.error_aware import error_aware_target
from moepress.quantize.gptq import gptq
from moepress.quantize.grid import Grid
from moepress.quantize.hessian import add_gram, down_target, gate_up_target, mirror, shrink, shrinkage
from tests.quantize.gptq_cases import correlated_hessian


def inputs(tokens: int, columns: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(tokens, columns, generator=torch.Generator().manual_seed(seed))


def mean(x: torch.Tensor) -> torch.Tensor:
    """(2/n) xᵀ x, as calibration makes it."""
    total = torch.zeros(x.shape[1], x.shape[1])
    add_gram(total, x)
    mirror(total)
    return total * (2 / len(x))


@pytest.mark.parametrize(("tokens", "columns"), [(5, 64), (1500, 96), (100, 1100)])
def test_half_a_gram_mirrored_is_the_whole_to_the_last_bit_of_symmetry(tokens: int, columns: int) -> None:
    x = inputs(tokens, columns)
    h = mean(x)
    assert torch.equal(h, h.t())
    torch.testing.assert_close(h.double(), 2 / tokens * x.double().t() @ x.double(), rtol=1e-4, atol=1e-5)


def test_shrinkage_by_token_count() -> None:
    assert (shrinkage(0, 64), shrinkage(64, 64), shrinkage(192, 64)) == (1.0, 0.5, 0.25)
    h, target = torch.full((64, 64), 4.0), torch.zeros(64, 64)
    torch.testing.assert_close(shrink(h, target, 192), torch.full((64, 64), 3.0))


def test_targets_keep_the_size_of_the_diagonal() -> None:
    pooled = correlated_hessian(64, 200, 0)
    assert float(gate_up_target(pooled).diagonal().mean()) == pytest.approx(float(pooled.diagonal().mean()), rel=1e-5)
    assert torch.linalg.cond(gate_up_target(pooled)) < torch.linalg.cond(pooled)
    own = down_target(pooled, 10, 99.0)
    assert float(own[3, 3]) == pytest.approx(float(pooled.diagonal().mean()), rel=1e-6)
    assert float(down_target(torch.zeros(8, 8), 0, 99.0)[2, 2]) == 99.0


def test_shrinking_helps_when_tokens_are_few() -> None:
    """Calibrate on a few tokens, judge on the true Hessian: overfitting is what shrinkage is for."""
    columns, weight = 128, torch.randn(1, 64, 128, generator=torch.Generator().manual_seed(5))
    truth = correlated_hessian(columns, 20_000, 3)
    root = torch.linalg.cholesky(truth + 1e-4 * torch.eye(columns))
    seen = mean(inputs(24, columns, 1) @ root.t())
    pooled = mean(inputs(2000, columns, 2) @ root.t() + 0.5 * inputs(2000, columns, 3))
    shrunk = shrink(seen, gate_up_target(pooled), 24)

    def judged(h: torch.Tensor) -> float:
        d = weight[0] - gptq(weight, h[None], Grid(4, 32)).weight.dequantize()[0]
        return float(((d @ truth) * d).sum())

    assert judged(shrunk) < 0.7 * judged(seen)


def test_error_aware_target_is_the_formula() -> None:
    """In float64, with an inverse; and it moves the output towards the source's."""
    columns, tokens = 48, 4000
    x = inputs(tokens, columns)
    seen = x @ (torch.eye(columns) + 0.1 * inputs(columns, columns, 1)) + 0.05 * inputs(tokens, columns, 2)
    weight = inputs(24, columns, 3)
    cross = 2 / tokens * (x - seen).t() @ seen
    target = error_aware_target(weight, cross, mean(seen), tokens)
    xs, xd, wd = seen.double(), x.double(), weight.double()
    full_h, full_c = 2 / tokens * xs.t() @ xs, 2 / tokens * (xd - xs).t() @ xs
    ridge = 0.1 * full_h.diagonal().mean() * torch.eye(columns)
    kept = tokens / (tokens + columns)
    expected = wd + kept * wd @ full_c @ torch.linalg.inv(full_h + ridge)
    torch.testing.assert_close(target.weight.double(), expected, rtol=1e-3, atol=1e-3)
    assert target.ridge_frac == 0.1
    assert target.change == pytest.approx(float((expected - wd).norm() / wd.norm()), rel=1e-3)
    before, after = xs @ wd.t() - xd @ wd.t(), xs @ expected.t() - xd @ wd.t()
    assert after.square().mean() < 0.25 * before.square().mean()


def test_error_aware_target_without_error_or_strength_is_the_weight() -> None:
    x, weight = inputs(500, 32), inputs(8, 32, 1)
    assert torch.equal(error_aware_target(weight, torch.zeros(32, 32), mean(x), 500).weight, weight)
    cross = 2 / 500 * torch.ones(500, 32).t() @ x
    assert torch.equal(error_aware_target(weight, cross, mean(x), 500, strength=0.0).weight, weight)


def test_error_aware_target_lowers_the_output_error_after_quantizing() -> None:
    columns, tokens = 64, 8000
    x = inputs(tokens, columns)
    seen = x + 0.2 * x @ inputs(columns, columns, 1) / 8
    weight = inputs(32, columns, 2)
    cross = 2 / tokens * (x - seen).t() @ seen
    target = error_aware_target(weight, cross, mean(seen), tokens)

    def output_error(aim: torch.Tensor) -> float:
        served = gptq(aim[None], mean(seen)[None], Grid(4, 32), source=weight[None]).weight.dequantize()[0]
        return float((seen @ served.t() - x @ weight.t()).square().mean())

    assert output_error(target.weight) < 0.5 * output_error(weight)


def test_broken_statistics_are_refused() -> None:
    weight, cross = inputs(4, 16), torch.full((16, 16), 1e-3)
    with pytest.raises(QuantizeError, match="not positive definite"):
        error_aware_target(weight, cross, -torch.eye(16), 10)
    cross[2, 3] = torch.nan
    with pytest.raises(QuantizeError, match="1 values"):
        error_aware_target(weight, cross, torch.eye(16), 10)
