"""Conversions that weigh errors by what they do to the model's predictions (`calibration.loss: kl`), end to end."""

from __future__ import annotations

import json
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
CONFIGS = Path(__file__).resolve().parents[1] / "configs"


def records(out: Path) -> dict[str, dict[str, object]]:
    found: dict[str, dict[str, object]] = {}
    for path in (out / ".moepress" / "receipts").glob("*.json"):
        found |= json.loads(path.read_text())["weights"]
    return {name: record for name, record in found.items() if record["action"] == "quantize"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "more"),
    [
        ("kimi", ("weights.algorithm=awq+gptq", "weights.awq.norm=true")),
        ("glm5", ("weights.signed_scales=true", "weights.scale=mse")),
        ("qwen3_moe", ("calibration.hessian=layer",)),
    ],
)
def test_pressed_in_company_of_other_options_and_says_how(family: str, more: tuple[str, ...], tmp_path: Path) -> None:
    source = build(family, tmp_path / "src")
    press(source.folder, tmp_path / "out", family, *SMALL, *more)
    assert verify(tmp_path / "out", source.folder).problems == ()
    body = source.config["num_hidden_layers"]
    for name, record in records(tmp_path / "out").items():
        layer = int(name.split("layers.")[1].split(".")[0])
        assert record.get("weighed_by") == ("kl" if layer < body else None), "an MTP layer's errors have no such price"
    assert not (tmp_path / "out" / ".moepress" / "fisher").exists()


@pytest.mark.slow
def test_stopped_with_other_threads_and_other_blocks_the_bytes_are_the_same(tmp_path: Path) -> None:
    source = build("kimi", tmp_path / "src")
    options = (*SMALL, "output.shard_size=1MB")
    press(source.folder, tmp_path / "whole", "kimi", *options, threads=1)
    fishers = tmp_path / "out" / ".moepress" / "fisher"
    for units in (1, 2):
        with pytest.raises(KeyboardInterrupt):
            press(source.folder, tmp_path / "out", "kimi", *options, threads=2, watcher=StopAfter(units))
        for path in sorted(fishers.glob("*.npy"))[:units]:
            path.unlink()  # lost: measured again
    press(source.folder, tmp_path / "out", "kimi", *options, threads=2)
    assert shard_bytes(tmp_path / "out") == shard_bytes(tmp_path / "whole")
    press(source.folder, tmp_path / "one", "kimi", *options, "calibration.memory=1MB")  # one expert a block
    whole, one = shard_bytes(tmp_path / "whole"), shard_bytes(tmp_path / "one")
    weights = [name for name in whole if name.endswith(".safetensors")]
    assert weights
    assert [one[name] for name in weights] == [whole[name] for name in weights]


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
    assert 2 < other.gptq / one.gptq < 4
    assert other.decoded == 2 * one.decoded
    memory = 1 << 40
    kept = calibration_cost(config, weighed, available=memory)
    assert kept.scratch == 128 * 512 * 7168 * 4 * 66, "the inputs of 61 layers, and five arrays at work"
    assert kept.memory > calibration_cost(config, plain, available=memory).memory
    rounded = load_recipe("kimi-k2", ["weights.algorithm=awq", "calibration.loss=kl"])
    assert not rounded.weighs_predictions
