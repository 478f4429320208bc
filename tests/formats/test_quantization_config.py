"""Source configs are read or refused; output configs say of every module what the files hold."""

from __future__ import annotations

import copy
import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.quantization import QuantizationConfig
from compressed_tensors.utils.match import is_match, match_targets

from moepress.errors import CheckpointError
from moepress.formats.module_matching import Lines, scheme_of, server_names
from moepress.formats.quantization_config import (
    EXPERT_TARGET,
    Linears,
    build_quantization_config,
    check_quantization_config,
    ignore_list,
    linear_modules,
    match_counts,
    parse_source_quantization,
)
from tests.formats.one_shard import FP8_BLOCK, int4_config
from tests.tiny_checkpoints.models import FAMILIES

CONFIGS = Path(__file__).parents[1] / "configs"
BLOCK = Linears((128, 128))
CHANNEL = Linears(None)


def published(name: str) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((CONFIGS / f"{name}.json").read_text())
    return config


# what a source says


@pytest.mark.parametrize(
    ("name", "scale_fmt"),
    [
        ("deepseek_v3", None),
        ("deepseek_v3.2", "ue8m0"),
        ("kimi_k2_instruct", None),
        ("glm_5_fp8", None),
        ("glm_5.2_fp8", None),
        ("qwen3_235b_a22b_fp8", None),
        ("minimax_m2.7", None),
    ],
)
def test_published_block_fp8(name: str, scale_fmt: str | None) -> None:
    source = parse_source_quantization(published(name))
    assert (source.method, source.place, source.blocks) == ("fp8", "quantization_config", ((128, 128),))
    assert source.scale_fmt == scale_fmt
    assert source.group_sizes == ()
    assert source.groups[0].activations == "dynamic"


def test_published_fp8_per_channel() -> None:
    source = parse_source_quantization(published("glm_4.7_fp8"))
    assert source.method == "compressed-tensors"
    (group,) = source.groups
    assert (group.type, group.num_bits, group.strategy, group.activations) == ("float", 8, "channel", "dynamic")
    assert source.blocks == ()
    assert "model.layers.3.mlp.gate" in source.ignore


@pytest.mark.parametrize("nested", [True, False])
def test_published_int4_nested_or_at_the_top(nested: bool) -> None:
    config = published("kimi_k2.5")
    quantization = config.get("quantization_config") or config["text_config"]["quantization_config"]
    config.pop("quantization_config", None)
    config["text_config"].pop("quantization_config", None)
    (config["text_config"] if nested else config)["quantization_config"] = quantization
    source = parse_source_quantization(config)
    assert source.place == ("text_config.quantization_config" if nested else "quantization_config")
    assert source.group_sizes == (32,)
    assert source.groups[0].symmetric
    both = copy.deepcopy(config)
    both["quantization_config"] = both["text_config"]["quantization_config"] = quantization
    assert parse_source_quantization(both).group_sizes == (32,), "the same block twice contradicts nothing"


def test_no_quantization() -> None:
    assert parse_source_quantization({"hidden_size": 8}).method == "none"
    assert parse_source_quantization({"quantization_config": None, "text_config": None}).method == "none"


def test_two_different_blocks_are_refused() -> None:
    """CF-10 (b): the source's FP8 block left in text_config beside a new one at the top."""
    config = {"quantization_config": int4_config(), "text_config": {"quantization_config": FP8_BLOCK}}
    with pytest.raises(
        CheckpointError, match="two different quantization blocks: compressed-tensors pack-quantized in"
    ):
        parse_source_quantization(config)


def test_a_block_is_found_in_any_section() -> None:
    """CF-10 (b): also where a wrapper calls its text model otherwise."""
    source = parse_source_quantization({"language_config": {"quantization_config": FP8_BLOCK}})
    assert source.place == "language_config.quantization_config"
    with pytest.raises(CheckpointError, match="two different quantization blocks"):
        parse_source_quantization(
            {"quantization_config": int4_config(), "llm_config": {"compression_config": FP8_BLOCK}}
        )


def compressed(**changes: Any) -> dict[str, Any]:
    config = int4_config()
    config["config_groups"]["group_0"]["weights"] |= changes.pop("weights", {})
    return config | changes


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        ({"quant_method": "gptq"}, "unknown quant_method 'gptq'"),
        ({"bits": 4}, "unknown quant_method None"),
        ({**FP8_BLOCK, "fmt": "e5m2"}, "unknown FP8 fmt 'e5m2'"),
        ({**FP8_BLOCK, "scale_fmt": "ue4m3"}, "unknown scale_fmt 'ue4m3'"),
        ({**FP8_BLOCK, "activation_scheme": "other"}, "unknown activation_scheme"),
        ({**FP8_BLOCK, "weight_block_size": [128]}, "a block size is two positive integers"),
        ({**FP8_BLOCK, "weight_block_size": [128, 0]}, "a block size is two positive integers"),
        (compressed(format="float-quantized"), "format 'float-quantized' contradicts 4-bit int"),
        (compressed(format="nvfp4-pack-quantized"), "unknown compressed-tensors format 'nvfp4-pack-quantized'"),
        (compressed(format=None), "unknown compressed-tensors format None"),
        (compressed(config_groups=None), "without config_groups"),
        (compressed(config_groups={"W4A16": ["Linear"]}), "a config group without a weights section"),
        (compressed(weights={"num_bits": 8}), "weights of 8 bits, type 'int'"),
        (compressed(weights={"num_bits": 4, "type": "float"}), "weights of 4 bits, type 'float'"),
        (compressed(weights={"strategy": "tensor_group"}), "strategy 'tensor_group'"),
        (compressed(weights={"group_size": None}), "strategy 'group' with group_size None"),
        (compressed(ignore="lm_head"), "expected a list of strings"),
        ("fp8", "is not an object"),
    ],
)
def test_what_is_not_known_is_refused(quantization: Any, message: str) -> None:
    """CF-10 (a): an unknown method or format never falls to a default."""
    with pytest.raises(CheckpointError, match=re.escape(message)):
        parse_source_quantization({"quantization_config": quantization})


def test_what_we_write_is_read_back() -> None:
    for layout, linears in (
        ("bf16_rest", None),
        ("linear_fp8_config", Linears((128, 128), "ue8m0")),
        ("two_groups", CHANNEL),
    ):
        written = build_quantization_config(layout=layout, group_size=64, ignore=[], linears=linears)  # type: ignore[arg-type]
        source = parse_source_quantization({"quantization_config": written})
        assert source.group_sizes == (64,)
        assert source.blocks == ((linears.block,) if linears and linears.block else ())
        assert source.scale_fmt == (linears.scale_fmt if linears else None)


# what we write


@cache
def modules_of(family: str, prefix: str | None = None) -> tuple[int, tuple[str, ...]]:
    """num_hidden_layers and the linear modules of a tiny model."""
    model = FAMILIES[family]
    config = model.config(model.layers, 2, model.mtp)
    prefix = model.prefix if prefix is None else prefix
    shapes = {}
    for weight in model.weights(config, False):
        outside = weight.name.startswith(("vision_tower.", "mm_projector."))
        name = weight.name if outside else prefix + weight.name
        if prefix == "model.language_model." and not outside:
            name = weight.name if weight.name.startswith("lm_head") else prefix + weight.name.removeprefix("model.")
        shapes[name] = weight.shape
    return config.get("text_config", config)["num_hidden_layers"], tuple(linear_modules(shapes))


NEVER_FP8 = re.compile(r"(lm_head|mlp\.gate|eh_proj|weights_proj|shared_head\.head)$|vision_tower|mm_projector")


def pressed(family: str, rest: str, prefix: str | None = None) -> tuple[int, dict[str, Any]]:
    """How each module is stored after a conversion that leaves ``rest`` (dense or fp8) beside INT4 experts."""
    layers, modules = modules_of(family, prefix)
    kinds = {name: "int4" if ".experts." in name else "dense" if NEVER_FP8.search(name) else rest for name in modules}
    return layers, kinds


def config_of(
    layout: Any, layers: int, kinds: dict[str, Any], linears: Linears | None = None, **options: Any
) -> dict[str, Any]:
    dense = [name for name, kind in kinds.items() if kind == "dense"]
    lines = ignore_list(dense, [name for name in kinds if name not in dense], num_layers=layers)
    return build_quantization_config(layout=layout, group_size=32, ignore=lines, linears=linears, **options)


FAMILY_NAMES = ("kimi", "glm4", "glm5", "kimi_k25", "deepseek_v32", "qwen3_moe")
LAYOUTS = [("bf16_rest", "dense", None), ("two_groups", "fp8", BLOCK), ("two_groups", "fp8", CHANNEL)]


@pytest.mark.oracle
@pytest.mark.parametrize("family", FAMILY_NAMES)
@pytest.mark.parametrize(("layout", "rest", "linears"), LAYOUTS)
def test_every_module_is_read_as_it_is_stored(layout: Any, rest: str, linears: Linears | None, family: str) -> None:
    """CF-01, CF-05, CF-09: by compressed-tensors' own matcher, under every name that servers use."""
    layers, kinds = pressed(family, rest)
    config = config_of(layout, layers, kinds, linears)
    counts = check_quantization_config(config, kinds, num_layers=layers)
    assert all(count for line, count in counts.items() if line != "Linear")
    oracle = QuantizationConfig.model_validate(config)
    linear = torch.nn.Linear(1, 1)
    targets = {target: group for group in oracle.config_groups.values() for target in group.targets}
    for module, kind in kinds.items():
        for name in server_names(module, num_layers=layers):
            assert is_match(name, linear, oracle.ignore) == (kind == "dense"), (name, kind)
            if kind != "dense":
                best = targets[match_targets(name, linear, targets)[0]]
                assert best.weights.num_bits == (4 if kind == "int4" else 8), name


@pytest.mark.oracle
@pytest.mark.parametrize("group_size", [-1, 32, 64, 128])
@pytest.mark.parametrize(("layout", "rest", "linears"), [*LAYOUTS, ("linear_fp8_config", "fp8", BLOCK)])
def test_config_is_valid_for_compressed_tensors(
    layout: Any, rest: str, linears: Linears | None, group_size: int
) -> None:
    config = build_quantization_config(
        layout=layout, group_size=group_size, ignore=["lm_head"], linears=linears, kv_cache_scales=True
    )
    oracle = QuantizationConfig.model_validate(json.loads(json.dumps(config)))
    experts = next(iter(oracle.config_groups.values()))
    assert experts.weights.strategy == ("channel" if group_size == -1 else "group")
    assert experts.weights.group_size == (None if group_size == -1 else group_size)
    assert experts.weights.symmetric
    assert experts.weights.actorder is None
    assert oracle.format == "pack-quantized"
    assert oracle.quantization_status == "compressed"
    scheme = config["kv_cache_scheme"]  # SGLang: float, 8 bits, per tensor, symmetric, static, or it is dropped
    assert (scheme["type"], scheme["num_bits"], scheme["strategy"]) == ("float", 8, "tensor")
    assert (scheme["symmetric"], scheme["dynamic"]) == (True, False)
    assert (
        build_quantization_config(layout=layout, group_size=32, ignore=[], linears=linears)["kv_cache_scheme"] is None
    )


def test_old_loaders_find_linear() -> None:
    """CF-08: a config without the key 'Linear' stops them; claiming every linear needs a complete ignore list."""
    layers, kinds = pressed("kimi", "dense")
    config = config_of("bf16_rest", layers, kinds)
    assert config["config_groups"]["group_0"]["targets"] == ["Linear", EXPERT_TARGET]
    assert not [name for name, kind in kinds.items() if kind == "dense" and scheme_of(config, name) != "ignored"]


def test_two_groups_names_linear_for_the_fp8_group() -> None:
    """SGLang reads the block size from the target 'Linear' alone, and refuses a top-level mixed-precision."""
    config = build_quantization_config(layout="two_groups", group_size=32, ignore=[], linears=BLOCK)
    experts, rest = config["config_groups"].values()
    assert (experts["targets"], experts["format"]) == ([EXPERT_TARGET], "pack-quantized")
    assert (rest["targets"], rest["format"]) == (["Linear"], "float-quantized")
    assert rest["weights"]["block_structure"] == [128, 128]
    assert rest["input_activations"]["dynamic"] is True
    channel = build_quantization_config(layout="two_groups", group_size=32, ignore=[], linears=CHANNEL)
    rest = channel["config_groups"]["group_1"]
    assert (rest["weights"]["strategy"], rest["input_activations"]["strategy"]) == ("channel", "token")


@pytest.mark.parametrize("family", ["kimi", "glm5", "deepseek_v32"])
def test_linear_fp8_config_needs_every_linear_in_fp8(family: str) -> None:
    """It bypasses ``ignore``: a BF16 linear in it would be read as FP8 without a scale."""
    layers, kinds = pressed(family, "fp8")
    config = config_of("linear_fp8_config", layers, kinds, BLOCK)
    assert config["linear_fp8_config"]["weight_block_size"] == [128, 128]
    built_dense = [
        r"re:.*\.mlp\.gate$",
        r"re:.*\.eh_proj$",
        r"re:.*\.indexer\.weights_proj$",
    ]
    check_quantization_config(config, kinds, num_layers=layers, built_dense=built_dense)
    shared = next(name for name in kinds if name.endswith("shared_experts.down_proj"))
    kinds[shared] = "dense"
    config = config_of("linear_fp8_config", layers, kinds, BLOCK)
    with pytest.raises(CheckpointError, match=r"1 × stored as dense and read as fp8: .*shared_experts\.down_proj"):
        check_quantization_config(config, kinds, num_layers=layers, built_dense=built_dense)


def test_layouts_refuse_linears_they_cannot_hold() -> None:
    with pytest.raises(CheckpointError, match="one scale per channel"):
        build_quantization_config(layout="linear_fp8_config", group_size=32, ignore=[], linears=CHANNEL)
    with pytest.raises(CheckpointError, match="needs FP8 linears"):
        build_quantization_config(layout="two_groups", group_size=32, ignore=[])
    with pytest.raises(CheckpointError, match="has no FP8 linears"):
        build_quantization_config(layout="bf16_rest", group_size=32, ignore=[], linears=BLOCK)


# ignore lines


def test_router_line_does_not_hit_gate_proj_nor_the_reverse() -> None:
    """CF-02: 'mlp.gate' is the beginning of 'mlp.gate_proj'."""
    names = [f"model.layers.1.mlp.{leaf}" for leaf in ("gate", "gate_proj", "up_proj", "down_proj", "gate_up_proj")]
    (line,) = ignore_list(names[:1], names[1:4], num_layers=2)
    assert [name for name in names if Lines([line]).match_suffix(name)] == names[:1]
    (line,) = ignore_list(names[1:4], names[:1], num_layers=2)
    assert [name for name in names if Lines([line]).match_suffix(name)] == names[1:]
    for loose in ("re:.*mlp.gate.*", "re:model.layers.1.mlp.gate"):
        assert Lines([loose]).match_exactly(names[1]), "the loose form hits both"
        config = build_quantization_config(layout="bf16_rest", group_size=32, ignore=[loose])
        with pytest.raises(CheckpointError, match="stored as int4 and read as dense"):
            check_quantization_config(config, {names[0]: "dense", names[1]: "int4"}, num_layers=2)


def test_lines_carry_split_and_fused_names_under_each_prefix() -> None:
    """CF-01: servers ask for gate_up_proj, qkv_proj and fused_qkv_a_proj_with_mqa, and under other prefixes."""
    for family, leaves in {
        "kimi": ["fused_qkv_a_proj_with_mqa", "fused_qkv_a_proj", "q_a_proj", "kv_b_proj"],
        "glm4": ["qkv_proj", "q_proj", "v_proj", "o_proj"],
    }.items():
        layers, kinds = pressed(family, "dense")
        lines = Lines(config_of("bf16_rest", layers, kinds)["ignore"])
        for prefix in (
            "model.layers.0",
            "language_model.model.layers.1",
            "model.language_model.layers.2",
            "model.decoder",
        ):
            asked = [f"{prefix}.self_attn.{leaf}" for leaf in leaves]
            asked += [f"{prefix}.mlp.shared_experts.{leaf}" for leaf in ("gate_proj", "gate_up_proj", "down_proj")]
            asked += [f"{prefix}.mlp.{leaf}" for leaf in ("gate_up_proj", "up_proj", "gate")]
            assert [name for name in asked if not lines.match_exactly(name)] == []
        assert not lines.match_exactly("model.layers.1.mlp.experts.0.gate_proj")
        assert not lines.match_exactly("model.layers.1.mlp.experts")


@pytest.mark.parametrize("prefix", ["", "language_model.", "model.language_model."])
def test_mtp_layer_stored_otherwise_than_the_body(prefix: str) -> None:
    """CF-05: MTP experts BF16, body INT4, for each prefix: the line names the layer, and where servers build it."""
    layers, kinds = pressed("kimi", "dense", prefix)
    mtp_experts = [name for name in kinds if f".{layers}.mlp.experts." in name]
    if not mtp_experts:  # Kimi K2 itself has no MTP layer
        layers, kinds = pressed("glm5", "dense", prefix)
        mtp_experts = [name for name in kinds if f".{layers}.mlp.experts." in name]
    assert mtp_experts
    kinds |= dict.fromkeys(mtp_experts, "dense")
    config = config_of("bf16_rest", layers, kinds)
    check_quantization_config(config, kinds, num_layers=layers)
    ignored = Lines(config["ignore"])
    for parent in (f"model.layers.{layers}.mlp", "model.decoder.mlp", f"model.layers.{layers}.mtp_block.mlp"):
        assert ignored.match_exactly(f"{parent}.experts.0.gate_proj")
    assert not ignored.match_exactly(f"model.layers.{layers - 1}.mlp.experts.0.gate_proj")
    assert not ignored.match_exactly(f"model.layers.{layers}0.mlp.experts.0.gate_proj")


def test_vision_and_projector_stand_with_their_full_names() -> None:
    """CF-09: mappers know 'vision_tower.' with its dot; leaf names survive them, and renamed children are covered."""
    layers, kinds = pressed("kimi_k25", "dense")
    config = config_of("bf16_rest", layers, kinds)
    leaves = [name for name in kinds if name.startswith(("vision_tower.", "mm_projector."))]
    assert leaves
    assert set(leaves) <= set(config["ignore"])
    ignored = Lines(config["ignore"])
    assert ignored.match_exactly("vision_tower.encoder.blocks.0.attn.qkv_proj"), "SGLang's own name for wqkv"
    assert ignored.match_exactly("mm_projector.linear_1"), "vLLM's own name for proj.0"
    assert ignored.match_exactly("lm_head")
    assert ignored.match_exactly("language_model.lm_head")
    assert not ignored.match_exactly("language_model.model.layers.1.mlp.experts.3.up_proj")


def test_attention_and_router_are_ignored_when_dense() -> None:
    """FP-16, LD-01, AC-01: kv_b_proj, shared experts and the router are in the list, experts alone are targets."""
    layers, kinds = pressed("glm5", "dense")
    config = config_of("bf16_rest", layers, kinds)
    read = {name: scheme_of(config, name) for name in kinds}
    assert {read[name] for name in kinds if ".experts." in name} == {"group_0"}
    assert {read[name] for name in kinds if ".experts." not in name} == {"ignored"}
    assert any(name.endswith("kv_b_proj") for name in kinds)
    assert any(name.endswith("indexer.wk") for name in kinds), "CF-12"


def test_list_stays_short_for_a_real_model() -> None:
    dense = [
        f"model.layers.{i}.self_attn.{leaf}" for i in range(79) for leaf in ("q_a_proj", "kv_a_proj_with_mqa", "o_proj")
    ]
    quantized = [f"model.layers.{i}.mlp.experts.{e}.up_proj" for i in range(79) for e in range(16)]
    lines = ignore_list(dense, quantized, num_layers=78)
    assert lines == [
        r"re:.*\.self_attn\.(?:fused_qkv_a_proj|fused_qkv_a_proj_with_mqa|kv_a_proj_with_mqa|o_proj|q_a_proj)$"
    ]
    config = build_quantization_config(layout="bf16_rest", group_size=32, ignore=lines)
    stored: dict[str, Any] = {**dict.fromkeys(dense, "dense"), **dict.fromkeys(quantized, "int4")}
    counts = check_quantization_config(config, stored, num_layers=78)
    assert counts == {lines[0]: 237, "Linear": 0, EXPERT_TARGET: 79 * 16}


def test_experts_kept_dense_in_one_layer_name_that_layer() -> None:
    names = [
        f"model.layers.{i}.mlp.experts.{e}.{leaf}_proj"
        for i in (3, 4, 13)
        for e in range(2)
        for leaf in ("gate", "up", "down")
    ]
    dense = [name for name in names if ".3." in name]
    lines = ignore_list(dense, [name for name in names if name not in dense], num_layers=20)
    assert lines == [r"re:.*\.(?:layers\.3)\.mlp\.experts\.\d+\.(?:down_proj|gate_proj|up_proj)$"]
    assert [name for name in names if Lines(lines).match_exactly(name)] == dense


def test_projections_that_servers_fuse_must_be_stored_alike() -> None:
    """A server builds one module of both, and takes the scheme of one of them."""
    attention = "model.layers.0.self_attn"
    with pytest.raises(CheckpointError, match=r"servers build .*\.fused_qkv_a_proj_with_mqa from 2"):
        ignore_list([f"{attention}.q_a_proj"], [f"{attention}.kv_a_proj_with_mqa"], num_layers=1)


# the proof


def test_lines_that_hit_nothing_are_refused() -> None:
    """AC-03: targets that match no module leave everything unquantized; a dead ignore line is a mistake as well."""
    layers, kinds = pressed("kimi", "dense")
    config = config_of("bf16_rest", layers, kinds)
    config["ignore"].append("re:.*indexers_proj$")
    with pytest.raises(CheckpointError, match=r"1 × lines that hit no module: re:\.\*indexers_proj"):
        check_quantization_config(config, kinds, num_layers=layers)
    config = config_of("bf16_rest", layers, kinds, expert_target=r"re:.*expert_\d+.*")
    assert match_counts(config, kinds, num_layers=layers)[r"re:.*expert_\d+.*"] == 0
    with pytest.raises(CheckpointError, match=r"1 × lines that hit no module: re:\.\*expert_"):
        check_quantization_config(config, kinds, num_layers=layers)


def test_a_dense_module_that_is_not_ignored_is_refused() -> None:
    layers, kinds = pressed("kimi", "dense")
    config = config_of("bf16_rest", layers, kinds)
    config["ignore"] = [line for line in config["ignore"] if "shared_experts" not in line]
    with pytest.raises(CheckpointError, match=r"\d+ × stored as dense and read as int4: .*shared_experts"):
        check_quantization_config(config, kinds, num_layers=layers)


def test_an_ignored_target_is_refused() -> None:
    layers, kinds = pressed("kimi", "dense")
    config = config_of("bf16_rest", layers, kinds)
    config["ignore"].append(r"re:.*\.layers\.1\..*experts.*")
    with pytest.raises(
        CheckpointError, match=r"\d+ × stored as int4 and read as dense: model\.layers\.1\.mlp\.experts"
    ):
        check_quantization_config(config, kinds, num_layers=layers)


def test_a_line_that_servers_read_differently_is_refused() -> None:
    """SGLang takes a plain line as a dotted suffix, others do not."""
    config = build_quantization_config(layout="bf16_rest", group_size=32, ignore=["self_attn.o_proj"])
    with pytest.raises(CheckpointError, match=r"SGLang would ignore model\.layers\.0\.self_attn\.o_proj"):
        check_quantization_config(config, {"model.layers.0.self_attn.o_proj": "dense"}, num_layers=1)


def test_names_under_which_servers_ask() -> None:
    assert server_names("lm_head", num_layers=2) == ("lm_head",)
    assert server_names("language_model.lm_head", num_layers=2) == ("language_model.lm_head", "lm_head")
    wrapped = server_names("model.language_model.layers.0.mlp.gate", num_layers=2)
    assert {"model.layers.0.mlp.gate", "language_model.model.layers.0.mlp.gate"} <= set(wrapped)
    mtp = server_names("model.layers.2.self_attn.o_proj", num_layers=2)
    assert {"model.decoder.self_attn.o_proj", "model.layers.2.mtp_block.self_attn.o_proj"} <= set(mtp)
    assert server_names("vision_tower.encoder.layers.5.mlp.fc1", num_layers=2) == (
        "vision_tower.encoder.layers.5.mlp.fc1",
    )


def test_a_pattern_that_is_none_is_named() -> None:
    with pytest.raises(CheckpointError, match=r"'re:\(' is not a pattern"):
        Lines(["re:("])
