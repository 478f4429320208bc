"""kill -9 at any moment of a calibrated conversion: the same command goes on, and the bytes are those of one run.

One process imports what a conversion needs and forks a child for every run, so that the moments of the kills fall into the
conversion and not into seconds of imports.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.pressing import shard_bytes
from tests.tiny_checkpoints import build

pytestmark = pytest.mark.slow

SEED, KILLS = 20261129, 5

DRIVER = """
import json, os, random, signal, sys, time
from pathlib import Path
import torch
import moepress.convert.calibrated.layers, transformers.models.deepseek_v3.modeling_deepseek_v3
from moepress.convert.run import convert
from tests.pressing import recipe_for

folder, options, seed, kills = json.loads(sys.argv[1])

def run(out, threads, seconds=None):
    child = os.fork()
    if child == 0:
        torch.set_num_threads(threads)
        convert(folder + "/src", Path(folder) / out, recipe_for("kimi", *options), threads=threads)
        os._exit(0)
    if seconds is not None:
        time.sleep(seconds)
        os.kill(child, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return status, len(list((Path(folder) / out / ".moepress" / "receipts").glob("*.json")))

begun = time.monotonic()
runs = [run("whole", 1)]
took = time.monotonic() - begun
moments = random.Random(seed)
runs += [run("out", 1 + kill % 2, moments.uniform(0.02, 0.6) * took) for kill in range(kills)]
runs.append(run("out", 2))
runs.append(run("threads", 2))
print(json.dumps(runs))
"""
OPTIONS = ("weights.algorithm=awq+gptq", "calibration.samples=6", "calibration.length=48", "output.shard_size=1MB")


def test_killed_at_random_moments_and_with_other_threads_the_bytes_are_those_of_one_run(tmp_path: Path) -> None:
    build("kimi", tmp_path / "src", layers=3)
    done = subprocess.run(
        [sys.executable, "-c", DRIVER, json.dumps([str(tmp_path), OPTIONS, SEED, KILLS])],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        env={**os.environ, "OMP_WAIT_POLICY": "passive"},
        cwd=Path(__file__).parents[2],
    )
    whole, *killed, resumed, two_threads = json.loads(done.stdout.splitlines()[-1])
    assert [whole[0], resumed[0], two_threads[0]] == [0, 0, 0]
    assert [status for status, _ in killed].count(-9) >= 1, f"at least one run was cut short: {killed}"
    receipts = [count for _, count in killed]
    assert receipts == sorted(receipts), f"finished shards stay: {receipts}"
    assert shard_bytes(tmp_path / "out") == shard_bytes(tmp_path / "whole")
    assert shard_bytes(tmp_path / "threads") == shard_bytes(tmp_path / "whole")
