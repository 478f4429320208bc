"""AWQ behind the norm: nothing changes before rounding, loud channels lose less after it, and every change is on record."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from moepress.convert.calibrated.norm_smoothing import scales_between
from moepress.convert.plan import make_plan, pressed_specs
from moepress.convert.run import convert
from moepress.errors import RecipeError
from moepress.formats.checkpoint import open_checkpoint
from moepress.formats.sizes import checkpoint_bytes
from moepress.recipe import load_recipe
from moepress.verify.run import verify
from tests.cases.rewritten import rewrite_tensors, tensors_of
from tests.pressing import StopAfter, press, recipe_for, shard_bytes
from tests.tiny_checkpoints import TinyCheckpoint, build

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
sys.path[:0] = [str(EXAMPLES), str(EXAMPLES / "tiny_kimi")]

NORM = "post_attention_layernorm.weight"
SMALL = ("calibration.samples=4", "calibration.length=48", "output.shard_size=1MB")
SMOOTHED = ("weights.algorithm=awq+gptq", "weights.awq.norm=true", *SMALL)
LOUD, HOW_LOUD = slice(0, None, 32), 16.0


def loud(family: str, folder: Path) -> TinyCheckpoint:
    """A tiny checkpoint whose norms before the experts have a few loud channels."""

    def edit(tensors: dict[str, torch.Tensor]) -> None:
        for name in tensors:
            if name.endswith(NORM):
                tensors[name] = tensors[name].clone()
                tensors[name][LOUD] *= HOW_LOUD

    source = build(family, folder)
    rewrite_tensors(source, edit)
    return source


def rescaled(out: Path) -> dict[str, dict[str, object]]:
    found: dict[str, dict[str, object]] = {}
    for path in (out / ".moepress" / "receipts").glob("*.json"):
        weights = json.loads(path.read_text())["weights"]
        found |= {name: record for name, record in weights.items() if record["action"] == "rescale"}
    return found


@pytest.mark.slow
@pytest.mark.parametrize("family", ["kimi", "glm4", "glm5", "qwen3_moe"])
def test_every_reader_of_the_norm_is_rescaled_and_verified(family: str, tmp_path: Path) -> None:
    """AW-03: norm, router, shared expert (FP8 in blocks, in rows, or none) and experts, of MTP layers too."""
    source = loud(family, tmp_path / "src")
    result = press(source.folder, tmp_path / "out", family, *SMOOTHED)
    assert verify(tmp_path / "out", source.folder).problems == ()
    records = rescaled(tmp_path / "out")
    layers = {name.split(".")[2] for name in records}
    for layer in layers:
        mine = sorted(name.split(".", 3)[3] for name in records if name.split(".")[2] == layer)
        shared = ["mlp.shared_experts.gate_proj.weight", "mlp.shared_experts.up_proj.weight"]
        assert mine == ["mlp.gate.weight", *([] if family == "qwen3_moe" else shared), NORM]
    assert len(layers) == len({d.identity.layer for d in result.plan.decisions.values() if d.action == "quantize"})
    assert max(record["awq_norm_alpha"] for record in records.values()) > 0  # type: ignore[type-var]
    assert min(record["awq_norm_gain"] for record in records.values()) < 1  # type: ignore[type-var]
    said = sum(count for reason, count in result.report["kept"].items() if "weights.awq.norm" in reason)
    assert said == len(records) + sum("beside gate" in d.reason for d in result.plan.decisions.values())


@pytest.mark.parametrize("family", ["kimi", "glm5", "qwen3_moe"])
def test_sizes_from_the_configuration_alone_count_what_becomes_bf16(family: str, tmp_path: Path) -> None:
    source = build(family, tmp_path / "src")
    predicted, planned = [], []
    for norm in ("true", "false"):
        recipe = recipe_for(family, "weights.algorithm=awq", f"weights.awq.norm={norm}")
        predicted.append(checkpoint_bytes(pressed_specs(source.config, recipe)))
        planned.append(make_plan(open_checkpoint(source.folder), recipe).output_bytes)
    assert predicted[0] - predicted[1] == planned[0] - planned[1]
    assert (planned[0] > planned[1]) == (family == "kimi"), "the others have BF16 ones already, or none"


@pytest.mark.slow
def test_resumed_between_layers_the_bytes_are_those_of_one_run(tmp_path: Path) -> None:
    source = loud("kimi", tmp_path / "src")
    press(source.folder, tmp_path / "whole", "kimi", *SMOOTHED)
    with pytest.raises(KeyboardInterrupt):
        press(source.folder, tmp_path / "out", "kimi", *SMOOTHED, watcher=StopAfter(3))
    press(source.folder, tmp_path / "out", "kimi", *SMOOTHED)
    assert shard_bytes(tmp_path / "out") == shard_bytes(tmp_path / "whole")


@pytest.mark.slow
@pytest.mark.parametrize("victim", [NORM, "mlp.gate.weight"])
def test_verify_finds_a_factor_that_is_not_the_norms(victim: str, tmp_path: Path) -> None:
    source = loud("kimi", tmp_path / "src")
    press(source.folder, tmp_path / "out", "kimi", *SMOOTHED)
    name = next(name for name in rescaled(tmp_path / "out") if name.endswith(victim))
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    path = tmp_path / "out" / index["weight_map"][name]
    header = int.from_bytes(path.read_bytes()[:8], "little")
    entry = json.loads(path.read_bytes()[8 : 8 + header])[name]
    with path.open("r+b") as file:  # the last value of the tensor: its sign and exponent
        file.seek(8 + header + entry["data_offsets"][1] - 2)
        file.write(b"\x55\x3f")
    assert any(name in problem for problem in verify(tmp_path / "out", source.folder).problems)


def test_awq_of_nothing_is_refused() -> None:
    with pytest.raises(RecipeError, match=r"awq\.up_down and awq\.norm are off"):
        load_recipe("kimi-k2", ["weights.algorithm=awq", "weights.awq.up_down=false"])


@pytest.fixture(scope="module")
def loud_kimi(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The trained tiny Kimi in BF16, the same function to the last bit, with loud channels before its experts."""
    import export

    folder: Path = tmp_path_factory.mktemp("loud") / "model"
    shutil.copytree(export.MASTER, folder)
    state = export.load_master_state_dict()
    sparse = {name.split(".")[2] for name in state if name.endswith("mlp.gate.weight")}
    for name in state:
        parts = name.split(".")
        if len(parts) < 4 or parts[2] not in sparse:
            continue
        if name.endswith(NORM):
            state[name][LOUD] *= HOW_LOUD
        elif parts[3] == "mlp" and parts[-2] in ("gate", "gate_proj", "up_proj") and state[name].ndim == 2:
            state[name][:, LOUD] /= HOW_LOUD
    export.write_safetensors(folder / "model.safetensors", state)
    return folder


def converted(source: Path, out: Path, *overrides: str) -> Path:
    options = ["serving.tensor_parallel=1", f"calibration.text={EXAMPLES / 'tiny_kimi' / 'calibration.txt'}"]
    options += ["calibration.samples=32", "calibration.length=256", "weights.group_size=128"]
    convert(source, out, load_recipe("kimi-k2-bf16", [*options, *overrides]))
    assert verify(out, source).problems == ()
    return out


@pytest.mark.slow
@pytest.mark.oracle
def test_before_rounding_the_smoothed_model_is_the_source_and_after_it_loses_less(
    loud_kimi: Path, tmp_path: Path
) -> None:
    """transformers' logits: KL below 1e-6 before quantization; with loud channels less than half of rounding's after it."""
    import judge

    source = judge.load_source()
    state = load_file(loud_kimi / "model.safetensors")
    missing, unexpected = judge.load_per_expert(source, state)
    assert not missing
    assert not unexpected
    windows = judge.heldout_windows(8192)

    out = converted(loud_kimi, tmp_path / "awq", "weights.algorithm=awq", "weights.awq.norm=true")
    written = tensors_of(out)
    smoothed = {name: written.get(name, tensor).float() for name, tensor in state.items()}
    changed = 0
    for name, tensor in state.items():
        if ".mlp.experts." in name and not name.endswith("down_proj.weight"):
            norm = f"{name.partition('.mlp.')[0]}.{NORM}"
            factors = scales_between(state[norm].float(), written[norm].float())
            smoothed[name] = tensor.float() * factors
            changed += int((factors != 1).any())
    assert changed, "there was something to smooth"
    before_rounding = judge.load_source()
    judge.load_per_expert(before_rounding, smoothed)
    assert judge.judge(source, before_rounding, windows).kl < 1e-6

    def kl(folder: Path) -> float:
        return judge.judge(source, judge.load_pressed(folder), windows).kl

    rounded = kl(converted(loud_kimi, tmp_path / "rtn", "weights.algorithm=rtn"))
    inside = kl(converted(loud_kimi, tmp_path / "inside", "weights.algorithm=awq"))
    both = kl(out)
    print(f"KL x1e-3: rounding {rounded * 1e3:.3f}, up_down {inside * 1e3:.3f}, and norm {both * 1e3:.3f}")
    assert both < 0.5 * rounded
    assert both < 0.5 * inside
