"""FP: the same numbers come out whatever the publisher's FP8 scales are called and stored as."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from moepress.errors import CheckpointError, PlanRefused
from moepress.verify.run import verify
from tests.cases.rewritten import rewrite_json, rewrite_tensors, same_bits, tensors_of
from tests.pressing import press, shard_bytes
from tests.tiny_checkpoints import build

EXPERT = "model.layers.1.mlp.experts.3.up_proj"
KEPT = "model.layers.1.self_attn.kv_a_proj_with_mqa"


def test_scales_under_another_name_give_the_same_bytes(tmp_path: Path) -> None:
    """FP-04: all scales called '.scale': found, and the output is that of the usual names, byte for byte."""
    usual = build("kimi", tmp_path / "usual")
    other = build("kimi", tmp_path / "other")

    def rename(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if name.endswith(".weight_scale_inv")]:
            tensors[name.replace(".weight_scale_inv", ".scale")] = tensors.pop(name)

    rewrite_tensors(other, rename)
    press(usual.folder, tmp_path / "a", "kimi")
    press(other.folder, tmp_path / "b", "kimi")
    a, b = tensors_of(tmp_path / "a"), tensors_of(tmp_path / "b")
    assert a.keys() == b.keys()
    assert all(same_bits(a[name], b[name]) for name in a)


def test_one_scale_gone_stops_the_conversion_by_name(tmp_path: Path) -> None:
    """FP-04: FP8 without its scale is never read as plain numbers; the names that were tried are listed."""
    source = build("kimi", tmp_path / "src")
    rewrite_tensors(source, lambda tensors: tensors.pop(f"{EXPERT}.weight_scale_inv"))
    with pytest.raises(CheckpointError) as error:
        press(source.folder, tmp_path / "out", "kimi")
    assert f"{EXPERT}.weight" in str(error.value)
    assert "tried .weight_scale_inv, .weight_scale, .scale" in str(error.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("scale_dtype", ["BF16", "UE8M0_F32", "F8_E8M0", "U8"])
def test_powers_of_two_are_decoded_whatever_they_are_stored_as(scale_dtype: str, tmp_path: Path) -> None:
    """FP-05, FP-06: kept linears get float scales of the same value, experts are close to the truth."""
    source = build("kimi", tmp_path / "src", scale_dtype=scale_dtype)
    press(source.folder, tmp_path / "out", "kimi")
    assert verify(tmp_path / "out", source.folder).problems == ()
    output = tensors_of(tmp_path / "out")
    scale = output[f"{KEPT}.weight_scale_inv"]
    assert scale.dtype == (torch.bfloat16 if scale_dtype == "BF16" else torch.float32)
    rows, columns = output[f"{KEPT}.weight"].shape
    spread = scale.float().repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
    torch.testing.assert_close(output[f"{KEPT}.weight"].float() * spread, source.truth[f"{KEPT}.weight"])


def test_exponent_bytes_for_experts_beside_float_scales_for_the_rest(tmp_path: Path) -> None:
    """FP-06: each scale is read by its own dtype; the experts are those of a checkpoint with float scales throughout."""
    floats = build("kimi", tmp_path / "floats", scale_dtype="UE8M0_F32")
    mixed = build("kimi", tmp_path / "mixed", scale_dtype="UE8M0_F32")

    def as_exponents(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if ".mlp.experts." in name and name.endswith("_scale_inv")]:
            tensors[name] = (torch.log2(tensors[name]) + 127).to(torch.uint8).view(torch.float8_e8m0fnu)

    rewrite_tensors(mixed, as_exponents)
    press(floats.folder, tmp_path / "a", "kimi")
    press(mixed.folder, tmp_path / "b", "kimi")
    a, b = tensors_of(tmp_path / "a"), tensors_of(tmp_path / "b")
    assert a.keys() == b.keys()
    assert all(same_bits(a[name], b[name]) for name in a)


def test_scale_bytes_without_a_declared_format_are_refused(tmp_path: Path) -> None:
    """FP-05: U8 scales and no scale_fmt: 120 is 2^-7 or 120, and nobody may guess."""
    source = build("kimi", tmp_path / "src", scale_dtype="U8")
    rewrite_json(source.folder / "config.json", lambda config: config["quantization_config"].pop("scale_fmt"))
    with pytest.raises(CheckpointError, match="declares no scale_fmt"):
        press(source.folder, tmp_path / "out", "kimi")


def test_rows_and_scales_of_attention_are_never_moved_apart(tmp_path: Path) -> None:
    """FP-12: kept q, k and v have the source's rows and the source's scales, both or neither."""
    source = build("glm4", tmp_path / "src")
    press(source.folder, tmp_path / "out", "glm4")
    output = tensors_of(tmp_path / "out")
    for projection in ("q_proj", "k_proj", "v_proj"):
        for part in ("weight", "weight_scale", "bias"):
            name = f"model.layers.1.self_attn.{projection}.{part}"
            assert same_bits(output[name], source.tensors[name]), name


def test_a_fused_qkv_is_refused_by_name(tmp_path: Path) -> None:
    """FP-12: rows grouped per head with block scales: an order that is not known here is not guessed."""
    source = build("glm4", tmp_path / "src")

    def fuse(tensors: dict[str, torch.Tensor]) -> None:
        attention = "model.layers.1.self_attn"
        for part in ("weight", "weight_scale", "bias"):
            rows = [tensors.pop(f"{attention}.{projection}_proj.{part}") for projection in "qkv"]
            raw = [tensor.view(torch.uint8) if part == "weight" else tensor for tensor in rows]
            tensors[f"{attention}.qkv_proj.{part}"] = torch.cat(raw).view(rows[0].dtype)

    rewrite_tensors(source, fuse)
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.self_attn\.qkv_proj"):
        press(source.folder, tmp_path / "out", "glm4")


@pytest.mark.parametrize("overrides", [(), ("mtp.experts=bf16", "mtp.rest=bf16"), ("rest.attention=bf16",)], ids=str)
def test_no_fp8_without_a_scale_and_no_scale_without_its_weight(overrides: tuple[str, ...], tmp_path: Path) -> None:
    """FP-13: whatever the recipe leaves as it is, codes and scales stay together or are both gone."""
    source = build("kimi", tmp_path / "src")
    press(source.folder, tmp_path / "out", "kimi", *overrides)
    output = tensors_of(tmp_path / "out")
    fp8 = {name for name, tensor in output.items() if tensor.dtype == torch.float8_e4m3fn}
    scales = {name for name in output if name.endswith((".weight_scale", ".weight_scale_inv"))}
    belongs_to = {name.removesuffix("_inv").removesuffix("_scale") for name in scales}
    packed = {name.removesuffix("_packed") for name in output if name.endswith(".weight_packed")}
    assert belongs_to == fp8 | packed
    assert fp8


def test_an_mtp_layer_left_in_fp8_beside_int4_experts_is_refused_before_work(tmp_path: Path) -> None:
    """FP-13: no server reads such a mixture; the plan says so, where other tools wrote codes without scales."""
    source = build("kimi", tmp_path / "src")
    with pytest.raises(PlanRefused, match=r"stored as fp8 and read as int4: model\.layers\.3\.mlp\.experts\.0"):
        press(source.folder, tmp_path / "out", "kimi", "mtp.experts=source")
    assert not (tmp_path / "out").exists()


def test_a_packed_kv_b_proj_is_refused(tmp_path: Path) -> None:
    """FP-16, LD-01: MLA absorbs kv_b_proj; a source that has it packed does not serve, and neither would its copy."""
    from tests.tiny_checkpoints import storage

    source = build("kimi_k25", tmp_path / "src")
    name = "language_model.model.layers.1.self_attn.kv_b_proj.weight"

    def pack(tensors: dict[str, torch.Tensor]) -> None:
        parts, _ = storage.int4(tensors.pop(name).float(), torch.int32)
        tensors.update({name.replace("weight", part): tensor for part, tensor in parts.items()})

    rewrite_tensors(source, pack)
    with pytest.raises(PlanRefused, match=r"1 INT4 weights are no routed experts.*kv_b_proj"):
        press(source.folder, tmp_path / "out", "kimi_k25")
    assert not shard_bytes(tmp_path / "out")
