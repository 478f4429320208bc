"""Folded KV scales in SGLang's own pool: the same answers with a 16-bit cache, and far better ones with an FP8 cache.

The pool, its e4m3 cast, names, sharding and the models are SGLang's; kernels are the CPU lab's.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch

from moepress.serving.launch import CPU_LAB
from moepress.serving.load_proof import RECORDER
from tests.pressing import press
from tests.stretched import stretched

pytestmark = [pytest.mark.slow, pytest.mark.oracle]

SMALL = ("calibration.samples=4", "calibration.length=48", "kv_cache.samples=2")
FP8 = ("--kv-cache-dtype", "fp8_e4m3")


@pytest.mark.parametrize("family", ["glm4", "kimi"])
def test_an_fp8_pool_without_scales_is_right_for_folded_weights_alone(
    family: str, sglang_python: Path, tmp_path: Path
) -> None:
    """KV-06: {scales folded, none} × {cache in 16 bits, FP8}; GLM-4 and MLA read no scale from the files."""
    source = stretched(family, tmp_path / "src", mtp=0)
    generator = torch.Generator().manual_seed(5)
    prompts = torch.randint(3, 500, (3, 24), generator=generator).tolist()
    forced = torch.randint(3, 500, (3, 4), generator=generator).tolist()
    jobs = []
    for scales in ("none", "folded"):
        press(source.folder, tmp_path / scales, family, f"kv_cache.scales={scales}", *SMALL)
        for cache in ((), FP8):
            name = f"{scales}-{len(cache)}"
            jobs.append(
                {
                    "model": str(tmp_path / scales),
                    "flags": ["--disable-shared-experts-fusion", *cache],
                    "report": str(tmp_path / f"{name}.report"),
                    "log": str(tmp_path / f"{name}.log"),
                    "prompts": prompts,
                    "forced": forced,
                }
            )
    (tmp_path / "jobs.json").write_text(json.dumps(jobs))
    run = subprocess.run(
        [sglang_python, Path(__file__).with_name("sglang_loads.py"), tmp_path / "jobs.json"],
        env={
            **{name: value for name, value in os.environ.items() if name != "VIRTUAL_ENV"},
            "PYTHONPATH": f"{CPU_LAB}:{RECORDER}",
            "SGLANG_USE_CPU_ENGINE": "1",
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
        },
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    answers = [json.loads(line) for line in run.stdout.splitlines() if line.startswith('{"model"')]
    assert [answer["error"] for answer in answers] == [None] * 4, (tmp_path / "none-2.log").read_text()[-3000:]
    plain, plain_fp8, folded, folded_fp8 = (torch.tensor(answer["logprobs"]).double() for answer in answers)
    assert "float8_e4m3" in (tmp_path / "folded-2.log").read_text()
    error = {"none": _kl(plain, plain_fp8), "folded": _kl(folded, folded_fp8)}
    print(family, "between the two in 16 bits", _kl(plain, folded), "FP8 against 16 bits", error)
    assert _kl(plain, folded) < 1e-3
    assert error["folded"] < 0.5 * error["none"], error


def _kl(truth: torch.Tensor, other: torch.Tensor) -> float:
    """Mean KL divergence in nats, [prompts, steps, vocabulary] of log-probabilities each."""
    return float((truth.exp() * (truth - other)).sum(-1).mean())
