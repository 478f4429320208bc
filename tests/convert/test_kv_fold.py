"""Folds on real models' shapes: what is touched, that FP8 blocks have room, and the arithmetic of bands."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from moepress.convert.kv.fold import AttentionShape, Fold, layer_folds, straddled, uniform
from moepress.convert.kv.stored_folds import fold_part, fold_rows
from moepress.errors import QuantizeError
from moepress.formats.checkpoint import TensorRef
from moepress.formats.storage import StoredWeight

CONFIGS = Path(__file__).parents[1] / "configs"
MLA_NAMES = (
    *(f"{name}.weight" for name in ("q_a_proj", "q_a_layernorm", "q_b_proj", "kv_a_proj_with_mqa", "kv_a_layernorm")),
    *("kv_b_proj.weight", "o_proj.weight"),
)


def text(name: str) -> dict[str, Any]:
    config = json.loads((CONFIGS / name).read_text())
    return dict(config.get("text_config", config))


def fp8(name: str, rows: int, columns: int, block: tuple[int, int] | None = (128, 128)) -> StoredWeight:
    """An FP8 weight by its shapes alone."""
    high, wide = block or (1, columns)
    parts = {
        "weight": TensorRef(f"{name}.weight", "F8_E4M3", (rows, columns), "s", 0, rows * columns),
        "scale": TensorRef(f"{name}.weight_scale_inv", "F32", (-(-rows // high), -(-columns // wide)), "s", 0, 0),
    }
    return StoredWeight(f"{name}.weight", "fp8_block" if block else "fp8_channel", (rows, columns), parts, block)


@pytest.mark.parametrize("published", ["kimi_k2_instruct.json", "deepseek_v3.json"])
def test_published_mla_models_have_room_for_both_scales_in_their_fp8_blocks(published: str) -> None:
    config = text(published)
    shape = AttentionShape.of("mla", config)
    heads = config["num_attention_heads"]
    folds = layer_folds(shape, MLA_NAMES, {"latent": 2, "k_pe": 3})
    assert set(folds) == {
        "kv_a_layernorm.weight",
        "kv_b_proj.weight",
        "kv_a_proj_with_mqa.weight",
        "q_a_layernorm.weight",
    }
    assert straddled(fp8("self_attn.kv_b_proj", heads * 256, 512), folds["kv_b_proj.weight"]) is None
    assert straddled(fp8("self_attn.kv_a_proj_with_mqa", 576, 7168), folds["kv_a_proj_with_mqa.weight"]) is None
    rows = folds["kv_b_proj.weight"].exponents(np.arange(heads * 256)).reshape(heads, 256)
    assert (rows[:, :128] == 2 - 3).all()
    assert (rows[:, 128:] == 2).all()
    assert folds["q_a_layernorm.weight"].uniform == 3
    assert folds["kv_a_layernorm.weight"].uniform == -2


def test_blocks_across_two_factors_are_noticed_and_channels_never_are() -> None:
    bands = Fold(((32, -1), (32, 2)))
    assert "covers rows of two factors" in str(straddled(fp8("x.self_attn.kv_b_proj", 256, 128), bands))
    assert straddled(fp8("x.self_attn.kv_b_proj", 256, 128, None), bands) is None
    assert straddled(fp8("x.self_attn.kv_b_proj", 256, 128), uniform(5)) is None


def test_gqa_folds_norms_where_there_are_any_and_biases_with_their_weights() -> None:
    shape = AttentionShape.of("gqa", {})
    names = [f"{p}_proj.{kind}" for p in "qkv" for kind in ("weight", "bias")] + ["o_proj.weight", "o_proj.bias"]
    plain = layer_folds(shape, names, {"k": 2, "v": -1})
    assert {name: fold.uniform for name, fold in plain.items()} == {
        "k_proj.weight": -2,
        "k_proj.bias": -2,
        "q_proj.weight": 2,
        "q_proj.bias": 2,
        "v_proj.weight": 1,
        "v_proj.bias": 1,
        "o_proj.weight": -1,
    }
    normed = layer_folds(shape, [*names, "q_norm.weight", "k_norm.weight"], {"k": 2})
    assert {name: fold.uniform for name, fold in normed.items()} == {"k_norm.weight": -2, "q_norm.weight": 2}
    assert layer_folds(shape, names, {"k": 0, "v": 0}) == {}


@pytest.mark.parametrize("cut", [1, 7, 16, 100])
def test_parts_are_folded_alike_however_they_are_cut(cut: int) -> None:
    """Pieces of a tensor may begin inside a row, and a scale belongs to the rows of its block."""
    fold = Fold(((128, -3), (128, 4)))
    stored = fp8("self_attn.kv_b_proj", 512, 320)
    scale = torch.rand(4, 3) + 0.5
    factors = torch.tensor([2.0**-3, 2.0**4, 2.0**-3, 2.0**4])[:, None]
    flat = scale.reshape(-1)
    pieces = [fold_part(flat[i : i + cut], i, stored, "scale", fold) for i in range(0, len(flat), cut)]
    assert torch.equal(torch.cat(pieces).view(4, 3), scale * factors)
    values = torch.randn(300, 5)
    banded = values.clone()
    fold_rows(banded, 100, fold, "w")
    rows = torch.arange(100, 400) % 256 < 128
    assert torch.equal(banded, values * torch.where(rows, 2.0**-3, 2.0**4)[:, None])


def test_an_overflow_is_refused() -> None:
    stored = StoredWeight("x", "dense", (4,), {"weight": TensorRef("x", "BF16", (4,), "s", 0, 8)})
    with pytest.raises(QuantizeError, match="overflows"):
        fold_part(torch.full((4,), 1e38, dtype=torch.bfloat16), 0, stored, "weight", uniform(4))
