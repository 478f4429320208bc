"""Time on paper: against arithmetic done by hand, and against measurements where there are any."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moepress.convert.forecast.machines import MACHINES, paper_time
from moepress.errors import PlanRefused
from moepress.recipe import load_recipe

CONFIGS = Path(__file__).parents[1] / "configs"


def config(name: str) -> dict[str, object]:
    data: dict[str, object] = json.loads((CONFIGS / name).read_text())
    return data


def test_rounding_is_bytes_over_rates() -> None:
    recipe = load_recipe("glm-5", ["weights.algorithm=rtn"])
    found = paper_time(config("glm_5.2_fp8.json"), recipe, "h200x8")
    assert found.stages["read"] == pytest.approx(755.617e9 / 12e9, rel=1e-3)
    assert found.bound_by == "disk"
    assert found.in_turn >= found.floor


def test_plain_gptq_of_glm_5_2_costs_what_its_active_parameters_say() -> None:
    """About 40 B active parameters, two operations each, a million tokens: 84 PFLOP, and the experts' Hessians beside them."""
    options = ["weights.algorithm=gptq", "calibration.samples=512", "calibration.length=2048"]
    plain = load_recipe("glm-5", [*options, "calibration.error_aware=false", "calibration.passes=0"])
    one = paper_time(config("glm_5.2_fp8.json"), plain, "h200")
    assert one.stages["forward"] == pytest.approx(2 * 40e9 * 2**20 / MACHINES["h200"].product, rel=0.15)
    full = paper_time(config("glm_5.2_fp8.json"), load_recipe("glm-5", options), "h200")
    assert full.stages["forward"] == pytest.approx(2 * one.stages["forward"], rel=0.05)
    assert full.stages["gptq"] > 5 * one.stages["gptq"]


def test_more_machines_take_less_of_everything_but_the_disk() -> None:
    recipe = load_recipe("kimi-k2", ["weights.algorithm=gptq", "calibration.samples=512", "calibration.length=2048"])
    one, eight, many = (paper_time(config("kimi_k2_instruct.json"), recipe, m) for m in ("h200", "h200x8", "4xh200x8"))
    assert one.in_turn > eight.in_turn > many.in_turn
    assert one.stages["gptq"] == pytest.approx(8 * eight.stages["gptq"])
    assert one.stages["read"] == many.stages["read"]
    assert "gather" not in eight.stages


def test_an_unknown_machine_is_refused_with_the_known_ones() -> None:
    with pytest.raises(PlanRefused, match="h200x8"):
        paper_time(config("glm_5.2_fp8.json"), load_recipe("glm-5"), "h100")
