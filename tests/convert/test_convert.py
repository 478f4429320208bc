"""Whole conversions of tiny checkpoints of every family: what comes out, byte for byte and number for number."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32
from safetensors.torch import load_file, safe_open

from moepress.convert.run import convert
from moepress.errors import CheckpointError, ConvertError, FormatError, PlanRefused, QuantizeError
from moepress.recipe import load_recipe
from moepress.verify.run import verify
from tests.pressing import RECIPES, StopAfter, press, recipe_for, shard_bytes
from tests.tiny_checkpoints import build


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    out: dict[str, torch.Tensor] = {}
    for shard in sorted(folder.glob("*.safetensors")):
        out |= load_file(shard)
    return out


def dequantized(output: dict[str, torch.Tensor], module: str) -> torch.Tensor:
    shape = torch.Size(output[f"{module}.weight_shape"].tolist())
    codes = unpack_from_int32(output[f"{module}.weight_packed"], 4, shape).float()
    scale = output[f"{module}.weight_scale"].float()
    return codes * scale.repeat_interleave(shape[1] // scale.shape[1], 1)


@pytest.mark.parametrize("family", sorted(RECIPES))
def test_every_family_converts_and_verifies(family: str, tmp_path: Path) -> None:
    source = build(family, tmp_path / "src")
    result = press(source.folder, tmp_path / "out", family)
    assert verify(tmp_path / "out", source.folder).problems == ()
    output = tensors(tmp_path / "out")
    for name, truth in source.truth.items():
        module = name.removesuffix(".weight")
        if f"{module}.weight_packed" in output and f"{module}.weight_packed" not in source.tensors:
            error = (dequantized(output, module) - truth).norm() / truth.norm()
            assert error < 0.1, f"{module}: {error}"
    assert set(result.report["fallbacks"]) == set()


def test_experts_that_are_int4_already_are_kept_bit_for_bit(tmp_path: Path) -> None:
    source = build("kimi_k25", tmp_path / "src")
    plan = press(source.folder, tmp_path / "out", "kimi_k25").plan
    assert [warning for warning in plan.warnings if "INT4 already" in warning], "nobody copies them unawares"
    output = tensors(tmp_path / "out")
    assert set(output) == set(source.tensors)
    packed = [name for name in output if name.endswith("weight_packed")]
    assert len(packed) > 20
    for name in packed:
        assert torch.equal(output[name], source.tensors[name]), name


@pytest.mark.parametrize("group_size", [32, 64, 128, -1])
@pytest.mark.parametrize("scale", ["max", "mse"])
def test_groups_and_scales_of_the_recipe_reach_the_file(group_size: int, scale: str, tmp_path: Path) -> None:
    source = build("kimi", tmp_path / "src")
    press(source.folder, tmp_path / "out", "kimi", f"weights.group_size={group_size}", f"weights.scale={scale}")
    output = tensors(tmp_path / "out")
    module = "model.layers.1.mlp.experts.0.gate_proj"
    assert output[f"{module}.weight_scale"].shape == (256, 1 if group_size == -1 else 256 // group_size)
    assert verify(tmp_path / "out", source.folder).problems == ()


def test_searched_scales_are_closer_than_max_scales(tmp_path: Path) -> None:
    """Stated margin: at least 5 % less error on every tiny expert's average."""
    source = build("kimi", tmp_path / "src")
    by_max = press(source.folder, tmp_path / "max", "kimi", "weights.scale=max").report["quantized"]
    by_mse = press(source.folder, tmp_path / "mse", "kimi", "weights.scale=mse").report["quantized"]
    assert by_mse["relative_error_mean"] < 0.95 * by_max["relative_error_mean"]


def test_dtypes_pass_through_exactly(tmp_path: Path) -> None:
    """Router bias stays F32 (as BF16 its values collapse), norms BF16, kept FP8 with its scale (FP-13)."""
    source = build("kimi", tmp_path / "src")
    press(source.folder, tmp_path / "out", "kimi")
    output = tensors(tmp_path / "out")
    assert output["model.layers.1.mlp.gate.e_score_correction_bias"].dtype == torch.float32
    assert output["model.layers.1.mlp.gate.weight"].dtype == torch.bfloat16
    for name, tensor in output.items():
        if tensor.dtype == torch.float8_e4m3fn:
            assert {f"{name}_scale_inv", f"{name}_scale"} & set(output), f"{name} lost its scale"


def test_fp8_beside_bf16_experts_keeps_its_scale_when_mtp_is_not_quantized(tmp_path: Path) -> None:
    """FP-13: a layer left in the source's FP8 is written with its scales, and described as FP8."""
    source = build("kimi", tmp_path / "src")
    press(source.folder, tmp_path / "out", "kimi", "mtp.experts=bf16", "mtp.rest=bf16")
    output = tensors(tmp_path / "out")
    assert output["model.layers.3.mlp.experts.0.gate_proj.weight"].dtype == torch.bfloat16
    assert verify(tmp_path / "out", source.folder).problems == ()


def test_nothing_of_the_sources_quantization_survives(tmp_path: Path) -> None:
    """CF-10(b): no second quantization_config, at the top or in a text part."""
    for family in ("kimi", "glm4", "glm5", "qwen3_moe"):
        source = build(family, tmp_path / family)
        press(source.folder, tmp_path / f"{family}-out", family)
        config = json.loads((tmp_path / f"{family}-out" / "config.json").read_text())
        assert config["quantization_config"]["quant_method"] == "compressed-tensors"
        assert "quantization_config" not in config.get("text_config", {})
        assert {k: v for k, v in config.items() if k != "quantization_config"} == {
            k: v for k, v in source.config.items() if k != "quantization_config"
        }


def test_index_is_right_whatever_the_sources_index_said(tmp_path: Path) -> None:
    """IX-04, IX-08: our shards, our total_size (tensor bytes), total_parameters counts logical weights."""
    source = build("kimi", tmp_path / "src")
    result = press(source.folder, tmp_path / "out", "kimi")
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    output = tensors(tmp_path / "out")
    assert index["metadata"]["total_size"] == sum(t.numel() * t.element_size() for t in output.values())
    assert index["metadata"]["total_parameters"] == sum(t.numel() for t in source.truth.values())
    on_disk = {path.name for path in (tmp_path / "out").glob("*.safetensors")}
    assert set(index["weight_map"].values()) == on_disk == {shard.name for shard in result.plan.shards}
    assert all(len(name.split("-")[1]) == 5 and len(name.split("-")[3].split(".")[0]) == 5 for name in on_disk)


def test_every_side_file_travels(tmp_path: Path) -> None:
    """SC-01, SC-04: tokenizer, template, .py and what it imports, licences; byte for byte, subfolders too."""
    source = build("kimi", tmp_path / "src")
    (source.folder / "tiktoken.model").write_bytes(b"IQ== 0\n")
    (source.folder / "tokenization_x.py").write_text("from .encoding_x import f\n")
    (source.folder / "encoding_x.py").write_text("def f(): ...\n")
    (source.folder / "figures").mkdir()
    (source.folder / "figures" / "logo.svg").write_text("<svg/>")
    press(source.folder, tmp_path / "out", "kimi")
    for path in source.folder.rglob("*"):
        if (
            path.is_file()
            and path.suffix != ".safetensors"
            and path.name not in ("config.json", "model.safetensors.index.json")
        ):
            assert (tmp_path / "out" / path.relative_to(source.folder)).read_bytes() == path.read_bytes()


def test_many_small_shards_hold_the_same_tensors_as_few(tmp_path: Path) -> None:
    source = build("kimi", tmp_path / "src")
    press(source.folder, tmp_path / "one", "kimi")
    press(source.folder, tmp_path / "many", "kimi", "output.shard_size=1MB")
    one, many = tensors(tmp_path / "one"), tensors(tmp_path / "many")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > len(list((tmp_path / "one").glob("*.safetensors")))
    assert one.keys() == many.keys()
    assert all(torch.equal(one[n].view(torch.uint8), many[n].view(torch.uint8)) for n in one)


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_bytes_do_not_depend_on_threads(threads: int, tmp_path: Path) -> None:
    source = build("kimi", tmp_path / "src")
    press(source.folder, tmp_path / "a", "kimi", threads=3)
    press(source.folder, tmp_path / "b", "kimi", threads=threads)
    assert shard_bytes(tmp_path / "a") == shard_bytes(tmp_path / "b")


def test_a_zero_size_tensor_is_not_dropped(tmp_path: Path) -> None:
    """ST-04: an unknown empty tensor is refused by name, never passed over."""
    source = build("kimi", tmp_path / "src", extras={"model.layers.1.dummy": torch.empty(0, 16, dtype=torch.bfloat16)})
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.dummy"):
        press(source.folder, tmp_path / "out", "kimi")


def test_tied_and_equal_tensors_keep_both_names(tmp_path: Path) -> None:
    """ST-14: names in = names out; a head that equals the embedding is still written."""
    source = build("kimi", tmp_path / "src")
    press(source.folder, tmp_path / "out", "kimi")
    output = tensors(tmp_path / "out")
    assert {"model.embed_tokens.weight", "lm_head.weight"} <= set(output)


class TestRefusals:
    """Stopped before any work, in one clear sentence, with nothing left behind."""

    def refused(self, source: Path, out: Path, family: str, *overrides: str) -> str:
        with pytest.raises((CheckpointError, PlanRefused, FormatError)) as error:
            press(source, out, family, *overrides)
        assert not out.exists() or not any(out.iterdir()), "something was written"
        return str(error.value)

    def test_mtp_announced_and_absent(self, tmp_path: Path) -> None:
        """CF-07: the layer that other tools lose without a word."""
        source = build("kimi", tmp_path / "src", mtp=0)
        config = json.loads((source.folder / "config.json").read_text())
        config["num_nextn_predict_layers"] = 1
        (source.folder / "config.json").write_text(json.dumps(config))
        text = self.refused(source.folder, tmp_path / "out", "kimi")
        assert "model.layers.3." in text
        assert "missing" in text

    def test_fused_experts_are_seen_and_named(self, tmp_path: Path) -> None:
        """T5-01: 3-D experts match no 'Linear'; other tools left them at 16 bits."""
        source = build("kimi", tmp_path / "src", published="bf16", fused_experts=True)
        assert "fused" in self.refused(source.folder, tmp_path / "out", "kimi")

    def test_a_recipe_for_another_family(self, tmp_path: Path) -> None:
        """AC-03: targets that match nothing must not give an unquantized copy."""
        source = build("kimi", tmp_path / "src")
        assert "glm4_moe" in self.refused(source.folder, tmp_path / "out", "glm4")

    def test_a_missing_expert(self, tmp_path: Path) -> None:
        """IX-02: config.json announces more than the files hold."""
        source = build("kimi", tmp_path / "src")
        config = json.loads((source.folder / "config.json").read_text())
        config["n_routed_experts"] = 9
        (source.folder / "config.json").write_text(json.dumps(config))
        assert "experts.8" in self.refused(source.folder, tmp_path / "out", "kimi")

    def test_groups_that_do_not_divide_a_ranks_share(self, tmp_path: Path) -> None:
        """I4-01: servers floor-divide in silence."""
        source = build("kimi", tmp_path / "src")
        text = self.refused(
            source.folder, tmp_path / "out", "kimi", "serving.tensor_parallel=4", "weights.group_size=128"
        )
        assert "0.5 groups" in text

    def test_output_is_the_source(self, tmp_path: Path) -> None:
        """CL-06: also through a link, and inside each other."""
        source = build("kimi", tmp_path / "src")
        before = shard_bytes(source.folder)
        (tmp_path / "link").symlink_to(source.folder)
        for out in (source.folder, tmp_path / "link", source.folder / "pressed", tmp_path):
            with pytest.raises(PlanRefused, match="same folder"):
                press(source.folder, out, "kimi")
        assert shard_bytes(source.folder) == before

    def test_output_folder_with_something_else(self, tmp_path: Path) -> None:
        source = build("kimi", tmp_path / "src")
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "thesis.tex").write_text("…")
        with pytest.raises(PlanRefused, match=r"thesis\.tex"):
            press(source.folder, tmp_path / "out", "kimi")

    def test_same_folder_other_recipe(self, tmp_path: Path) -> None:
        """CL-03: a second pass with another setting must not overwrite a finished result; says what differs."""
        source = build("kimi", tmp_path / "src")
        press(source.folder, tmp_path / "out", "kimi")
        before = shard_bytes(tmp_path / "out")
        with pytest.raises(PlanRefused, match=r"weights\.group_size 32 → 64"):
            press(source.folder, tmp_path / "out", "kimi", "weights.group_size=64")
        assert shard_bytes(tmp_path / "out") == before

    def test_a_stale_file_in_a_reused_folder(self, tmp_path: Path) -> None:
        source = build("kimi", tmp_path / "src")
        press(source.folder, tmp_path / "out", "kimi")
        (tmp_path / "out" / "model-00009-of-00009.safetensors").write_bytes(b"old")
        with pytest.raises(PlanRefused, match="model-00009-of-00009"):
            press(source.folder, tmp_path / "out", "kimi")

    def test_fp8_that_the_layout_cannot_hold(self, tmp_path: Path) -> None:
        source = build("kimi", tmp_path / "src")
        text = self.refused(source.folder, tmp_path / "out", "kimi", "serving.layout=bf16_rest")
        assert "rest.attention=bf16" in text


class TestDamagedSource:
    """Wrong numbers in the source: named, and no shard of them stays."""

    def damage(self, tmp_path: Path, name: str, change: object) -> Path:
        source = build("kimi", tmp_path / "src", shards=1)
        path = source.folder / "model.safetensors"
        with safe_open(path, "pt") as file:
            start = file.get_slice(name).get_shape()
        assert start
        import struct

        raw = bytearray(path.read_bytes())
        (length,) = struct.unpack("<Q", raw[:8])
        first, last = json.loads(raw[8 : 8 + length])[name]["data_offsets"]
        change(raw, 8 + length + first, 8 + length + last)  # type: ignore[operator]
        path.write_bytes(raw)
        return source.folder

    @pytest.mark.parametrize("code", [0x7F, 0xFF])
    @pytest.mark.parametrize(
        "name", ["model.layers.1.mlp.experts.3.up_proj.weight", "model.layers.0.self_attn.o_proj.weight"]
    )
    def test_nan_codes_are_refused_by_name(self, code: int, name: str, tmp_path: Path) -> None:
        """FP-10: other tools turn a NaN weight into the integer 0 without a word; kept FP8 is looked at too."""

        def change(raw: bytearray, first: int, last: int) -> None:
            raw[first + 777] = code

        source = self.damage(tmp_path, name, change)
        with pytest.raises((FormatError, QuantizeError)) as error:
            press(source, tmp_path / "out", "kimi")
        assert name in str(error.value)
        assert not list((tmp_path / "out").glob(".*moepress-tmp"))

    @pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
    def test_scales_that_are_not_finite_are_refused_by_name(self, value: float, tmp_path: Path) -> None:
        import struct

        name = "model.layers.1.mlp.experts.3.up_proj.weight_scale_inv"

        def change(raw: bytearray, first: int, last: int) -> None:
            raw[first : first + 4] = struct.pack("<f", value)

        source = self.damage(tmp_path, name, change)
        with pytest.raises(FormatError, match=r"experts\.3\.up_proj"):
            press(source, tmp_path / "out", "kimi")


class TestResume:
    """Stopped anywhere, the same command gives the bytes of a run that was never stopped."""

    @pytest.mark.parametrize("units", [1, 2, 3, 4])
    def test_after_an_interrupt(self, units: int, tmp_path: Path) -> None:
        source = build("kimi", tmp_path / "src")
        press(source.folder, tmp_path / "whole", "kimi")
        with pytest.raises(KeyboardInterrupt):
            press(source.folder, tmp_path / "out", "kimi", watcher=StopAfter(units))
        assert not (tmp_path / "out" / "config.json").exists()
        assert not (tmp_path / "out" / "model.safetensors.index.json").exists()
        result = press(source.folder, tmp_path / "out", "kimi")
        assert result.resumed == units
        assert shard_bytes(tmp_path / "out") == shard_bytes(tmp_path / "whole")

    def test_a_finished_run_given_again_does_nothing(self, tmp_path: Path) -> None:
        source = build("kimi", tmp_path / "src")
        press(source.folder, tmp_path / "out", "kimi")
        times = {p.name: p.stat().st_mtime_ns for p in (tmp_path / "out").glob("*.safetensors")}
        assert press(source.folder, tmp_path / "out", "kimi").resumed == len(times)
        assert times == {p.name: p.stat().st_mtime_ns for p in (tmp_path / "out").glob("*.safetensors")}

    def test_a_source_that_changed_is_refused(self, tmp_path: Path) -> None:
        """CL-04: resume against other weights would mix two models."""
        source = build("kimi", tmp_path / "src")
        with pytest.raises(KeyboardInterrupt):
            press(source.folder, tmp_path / "out", "kimi", watcher=StopAfter(1))
        shutil.rmtree(source.folder)
        build("kimi", source.folder, shards=3)
        with pytest.raises(PlanRefused, match="source_fingerprint"):
            press(source.folder, tmp_path / "out", "kimi")

    def test_a_shard_that_vanished_after_its_receipt(self, tmp_path: Path) -> None:
        source = build("kimi", tmp_path / "src")
        press(source.folder, tmp_path / "out", "kimi")
        next((tmp_path / "out").glob("*.safetensors")).unlink()
        with pytest.raises(ConvertError, match="is missing"):
            press(source.folder, tmp_path / "out", "kimi")

    def test_two_runs_on_one_folder(self, tmp_path: Path) -> None:
        """CL-06: the second is refused while the first lives, and takes over when it is dead."""
        source = build("kimi", tmp_path / "src")
        state = tmp_path / "out" / ".moepress"
        state.mkdir(parents=True)
        sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        started = Path(f"/proc/{sleeper.pid}/stat").read_text().rpartition(")")[2].split()[19]
        import socket

        lock = {"host": socket.gethostname(), "pid": sleeper.pid, "started": started}
        (state / "run.lock").write_text(json.dumps(lock))
        try:
            with pytest.raises(ConvertError, match=f"process {sleeper.pid}"):
                press(source.folder, tmp_path / "out", "kimi")
        finally:
            sleeper.kill()
            sleeper.wait()
        press(source.folder, tmp_path / "out", "kimi")
        (state / "run.lock").write_text(json.dumps({**lock, "host": "another-host"}))
        with pytest.raises(ConvertError, match="another-host"):
            press(source.folder, tmp_path / "out", "kimi")


@pytest.mark.slow
def test_kill_9_at_random_moments_then_resume_gives_the_same_bytes(tmp_path: Path) -> None:
    """A process that is killed without a chance to clean up, up to eight times, each time a little later in its run."""
    source = build("kimi", tmp_path / "src", layers=6, experts=16)
    press(source.folder, tmp_path / "whole", "kimi", "output.shard_size=1MB")
    script = (
        "import sys; from pathlib import Path; from tests.pressing import press\n"
        "print('go', flush=True)\n"
        f"press(Path({str(source.folder)!r}), Path({str(tmp_path / 'out')!r}), 'kimi', 'output.shard_size=1MB', threads=1)\n"
    )
    killed = 0
    moments = iter([0.02 * step for step in range(1, 60)])
    while killed < 8:
        process = subprocess.Popen(
            [sys.executable, "-c", script], cwd=Path(__file__).parents[2], stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        process.stdout.readline()
        try:
            process.wait(next(moments))
        except subprocess.TimeoutExpired:
            os.kill(process.pid, signal.SIGKILL)
            killed += 1
        if process.wait() == 0:
            break
    press(source.folder, tmp_path / "out", "kimi", "output.shard_size=1MB")
    assert killed >= 3
    assert shard_bytes(tmp_path / "out") == shard_bytes(tmp_path / "whole")
    assert verify(tmp_path / "out", source.folder).problems == ()


def test_a_full_disk_is_found_before_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """HB-11: the plan knows the size; a disk that is too small is refused at once."""
    source = build("kimi", tmp_path / "src")

    def nearly_full(folder: object) -> object:
        return shutil._ntuple_diskusage(10**9, 10**9 - 5000, 5000)  # type: ignore[attr-defined]

    monkeypatch.setattr("moepress.convert.forecast.estimate.shutil.disk_usage", nearly_full)
    with pytest.raises(PlanRefused, match="5,000 are free"):
        press(source.folder, tmp_path / "out", "kimi")


def test_the_recipe_of_a_conversion_is_in_its_report(tmp_path: Path) -> None:
    source = build("kimi", tmp_path / "src")
    report = convert(source.folder, tmp_path / "out", recipe_for("kimi")).report
    assert report["recipe"] == json.loads(recipe_for("kimi").canonical_json())
    assert load_recipe("kimi-k2").name == report["recipe"]["name"]
