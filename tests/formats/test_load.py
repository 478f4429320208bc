"""A stored weight becomes the numbers it stands for."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from moepress.errors import FormatError
from moepress.formats.checkpoint import Checkpoint, open_checkpoint
from moepress.formats.fp8 import encode_fp8_block
from moepress.formats.int4 import pack_int4
from moepress.formats.load import load_weight
from moepress.formats.reader import TensorReader
from moepress.formats.storage import resolve_storage
from tests.formats.one_shard import FP8_BLOCK, int4_config, one_shard
from tests.tiny_checkpoints import build


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Small tensors: a thread pool costs more than it brings."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def load(checkpoint: Checkpoint, name: str, **options: Any) -> torch.Tensor:
    with TensorReader(checkpoint, threads=1) as reader:
        return load_weight(reader, resolve_storage(checkpoint)[name], **options)


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("kimi", {"scales_apart": True}),
        ("kimi", {"published": "fp8_block", "scale_dtype": "U8"}),
        ("glm4", {}),
        ("glm5", {"scale_dtype": "BF16"}),
        ("kimi_k25", {}),
        ("deepseek_v32", {"published": "fp8_block", "scale_dtype": "F8_E8M0"}),
        ("qwen3_moe", {"published": "bf16", "fused_experts": True}),
    ],
)
def test_every_weight_has_the_value_that_plain_torch_gives(
    family: str, options: dict[str, Any], tmp_path: Path
) -> None:
    """FP-05, FP-06 and the rest: bit for bit, for every way in which these families are published."""
    tiny = build(family, tmp_path, experts=2, **options)
    checkpoint = open_checkpoint(tmp_path)
    with TensorReader(checkpoint) as reader:
        for name, stored in resolve_storage(checkpoint).items():
            decoded = load_weight(reader, stored)
            assert decoded.dtype == torch.float32
            assert torch.equal(decoded, tiny.truth[name]), name
            rows = slice(1, max(2, stored.shape[0] // 2 + 3))
            assert torch.equal(load_weight(reader, stored, rows=rows), tiny.truth[name][rows]), name


def test_rows_of_a_ragged_block_weight_into_the_callers_buffer(tmp_path: Path) -> None:
    codes, scale = encode_fp8_block(torch.randn(576, 100))
    checkpoint = one_shard(tmp_path, {"a.weight": codes, "a.weight_scale_inv": scale}, FP8_BLOCK)
    whole = load(checkpoint, "a.weight")
    buffer = torch.empty(70, 100)
    assert load(checkpoint, "a.weight", rows=slice(500, 570), out=buffer) is buffer
    assert torch.equal(buffer, whole[500:570])
    assert load(checkpoint, "a.weight", rows=slice(570, 900)).shape == (6, 100)
    assert load(checkpoint, "a.weight", rows=slice(9, 9)).shape == (0, 100)
    with pytest.raises(FormatError, match="buffer must be contiguous float32"):
        load(checkpoint, "a.weight", out=buffer)
    with pytest.raises(FormatError, match="cannot take"):
        load(checkpoint, "a.weight", rows=slice(0, 9, 2))


def test_scalars_empty_tensors_and_integers(tmp_path: Path) -> None:
    """ST-04: what is stored is read, also when it is nothing."""
    tensors = {"k_scale": torch.tensor(0.06), "dummy": torch.zeros(0, 16, dtype=torch.bfloat16), "ids": torch.arange(5)}
    checkpoint = one_shard(tmp_path, tensors)
    assert load(checkpoint, "k_scale").item() == pytest.approx(0.06)
    assert load(checkpoint, "dummy").shape == (0, 16)
    assert load(checkpoint, "ids").tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]


@pytest.mark.parametrize("transposed", [False, True])
def test_fused_experts_come_out_as_experts_out_in(transposed: bool, tmp_path: Path) -> None:
    """T5-01: whichever way round the file has them."""
    truth = torch.randn(3, 64, 16).to(torch.bfloat16)
    name = "model.layers.0.mlp.experts.gate_up_proj"
    stored = truth.transpose(1, 2) if transposed else truth
    checkpoint = one_shard(tmp_path, {name: stored}, hidden_size=16)
    assert torch.equal(load(checkpoint, name), truth.float())
    assert torch.equal(load(checkpoint, name, rows=slice(1, 2)), truth.float()[1:2])


def test_fused_experts_in_fp8(tmp_path: Path) -> None:
    name = "model.layers.0.mlp.experts.down_proj"
    encoded = [encode_fp8_block(torch.randn(130, 200)) for _ in range(2)]
    tensors = {
        name: torch.stack([codes.view(torch.uint8) for codes, _ in encoded]).view(torch.float8_e4m3fn),
        f"{name}_scale_inv": torch.stack([scale for _, scale in encoded]),
    }
    checkpoint = one_shard(tmp_path, tensors, FP8_BLOCK, hidden_size=130)
    decoded = load(checkpoint, name)
    for expert, (codes, scale) in enumerate(encoded):
        spread = scale.repeat_interleave(128, 0)[:130].repeat_interleave(128, 1)[:, :200]
        assert torch.equal(decoded[expert], codes.float() * spread)


def test_nan_is_refused_by_name_with_a_count(tmp_path: Path) -> None:
    """FP-10: in dense tensors, FP8 codes and INT4 scales alike."""
    dense = torch.ones(4, 4, dtype=torch.bfloat16)
    dense[1, 2] = math.inf
    codes, scale = encode_fp8_block(torch.randn(8, 8))
    codes.view(torch.uint8)[0, 0] = 0xFF
    int4 = packed_parts(torch.zeros(4, 32, dtype=torch.int8), torch.tensor([[math.nan]] * 4))
    for name, tensors, config, what in [
        ("n.weight", {"n.weight": dense}, None, "1 of 16 values are NaN or infinite"),
        ("f.weight", {"f.weight": codes, "f.weight_scale_inv": scale}, FP8_BLOCK, "1 of 64 FP8 codes are NaN"),
        ("e.weight", int4, int4_config(), "4 of 4 values are NaN or infinite"),
    ]:
        with pytest.raises(FormatError, match=what) as caught:
            load(one_shard(tmp_path / name, tensors, config), name)
        assert caught.value.where in (name, "e.weight_scale")


# packed INT4


def packed_parts(
    codes: torch.Tensor, scale: torch.Tensor, zero_point: torch.Tensor | None = None, **extra: torch.Tensor
) -> dict[str, torch.Tensor]:
    parts = {"packed": pack_int4(codes), "scale": scale, "shape": torch.tensor(codes.shape), **extra}
    if zero_point is not None:
        parts["zero_point"] = pack_int4(zero_point.T.contiguous()).T
    return {f"e.weight_{suffix}": tensor for suffix, tensor in parts.items()}


def codes_of(rows: int, columns: int) -> torch.Tensor:
    return torch.randint(-8, 8, (rows, columns), dtype=torch.int8, generator=torch.Generator().manual_seed(1))


def test_zero_points_are_unpacked_too(tmp_path: Path) -> None:
    """I4-07: asymmetric groups, rows that do not fill a packed word, and bands that begin inside one."""
    codes, scale, zero_point = codes_of(20, 128), torch.rand(20, 4) + 0.1, codes_of(20, 4)
    checkpoint = one_shard(tmp_path, packed_parts(codes, scale, zero_point), int4_config(symmetric=False))
    spread = [each.float().repeat_interleave(32, 1) for each in (zero_point, scale)]
    truth = (codes.float() - spread[0]) * spread[1]
    assert torch.equal(load(checkpoint, "e.weight"), truth)
    for rows in (slice(3, 11), slice(8, 16), slice(19, 20), slice(5, 5)):
        assert torch.equal(load(checkpoint, "e.weight", rows=rows), truth[rows])


def test_width_that_does_not_fill_a_word(tmp_path: Path) -> None:
    """I4-04: [4, 20] comes back as 20 columns, not 24."""
    codes, scale = codes_of(4, 20), torch.rand(4, 1) + 0.1
    checkpoint = one_shard(tmp_path, packed_parts(codes, scale), int4_config(-1))
    assert torch.equal(load(checkpoint, "e.weight"), codes.float() * scale)


@pytest.mark.parametrize("stated", [[4, 56], [64, 4], [4, 72], [8, 64]])
def test_weight_shape_must_agree_with_the_packed_words(stated: list[int], tmp_path: Path) -> None:
    """I4-04: a transposed or padded weight_shape is refused, with both numbers."""
    parts = packed_parts(codes_of(4, 64), torch.ones(4, 2))
    parts["e.weight_shape"] = torch.tensor(stated)
    with pytest.raises(FormatError, match=r"weight_shape says .*hold \[4, 64\]"):
        load(one_shard(tmp_path, parts, int4_config()), "e.weight")


def test_int32_weight_shape_as_kimi_publishes_it(tmp_path: Path) -> None:
    codes = codes_of(4, 64)
    parts = packed_parts(codes, torch.ones(4, 2, dtype=torch.bfloat16))
    parts["e.weight_shape"] = torch.tensor([4, 64], dtype=torch.int32)
    assert torch.equal(load(one_shard(tmp_path, parts, int4_config()), "e.weight"), codes.float())


def test_activation_order(tmp_path: Path) -> None:
    """I4-08: columns find their group through g_idx; an index that shares columns out unevenly is refused."""
    codes, scale = codes_of(4, 64), torch.tensor([[1.0, 100.0]] * 4)
    g_idx = (torch.arange(64, dtype=torch.int32) * 37 % 64) // 32
    decoded = load(one_shard(tmp_path / "a", packed_parts(codes, scale, g_idx=g_idx), int4_config()), "e.weight")
    assert torch.equal(decoded, codes.float() * torch.where(g_idx == 0, 1.0, 100.0))
    for wrong in (torch.zeros(64), torch.arange(64) // 16, torch.arange(64) // 32 - 1):
        parts = packed_parts(codes, scale, g_idx=wrong.to(torch.int32))
        with pytest.raises(FormatError, match="does not give each of 2 groups 32 of the 64 columns"):
            load(one_shard(tmp_path / "b", parts, int4_config()), "e.weight")
