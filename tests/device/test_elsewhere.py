"""Calibrated conversions on a second device (`elsewhere`): nothing is mixed, nothing falls back to a CPU loop, and the
output is the CPU's but for what sums in another order change."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from moepress.convert.run import convert
from moepress.formats.int4 import unpack_int4
from moepress.verify.run import verify
from tests.device.elsewhere import DEVICE, Elsewhere
from tests.pressing import press, recipe_for
from tests.tiny_checkpoints import build

SMALL = ("calibration.samples=4", "calibration.length=48")


def press_elsewhere(source: Path, out: Path, family: str, *options: str) -> Elsewhere:
    with Elsewhere() as device:
        convert(source, out, recipe_for(family, *options), device=DEVICE)
    return device


def codes(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors = load_file(path)
        for name, packed in tensors.items():
            if name.endswith("_packed"):
                columns = int(tensors[name.replace("_packed", "_shape")][1])
                found[name] = unpack_int4(packed, columns)
    return found


def devices(folder: Path) -> set[str]:
    receipts = [json.loads(path.read_text()) for path in (folder / ".moepress" / "receipts").glob("*.json")]
    return {w["device"] for receipt in receipts for w in receipt["weights"].values() if "device" in w}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("kimi", ("weights.algorithm=gptq",)),
        ("kimi", ("weights.algorithm=awq+gptq", "weights.awq.norm=true", "calibration.hessian=layer")),
        ("glm5", ("weights.algorithm=awq",)),
        ("qwen3_moe", ("weights.algorithm=gptq", "calibration.router_weighted=true", "calibration.hessian=expert")),
    ],
)
def test_a_conversion_elsewhere_is_the_one_here(family: str, options: tuple[str, ...], tmp_path: Path) -> None:
    source = build(family, tmp_path / "src")
    press(source.folder, tmp_path / "here", family, *options, *SMALL)
    device = press_elsewhere(source.folder, tmp_path / "there", family, *options, *SMALL)
    assert verify(tmp_path / "there", source.folder).problems == ()
    assert device.counts["aten::mm"] + device.counts["aten::addmm_"] > 100
    here, there = codes(tmp_path / "here"), codes(tmp_path / "there")
    assert here.keys() == there.keys()
    same = [float((here[name] == there[name]).float().mean()) for name in here]
    assert min(same) > 0.9
    assert sum(same) / len(same) > 0.985
    assert devices(tmp_path / "here") == {"cpu"}
    assert devices(tmp_path / "there") == {DEVICE}
