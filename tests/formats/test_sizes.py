"""Every size that is publicly known of these checkpoints, from configuration alone."""

from __future__ import annotations

import math
from typing import Any

import pytest

from moepress.formats.architecture import BF16, StoredAs, WeightSpec
from moepress.formats.families import Component
from moepress.formats.sizes import (
    GB,
    GIB,
    Policy,
    bytes_per_gpu,
    checkpoint_bytes,
    groups_per_rank,
    kv_bytes_per_token,
    kv_pool_bytes,
    kv_tokens,
    largest_tensor_parallel,
    pressed,
    stored_bytes,
    tensor_parallel_problems,
)
from tests.formats.published import config_of, weights_of

EXPERT, SHARED, DENSE = Component.ROUTED_EXPERT, Component.SHARED_EXPERT, Component.DENSE_MLP
INT4_G32, INT4_G128 = StoredAs("int4", 32), StoredAs("int4", 128)
ALL_BF16 = dict.fromkeys(Component, BF16)

AS_PUBLISHED = Policy()
G32 = Policy({EXPERT: INT4_G32})
G32_MTP_AS_PUBLISHED = Policy({EXPERT: INT4_G32}, mtp={})
G32_SHARED_DENSE_MTP_BF16 = Policy({EXPERT: INT4_G32, SHARED: BF16, DENSE: BF16}, mtp=ALL_BF16)
G32_REST_BF16 = Policy({**ALL_BF16, EXPERT: INT4_G32})
G128 = Policy({EXPERT: INT4_G128})


def load(model: str) -> tuple[dict[str, Any], tuple[WeightSpec, ...]]:
    return config_of(model), weights_of(model)


@pytest.mark.parametrize(
    ("model", "policy", "gigabytes", "gibibytes", "per_gpu"),
    [
        ("glm_5.2_fp8", AS_PUBLISHED, 755.62, 703.72, 88.46),
        ("glm_5.2_fp8", G32, 434.12, 404.31, 51.53),
        ("glm_5.2_fp8", G32_MTP_AS_PUBLISHED, 438.35, 408.25, 51.53),
        ("glm_5.2_fp8", G32_SHARED_DENSE_MTP_BF16, None, 420.71, 51.94),
        ("glm_5.2_fp8", G32_REST_BF16, 450.90, 419.94, 54.62),
        ("glm_5.2_fp8", G128, 399.69, 372.24, 47.57),
        ("kimi_k2_instruct", AS_PUBLISHED, 1029.17, 958.49, None),
        ("kimi_k2.5", AS_PUBLISHED, 595.15, 554.28, 71.95),
    ],
)
def test_known_sizes(
    model: str, policy: Policy, gigabytes: float | None, gibibytes: float, per_gpu: float | None
) -> None:
    """Checkpoint in GB and GiB, and GiB of weights per GPU at TP8 without MTP: to the last digit."""
    config, specs = load(model)
    specs = tuple(pressed(specs, policy))
    size = checkpoint_bytes(specs)
    assert round(size / GIB, 2) == gibibytes
    if gigabytes is not None:
        assert round(size / GB, 2) == gigabytes
    if per_gpu is not None:
        assert round(bytes_per_gpu(config, specs, tp=8).total / GIB, 2) == per_gpu


def test_what_makes_up_a_gpus_share() -> None:
    config, specs = load("kimi_k2.5")
    share = bytes_per_gpu(config, specs, tp=8)
    vision = sum(2 * s.numel for s in specs if s.identity.component in (Component.VISION, Component.PROJECTOR))
    assert share.absorbed == 61 * 16384 * 512 * 2 // 8  # kv_b_proj again, in BF16
    assert share.replicated > vision
    one = bytes_per_gpu(config, specs, tp=1)
    assert one.split + one.replicated == checkpoint_bytes(specs)


def test_expert_parallelism_moves_experts_instead_of_columns() -> None:
    config, specs = load("glm_5.2_fp8")
    assert bytes_per_gpu(config, specs, tp=8, ep=8).total == bytes_per_gpu(config, specs, tp=8).total
    uneven = bytes_per_gpu(config, specs, tp=6, ep=6)  # 256 experts over 6 ranks: the first has 43
    experts = sum(stored_bytes(s.shape, s.published) for s in specs if s.identity.component is EXPERT)
    experts -= sum(
        stored_bytes(s.shape, s.published) for s in specs if s.identity.expert is not None and s.identity.is_mtp
    )
    even = bytes_per_gpu(config, specs, tp=6)
    assert uneven.split - even.split == pytest.approx(experts * (43 / 256 - 1 / 6), rel=1e-9)


def test_mtp_layers_count_when_they_are_served() -> None:
    config, specs = load("glm_5.2_fp8")
    without, with_mtp = (bytes_per_gpu(config, specs, tp=8, mtp=mtp).total for mtp in (False, True))
    assert 1.16 < (with_mtp - without) / GIB < 1.35  # 9.95e9 parameters in FP8 over 8 ranks, q_a, eh_proj, … whole


@pytest.mark.parametrize(
    ("model", "kv_dtype", "expected"),
    [
        ("kimi_k2_instruct", "bf16", 70_272),
        ("kimi_k2_instruct", "fp8", 35_136),
        ("kimi_k2.5", "bf16", 70_272),
        ("glm_5.2_fp8", "bf16", 92_628),
        ("glm_5.2_fp8", "fp8", 53_940),
        ("glm_4.7_fp8", "bf16", 47_104),
        ("glm_4.7_fp8", "fp8", 23_552),
        ("qwen3_235b_a22b_fp8", "bf16", 94 * 2 * 128 * 2),  # 4 KV heads on 8 ranks: each rank keeps one
    ],
)
def test_kv_bytes_per_token_at_tp8(model: str, kv_dtype: Any, expected: int) -> None:
    assert kv_bytes_per_token(config_of(model), kv_dtype, tp=8) == expected


def test_kv_of_every_layer_full() -> None:
    """GLM-5 and 5.1 keep index keys on all 78 layers, 5.2 on 21."""
    assert kv_bytes_per_token(config_of("glm_5_fp8"), "fp8", tp=8) == 78 * (656 + 132)


def test_kv_tokens_of_a_pool() -> None:
    pool = int(44.9 * GIB)
    assert kv_tokens(pool, 70_272) // 1000 == 686
    assert kv_tokens(pool, 35_136) // 1000 == 1372
    assert kv_tokens(-1, 35_136) == 0


def test_headroom_may_be_negative() -> None:
    assert kv_pool_bytes(140 * GIB, 0.9, 100 * GIB) == 26 * GIB
    assert kv_pool_bytes(80 * GIB, 0.9, 88 * GIB) == -16 * GIB


@pytest.mark.parametrize(
    ("intermediate", "share", "fitting"),
    [
        (2048, 256, (32, 64, 128)),  # Kimi K2, GLM-5.x, DeepSeek V3
        (1536, 192, (32, 64)),  # GLM-4.5 to 4.7, MiniMax-M2, Qwen3-235B
        (1408, 176, ()),  # GLM-4.5-Air
        (2880, 360, ()),  # gpt-oss
    ],
)
def test_groups_that_fit_at_tp8(intermediate: int, share: int, fitting: tuple[int, ...]) -> None:
    assert intermediate // 8 == share
    whole = tuple(g for g in (32, 64, 128) if groups_per_rank(intermediate, g, 8).is_integer())
    assert whole == fitting
    assert fitting == tuple(g for g in (32, 64, 128) if largest_tensor_parallel(intermediate, g) >= 8)


@pytest.mark.parametrize(
    ("intermediate", "group", "tp", "groups", "largest"),
    [(1408, 128, 8, 1.375, 1), (1536, 128, 16, 0.75, 4), (2048, 128, 32, 0.5, 16), (2048, 32, 8, 8, 64)],
)
def test_public_tensor_parallel_failures(intermediate: int, group: int, tp: int, groups: float, largest: int) -> None:
    assert groups_per_rank(intermediate, group, tp) == groups
    assert largest_tensor_parallel(intermediate, group) == largest


@pytest.mark.parametrize(
    ("moe_intermediate", "group_size", "largest"),
    [
        (100, 32, 0),
        (1408, 128, 1),
        (1536, 128, 4),
        (2048, 128, 16),
        (2048, 32, 64),
        (1536, 32, 16),
        (1536, 64, 8),
        (1408, 32, 4),
        (1000, 32, 0),
        (2048, -1, 256),
    ],
)
def test_largest_safe_tensor_parallel_size(moe_intermediate: int, group_size: int, largest: int) -> None:
    """I4-01: down_proj is split along its input, and whole groups have to stay together."""
    assert largest_tensor_parallel(moe_intermediate, group_size) == largest
    unit = 8 if group_size == -1 else group_size
    fitting = [tp for tp in (1, 2, 4, 8, 16, 32, 64, 128, 256) if moe_intermediate % (tp * unit) == 0]
    assert max(fitting, default=0) == largest


def test_the_planner_names_what_cannot_be_cut() -> None:
    config, specs = load("glm_4.7_fp8")
    assert tensor_parallel_problems(config, pressed(specs, G32), tp=8) == []
    (problem,) = tensor_parallel_problems(config, pressed(specs, G128), tp=8)
    assert problem == (
        "routed_expert down_proj: 192 columns per rank are 1.5 groups of 128; the largest split that fits is 4"
    )
    assert tensor_parallel_problems(config, pressed(specs, G128), tp=8, ep=8) == []  # whole experts: nothing is cut
    assert tensor_parallel_problems(config, pressed(specs, G128), tp=8, ep=2) == []


def test_fp8_blocks_and_heads_must_divide_too() -> None:
    config, specs = load("qwen3_235b_a22b_fp8")
    problems = tensor_parallel_problems(config, specs, tp=8)
    assert len(problems) == 3
    assert problems[0] == "routed_expert gate_proj: 192 rows per rank are 1.5 FP8 blocks of 128"
    assert tensor_parallel_problems(config, specs, tp=4) == []
    assert "64 attention heads do not divide over 3 ranks" in tensor_parallel_problems(config, specs, tp=3)
    assert tensor_parallel_problems(config, (), tp=8, ep=3) == [
        "8 tensor-parallel ranks do not divide into 3 expert-parallel ones",
        "128 experts do not divide over 3 expert-parallel ranks",
    ]


@pytest.mark.parametrize(
    ("shape", "stored", "expected"),
    [
        ((576, 7168), StoredAs("fp8_block"), 576 * 7168 + 4 * 5 * 56),  # 4.5 blocks of rows: the last one is ragged
        ((130, 257), StoredAs("fp8_block"), 130 * 257 + 4 * 2 * 3),
        ((100, 40), StoredAs("fp8_channel"), 4000 + 400),
        ((100, 40), StoredAs("fp8_tensor"), 4004),
        ((2048, 7168), StoredAs("int4", 32), 2048 * 7168 // 2 + 2 * 2048 * 7168 // 32 + 16),
        ((4, 20), StoredAs("int4", -1), 4 * 4 * 3 + 2 * 4 + 16),  # 20 columns fill three words
        ((256,), StoredAs("f32"), 1024),
        ((8, 512, 256), BF16, 2 * 8 * 512 * 256),
    ],
)
def test_stored_bytes(shape: tuple[int, ...], stored: StoredAs, expected: int) -> None:
    assert stored_bytes(shape, stored) == expected


def test_vectors_and_f32_are_never_packed() -> None:
    """Whatever a policy says: a bias has no scales, and the router's correction bias must stay F32."""
    specs = load("glm_4.7_fp8")[1]
    everything_int4 = pressed(specs, Policy(dict.fromkeys(Component, INT4_G32)))
    for before, after in zip(specs, everything_int4, strict=True):
        if len(before.shape) < 2 or before.published.kind == "f32":
            assert after.published == before.published
    assert math.isclose(checkpoint_bytes(everything_int4) / checkpoint_bytes(specs), 0.5625, rel_tol=0.01)
