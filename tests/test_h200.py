"""The device script at tiny sizes on a processor: every part gives figures, and one that fails loses no other."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.h200 import PARTS, rates_for_machines, table, wrong

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
def test_every_part_runs_at_tiny_sizes(tmp_path: Path) -> None:
    report = tmp_path / "h200.json"
    command = [sys.executable, "-m", "benchmarks.h200", "--smoke", "--json", str(report)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(report.read_text())
    assert list(found["parts"]) == list(PARTS)
    assert found["wrong"] == []
    checks = found["parts"]["kernels"]["checks"]
    assert {"decode_fp8", "gram_bf16", "cholesky_by_panels"} <= checks.keys()
    for name in ("glm blend", "glm layer", "glm polish", "kimi block"):
        layer = found["parts"][name]
        assert layer["experts"] == layer["experts_of_layer"] == 4
        assert layer["fallbacks"] == 0
        assert set(layer["stages"]) >= {"decode", "moments", "gptq"}
    polished, plain = (found["parts"][name]["loss_mean"] for name in ("glm polish", "glm blend"))
    assert polished < plain, "the same data: polishing lowers the loss"
    for part in PARTS:
        assert part in done.stdout


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
