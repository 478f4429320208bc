"""I4: experts come out as the server unpacks them, and what it cannot unpack is not carried to it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32

from moepress.errors import PlanRefused
from tests.cases.rewritten import rewrite_json, rewrite_tensors, tensors_of
from tests.pressing import press
from tests.tiny_checkpoints import build


def packed_names(tensors: dict[str, torch.Tensor]) -> list[str]:
    return [name for name in tensors if name.endswith(".weight_packed")]


def test_experts_with_zero_points_are_not_carried_to_a_symmetric_server(tmp_path: Path) -> None:
    """I4-06, I4-07: read and understood, and refused with the server's name, before any work."""
    source = build("kimi_k25", tmp_path / "src")

    def add_zero_points(tensors: dict[str, torch.Tensor]) -> None:
        for name in packed_names(tensors):
            rows, groups = tensors[name.replace("packed", "scale")].shape
            zero_points = torch.zeros(-(-rows // 8), groups, dtype=torch.int32)
            tensors[name.replace("packed", "zero_point")] = zero_points

    def declare(config: dict[str, Any]) -> None:
        groups = config["text_config"]["quantization_config"]["config_groups"]
        groups["group_0"]["weights"]["symmetric"] = False

    rewrite_tensors(source, add_zero_points)
    rewrite_json(source.folder / "config.json", declare)
    with pytest.raises(PlanRefused, match=r"sglang.*\n.*48 INT4 weights have zero points"):
        press(source.folder, tmp_path / "out", "kimi_k25")
    assert not (tmp_path / "out").exists()


def test_experts_with_an_activation_order_are_not_carried(tmp_path: Path) -> None:
    """I4-08: g_idx on every expert, actorder null in the config: the server would leave it uninitialised."""
    source = build("kimi_k25", tmp_path / "src")

    def add_g_idx(tensors: dict[str, torch.Tensor]) -> None:
        for name in packed_names(tensors):
            columns = tensors[name].shape[1] * 8
            tensors[name.replace("packed", "g_idx")] = torch.arange(columns, dtype=torch.int32) // 32

    rewrite_tensors(source, add_g_idx)
    with pytest.raises(PlanRefused, match="48 INT4 weights have an activation order"):
        press(source.folder, tmp_path / "out", "kimi_k25")


def test_our_experts_have_no_activation_order_no_zero_points_and_their_true_shape(tmp_path: Path) -> None:
    """I4-04, I4-08: exactly packed, scale and shape; the shape is int64 and that of the source."""
    source = build("kimi", tmp_path / "src")
    press(source.folder, tmp_path / "out", "kimi")
    output = tensors_of(tmp_path / "out")
    for name in packed_names(output):
        module = name.removesuffix(".weight_packed")
        assert {n for n in output if n.startswith(f"{module}.")} == {
            f"{module}.weight_{part}" for part in ("packed", "scale", "shape")
        }
        shape = output[f"{module}.weight_shape"]
        assert shape.dtype == torch.int64
        assert tuple(shape.tolist()) == source.truth[f"{module}.weight"].shape
    weights = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["config_groups"]
    assert {group["weights"]["actorder"] for group in weights.values() if group["weights"]["type"] == "int"} == {None}


def test_a_source_on_the_int4_grid_is_pressed_without_error(tmp_path: Path) -> None:
    """I4-10: trained on [-7, 7] times a step: the largest magnitude over 7 is found, and every value comes back."""
    source = build("kimi", tmp_path / "src", published="bf16")
    random = torch.Generator().manual_seed(0)
    name = "model.layers.1.mlp.experts.3.up_proj"
    codes = torch.randint(-7, 8, source.truth[f"{name}.weight"].shape, generator=random)
    codes[:, ::32] = 7
    rewrite_tensors(source, lambda t: t.update({f"{name}.weight": (codes * 2.0**-7).bfloat16()}))
    press(source.folder, tmp_path / "out", "kimi")
    output = tensors_of(tmp_path / "out")
    unpacked = unpack_from_int32(output[f"{name}.weight_packed"], 4, codes.shape)
    assert torch.equal(unpacked.to(codes.dtype), codes)
    assert bool((output[f"{name}.weight_scale"] == 2.0**-7).all())


def test_one_expert_end_to_end_against_the_dense_reference(tmp_path: Path) -> None:
    """I4-11: gate is negative and large, up small: served in the right places the expert agrees, swapped it does not."""
    source = build("kimi", tmp_path / "src")
    press(source.folder, tmp_path / "out", "kimi")
    output = tensors_of(tmp_path / "out")
    expert = "model.layers.1.mlp.experts.3"

    def served(projection: str) -> torch.Tensor:
        module = f"{expert}.{projection}"
        shape = torch.Size(output[f"{module}.weight_shape"].tolist())
        scale = output[f"{module}.weight_scale"].float()
        codes = unpack_from_int32(output[f"{module}.weight_packed"], 4, shape).float()
        return codes * scale.repeat_interleave(shape[1] // scale.shape[1], 1)

    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))

    def run(gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        return (torch.nn.functional.silu(x @ gate.T) * (x @ up.T)) @ down.T

    gate, up, down = (source.truth[f"{expert}.{p}_proj.weight"] for p in ("gate", "up", "down"))
    truth = run(gate, up, down)
    right = run(served("gate_proj"), served("up_proj"), served("down_proj"))
    swapped = run(served("up_proj"), served("gate_proj"), served("down_proj"))
    assert (right - truth).norm() < 0.25 * truth.norm()
    assert (swapped - truth).norm() > 0.5 * truth.norm()
