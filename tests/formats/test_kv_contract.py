"""What servers do with KV scales, as data: no emission is offered that a server drops or gets wrong."""

from __future__ import annotations

import pytest

from moepress.formats.runtime_contract import CONTRACTS, Contract, KvEmission, contract_for

EVERY = pytest.mark.parametrize("contract", CONTRACTS.values(), ids=lambda c: f"{c.server}-{c.family}")


@EVERY
def test_the_emission_a_contract_names_is_one_it_allows(contract: Contract) -> None:
    """KV-02: and what is written has a name that the server reads, one for each cached tensor."""
    scales = contract.kv_scales
    assert scales.refusal(scales.emission) is None
    assert scales.refusal("none") is None
    assert (scales.refusal("checkpoint") is None) == (scales.effect == "used")
    assert {suffix for _, suffix in scales.written} <= set(scales.names)
    assert bool(scales.written) == (scales.emission == "checkpoint")
    assert scales.dynamic == (scales.emission == "none")


@pytest.mark.parametrize(
    ("server", "family", "emission", "said"),
    [
        ("sglang", "glm4_moe", "checkpoint", "dropped"),
        ("sglang", "qwen3_moe", "checkpoint", "dropped"),
        ("sglang", "kimi_k2", "checkpoint", "wrong unless they are 1.0"),
        ("sglang", "glm_moe_dsa", "folded", "one a tile"),
        ("sglang", "deepseek_v32", "checkpoint", "one a tile"),
        ("vllm", "deepseek_v3", "checkpoint", "nobody has verified"),
    ],
)
def test_a_refusal_says_what_would_happen(server: str, family: str, emission: KvEmission, said: str) -> None:
    version = {"sglang": "0.5.23", "vllm": "0.32.0"}[server]
    assert said in str(contract_for(server, version, family).kv_scales.refusal(emission))


@pytest.mark.parametrize(
    ("server", "family", "suffix", "value", "good"),
    [
        ("vllm", "glm4_moe", "k_scale", 0.06, True),
        ("vllm", "glm4_moe", "qkv_proj.k_scale", 0.06, False),
        ("sglang", "glm4_moe", "k_scale", 0.06, False),
        ("sglang", "kimi_k2", "k_proj.k_scale", 1.0, True),
        ("sglang", "kimi_k2", "k_proj.k_scale", 0.06, False),
        ("sglang", "kimi_k2", "attn.k_scale", 1.0, False),
        ("sglang", "glm_moe_dsa", "k_scale", 1.0, False),
    ],
)
def test_a_scale_found_in_files(server: str, family: str, suffix: str, value: float, good: bool) -> None:
    """KV-02, KV-04, KV-05: by name first, then by what the server would do with the value."""
    version = {"sglang": "0.5.23", "vllm": "0.32.0"}[server]
    problem = contract_for(server, version, family).kv_scales.problem(f"model.layers.0.self_attn.{suffix}", value)
    assert (problem is None) == good, problem
