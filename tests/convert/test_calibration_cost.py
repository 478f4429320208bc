"""The estimate of a calibrated conversion against the conversion."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from moepress.calibration.memory import available_memory
from moepress.convert.forecast.calibration_cost import PROCESS_BYTES, calibration_cost, operations, timed
from moepress.convert.plan import make_plan
from moepress.formats.checkpoint import open_checkpoint
from moepress.recipe import load_recipe
from tests.pressing import recipe_for
from tests.tiny_checkpoints import build

CONFIGS = Path(__file__).parents[1] / "configs"
MIB = 1 << 20

RUN = """
import json, sys
from pathlib import Path
from moepress.convert.run import convert
from moepress.recipe import load_recipe

def status(field):
    return int(Path("/proc/self/status").read_text().split(field + ":")[1].split()[0]) * 1024

source, out, few, many = json.loads(sys.argv[1])
convert(source, Path(out) / "few", load_recipe("kimi-k2", few), threads=1)  # imports, compiled loops
before = status("VmRSS")
Path("/proc/self/clear_refs").write_text("5")
convert(source, Path(out) / "many", load_recipe("kimi-k2", many), threads=1)
print(json.dumps({"before": before, "peak": status("VmHWM")}))
"""


@pytest.mark.slow
def test_a_conversion_takes_between_two_fifths_and_all_of_the_memory_that_was_estimated(tmp_path: Path) -> None:
    """AW-05: the estimate is for whoever must not run out, so it errs upwards; the process itself apart."""
    source = build("kimi", tmp_path / "src", experts=32, layers=2, mtp=0)
    few = ["serving.tensor_parallel=1", "weights.algorithm=gptq", "calibration.samples=2", "calibration.length=16"]
    many = [*few[:2], "calibration.samples=24", "calibration.length=512", "calibration.passes=1"]
    cost = calibration_cost(source.config, load_recipe("kimi-k2", many), available=available_memory())
    done = subprocess.run(
        [sys.executable, "-c", RUN, json.dumps([str(source.folder), str(tmp_path), few, many])],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"},
    )
    seen = json.loads(done.stdout)
    estimated, used = cost.memory - PROCESS_BYTES, seen["peak"] - seen["before"]
    print(f"estimated {estimated / MIB:,.0f} MiB, used {used / MIB:,.0f} MiB, process {seen['before'] / MIB:,.0f} MiB")
    assert 0.4 * estimated < used < estimated
    assert seen["before"] < PROCESS_BYTES


def test_what_does_not_fit_is_spilled_or_told() -> None:
    config = json.loads((CONFIGS / "kimi_k2_instruct.json").read_text())
    recipe = load_recipe("kimi-k2", ["weights.algorithm=gptq", "calibration.samples=512", "calibration.length=2048"])
    cost = calibration_cost(config, recipe, available=12 << 30)
    assert cost.scratch == 512 * 2048 * 7168 * 4 * 4, "two runs, the tapped inputs, the routed sum"
    assert 10 << 30 < cost.memory < 32 << 30
    assert "more memory than is free" in "".join(cost.lines())
    assert len(replace(cost, available=64 << 30).lines()) == 1


def test_operations_follow_the_recipe() -> None:
    """Four layers of Kimi K2 with 128 samples of 512 tokens: most of it is what GPTQ does to 1,152 experts."""
    config = json.loads((CONFIGS / "kimi_k2_instruct.json").read_text()) | {"num_hidden_layers": 4}

    def of(*options: str) -> float:
        return operations(config, load_recipe("kimi-k2", ["weights.algorithm=gptq", *options])).total

    everything = operations(config, load_recipe("kimi-k2", ["weights.algorithm=gptq"]))
    assert everything.gptq > everything.forward
    assert of("calibration.passes=0") < of()
    assert of("calibration.error_aware=false") < of()
    assert of("calibration.samples=256") > of()
    assert operations(config, load_recipe("kimi-k2", ["weights.algorithm=awq"])).gptq == 0


def test_seconds_are_measured_or_said_to_be_few(tmp_path: Path) -> None:
    """A small model's calibration may be half a minute on two processors: nobody is left without a word about time."""
    checkpoint = open_checkpoint(build("kimi", tmp_path / "src").folder)
    shown = {}
    for samples in (4, 512):
        recipe = recipe_for("kimi", "weights.algorithm=gptq", f"calibration.samples={samples}")
        plan = make_plan(checkpoint, recipe, calibration="0" * 64)
        cost = timed(calibration_cost(checkpoint.config, recipe, available=64 << 30), checkpoint, plan)
        shown[samples] = (cost.seconds, cost.lines()[0])
    assert shown[4][0] is None
    assert shown[4][1].endswith("seconds of work: less than it takes to measure how many")
    assert (shown[512][0] or 0) > 0
    assert shown[512][1].endswith("here (from rates measured now)")


@pytest.mark.parametrize("family", ["kimi", "glm4", "glm5", "deepseek_v32", "qwen3_moe"])
def test_every_family_has_a_cost(family: str, tmp_path: Path) -> None:
    source = build(family, tmp_path / "src")
    cost = calibration_cost(source.config, recipe_for(family, "weights.algorithm=gptq"), available=1)
    assert cost.memory > PROCESS_BYTES
    assert min(cost.operations.forward, cost.operations.moments, cost.operations.gptq) > 0
