"""verify as a judge: a good output passes, and each kind of damage is found and named."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from moepress.verify.run import verify
from tests.pressing import press
from tests.tiny_checkpoints import build

EXPERT = "model.layers.1.mlp.experts.2.up_proj"


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("good")
    source = build("kimi", folder / "src")
    press(source.folder, folder / "out", "kimi")
    return folder / "src", folder / "out"


@pytest.fixture
def pair(good: tuple[Path, Path], tmp_path: Path) -> tuple[Path, Path]:
    source, out = good
    shutil.copytree(out, tmp_path / "out")
    return source, tmp_path / "out"


def change(out: Path, name: str, edit: Callable[[dict[str, torch.Tensor]], None], *, honest: bool = True) -> None:
    """Edits the shard that holds ``name``. ``honest``: checksums follow, so only the numbers can give it away."""
    import hashlib

    index = json.loads((out / "model.safetensors.index.json").read_text())
    shard = out / index["weight_map"][name]
    state = load_file(shard)
    edit(state)
    save_file(state, shard, metadata={"format": "pt"})
    if honest:
        digest = hashlib.sha256(shard.read_bytes()).hexdigest()
        for path in (out / "moepress_report.json", out / ".moepress" / "receipts" / f"{shard.name}.json"):
            data = json.loads(path.read_text())
            if "shards" in data:
                data["shards"][shard.name] = digest
            else:
                data["sha256"] = digest
            path.write_text(json.dumps(data))


def found(pair: tuple[Path, Path]) -> str:
    result = verify(pair[1], pair[0])
    assert result.problems, "the damage was not seen"
    return "\n".join(result.problems)


def test_a_good_output_has_no_problems(good: tuple[Path, Path]) -> None:
    result = verify(good[1], good[0])
    assert result.problems == ()
    assert result.tensors > 200
    assert any("72 quantized" in line for line in result.checked)


def test_one_wrong_code_of_one_expert(pair: tuple[Path, Path]) -> None:
    """One of 65,536 codes moved by one step, checksums made to agree: the relative error hardly moves, the code is off."""

    def edit(state: dict[str, torch.Tensor]) -> None:
        state[f"{EXPERT}.weight_packed"][5, 7] ^= 1

    change(pair[1], f"{EXPERT}.weight_packed", edit)
    assert "1 of 65536 codes" in found(pair)


def test_a_changed_scale(pair: tuple[Path, Path]) -> None:
    def edit(state: dict[str, torch.Tensor]) -> None:
        state[f"{EXPERT}.weight_scale"][3, 1] *= 1.5

    change(pair[1], f"{EXPERT}.weight_scale", edit)
    assert EXPERT in found(pair)


def test_gate_and_up_swapped(pair: tuple[Path, Path]) -> None:
    """I4-11: equal shapes, valid tensors, wrong model."""

    def edit(state: dict[str, torch.Tensor]) -> None:
        for part in ("weight_packed", "weight_scale"):
            gate = EXPERT.replace("up_proj", "gate_proj")
            state[f"{gate}.{part}"], state[f"{EXPERT}.{part}"] = state[f"{EXPERT}.{part}"], state[f"{gate}.{part}"]

    change(pair[1], f"{EXPERT}.weight_packed", edit)
    assert "relative error" in found(pair)


def test_two_experts_exchanged(pair: tuple[Path, Path]) -> None:
    def edit(state: dict[str, torch.Tensor]) -> None:
        other = EXPERT.replace("experts.2", "experts.5")
        for part in ("weight_packed", "weight_scale"):
            state[f"{other}.{part}"], state[f"{EXPERT}.{part}"] = state[f"{EXPERT}.{part}"], state[f"{other}.{part}"]

    change(pair[1], f"{EXPERT}.weight_packed", edit)
    assert "relative error" in found(pair)


@pytest.mark.parametrize("shape", [[256, 264], [264, 256], [0, 0]])
def test_a_wrong_weight_shape(pair: tuple[Path, Path], shape: list[int]) -> None:
    """I4-04: the true width cannot be told from the packed one."""

    def edit(state: dict[str, torch.Tensor]) -> None:
        state[f"{EXPERT}.weight_shape"] = torch.tensor(shape)

    change(pair[1], f"{EXPERT}.weight_shape", edit)
    assert "weight_shape" in found(pair)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("model.norm.weight", "a norm"),
        ("model.layers.1.mlp.gate.weight", "a router"),
        ("model.layers.1.mlp.gate.e_score_correction_bias", "a router bias"),
        ("model.layers.0.self_attn.o_proj.weight", "kept FP8 codes"),
        ("model.layers.0.self_attn.kv_a_proj_with_mqa.weight_scale_inv", "a kept, ragged scale"),
        ("lm_head.weight", "the head"),
    ],
)
def test_one_changed_byte_of_a_kept_tensor(pair: tuple[Path, Path], name: str, why: str) -> None:
    def edit(state: dict[str, torch.Tensor]) -> None:
        raw = state[name].view(-1).view(torch.uint8).clone()
        raw[0] ^= 1
        state[name] = raw.view(state[name].dtype).view(state[name].shape)

    change(pair[1], name, edit)
    assert name in found(pair), why


def test_a_bias_rounded_to_bf16_and_back(pair: tuple[Path, Path]) -> None:
    name = "model.layers.1.mlp.gate.e_score_correction_bias"

    def edit(state: dict[str, torch.Tensor]) -> None:
        state[name] = state[name].bfloat16().float()

    change(pair[1], name, edit)
    assert name in found(pair)


def test_a_tensor_that_went_missing(pair: tuple[Path, Path]) -> None:
    """IX-02: also when the index forgets it too."""
    name = f"{EXPERT}.weight_scale"

    def edit(state: dict[str, torch.Tensor]) -> None:
        del state[name]

    change(pair[1], name, edit)
    path = pair[1] / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    del index["weight_map"][name]
    path.write_text(json.dumps(index))
    text = found(pair)
    assert f"{name}: missing" in text
    assert "experts have no up_proj.weight_scale" in text


def test_a_tensor_nobody_knows(pair: tuple[Path, Path]) -> None:
    def edit(state: dict[str, torch.Tensor]) -> None:
        state["model.layers.1.mlp.experts.2.up_proj.weight_g_idx"] = torch.arange(256, dtype=torch.int32)

    change(pair[1], f"{EXPERT}.weight_packed", edit)
    assert "weight_g_idx" in found(pair)


def test_a_missing_shard(pair: tuple[Path, Path]) -> None:
    """IX-01: a server would start with random weights."""
    (pair[1] / "model-00003-of-00004.safetensors").unlink()
    assert "model-00003-of-00004.safetensors: named by the index, not in the folder" in found(pair)


def test_a_stale_shard(pair: tuple[Path, Path]) -> None:
    shutil.copy(pair[1] / "model-00001-of-00004.safetensors", pair[1] / "model-00005-of-00005.safetensors")
    assert "not named by the index" in found(pair)


def test_a_cut_shard(pair: tuple[Path, Path]) -> None:
    path = pair[1] / "model-00002-of-00004.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    assert "model-00002-of-00004.safetensors" in found(pair)


def test_damage_that_headers_do_not_show(pair: tuple[Path, Path]) -> None:
    """HB-02: last bytes overwritten; size and header are right."""
    path = pair[1] / "model-00002-of-00004.safetensors"
    raw = bytearray(path.read_bytes())
    raw[-100:] = b"\0" * 100
    path.write_bytes(raw)
    assert "SHA-256" in found(pair)


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("format", "mixed-precision", "pack-quantized"),
        ("quant_method", "fp8", "compressed-tensors"),
        ("ignore", [], "described with|describes it with"),
        ("config_groups", {}, "describes it with 16"),
    ],
)
def test_a_config_that_does_not_say_what_the_files_hold(
    pair: tuple[Path, Path], field: str, value: object, says: str
) -> None:
    import re

    path = pair[1] / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"][field] = value
    if field == "ignore":
        config["quantization_config"]["config_groups"]["group_0"]["targets"] = ["Linear"]
    path.write_text(json.dumps(config))
    assert re.search(says, found(pair))


def test_an_mtp_layer_that_the_config_forgets(pair: tuple[Path, Path]) -> None:
    path = pair[1] / "config.json"
    config = json.loads(path.read_text())
    config["num_nextn_predict_layers"] = 0
    path.write_text(json.dumps(config))
    assert "config.json" in found(pair)


def test_a_changed_field_of_the_configuration(pair: tuple[Path, Path]) -> None:
    path = pair[1] / "config.json"
    config = json.loads(path.read_text())
    config["routed_scaling_factor"] = 1.0
    path.write_text(json.dumps(config))
    assert "routed_scaling_factor" in found(pair)


@pytest.mark.parametrize("name", ["tokenizer.json", "chat_template.jinja"])
def test_side_files_changed_or_gone(pair: tuple[Path, Path], name: str) -> None:
    (pair[1] / name).write_text("{}")
    assert f"{name}: differs" in found(pair)
    (pair[1] / name).unlink()
    assert f"{name}: a side file of the source that the output lacks" in found(pair)


def test_a_foreign_file(pair: tuple[Path, Path]) -> None:
    (pair[1] / "pytorch_model.bin").write_bytes(b"x")
    assert "pytorch_model.bin" in found(pair)


def test_a_wrong_total_size(pair: tuple[Path, Path]) -> None:
    path = pair[1] / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["metadata"]["total_size"] += 1
    path.write_text(json.dumps(index))
    assert "total_size" in found(pair)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json", "moepress_report.json"])
def test_broken_or_missing_json(pair: tuple[Path, Path], name: str) -> None:
    (pair[1] / name).write_text("{")
    assert name in found(pair)
    (pair[1] / name).unlink()
    assert f"{name}: is missing" in found(pair)


def test_without_a_source_the_output_is_checked_against_itself(pair: tuple[Path, Path]) -> None:
    assert verify(pair[1]).problems == ()
    (pair[1] / "model-00003-of-00004.safetensors").unlink()
    assert verify(pair[1]).problems
