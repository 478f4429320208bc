"""CL, T5-05, HB-11: one plan, the same in every process; a run cut short leaves nothing half done."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from moepress.errors import ConvertError
from tests.cases.rewritten import rewrite_json
from tests.pressing import press, shard_bytes
from tests.tiny_checkpoints import TinyCheckpoint, build

ROOT = Path(__file__).parents[2]

PLAN = """
import sys
from moepress.convert.plan import make_plan
from moepress.formats.checkpoint import open_checkpoint
from moepress.recipe import load_recipe
plan = make_plan(open_checkpoint(sys.argv[1]), load_recipe("kimi-k2", ["serving.tensor_parallel=1", *sys.argv[2:]]))
print(plan.key, *(tensor.name for shard in plan.shards for tensor in shard.tensors))
"""

PRESS = """
import sys
from pathlib import Path
from moepress.errors import ConvertError
from tests.pressing import press
try:
    press(Path(sys.argv[1]), Path(sys.argv[2]), "kimi", threads=1)
except ConvertError as error:
    sys.exit(str(error))
"""


def planned(source: Path, seed: str, *overrides: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", PLAN, str(source), *overrides],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONHASHSEED": seed},
    )
    return done.stdout.split()


def test_processes_agree_on_every_name_and_on_the_key(tiny: Callable[[str], TinyCheckpoint]) -> None:
    """T5-05: whatever order a process keeps its sets in; another recipe is another key."""
    folder = tiny("kimi").folder
    first, second = planned(folder, "1"), planned(folder, "2")
    assert first == second
    assert planned(folder, "1", "weights.group_size=64")[0] != first[0]


def test_a_shard_of_another_plan_is_not_taken_for_finished(tmp_path: Path) -> None:
    """T5-05, CL-04: its receipt carries the key of the plan it was written by."""
    source = build("kimi", tmp_path / "src")
    press(source.folder, tmp_path / "out", "kimi")
    receipt = min((tmp_path / "out" / ".moepress" / "receipts").glob("*.json"))
    rewrite_json(receipt, lambda data: data.update(plan_key="0" * 64))
    with pytest.raises(ConvertError, match="belongs to another plan"):
        press(source.folder, tmp_path / "out", "kimi")


def test_a_disk_that_refuses_in_the_middle_leaves_nothing_half_done(tmp_path: Path) -> None:
    """HB-11: the limit on file size stands for the disk; no temporary file stays, and the same command goes on."""
    source = build("kimi", tmp_path / "src")
    out = tmp_path / "out"

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, 1_000_000))

    done = subprocess.run(
        [sys.executable, "-c", PRESS, str(source.folder), str(out)],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        preexec_fn=limit,
    )
    assert done.returncode == 1
    assert "cannot be written: File too large" in done.stderr
    left = {path.name for path in out.rglob("*") if path.is_file()}
    assert left == {"plan.json"}
    press(source.folder, out, "kimi")
    press(source.folder, tmp_path / "whole", "kimi")
    assert shard_bytes(out) == shard_bytes(tmp_path / "whole")
    assert json.loads((out / "config.json").read_text())["quantization_config"]
