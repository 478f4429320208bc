"""Calibrated conversions on a second device (`elsewhere`): nothing is mixed, nothing falls back to a CPU loop, and the
output is the CPU's but for what sums in another order change."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from moepress.convert.plan import make_plan
from moepress.convert.run import convert
from moepress.convert.units import Pool, run_unit
from moepress.formats.checkpoint import open_checkpoint
from moepress.formats.int4 import unpack_int4
from moepress.formats.reader import TensorReader
from moepress.quantize.grid import Grid
from moepress.quantize.rtn import rtn
from moepress.verify.run import verify
from tests.device.elsewhere import DEVICE, Elsewhere
from tests.pressing import press, recipe_for, shard_bytes
from tests.tiny_checkpoints import build

SMALL = ("calibration.samples=4", "calibration.length=48", "calibration.passes=1")
FLOAT32 = "calibration.precision=float32"
"""A device has no mixed products, so the processor is asked for none either."""


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


# One pass, few layers: every operation goes through Python here.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("kimi", ("weights.algorithm=gptq", "weights.scale=max")),
        (
            "kimi",
            ("weights.algorithm=awq+gptq", "weights.scale=max", "weights.awq.norm=true", "calibration.hessian=layer"),
        ),
        (
            "glm5",
            (
                "weights.algorithm=gptq",
                "weights.scale=max",
                "calibration.router_weighted=true",
            ),
        ),
    ],
)
def test_a_conversion_elsewhere_is_the_one_here(family: str, options: tuple[str, ...], tmp_path: Path) -> None:
    source = build(family, tmp_path / "src", mtp=0, layers=2)
    press(source.folder, tmp_path / "here", family, *options, *SMALL, FLOAT32)
    device = press_elsewhere(source.folder, tmp_path / "there", family, *options, *SMALL, FLOAT32)
    assert verify(tmp_path / "there", source.folder).problems == ()
    assert device.counts["aten::mm"] + device.counts["aten::addmm_"] > 50
    here, there = codes(tmp_path / "here"), codes(tmp_path / "there")
    assert here.keys() == there.keys()
    same = [float((here[name] == there[name]).float().mean()) for name in here]
    assert min(same) > 0.9
    assert sum(same) / len(same) > 0.985
    assert devices(tmp_path / "here") == {"cpu"}
    assert devices(tmp_path / "there") == {DEVICE}


@pytest.mark.slow
def test_bfloat16_runs_elsewhere(tmp_path: Path) -> None:
    """Attention takes torch's plain form on this device, which rounds to BF16 at other places: the codes are near, no more."""
    source = build("kimi", tmp_path / "src", mtp=0, layers=2)
    options = ("weights.algorithm=gptq", "weights.scale=max", "calibration.precision=bfloat16", *SMALL)
    here = press(source.folder, tmp_path / "here", "kimi", *options).report["quantized"]["relative_error_mean"]
    press_elsewhere(source.folder, tmp_path / "there", "kimi", *options)
    assert verify(tmp_path / "there", source.folder).problems == ()
    there = json.loads((tmp_path / "there" / "moepress_report.json").read_text())["quantized"]["relative_error_mean"]
    assert there == pytest.approx(here, rel=0.02)


def test_searched_scales_elsewhere_are_those_here() -> None:
    weight = torch.randn(6, 64, generator=torch.Generator().manual_seed(0)) * 0.02
    weight[2] = torch.randint(-7, 8, (64,), generator=torch.Generator().manual_seed(1)) * 0.03125  # on a grid already
    with Elsewhere():
        there = rtn(weight.to(DEVICE), Grid(4, 32), scale="mse")
        found, scales = there.codes.cpu(), there.scales.cpu()
    here = rtn(weight, Grid(4, 32), scale="mse")
    assert torch.equal(found, here.codes)
    assert torch.equal(scales, here.scales)


class InThisThread(Pool):
    """The device belongs to the thread that entered it, so pieces are pressed in that one."""

    def in_order(self, work: Any, items: Iterable[Any]) -> Iterator[tuple[Any, Any]]:
        yield from ((item, work(item)) for item in items)


@pytest.mark.parametrize(
    ("published", "overrides"),
    [
        ("fp8_block", ()),
        ("fp8_block", ("weights.scale=mse", "weights.group_size=128")),
        ("bf16", ("weights.signed_scales=true",)),
    ],
)
def test_rounding_elsewhere_gives_the_shards_of_rounding_here(
    published: str, overrides: tuple[str, ...], tmp_path: Path
) -> None:
    source = build("kimi", tmp_path / "src", published=published, mtp=0, layers=2)
    checkpoint = open_checkpoint(source.folder)
    recipe = recipe_for("kimi", *overrides)
    here = press(source.folder, tmp_path / "here", "kimi", *overrides).plan
    plan = make_plan(checkpoint, recipe)
    (tmp_path / "there").mkdir()
    records = {}
    with TensorReader(checkpoint) as reader, InThisThread(1) as pool, Elsewhere() as device:
        for shard in plan.shards:
            receipt = run_unit(shard, plan, reader, tmp_path / "there", pool, lambda _: None, DEVICE)
            records |= receipt["weights"]
    assert device.counts["aten::div"] + device.counts["aten::amax"] > 20
    finished = shard_bytes(tmp_path / "here")
    assert shard_bytes(tmp_path / "there") == {shard.name: finished[shard.name] for shard in plan.shards}
    assert here.key == plan.key
    rounded = {name: record for name, record in records.items() if record["action"] == "quantize"}
    assert {record["device"] for record in rounded.values()} == {DEVICE}
    for path in (tmp_path / "here" / ".moepress" / "receipts").glob("*.json"):
        for name, record in json.loads(path.read_text())["weights"].items():
            assert records[name]["source_xxh3"] == record["source_xxh3"]
            if name in rounded:
                assert record["device"] == "cpu"
                assert rounded[name]["relative_error"] == pytest.approx(record["relative_error"], rel=1e-6)


def test_the_device_refuses_what_cuda_refuses() -> None:
    with Elsewhere() as device:
        x = torch.ones(3, 4, device=DEVICE)
        with pytest.raises(RuntimeError, match="on one device"):
            x + torch.ones(3, 4)
        with pytest.raises(TypeError, match="numpy"):
            x.numpy()
        with pytest.raises(RuntimeError):
            x.data_ptr()
        assert (x + torch.tensor(2.0)).sum().item() == 36
        assert x[torch.tensor([0, 2])].shape == (2, 4)
    assert device.counts["aten::add"] == 1
