"""Every tensor of a checkpoint ends in exactly one weight, or the error says which do not and why."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from moepress.errors import CheckpointError
from moepress.formats.checkpoint import Checkpoint, open_checkpoint
from moepress.formats.storage import StoredWeight, resolve_storage
from tests.formats.one_shard import FP8_BLOCK, int4_config, one_shard
from tests.tiny_checkpoints import FAMILIES, build

FP8 = torch.float8_e4m3fn
UE8M0 = {**FP8_BLOCK, "scale_fmt": "ue8m0"}


def fp8(rows: int, columns: int) -> torch.Tensor:
    return torch.zeros(rows, columns).to(FP8)


def packed(rows: int = 4, columns: int = 64, group: int = 32, **extra: torch.Tensor) -> dict[str, torch.Tensor]:
    groups = 1 if group == -1 else columns // group
    return {
        "weight_packed": torch.zeros(rows, -(-columns // 8), dtype=torch.int32),
        "weight_scale": torch.ones(rows, groups, dtype=torch.bfloat16),
        "weight_shape": torch.tensor([rows, columns]),
        **extra,
    }


def under(module: str, parts: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {f"{module}.{suffix}": tensor for suffix, tensor in parts.items()}


def refused(checkpoint: Checkpoint) -> str:
    with pytest.raises(CheckpointError) as caught:
        resolve_storage(checkpoint)
    assert caught.value.where == checkpoint.location
    return caught.value.what


def census(checkpoint: Checkpoint, weights: dict[str, StoredWeight]) -> None:
    """Each tensor is a part of one weight, and of one only."""
    parts = Counter(part.name for weight in weights.values() for part in weight.parts.values())
    assert set(parts) == set(checkpoint.tensors)
    assert set(parts.values()) == {1}
    assert all(name == weight.name for name, weight in weights.items())


@pytest.mark.parametrize(
    ("family", "variant"),
    [
        *((family, {}) for family in sorted(FAMILIES)),
        ("kimi", {"scales_apart": True, "shards": 3}),
        ("kimi", {"scale_dtype": "BF16", "prefix": "model.language_model."}),
        ("glm4", {"published": "int4"}),
        ("qwen3_moe", {"published": "bf16", "fused_experts": True}),
    ],
    ids=str,
)
def test_every_tensor_of_every_family_belongs_to_one_weight(
    family: str, variant: dict[str, Any], tmp_path: Path
) -> None:
    """FP-14: scales are consumed by their weights, in whichever shard they lie."""
    tiny = build(family, tmp_path, experts=2, **variant)
    checkpoint = open_checkpoint(tmp_path)
    weights = resolve_storage(checkpoint)
    census(checkpoint, weights)
    assert {name: weight.shape for name, weight in weights.items()} == {
        name: tuple(value.shape) for name, value in tiny.truth.items()
    }


def test_ragged_edges_get_the_declared_block(tmp_path: Path) -> None:
    """FP-01: 576 rows are 5 scale rows, 192 are 2."""
    tensors = {
        "a.weight": fp8(576, 256),
        "a.weight_scale_inv": torch.ones(5, 2),
        "b.weight": fp8(192, 257),
        "b.weight_scale_inv": torch.ones(2, 3),
    }
    weights = resolve_storage(one_shard(tmp_path, tensors, FP8_BLOCK))
    assert [weights[name].kind for name in ("a.weight", "b.weight")] == ["fp8_block"] * 2
    assert weights["a.weight"].block == (128, 128)
    assert weights["a.weight"].module == "a"
    assert weights["a.weight"].nbytes == 576 * 256 + 4 * 5 * 2


def test_scale_of_another_block_size_is_refused(tmp_path: Path) -> None:
    """FP-02: what the scale's shape would suggest does not count."""
    tensors = {"a.weight": fp8(576, 256), "a.weight_scale_inv": torch.ones(9, 4)}
    message = refused(one_shard(tmp_path, tensors, FP8_BLOCK))
    assert "1 × FP8 whose scale has the wrong shape for the declared blocks of 128×128" in message
    assert "a.weight [576, 256] with [9, 4]" in message
    undeclared = {key: value for key, value in FP8_BLOCK.items() if key != "weight_block_size"}
    tensors["a.weight_scale_inv"] = torch.ones(5, 2)
    assert "declares no weight_block_size" in refused(one_shard(tmp_path, tensors, undeclared))


@pytest.mark.parametrize("suffix", ["weight_scale_inv", "weight_scale", "scale"])
def test_scale_is_found_under_each_published_suffix(suffix: str, tmp_path: Path) -> None:
    """FP-04: DeepSeek calls it '.scale' in places."""
    tensors = {"a.weight": fp8(128, 128), f"a.{suffix}": torch.ones(1, 1)}
    weights = resolve_storage(one_shard(tmp_path, tensors, FP8_BLOCK))
    assert weights["a.weight"].parts["scale"].name == f"a.{suffix}"


@pytest.mark.parametrize(
    "scale", [torch.ones(1, 1), torch.ones(1), torch.tensor(1.0), torch.ones(256), torch.ones(256, 1), torch.ones(3, 2)]
)
def test_scale_that_has_not_the_shape_of_the_declared_blocks_is_refused(scale: torch.Tensor, tmp_path: Path) -> None:
    """FP-02: one for all, one per row, transposed: the shape of another layout is no reason to read it as that one."""
    tensors = {"a.weight": fp8(256, 384), "a.weight_scale_inv": scale}
    message = refused(one_shard(tmp_path, tensors, FP8_BLOCK))
    assert f"for the declared blocks of 128×128: a.weight [256, 384] with {list(scale.shape)}" in message


@pytest.mark.parametrize("scale", [torch.ones(1), torch.ones(2), torch.ones(2, 1, 1), torch.ones(2, 256, 1)])
def test_fused_experts_under_declared_blocks_have_block_scales(scale: torch.Tensor, tmp_path: Path) -> None:
    name = "model.layers.1.mlp.experts.gate_up_proj"
    tensors = {name: torch.zeros(2, 256, 384).to(FP8), f"{name}_scale_inv": scale}
    assert "for the declared blocks of 128×128" in refused(one_shard(tmp_path, tensors, FP8_BLOCK, hidden_size=384))


@pytest.mark.parametrize(
    ("strategy", "fits", "other"), [("channel", (96, 1), (1,)), ("channel", (96,), ()), ("tensor", (1,), (96, 1))]
)
def test_scale_of_another_strategy_than_the_declared_one_is_refused(
    strategy: str, fits: tuple[int, ...], other: tuple[int, ...], tmp_path: Path
) -> None:
    weights = {"num_bits": 8, "type": "float", "strategy": strategy, "symmetric": True}
    group = {"targets": ["Linear"], "weights": weights}
    config = {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {"group_0": group}}
    tensors = {"a.weight": fp8(96, 200), "a.weight_scale": torch.ones(fits)}
    assert resolve_storage(one_shard(tmp_path, tensors, config))["a.weight"].kind == f"fp8_{strategy}"
    tensors["a.weight_scale"] = torch.ones(other)
    asked = "row" if strategy == "channel" else "tensor"
    assert f"for the declared one scale per {asked}: a.weight" in refused(one_shard(tmp_path, tensors, config))


def test_fp8_without_a_scale_is_an_error_that_lists_what_was_tried(tmp_path: Path) -> None:
    """FP-04: a bare cast would give values up to 448 where the truth is 2.6."""
    tensors = {f"layers.{i}.weight": fp8(128, 128) for i in range(7)}
    message = refused(one_shard(tmp_path, tensors, FP8_BLOCK))
    assert message.startswith("7 of 7 tensors cannot be read for certain")
    assert "7 × FP8 without a scale (tried .weight_scale_inv, .weight_scale, .scale)" in message
    assert message.count("layers.") == 5
    assert "and 2 more" in message


def test_two_scales_for_one_weight_are_refused(tmp_path: Path) -> None:
    tensors = {"a.weight": fp8(128, 128), "a.weight_scale": torch.ones(1, 1), "a.weight_scale_inv": torch.ones(1, 1)}
    assert "FP8 with more than one scale: a.weight" in refused(one_shard(tmp_path, tensors, FP8_BLOCK))


@pytest.mark.parametrize(
    ("scale", "kind"),
    [
        (torch.ones(96, 1), "fp8_channel"),
        (torch.ones(96), "fp8_channel"),
        (torch.tensor(1.0), "fp8_tensor"),
        (torch.ones(1), "fp8_tensor"),
        (torch.ones(96, 1, dtype=torch.bfloat16), "fp8_channel"),
    ],
)
def test_one_scale_per_channel_or_per_tensor(scale: torch.Tensor, kind: str, tmp_path: Path) -> None:
    """GLM-4.x has one per channel, in a tensor called weight_scale."""
    tensors = {"a.weight": fp8(96, 200), "a.weight_scale": scale, "a.input_scale": torch.tensor(0.5)}
    weight = resolve_storage(one_shard(tmp_path, tensors))["a.weight"]
    assert (weight.kind, weight.block, weight.scale_encoding) == (kind, None, "float")
    assert set(weight.parts) == {"weight", "scale", "input_scale"}


def test_one_block_over_everything_is_a_block_when_one_is_declared(tmp_path: Path) -> None:
    tensors = {"a.weight": fp8(96, 100), "a.weight_scale_inv": torch.ones(1, 1)}
    assert resolve_storage(one_shard(tmp_path, tensors, FP8_BLOCK))["a.weight"].kind == "fp8_block"


def test_e8m0_scales_by_dtype_or_by_declaration(tmp_path: Path) -> None:
    """FP-05, FP-06: bytes are exponents when the dtype or config.json says so; otherwise they are nothing."""
    as_bytes = torch.full((2, 2), 120, dtype=torch.uint8)
    tensors = {"a.weight": fp8(256, 256), "a.weight_scale_inv": as_bytes.view(torch.float8_e8m0fnu)}
    assert resolve_storage(one_shard(tmp_path, tensors, FP8_BLOCK))["a.weight"].scale_encoding == "e8m0"
    tensors["a.weight_scale_inv"] = as_bytes
    assert resolve_storage(one_shard(tmp_path, tensors, UE8M0))["a.weight"].scale_encoding == "e8m0"
    message = refused(one_shard(tmp_path, tensors, FP8_BLOCK))
    assert "FP8 whose scale is bytes, and config.json declares no scale_fmt: a.weight" in message
    tensors["a.weight_scale_inv"] = torch.full((2, 2), 2.0**-7)
    assert resolve_storage(one_shard(tmp_path, tensors, UE8M0))["a.weight"].scale_encoding == "float"


def test_blocks_of_one_row_by_32_columns(tmp_path: Path) -> None:
    """FP-05: 1×32 blocks of bytes."""
    tensors = {"a.weight": fp8(16, 70), "a.scale": torch.full((16, 3), 120, dtype=torch.uint8)}
    weight = resolve_storage(one_shard(tmp_path, tensors, {**UE8M0, "weight_block_size": [1, 32]}))["a.weight"]
    assert (weight.kind, weight.block) == ("fp8_block", (1, 32))


@pytest.mark.parametrize(
    "name",
    [
        "a.weight_scale_inv",
        "a.weight_scale",
        "a.scale",
        "a.weight_shape",
        "a.weight_g_idx",
        "a.input_scale",
        "a.qweight",
        "a.weight_global_scale",
        "mlp.experts.gate_up_proj_packed",
        "mlp.experts.gate_up_proj_blocks",
    ],
)
def test_parts_without_their_weight_are_refused(name: str, tmp_path: Path) -> None:
    """FP-14 and T5-03: a scale is never an ordinary weight, and packed tensors of fused experts are not known."""
    tensors = {name: torch.ones(2, 2), "norm.weight": torch.ones(4)}
    assert f"1 × scales or parts that belong to no weight: {name}" in refused(one_shard(tmp_path, tensors))


def test_bytes_of_an_unknown_encoding_are_refused(tmp_path: Path) -> None:
    tensors = {"a.weight": torch.zeros(4, 4, dtype=torch.uint8), "b.weight": fp8(4, 4).to(torch.float8_e5m2)}
    message = refused(one_shard(tmp_path, tensors))
    assert "1 × U8 of an encoding that is not known here: a.weight" in message
    assert "1 × F8_E5M2 of an encoding that is not known here: b.weight" in message


def test_dense_tensors_of_all_kinds_stand_for_themselves(tmp_path: Path) -> None:
    """ST-04 (nothing is dropped for being empty), and KV scales, router bias and integer buffers are kept."""
    tensors = {
        "model.layers.1.dummy": torch.zeros(0, 16, dtype=torch.bfloat16),
        "model.layers.1.mlp.gate.e_score_correction_bias": torch.ones(8),
        "model.layers.1.self_attn.k_proj.k_scale": torch.tensor(0.06),
        "model.layers.1.self_attn.v_scale": torch.ones(1),
        "model.layers.1.self_attn.q_proj.bias": torch.ones(8, dtype=torch.float16),
        "model.layers.1.layer.scale": torch.ones(8),
        "vision_tower.patch_embed.proj.weight": torch.ones(2, 3, 4, 4, dtype=torch.bfloat16),
        "position_ids": torch.arange(4),
    }
    checkpoint = one_shard(tmp_path, tensors)
    weights = resolve_storage(checkpoint)
    census(checkpoint, weights)
    assert {weight.kind for weight in weights.values()} == {"dense"}
    assert weights["model.layers.1.dummy"].shape == (0, 16)
    assert weights["model.layers.1.mlp.gate.e_score_correction_bias"].dtype == "F32"


def test_indexer_keeps_its_scales(tmp_path: Path) -> None:
    """CF-12: wk in FP8 with a scale, weights_proj in BF16: each is what it is, whatever config.json lists."""
    indexer = "model.layers.0.self_attn.indexer"
    tensors = {
        f"{indexer}.wk.weight": fp8(128, 256),
        f"{indexer}.wk.weight_scale_inv": torch.ones(1, 2),
        f"{indexer}.weights_proj.weight": torch.ones(32, 256, dtype=torch.bfloat16),
        f"{indexer}.k_norm.weight": torch.ones(128),
        f"{indexer}.k_norm.bias": torch.ones(128),
    }
    lists_wk = {**FP8_BLOCK, "modules_to_not_convert": [f"{indexer}.wk", "model.layers.0.self_attn.indexers_proj"]}
    weights = resolve_storage(one_shard(tmp_path, tensors, lists_wk))
    assert weights[f"{indexer}.wk.weight"].kind == "fp8_block"
    assert weights[f"{indexer}.weights_proj.weight"].kind == "dense"


# packed INT4


def test_packed_weight_goes_by_its_logical_name(tmp_path: Path) -> None:
    weights = resolve_storage(one_shard(tmp_path, under("e", packed(8, 96)), int4_config()))
    assert list(weights) == ["e.weight"]
    weight = weights["e.weight"]
    assert (weight.kind, weight.shape, weight.group_size, weight.dtype) == ("int4_packed", (8, 96), 32, "I32")
    assert set(weight.parts) == {"packed", "scale", "shape"}


@pytest.mark.parametrize("missing", ["weight_scale", "weight_shape"])
def test_packed_weight_without_a_part_is_refused(missing: str, tmp_path: Path) -> None:
    """I4-04: without weight_shape the true width is a guess."""
    parts = packed()
    del parts[missing]
    message = refused(one_shard(tmp_path, under("e", parts), int4_config()))
    assert f"1 × packed INT4 without its {missing}: e.weight_packed" in message


@pytest.mark.parametrize("columns", [20, 17, 24, 64])
def test_width_of_a_row_with_one_scale_comes_from_weight_shape(columns: int, tmp_path: Path) -> None:
    """I4-04: 20 columns are 3 words, as are 17 and 24."""
    weights = resolve_storage(one_shard(tmp_path, under("e", packed(4, columns, -1)), int4_config(-1)))
    assert weights["e.weight"].shape == (4, columns)
    assert weights["e.weight"].group_size == -1


@pytest.mark.parametrize(("stated", "group"), [([4, 32], -1), ([20, 4], -1), ([4, 0], -1)])
def test_weight_shape_that_contradicts_the_packed_width_is_refused(
    stated: list[int], group: int, tmp_path: Path
) -> None:
    """I4-04: 3 words of 20 columns, weight_shape says something else."""
    parts = packed(4, 20, group)
    parts["weight_shape"] = torch.tensor(stated)
    message = refused(one_shard(tmp_path, under("e", parts), int4_config(group)))
    assert "packed INT4 whose scale or weight_shape does not fit (declared group size: -1)" in message


def test_group_size_is_the_declared_one(tmp_path: Path) -> None:
    tensors = under("e", packed(4, 256, 64))
    assert "declared group size: 32" in refused(one_shard(tmp_path, tensors, int4_config(32)))
    assert resolve_storage(one_shard(tmp_path, tensors, int4_config(64)))["e.weight"].group_size == 64
    assert "declares no 4-bit group" in refused(one_shard(tmp_path, tensors))


def test_zero_points_and_group_indexes_are_parts(tmp_path: Path) -> None:
    """I4-06, I4-07: zero points are packed along rows."""
    extra = {
        "weight_zero_point": torch.zeros(2, 2, dtype=torch.int32),
        "weight_g_idx": torch.zeros(64, dtype=torch.int32),
    }
    tensors = under("e", packed(12, 64, **extra))
    weight = resolve_storage(one_shard(tmp_path, tensors, int4_config(symmetric=False)))["e.weight"]
    assert set(weight.parts) == {"packed", "scale", "shape", "zero_point", "g_idx"}
    tensors["e.weight_zero_point"] = torch.zeros(12, 1, dtype=torch.int32)
    message = refused(one_shard(tmp_path, tensors, int4_config(symmetric=False)))
    assert "packed INT4 with a part of the wrong shape: e.weight_packed: zero_point [12, 1]" in message


def test_one_expert_without_g_idx_among_others_is_refused(tmp_path: Path) -> None:
    """I4-08: a server takes the activation order of all experts from one of them."""
    tensors = {}
    for expert in range(3):
        extra = {"weight_g_idx": torch.arange(64, dtype=torch.int32) // 32} if expert != 1 else {}
        tensors |= under(f"model.layers.1.mlp.experts.{expert}.up_proj", packed(**extra))
    message = refused(one_shard(tmp_path, tensors, int4_config()))
    assert "1 × experts without weight_g_idx whose neighbours have it: model.layers.1.mlp.experts.1.up_proj" in message


def test_a_weight_in_two_forms_is_refused(tmp_path: Path) -> None:
    tensors = {**under("e", packed()), "e.weight": torch.ones(4, 64)}
    assert "1 × stored twice, in two forms: e.weight" in refused(one_shard(tmp_path, tensors, int4_config()))


# fused experts


@pytest.mark.parametrize("transposed", [False, True])
def test_fused_experts_are_recognised_in_either_order(transposed: bool, tmp_path: Path) -> None:
    """T5-01: three dimensions, no Linear modules; shapes are given as [experts, out, in]."""
    gate_up, down = torch.ones(8, 512, 128), torch.ones(8, 128, 256)
    if transposed:
        gate_up, down = gate_up.transpose(1, 2), down.transpose(1, 2)
    tensors = {
        "model.layers.1.mlp.experts.gate_up_proj": gate_up.to(torch.bfloat16),
        "model.layers.1.mlp.experts.down_proj": down.to(torch.bfloat16),
    }
    weights = resolve_storage(one_shard(tmp_path, tensors, hidden_size=128))
    assert {weight.kind for weight in weights.values()} == {"fused_experts"}
    assert [weights[name].shape for name in tensors] == [(8, 512, 128), (8, 128, 256)]
    assert {weight.transposed for weight in weights.values()} == {transposed}


@pytest.mark.parametrize("transposed", [False, True])
def test_square_fused_experts_are_read_as_their_neighbour_is(transposed: bool, tmp_path: Path) -> None:
    """2·I = H: gate_up alone could be either way round; down cannot."""
    down = torch.ones(2, 64, 128) if transposed else torch.ones(2, 128, 64)
    tensors = {"mlp.experts.gate_up_proj": torch.ones(2, 128, 128), "mlp.experts.down_proj": down}
    weights = resolve_storage(one_shard(tmp_path, tensors, hidden_size=128))
    assert {weight.transposed for weight in weights.values()} == {transposed}
    assert weights["mlp.experts.down_proj"].shape == (2, 128, 64)


def test_fused_experts_in_fp8(tmp_path: Path) -> None:
    name = "model.layers.1.mlp.experts.down_proj"
    tensors = {name: torch.zeros(2, 128, 256).to(FP8), f"{name}_scale_inv": torch.ones(2, 1, 2)}
    weight = resolve_storage(one_shard(tmp_path, tensors, FP8_BLOCK, text_config={"hidden_size": 128}))[name]
    assert (weight.kind, weight.block, weight.shape) == ("fused_experts", (128, 128), (2, 128, 256))


def test_fused_experts_of_another_hidden_size_are_refused(tmp_path: Path) -> None:
    tensors = {"mlp.experts.gate_up_proj": torch.ones(2, 64, 64)}
    assert "without a dimension of hidden_size 128" in refused(one_shard(tmp_path, tensors, hidden_size=128))


def test_problems_of_all_kinds_are_reported_at_once(tmp_path: Path) -> None:
    tensors = {
        "a.weight": fp8(4, 4),
        "b.weight_scale_inv": torch.ones(1, 1),
        "c.weight": torch.zeros(4, 4, dtype=torch.int8),
        "d.weight": torch.ones(4),
    }
    message = refused(one_shard(tmp_path, tensors, FP8_BLOCK))
    assert message.startswith("3 of 4 tensors cannot be read for certain")
    assert len(re.findall(r"^  1 × ", message, flags=re.MULTILINE)) == 3


def test_headers_are_enough_and_torch_is_not_imported() -> None:
    """Looking at a checkpoint starts fast."""
    modules = "storage", "scale_layout", "source_quantization", "quantization_config", "runtime_contract"
    code = "import sys, " + ", ".join(f"moepress.formats.{module}" for module in modules)
    code += "; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
