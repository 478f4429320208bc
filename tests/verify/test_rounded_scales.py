"""Scales of rounding to nearest, worked out again by `verify`: the compiled search's pass, anything else is found."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fuzz import small
from fuzz.small import Tensor
from moepress.convert.run import convert
from moepress.quantize.grid import Grid
from moepress.quantize.rtn import rtn
from moepress.recipe import load_recipe
from moepress.verify.rounded_scales import ROWS_PER_SAMPLE, max_scales_off, searched_scales_off
from moepress.verify.run import verify
from tests.verify.corruptions.written import tensors

ROWS, COLUMNS = 96, 256


def weight(kind: str) -> torch.Tensor:
    """float32 [96, 256]: of FP8 blocks, on an INT4 grid before, or with groups of nothing."""
    generator = torch.Generator().manual_seed(7)
    w = torch.randn(ROWS, COLUMNS, generator=generator) * 0.02
    if kind == "fp8":
        return (w * 1000).to(torch.float8_e4m3fn).float() * 0.0012
    if kind == "on a grid":
        steps = (torch.rand(ROWS, COLUMNS // 32, generator=generator) * 0.01 + 0.001).to(torch.bfloat16).float()
        return torch.randint(-7, 8, (ROWS, COLUMNS), generator=generator) * steps.repeat_interleave(32, 1)
    w[:, :128] = 0
    return w


def served(truth: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The nearest codes times their scales: what a whole change of a scale would leave."""
    spread = scale.float().repeat_interleave(COLUMNS // scale.shape[1], 1)
    return (truth / spread).round().clamp(-8, 7) * spread


@pytest.mark.parametrize("kind", ["fp8", "on a grid", "with zeros"])
@pytest.mark.parametrize("group", [32, 128, -1])
@pytest.mark.parametrize("signed", [False, True])
def test_the_compiled_searchs_scales_pass_and_one_a_step_off_is_found_wherever_it_is(
    kind: str, group: int, signed: bool
) -> None:
    truth = weight(kind)
    pressed = rtn(truth, Grid(4, group, signed), scale="mse")
    strange, worse, judged = searched_scales_off(truth, pressed.scales, pressed.dequantize(), name="a", signed=signed)
    assert (strange, worse) == (0, 0)
    assert judged >= pressed.scales.numel() // ROWS_PER_SAMPLE
    for place in range(0, pressed.scales.numel(), max(1, pressed.scales.numel() // 24)):
        for step in (-1, 1):
            scale = pressed.scales.clone()
            scale.view(torch.int16).view(-1)[place] += step
            found = searched_scales_off(truth, scale, served(truth, scale), name="a", signed=signed)
            assert found[:2] != (0, 0), f"group {place}, {step}"


def test_a_search_that_takes_another_of_its_scales_is_found_in_the_sample() -> None:
    truth = weight("fp8")
    scale = rtn(truth, Grid(4, 32), scale="max").scales  # max|w| / 7.5 is one of those that the search tries
    strange, worse, judged = searched_scales_off(truth, scale, served(truth, scale), name="a", signed=False)
    assert strange == 0
    assert worse > judged // 2
    assert max_scales_off(truth, scale) == 0
    assert max_scales_off(truth, rtn(truth, Grid(4, 32), scale="mse").scales) > scale.numel() // 2


@pytest.mark.parametrize("family", ["kimi", "qwen3"])
def test_a_least_error_scale_one_step_off_with_codes_error_and_checksums_to_match_is_found(
    family: str, tmp_path: Path
) -> None:
    """The change moves the weight's error by less than receipts are held to."""
    for name, raw in small.build(family).whole().items():
        path = tmp_path / "src" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(raw)
    recipe = load_recipe({"kimi": "kimi-k2", "qwen3": "qwen3-moe"}[family], ["serving.tensor_parallel=1"])
    assert recipe.weights.scale == "mse"
    out = tmp_path / "out"
    convert(tmp_path / "src", out, recipe, threads=1)
    assert verify(out, tmp_path / "src", threads=1).problems == ()
    module = "model.layers.1.mlp.experts.1.up_proj"

    def one_step(held: dict[str, Tensor]) -> None:
        scale = held[f"{module}.weight_scale"]
        last = int.from_bytes(scale.data[-2:], "little") + 1
        scale.data = scale.data[:-2] + last.to_bytes(2, "little")

    tensors(one_step, f"{module}.weight_scale")(out)
    problems = verify(out, tmp_path / "src", threads=1).problems
    assert any(module in problem and "none that the recipe's search tries" in problem for problem in problems)
