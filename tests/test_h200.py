"""The device script at tiny sizes on a processor: every part gives figures, and one that fails loses no other."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.h200 import PARTS, Figures, rates_for_machines, table, wrong

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def figures() -> dict[str, Figures]:
    """Every part in this process: starting one for each takes longer than what they do at tiny sizes."""
    with torch.no_grad():
        return {name: part.run("cpu", True) for name, part in PARTS.items()}


@pytest.mark.slow
def test_every_part_gives_its_figures_at_tiny_sizes(figures: dict[str, Figures]) -> None:
    assert wrong(figures) == []
    assert {"decode_fp8", "gram_bf16", "cholesky_by_panels"} <= figures["kernels"]["checks"].keys()
    for name in ("glm blend", "glm layer", "glm polish", "kimi block"):
        layer = figures[name]
        assert layer["experts"] == layer["experts_of_layer"] == 4
        assert layer["fallbacks"] == 0
        assert layer["stages"].keys() >= {"decode", "moments", "gptq"}
    assert figures["glm polish"]["loss_mean"] < figures["glm blend"]["loss_mean"], "the same data, polished"
    told = "\n".join(table(figures))
    assert all(f"\n{part}" in told for part in PARTS)
    assert rates_for_machines(figures).keys() == {"link", "product", "plain"}


@pytest.mark.slow
def test_the_command_runs_a_part_as_a_process_and_writes_json(tmp_path: Path) -> None:
    report = tmp_path / "h200.json"
    command = [sys.executable, "-m", "benchmarks.h200", "--smoke", "--only", "rtn", "--json", str(report)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(report.read_text())
    assert found["wrong"] == []
    assert found["parts"]["rtn"]["gbps"] > 0


def test_a_part_that_failed_or_disagrees_is_told() -> None:
    found = {
        "ceilings": {"failed": "not done after 30 s"},
        "kernels": {"checks": {"round_block codes": {"worst": 1.0, "tolerance": 0.0, "ok": False}}},
        "glm blend": {"moments_tflops": 400.0, "gptq_tflops": 20.0, "fallbacks": 2, **LAYER},
    }
    told = "\n".join(table(found))
    assert "FAILED: not done after 30 s" in told
    assert "DISAGREES" in told
    assert [problem.split(":")[0] for problem in wrong(found)] == [
        "ceilings",
        "round_block codes disagrees with its twin",
        "glm blend",
    ]
    assert rates_for_machines(found) == {"product": 400e12}


def test_all_limits_together_stay_below_five_minutes() -> None:
    assert sum(part.limit for part in PARTS.values()) < 300


LAYER = {
    "experts": 8,
    "experts_of_layer": 256,
    "seconds": 1.0,
    "seconds_a_layer": 32.0,
    "stages": {"decode": 0.1, "moments": 0.4, "gptq": 0.5},
}
