"""Which family, and what each tensor is: by whole names, never by patterns that catch a neighbour."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moepress.errors import CheckpointError
from moepress.formats.families import (
    Component,
    Identity,
    canonical_name,
    classify,
    classify_all,
    identify_family,
    logical_name,
    mtp_layers,
    text_config,
)
from moepress.formats.family_tables import FAMILIES
from tests import tiny_checkpoints

Tiny = Callable[[str], tiny_checkpoints.TinyCheckpoint]

KIMI: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "kimi_k2",
    "num_hidden_layers": 3,
    "num_nextn_predict_layers": 1,
    "n_routed_experts": 8,
}
WRAPPED: dict[str, Any] = {
    "architectures": ["KimiK25ForConditionalGeneration"],
    "model_type": "kimi_k25",
    "text_config": KIMI,
}
GLM5: dict[str, Any] = {**KIMI, "architectures": ["GlmMoeDsaForCausalLM"], "model_type": "glm_moe_dsa"}
MINIMAX: dict[str, Any] = {
    "architectures": ["MiniMaxM2ForCausalLM"],
    "model_type": "minimax_m2",
    "num_hidden_layers": 3,
    "num_local_experts": 8,
    "num_mtp_modules": 3,
}


def identity(config: dict[str, Any], name: str) -> Identity:
    return classify(identify_family(config), config, name)


@pytest.mark.parametrize(
    ("config", "key"),
    [
        (KIMI, "deepseek_v3"),
        ({**KIMI, "model_type": "deepseek_v3"}, "deepseek_v3"),
        ({"model_type": "deepseek_v32", "architectures": ["DeepseekV32ForCausalLM"]}, "deepseek_v32"),
        (WRAPPED, "kimi_k25"),
        ({"model_type": "glm4_moe", "architectures": ["Glm4MoeForCausalLM"]}, "glm4_moe"),
        (GLM5, "glm_moe_dsa"),
        ({"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"]}, "qwen3_moe"),
        (MINIMAX, "minimax_m2"),
        ({"model_type": "qwen3_moe"}, "qwen3_moe"),
        ({"architectures": ["Qwen3MoeForCausalLM"]}, "qwen3_moe"),
    ],
)
def test_identify_family(config: dict[str, Any], key: str) -> None:
    assert identify_family(config).key == key


def test_an_unknown_family_lists_the_known_ones_and_how_to_add_one() -> None:
    with pytest.raises(CheckpointError) as error:
        identify_family({"model_type": "llama", "architectures": ["LlamaForCausalLM"]})
    assert "'llama'" in error.value.what
    for family in FAMILIES:
        assert all(model_type in error.value.what for model_type in family.model_types)
    assert "the guide Add a family" in str(error.value.hint)
    with pytest.raises(CheckpointError, match="unknown model family"):
        identify_family({})


@pytest.mark.parametrize("architecture", ["Glm4MoeForCausalLM", "SomethingNewForCausalLM"])
def test_a_configuration_that_contradicts_itself_is_refused(architecture: str) -> None:
    with pytest.raises(CheckpointError, match="contradicts itself"):
        identify_family({**KIMI, "architectures": [architecture]})


def test_a_wrapper_needs_its_text_config() -> None:
    with pytest.raises(CheckpointError, match="text_config"):
        identify_family({"model_type": "kimi_k25", "architectures": ["KimiK25ForConditionalGeneration"]})
    assert text_config(identify_family(WRAPPED), WRAPPED) is KIMI


MLP, ROUTER, NORM = Component.DENSE_MLP, Component.ROUTER, Component.NORM


@pytest.mark.parametrize(
    ("config", "name", "expected"),
    [
        (KIMI, "model.embed_tokens.weight", Identity(Component.EMBEDDING, None, None, "embed_tokens", False)),
        (KIMI, "lm_head.weight", Identity(Component.LM_HEAD, None, None, "lm_head", False)),
        (KIMI, "model.norm.weight", Identity(NORM, None, None, None, False)),
        (KIMI, "model.layers.0.mlp.gate_proj.weight", Identity(MLP, 0, None, "gate_proj", False)),
        (KIMI, "model.layers.1.mlp.gate.weight", Identity(ROUTER, 1, None, "gate", False)),
        (KIMI, "model.layers.1.mlp.gate.e_score_correction_bias", Identity(ROUTER, 1, None, None, False)),
        (
            KIMI,
            "model.layers.1.mlp.shared_experts.up_proj.weight",
            Identity(Component.SHARED_EXPERT, 1, None, "up_proj", False),
        ),
        (
            KIMI,
            "model.layers.2.mlp.experts.7.down_proj.weight_scale_inv",
            Identity(Component.ROUTED_EXPERT, 2, 7, "down_proj", False),
        ),
        (
            KIMI,
            "model.layers.3.mlp.experts.7.down_proj.weight",
            Identity(Component.ROUTED_EXPERT, 3, 7, "down_proj", True),
        ),
        (KIMI, "model.layers.3.eh_proj.weight", Identity(Component.MTP_PROJECTION, 3, None, "eh_proj", True)),
        (KIMI, "model.layers.3.shared_head.norm.weight", Identity(NORM, 3, None, None, True)),
        (KIMI, "model.layers.3.shared_head.head.weight", Identity(Component.LM_HEAD, 3, None, "head", True)),
        (KIMI, "model.layers.3.embed_tokens.weight", Identity(Component.EMBEDDING, 3, None, "embed_tokens", True)),
        (
            KIMI,
            "model.layers.0.self_attn.kv_a_proj_with_mqa.weight",
            Identity(Component.ATTENTION, 0, None, "kv_a_proj_with_mqa", False),
        ),
        (KIMI, "model.layers.0.self_attn.kv_a_layernorm.weight", Identity(NORM, 0, None, None, False)),
        (
            KIMI,
            "model.layers.0.self_attn.k_proj.k_scale",
            Identity(Component.ATTENTION, 0, None, "k_scale", False),
        ),
        (
            KIMI,
            "model.layers.1.mlp.experts.gate_up_proj",
            Identity(Component.ROUTED_EXPERT, 1, None, "gate_up_proj", False),
        ),
        (
            GLM5,
            "model.layers.2.self_attn.indexer.weights_proj.weight",
            Identity(Component.INDEXER, 2, None, "weights_proj", False),
        ),
        (
            GLM5,
            "model.layers.3.self_attn.indexer.k_norm.bias",
            Identity(Component.INDEXER, 3, None, None, True),
        ),
        (
            WRAPPED,
            "language_model.model.layers.2.mlp.experts.0.up_proj.weight_packed",
            Identity(Component.ROUTED_EXPERT, 2, 0, "up_proj", False),
        ),
        (
            WRAPPED,
            "model.language_model.layers.3.mlp.experts.0.up_proj.weight",
            Identity(Component.ROUTED_EXPERT, 3, 0, "up_proj", True),
        ),
        (WRAPPED, "language_model.lm_head.weight", Identity(Component.LM_HEAD, None, None, "lm_head", False)),
        (WRAPPED, "mm_projector.proj.2.weight", Identity(Component.PROJECTOR, None, None, "2", False)),
        (
            WRAPPED,
            "vision_tower.encoder.blocks.26.wqkv.weight",
            Identity(Component.VISION, None, None, "wqkv", False),
        ),
        (
            MINIMAX,
            "model.layers.2.block_sparse_moe.experts.3.w3.weight_scale_inv",
            Identity(Component.ROUTED_EXPERT, 2, 3, "up_proj", False),
        ),
    ],
)
def test_classify(config: dict[str, Any], name: str, expected: Identity) -> None:
    assert identity(config, name) == expected


@pytest.mark.parametrize(
    ("config", "name"),
    [
        (KIMI, "model.layers.1.mlp.gat.weight"),
        (KIMI, "model.layers.1.mlp.gate_proj_extra.weight"),
        (KIMI, "model.layers.1.mlp.gate.weight.more"),
        (KIMI, "xmodel.layers.1.mlp.gate.weight"),
        (KIMI, "model.layers.1.xmlp.gate.weight"),
        (KIMI, "model.layers.one.mlp.gate.weight"),
        (KIMI, "model.layers.1.mlp.experts.x.gate_proj.weight"),
        (KIMI, "model.layers.1.mlp.experts.gate_up_proj_packed"),  # packed and fused: no server reads it
        (KIMI, "model.layers.1.eh_proj.weight"),  # belongs to MTP layers only
        (KIMI, "model.layers.1.self_attn.indexer.wk.weight"),  # DeepSeek V3 has no indexer
        (KIMI, "model.layers.1.self_attn.q_norm.weight"),
        (KIMI, "model.layers.1.dummy"),
        (KIMI, "model.norm.weight_scale"),  # a vector is never quantized
        (KIMI, "vision_tower.encoder.blocks.0.wqkv.weight"),
        (KIMI, "language_model.lm_head.weight"),
        (WRAPPED, "language_model.vision_tower.encoder.blocks.0.wqkv.weight"),
        (WRAPPED, "vision_tower.encoder.layers.0.mlp.fc1.weight"),
        (MINIMAX, "model.layers.1.mlp.experts.0.gate_proj.weight"),
        (KIMI, ""),
        (KIMI, ".weight"),
    ],
)
def test_there_is_no_catch_all(config: dict[str, Any], name: str) -> None:
    with pytest.raises(CheckpointError) as error:
        identity(config, name)
    assert error.value.where == name
    assert "unknown tensor name" in error.value.what


def test_layers_and_experts_beyond_the_configuration_are_named() -> None:
    with pytest.raises(CheckpointError, match=r"layer 4 is beyond .*num_hidden_layers 3, MTP layers 1"):
        identity(KIMI, "model.layers.4.eh_proj.weight")
    with pytest.raises(CheckpointError, match=r"layer 3 is beyond .*MTP layers 0"):
        identity({**KIMI, "num_nextn_predict_layers": 0}, "model.layers.3.mlp.gate.weight")
    with pytest.raises(CheckpointError, match="expert 8 is beyond"):
        identity(KIMI, "model.layers.1.mlp.experts.8.up_proj.weight")


def test_mtp_layers() -> None:
    assert mtp_layers(identify_family(KIMI), KIMI) == range(3, 4)
    assert mtp_layers(identify_family(WRAPPED), WRAPPED) == range(3, 4)
    assert not mtp_layers(identify_family(MINIMAX), MINIMAX)  # announces three, publishes none


def test_all_unknown_names_are_reported_together() -> None:
    names = [f"model.layers.1.new_{i}.weight" for i in range(8)]
    family = identify_family(KIMI)
    with pytest.raises(CheckpointError) as error:
        classify_all(family, KIMI, ["lm_head.weight", *names])
    assert error.value.what.startswith("8 tensor names do not belong")
    assert ", ".join(names[:5]) in error.value.what
    assert names[5] not in error.value.what
    with pytest.raises(CheckpointError, match="unknown tensor name"):
        classify_all(family, KIMI, names[:1])


@pytest.mark.parametrize("prefix", ["language_model.", "model.language_model."])
def test_both_wrappers(prefix: str, tmp_path: Path) -> None:
    """The same text model under two prefixes: every tensor is what it is without one."""
    made = tiny_checkpoints.build("kimi_k25", tmp_path / "model", prefix=prefix, mtp=1, published="fp8_block")
    family = identify_family(made.config)
    for name, found in classify_all(family, made.config, made.tensors).items():
        assert found == identity(WRAPPED, canonical_name(family, name))


@pytest.mark.parametrize("name", tiny_checkpoints.FAMILIES)
def test_every_tensor_of_every_family(name: str, tiny: Tiny) -> None:
    checkpoint = tiny(name)
    family = identify_family(checkpoint.config)
    found = classify_all(family, checkpoint.config, checkpoint.tensors)
    experts = {(i.layer, i.expert, i.projection) for i in found.values() if i.component is Component.ROUTED_EXPERT}
    text = text_config(family, checkpoint.config)
    hidden_layers = text["num_hidden_layers"]
    first = text.get("first_k_dense_replace", 0)
    layers = range(first, hidden_layers + len(mtp_layers(family, checkpoint.config)))
    projections = ("gate_proj", "up_proj", "down_proj")
    assert experts == {(layer, expert, p) for layer in layers for expert in range(8) for p in projections}
    for tensor, what in found.items():
        assert what.is_mtp == (what.layer is not None and what.layer >= hidden_layers), tensor


@pytest.mark.parametrize("name", tiny_checkpoints.FAMILIES)
def test_the_expert_pattern_hits_the_routed_experts_and_nothing_else(name: str, tiny: Tiny) -> None:
    """compressed-tensors and SGLang match `re:` targets with re.match, anchored at the start only."""
    checkpoint = tiny(name)
    family = identify_family(checkpoint.config)
    for tensor, what in classify_all(family, checkpoint.config, checkpoint.tensors).items():
        module = logical_name(tensor)[0].removesuffix(".weight")
        assert bool(re.match(family.expert_pattern, module)) == (what.component is Component.ROUTED_EXPERT), tensor


@pytest.mark.parametrize(
    ("tensor", "weight", "part"),
    [
        ("a.down_proj.weight", "a.down_proj.weight", "weight"),
        ("a.down_proj.weight_packed", "a.down_proj.weight", "packed"),
        ("a.down_proj.weight_scale", "a.down_proj.weight", "scale"),
        ("a.down_proj.weight_scale_inv", "a.down_proj.weight", "scale"),
        ("a.down_proj.scale", "a.down_proj.weight", "scale"),
        ("a.down_proj.weight_shape", "a.down_proj.weight", "shape"),
        ("a.down_proj.weight_zero_point", "a.down_proj.weight", "zero_point"),
        ("a.down_proj.weight_g_idx", "a.down_proj.weight", "g_idx"),
        ("a.q_proj.bias", "a.q_proj.bias", "weight"),
        ("a.k_scale", "a.k_scale", "weight"),
        ("weight", "weight", "weight"),
    ],
)
def test_logical_name(tensor: str, weight: str, part: str) -> None:
    assert logical_name(tensor) == (weight, part)


def test_tables_are_consistent() -> None:
    keys = [family.key for family in FAMILIES]
    types = [model_type for family in FAMILIES for model_type in family.model_types]
    assert len(set(keys)) == len(keys)
    assert len(set(types)) == len(types)
    for family in FAMILIES:
        for slots in ((*family.layer, *family.dense, *family.sparse), family.mtp, family.top):
            names = [slot.name for slot in slots]
            assert len(set(names)) == len(names), family.key
        for slot in (*family.layer, *family.dense, *family.sparse, *family.mtp, *family.top):
            assert slot.role != "linear" or len(slot.shape) in (2, 3), slot.name
