"""The contracts are complete, say how they are known, and refuse what a server cannot serve."""

from __future__ import annotations

import dataclasses

import pytest

from moepress.errors import PlanRefused
from moepress.formats.module_matching import Lines
from moepress.formats.runtime_contract import (
    CONTRACTS,
    FAMILIES,
    Contract,
    check_group,
    contract_for,
    doubtful_signed_scales,
)

SGLANG = "0.5.23"
EVERY = pytest.mark.parametrize(
    "contract", CONTRACTS.values(), ids=lambda contract: f"{contract.server}-{contract.family}"
)


def sglang(family: str) -> Contract:
    return contract_for("sglang", SGLANG, family)


def test_every_family_has_a_contract_with_both_servers() -> None:
    assert set(CONTRACTS) == {
        (server, version, family) for server, version in (("sglang", SGLANG), ("vllm", "0.32.0")) for family in FAMILIES
    }
    assert contract_for("sglang", f"{SGLANG}+cpu", "kimi_k2") is sglang("kimi_k2")


@pytest.mark.parametrize(
    ("server", "version", "family"),
    [("sglang", "0.5.24", "kimi_k2"), ("tgi", "3", "kimi_k2"), ("sglang", SGLANG, "llama")],
)
def test_what_nobody_looked_at_is_refused(server: str, version: str, family: str) -> None:
    with pytest.raises(PlanRefused, match=f"no contract for {server} {version} with {family}") as caught:
        contract_for(server, version, family)
    assert caught.value.hint
    assert f"sglang {SGLANG}" in caught.value.hint


@EVERY
def test_every_fact_says_how_it_is_known(contract: Contract) -> None:
    facts = [row.evidence for row in contract.layouts if row.works]
    facts += [contract.kv_scales.evidence, contract.group_evidence, contract.symmetric_evidence]
    facts += [flag.evidence for flag in contract.flags] + [row.evidence for row in contract.signed_scales]
    assert [fact for fact in facts if not fact.startswith(("seen", "read", "not verified"))] == []
    assert all(field is not None for field in dataclasses.astuple(contract))


@EVERY
def test_default_layout_works_and_others_are_explained(contract: Contract) -> None:
    assert contract.layout(contract.default_layout).works
    assert {row.layout for row in contract.layouts} == {"bf16_rest", "linear_fp8_config", "two_groups"}
    assert all(row.evidence for row in contract.layouts)
    assert contract.layout("two_groups").fp8_scale_suffix == "weight_scale"
    assert contract.layout("linear_fp8_config").fp8_scale_suffix == "weight_scale_inv"
    assert contract.layout("bf16_rest").works, "BF16 beside INT4 experts is what everybody reads"


def test_layouts_by_family() -> None:
    assert sglang("deepseek_v3").layout("linear_fp8_config").evidence.startswith("seen booting")
    assert sglang("glm4_moe").layout("two_groups").evidence.startswith("seen booting")
    assert not sglang("glm4_moe").layout("linear_fp8_config").works, "one scale per channel"
    assert "channel" in sglang("glm4_moe").layout("two_groups").fp8_strategies
    assert sglang("kimi_k25").default_layout == "bf16_rest"
    for family in FAMILIES:
        assert not contract_for("vllm", "0.32.0", family).layout("linear_fp8_config").works, "vLLM has no such key"


def test_kv_scales_are_written_only_where_they_take_effect() -> None:
    """KV-01 to KV-05: dropped (GLM-4, Qwen3), wrong (MLA with flashmla), inert (sparse attention)."""
    for contract in CONTRACTS.values():
        assert (contract.kv_scales.emission == "checkpoint") == (contract.kv_scales.effect == "used")
    assert sglang("kimi_k25").kv_scales.effect == "wrong unless 1.0"
    assert sglang("kimi_k25").kv_scales.names == ("k_proj.k_scale",)
    assert sglang("glm4_moe").kv_scales.emission == "folded"
    assert sglang("glm_moe_dsa").kv_scales.emission == "none"
    assert contract_for("vllm", "0.32.0", "glm4_moe").kv_scales.effect == "used"


@pytest.mark.parametrize("family", FAMILIES)
def test_launch_line_matches_what_the_checkpoint_holds(family: str) -> None:
    """LD-02 and KV-13: fusion of shared experts is off; nothing about the KV cache unless it is to be FP8."""
    plain = sglang(family).launch_arguments(fp8_kv=False)
    assert not any("kv" in argument for argument in plain)
    assert ("--disable-shared-experts-fusion" in plain) == (family != "qwen3_moe"), "Qwen3-MoE has no shared expert"
    fp8 = sglang(family).launch_arguments(fp8_kv=True)
    assert fp8[-2:] == ("--kv-cache-dtype", "fp8_e4m3")
    assert ("flashmla" in fp8) == (family in ("deepseek_v3", "kimi_k2", "kimi_k25"))


@EVERY
def test_modules_that_are_always_dense_hold_no_expert(contract: Contract) -> None:
    lines = Lines(contract.built_dense)
    assert lines.match_exactly("model.layers.3.mlp.gate")
    for leaf in ("gate_proj", "experts.0.gate_proj", "shared_experts.gate_proj"):
        assert not lines.match_exactly(f"model.layers.3.mlp.{leaf}")


@pytest.mark.parametrize(
    ("moe_intermediate", "group_size", "tensor_parallel", "groups"),
    [(1408, 128, 8, "1.375"), (1536, 128, 16, "0.75"), (2048, 128, 32, "0.5"), (1536, 128, 8, "1.5")],
)
def test_groups_that_would_straddle_ranks_are_refused(
    moe_intermediate: int, group_size: int, tensor_parallel: int, groups: str
) -> None:
    """I4-01: 1.375, 0.75 and 0.5 groups per rank; the message has the largest safe size and a group that fits."""
    with pytest.raises(PlanRefused, match=f"which is {groups} groups of {group_size}") as caught:
        check_group(
            sglang("kimi_k2"),
            group_size=group_size,
            moe_intermediate=moe_intermediate,
            hidden_size=7168,
            tensor_parallel=tensor_parallel,
        )
    assert caught.value.hint
    assert f"largest safe TP for group size {group_size}: " in caught.value.hint


def grid(family: str, group_size: int, share: int, hidden_size: int = 7168, *, symmetric: bool = True) -> list[str]:
    return check_group(
        sglang(family),
        group_size=group_size,
        moe_intermediate=share * 8,
        hidden_size=hidden_size,
        tensor_parallel=8,
        symmetric=symmetric,
    )


@EVERY
def test_every_kernel_of_a_grid_has_a_row_for_scales_below_zero(contract: Contract) -> None:
    """And what is not known to take them is met by default or by a setting that the row names."""
    assert set(contract.group_sizes) <= {row.kernel for row in contract.signed_scales}
    for row in contract.signed_scales:
        assert (row.takes is None) == row.evidence.startswith("not verified")
        assert row.takes or row.when


def test_which_kernels_are_doubtful_for_scales_below_zero() -> None:
    vllm = contract_for("vllm", "0.32.0", "kimi_k2")

    def doubtful(contract: Contract, group_size: int, *, settings: bool) -> list[str]:
        return [row.kernel for row in doubtful_signed_scales(contract, group_size, settings=settings)]

    assert doubtful(sglang("kimi_k2"), 32, settings=False) == []
    assert doubtful(sglang("kimi_k2"), 32, settings=True) == ["flashinfer_trtllm"]
    assert doubtful(sglang("kimi_k2"), 128, settings=True) == []
    assert doubtful(vllm, 32, settings=False) == ["flashinfer_trtllm"]
    assert doubtful(vllm, 128, settings=False) == []
    assert doubtful(vllm, 128, settings=True) == ["marlin with INT8 activations"]


def test_kernels_that_take_a_grid() -> None:
    assert grid("kimi_k2", 32, 256) == ["marlin", "triton"]
    assert grid("kimi_k2", 64, 256) == ["marlin"]
    assert grid("kimi_k2", 128, 256) == ["marlin", "triton"]
    assert grid("kimi_k2", -1, 256) == ["marlin"]
    assert grid("glm4_moe", 64, 192) == ["marlin"]
    assert grid("glm4_moe", 32, 96) == ["triton"], "96 columns are no multiple of Marlin's tile of 64"


def test_grids_that_no_kernel_takes_are_refused() -> None:
    """I4-06: asymmetric experts do not load in SGLang."""
    with pytest.raises(PlanRefused, match="no kernel takes group size 16") as caught:
        grid("kimi_k2", 16, 256)
    assert caught.value.hint == "known sizes: marlin [-1, 32, 64, 128], triton [32, 128]"
    with pytest.raises(PlanRefused, match="asymmetric INT4 experts"):
        grid("kimi_k2", 32, 256, symmetric=False)
    with pytest.raises(PlanRefused, match="hidden size 7180 is no multiple of group size 32"):
        grid("kimi_k2", 32, 256, hidden_size=7180)
    with pytest.raises(PlanRefused, match="no multiple of a kernel's tile"):
        grid("kimi_k2", -1, 8 * 12)
    vllm = contract_for("vllm", "0.32.0", "kimi_k2")
    assert check_group(
        vllm, group_size=32, moe_intermediate=2048, hidden_size=7168, tensor_parallel=8, symmetric=False
    ) == ["marlin"]
