"""Conversions that weigh errors by what they do to the model's predictions (`calibration.loss: kl`), end to end."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from moepress.convert.calibrated.fishers import LayerFishers
from moepress.convert.forecast.calibration_cost import calibration_cost, label_draws, operations
from moepress.convert.journal import Journal
from moepress.convert.plan import make_plan
from moepress.errors import ConvertError
from moepress.formats.checkpoint import open_checkpoint
from moepress.recipe import load_recipe
from moepress.verify.run import verify
from tests.pressing import StopAfter, press, recipe_for, shard_bytes
from tests.tiny_checkpoints import build

SMALL = ("weights.algorithm=gptq", "calibration.loss=kl", "calibration.samples=4", "calibration.length=48")
SHARDS = "output.shard_size=1MB"
CONFIGS = Path(__file__).resolve().parents[1] / "configs"


def records(out: Path) -> dict[str, dict[str, object]]:
    found: dict[str, dict[str, object]] = {}
    for path in (out / ".moepress" / "receipts").glob("*.json"):
        found |= json.loads(path.read_text())["weights"]
    return {name: record for name, record in found.items() if record["action"] == "quantize"}


@pytest.mark.slow
@pytest.mark.parametrize("family", ["kimi", "glm4", "glm5", "deepseek_v32", "qwen3_moe"])
def test_every_family_is_pressed_and_says_how(family: str, tmp_path: Path) -> None:
    source = build(family, tmp_path / "src")
    press(source.folder, tmp_path / "out", family, *SMALL, SHARDS)
    assert verify(tmp_path / "out", source.folder).problems == ()
    body = source.config["num_hidden_layers"]
    for name, record in records(tmp_path / "out").items():
        layer = int(name.split("layers.")[1].split(".")[0])
        assert record.get("weighed_by") == ("kl" if layer < body else None), "an MTP layer's errors have no such price"
    assert not (tmp_path / "out" / ".moepress" / "fisher").exists()


@pytest.mark.slow
def test_stopped_and_resumed_with_other_threads_the_bytes_are_those_of_one_run(tmp_path: Path) -> None:
    source = build("kimi", tmp_path / "src")
    press(source.folder, tmp_path / "whole", "kimi", *SMALL, SHARDS, threads=1)
    fishers = tmp_path / "out" / ".moepress" / "fisher"
    for units in (1, 2):
        with pytest.raises(KeyboardInterrupt):
            press(source.folder, tmp_path / "out", "kimi", *SMALL, SHARDS, threads=2, watcher=StopAfter(units))
        for path in sorted(fishers.glob("*.npy"))[:units]:
            path.unlink()  # lost: measured again
    press(source.folder, tmp_path / "out", "kimi", *SMALL, SHARDS, threads=2)
    assert shard_bytes(tmp_path / "out") == shard_bytes(tmp_path / "whole")


@pytest.mark.slow
@pytest.mark.parametrize(
    "more", [("calibration.hessian=layer",), ("weights.algorithm=awq+gptq", "weights.awq.norm=true")]
)
def test_together_with_other_options(more: tuple[str, ...], tmp_path: Path) -> None:
    source = build("kimi", tmp_path / "src")
    press(source.folder, tmp_path / "out", "kimi", *SMALL, *more)
    assert verify(tmp_path / "out", source.folder).problems == ()


def test_blocks_of_one_expert_give_the_bytes_of_one_block(tmp_path: Path) -> None:
    source = build("kimi", tmp_path / "src")
    press(source.folder, tmp_path / "one", "kimi", *SMALL)
    press(source.folder, tmp_path / "many", "kimi", *SMALL, "calibration.memory=1MB")
    one, many = shard_bytes(tmp_path / "one"), shard_bytes(tmp_path / "many")
    weights = [name for name in one if name.endswith(".safetensors")]
    assert weights
    assert [one[name] for name in weights] == [many[name] for name in weights]


def test_a_damaged_file_says_which(tmp_path: Path) -> None:
    source = build("kimi", tmp_path / "src")
    journal = Journal(tmp_path / "out", make_plan(open_checkpoint(source.folder), recipe_for("kimi", *SMALL)))
    fishers = LayerFishers(journal)
    assert fishers.missing({1, 2}) == {1, 2}
    (journal.state / "fisher").mkdir(parents=True)
    (journal.state / "fisher" / "layer-00001.npy").write_bytes(b"half a file")
    assert fishers.missing({1, 2}) == {2}
    with pytest.raises(ConvertError, match="cannot be read"):
        fishers.read(1)


def test_the_plan_counts_the_backward_pass() -> None:
    config = json.loads((CONFIGS / "kimi_k2_instruct.json").read_text())
    plain = load_recipe("kimi-k2", ["weights.algorithm=gptq"])
    weighed = load_recipe("kimi-k2", ["weights.algorithm=gptq", "calibration.loss=kl"])
    assert label_draws(weighed, 7168) == 1
    assert label_draws(load_recipe("kimi-k2", ["calibration.samples=8", "calibration.length=64"]), 256) == 4
    one, other = operations(config, plain), operations(config, weighed)
    assert 2 < other.forward / one.forward < 3.5
    assert 1.3 < other.gptq / one.gptq < 2.5
    assert other.decoded == 2 * one.decoded
    memory = 1 << 40
    kept = calibration_cost(config, weighed, available=memory)
    assert kept.scratch == 128 * 512 * 7168 * 4 * 66, "the inputs of 61 layers, and five arrays at work"
    assert kept.memory > calibration_cost(config, plain, available=memory).memory
    ignored = replace(one)
    assert (
        operations(config, load_recipe("kimi-k2", ["weights.algorithm=awq", "calibration.loss=kl"])).forward
        <= ignored.forward
    )
