"""The complete list of weights, from configuration alone: against published files and against the tiny checkpoints."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable

import pytest
import torch

from moepress.errors import CheckpointError
from moepress.formats.architecture import (
    StoredAs,
    expected_weights,
    full_indexer_layers,
    parameter_count,
    sparse_layers,
)
from moepress.formats.families import Component, classify, identify_family, logical_name
from tests.formats.published import config_of, weights_of
from tests.tiny_checkpoints import FAMILIES, TinyCheckpoint


@pytest.mark.parametrize(
    ("model", "billions"),
    [
        ("glm_5.2_fp8", 753.33),
        ("glm_5_fp8", 753.86),
        ("kimi_k2_instruct", 1026.41),
        ("deepseek_v3", 682.64),
        ("glm_4.7_fp8", 356.78),
    ],
)
def test_parameters(model: str, billions: float) -> None:
    assert parameter_count(weights_of(model)) / 1e9 == pytest.approx(billions, abs=0.006)  # GLM-4.7 is 356.786, cut off


@pytest.mark.parametrize(
    ("model", "component", "billions"),
    [
        ("glm_5.2_fp8", Component.ROUTED_EXPERT, 724.776),
        ("glm_5.2_fp8", Component.ATTENTION, 12.872),
        ("glm_5.2_fp8", Component.SHARED_EXPERT, 2.831),
        ("glm_5.2_fp8", Component.DENSE_MLP, 0.679),
        ("glm_5.2_fp8", Component.INDEXER, 0.197),
        ("glm_5.2_fp8", Component.ROUTER, 0.118),
        ("glm_5.2_fp8", Component.EMBEDDING, 0.952),
        ("glm_5.2_fp8", Component.LM_HEAD, 0.952),
        ("kimi_k2.5", Component.ROUTED_EXPERT, 1014.686),
        ("kimi_k2.5", Component.ATTENTION, 6.168),
        ("kimi_k2.5", Component.SHARED_EXPERT, 2.642),
        ("kimi_k2.5", Component.DENSE_MLP, 0.396),
        ("kimi_k2.5", Component.ROUTER, 0.165),
    ],
)
def test_parameters_of_a_component(model: str, component: Component, billions: float) -> None:
    main = [s for s in weights_of(model) if s.identity.component is component and not s.identity.is_mtp]
    assert round(parameter_count(main) / 1e9, 3) == billions


def test_parameters_of_mtp_vision_and_the_rest() -> None:
    assert round(parameter_count(s for s in weights_of("glm_5.2_fp8") if s.identity.is_mtp) / 1e9, 2) == 9.95
    kimi = weights_of("kimi_k2.5")
    seeing = [s for s in kimi if s.identity.component in (Component.VISION, Component.PROJECTOR)]
    ends = [s for s in kimi if s.identity.component in (Component.EMBEDDING, Component.LM_HEAD)]
    assert round(parameter_count(seeing) / 1e9, 2) == 0.47
    assert round(parameter_count(ends) / 1e9, 3) in (2.348, 2.349)
    assert round((parameter_count(kimi) - parameter_count(seeing)) / 1e9, 2) == 1026.41


@pytest.mark.parametrize(
    ("model", "tensors", "elements"),
    [  # counted in the headers of the published files, scales included
        ("deepseek_v3", 91_991, 684_531_386_000),
        ("deepseek_v3.2", 92_425, 685_396_921_376),
        ("kimi_k2.5", 208_550, 170_738_182_128),
        ("qwen3_30b_a3b_fp8", 37_491, 30_533_947_392),
        ("minimax_m2.7", 96_103, 228_703_644_928),
    ],
)
def test_tensors_and_elements_of_the_published_files(model: str, tensors: int, elements: int) -> None:
    """Exact, to the tensor and to the element, with the MTP layer's copies."""
    found_tensors = found_elements = 0
    for spec in weights_of(model):
        rows, columns = (*spec.shape, 1, 1)[:2] if len(spec.shape) < 3 else (1, spec.numel)
        match spec.published.kind:
            case "fp8_block":
                found_tensors += 2
                found_elements += spec.numel + -(-rows // 128) * -(-columns // 128)
            case "int4":  # packed words, scales, shape
                found_tensors += 3
                found_elements += spec.numel // 8 + spec.numel // 32 + 2
            case _:
                found_tensors += 1
                found_elements += spec.numel
    assert (found_tensors, found_elements) == (tensors, elements)


@pytest.mark.parametrize(
    ("model", "elements"),
    [("glm_5_fp8", 753_864_139_008), ("glm_4.7_fp8", 358_337_791_296), ("qwen3_30b_a3b_fp8", 30_532_122_624)],
)
def test_elements_of_the_published_bf16_files(model: str, elements: int) -> None:
    assert sum(spec.numel for spec in weights_of(model)) == elements


def test_every_spec_classifies_as_itself() -> None:
    """The table read in both directions gives the same answer."""
    for model in ("glm_4.7_fp8", "kimi_k2.5", "minimax_m2.7"):
        config = config_of(model)
        family = identify_family(config)
        for spec in weights_of(model):
            assert classify(family, config, spec.name) == spec.identity
    assert len({spec.name for spec in weights_of("kimi_k2.5")}) == len(weights_of("kimi_k2.5"))


def test_glm_5_2_has_an_indexer_on_21_layers_and_on_the_mtp_layer() -> None:
    def layers(model: str) -> set[int | None]:
        return {spec.identity.layer for spec in weights_of(model) if spec.identity.component is Component.INDEXER}

    assert layers("glm_5.2_fp8") == {0, 1, 2, *range(6, 75, 4), 78}
    assert layers("glm_5_fp8") == set(range(79))


def test_three_ways_to_say_which_layers_have_an_indexer() -> None:
    text = {"num_hidden_layers": 8, "index_topk": 64}
    by_schedule = full_indexer_layers({**text, "index_topk_freq": 4, "index_skip_topk_offset": 3})
    assert by_schedule == [True, True, True, False, False, False, True, False]
    assert full_indexer_layers({**text, "index_topk_pattern": "FFFSSSFS", "index_topk_freq": 1}) == by_schedule
    types = ["full" if full else "shared" for full in by_schedule]
    assert full_indexer_layers({**text, "indexer_types": types, "index_topk_pattern": "SSSSSSSS"}) == by_schedule
    assert full_indexer_layers(text) == [True] * 8
    assert full_indexer_layers({"num_hidden_layers": 8}) == [False] * 8


def test_ways_to_say_which_layers_are_sparse() -> None:
    four = {"num_hidden_layers": 4}
    assert sparse_layers({**four, "first_k_dense_replace": 1}) == [False, True, True, True]
    assert sparse_layers({**four, "first_k_dense_replace": 1, "moe_layer_freq": 2}) == [False, False, True, False]
    assert sparse_layers({**four, "decoder_sparse_step": 2, "mlp_only_layers": [3]}) == [False, True, False, False]
    assert sparse_layers({**four, "mlp_layer_types": ["dense", "sparse", "dense", "sparse"]}) == [False, True] * 2
    assert sparse_layers(four) == [True] * 4


@pytest.mark.parametrize("family", FAMILIES)
def test_the_tiny_checkpoints_hold_exactly_what_is_expected(family: str, tiny: Callable[[str], TinyCheckpoint]) -> None:
    """Names and shapes; and `published` is how the tensors really are stored."""
    checkpoint = tiny(family)
    expected = {spec.name: spec for spec in expected_weights(checkpoint.config)}
    optional = {name for name, spec in expected.items() if spec.copy_of is not None}
    assert set(checkpoint.truth) <= set(expected)
    assert set(expected) - set(checkpoint.truth) <= optional
    for name, value in checkpoint.truth.items():
        assert expected[name].shape == tuple(value.shape), name

    parts: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in checkpoint.tensors.items():
        weight, part = logical_name(name)
        parts.setdefault(weight, {})[part] = tensor
    kinds = {name: expected[name].published for name in checkpoint.truth}
    assert {name: kind_of(stored) for name, stored in parts.items()} == kinds


def kind_of(parts: dict[str, torch.Tensor]) -> StoredAs:
    if "packed" in parts:
        return StoredAs("int4", parts["packed"].shape[1] * 8 // parts["scale"].shape[1])
    weight = parts["weight"]
    if weight.dtype == torch.float8_e4m3fn:
        return StoredAs("fp8_channel" if parts["scale"].shape[0] == weight.shape[0] else "fp8_block")
    return StoredAs({torch.float32: "f32", torch.bfloat16: "bf16"}[weight.dtype])  # type: ignore[arg-type]


def test_mtp_copies_are_marked_and_not_counted() -> None:
    copies = {s.name: s.copy_of for s in weights_of("deepseek_v3") if s.copy_of}
    assert copies == {
        "model.layers.61.embed_tokens.weight": "model.embed_tokens.weight",
        "model.layers.61.shared_head.head.weight": "lm_head.weight",
    }
    assert not [s for s in weights_of("glm_5.2_fp8") if s.copy_of]  # GLM-5 publishes none


def test_our_own_output_is_understood_too() -> None:
    """Two config groups, an INT4 expert pattern beside FP8 linears; a name wins over a class, wherever it stands."""
    config = copy.deepcopy(config_of("glm_4.7_fp8"))
    linear = config["quantization_config"]["config_groups"]["group_0"]
    int4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 64, "symmetric": True}
    experts = {"targets": [f"re:{identify_family(config).expert_pattern}"], "weights": int4, "format": "pack-quantized"}
    linear["format"] = "float-quantized"
    config["quantization_config"] |= {
        "config_groups": {"group_0": linear, "group_1": experts},
        "format": "pack-quantized",
    }
    by_component = Counter((s.identity.component, s.published) for s in expected_weights(config))
    assert by_component[Component.ROUTED_EXPERT, StoredAs("int4", 64)] == 90 * 160 * 3
    assert by_component[Component.SHARED_EXPERT, StoredAs("fp8_channel")] == 90 * 3
    assert len([c for c, stored in by_component if c is Component.ROUTED_EXPERT]) == 1


def test_modules_to_not_convert_keeps_a_linear_in_bf16() -> None:
    config = config_of("deepseek_v3")
    config["quantization_config"]["modules_to_not_convert"] = ["kv_b_proj", "model.layers.3.self_attn.o_proj"]
    kept = {s.name for s in expected_weights(config) if s.published.kind == "bf16" and s.name.endswith("_proj.weight")}
    assert "model.layers.3.self_attn.o_proj.weight" in kept
    assert "model.layers.4.self_attn.o_proj.weight" not in kept
    assert len([name for name in kept if "kv_b_proj" in name]) == 62


def test_variants_within_a_family() -> None:
    """No query compression (Moonlight), tied head, no shared expert."""
    config = config_of("deepseek_v3")
    config |= {"q_lora_rank": None, "tie_word_embeddings": True, "n_shared_experts": None}
    names = {spec.name for spec in expected_weights(config)}
    assert "model.layers.0.self_attn.q_proj.weight" in names
    assert not [n for n in names if "q_a_proj" in n or "q_b_proj" in n or "shared_experts" in n]
    assert "lm_head.weight" not in names


@pytest.mark.parametrize(
    "field", ["hidden_size", "kv_lora_rank", "vocab_size", "num_hidden_layers", "n_routed_experts"]
)
def test_a_missing_field_is_named(field: str) -> None:
    config = config_of("deepseek_v3")
    del config[field]
    with pytest.raises(CheckpointError, match=field):
        expected_weights(config)
