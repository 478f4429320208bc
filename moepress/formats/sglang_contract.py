"""SGLang 0.5.23: what it reads of our output, by family.

Paths are below ``sglang/srt``; ``ct`` stands for ``layers/quantization/compressed_tensors``. 'Seen' was on a CPU, with
kernels alone replaced. Reading is not running: a row that begins with 'read' is settled by booting a tiny checkpoint of
that family, and on a GPU by booting the real one.
"""

from __future__ import annotations

from collections.abc import Mapping

from moepress.formats.contract_types import (
    DSA_FAMILIES,
    GQA_FAMILIES,
    Contract,
    LaunchFlag,
    LayoutSupport,
    SignedScales,
    layout_rows,
)
from moepress.formats.kv_contract import SGLANG_DSA, SGLANG_GQA, SGLANG_MLA
from moepress.formats.quantization_config import Layout

VERSION = "0.5.23"

_EXPERTS = "seen booting with INT4 experts"
_LINEAR_FP8 = "read in ct/compressed_tensors.py:188-193 (every LinearBase becomes FP8, ignore is bypassed)"
_TWO_GROUPS = "read in ct/compressed_tensors.py:272-279 (block size from the target Linear alone), 730, 803-812"
_MLA_LAYOUTS = layout_rows(
    ("bf16_rest", True, _EXPERTS),
    (
        "linear_fp8_config",
        True,
        "seen booting with the trained tiny Kimi on a CPU: 252 of 256 teacher-forced tokens equal transformers on the "
        "dequantized weights, 4 at near-ties (top two within 0.26); with FP8 KV 253, 3",
    ),
    (
        "two_groups",
        True,
        "seen booting on a CPU with an untrained tiny Kimi: 13 of 16 prompts equal, 3 at near-ties; "
        f"{_TWO_GROUPS}; kv_b_proj by models/deepseek_common/deepseek_weight_loader.py:100-112, 640-690",
    ),
)
_LAYOUTS: Mapping[str, tuple[Layout, tuple[LayoutSupport, ...]]] = {
    "deepseek_v3": ("linear_fp8_config", _MLA_LAYOUTS),
    "kimi_k2": ("linear_fp8_config", _MLA_LAYOUTS),
    "kimi_k25": (
        "bf16_rest",
        layout_rows(
            ("bf16_rest", True, f"{_EXPERTS}; the publisher's own layout"),
            ("linear_fp8_config", False, "the source's linears are BF16, and this layout reads every linear as FP8"),
            ("two_groups", False, "the source's linears are BF16"),
        ),
    ),
    "deepseek_v32": (
        "linear_fp8_config",
        layout_rows(
            ("bf16_rest", True, "read: the classes of deepseek_v3; not run, sparse attention needs a GPU"),
            ("linear_fp8_config", True, f"{_LINEAR_FP8}; the indexer's BF16 weights_proj is built without it"),
            ("two_groups", True, f"{_TWO_GROUPS}; indexer.wk by deepseek_weight_loader.py:115-172, either scale name"),
        ),
    ),
    "glm_moe_dsa": (
        "linear_fp8_config",
        layout_rows(
            ("bf16_rest", True, "seen loading and running on a CPU: 125 of 128 tokens equal, 1 near-tie, 2 differ"),
            (
                "linear_fp8_config",
                True,
                "seen booting on a CPU: 246 of 256 tokens equal, 8 near-ties, 2 differ (the dense model likewise); "
                f"{_LINEAR_FP8}. BF16 linears are built without it: indexer.weights_proj "
                "(layers/attention/dsa/dsa_indexer.py:353-374), eh_proj (models/deepseek_nextn.py:102)",
            ),
            (
                "two_groups",
                True,
                "seen loading and running on a CPU: 120 of 128 tokens equal, 6 near-ties, 2 differ; "
                f"{_TWO_GROUPS}. The layout that can keep shared and dense layers in BF16 beside FP8",
            ),
        ),
    ),
    "glm4_moe": (
        "two_groups",
        layout_rows(
            ("bf16_rest", True, _EXPERTS),
            ("linear_fp8_config", False, "it reads block scales, and GLM-4.x is published with one per channel"),
            (
                "two_groups",
                True,
                "seen booting on a CPU with scales per channel: 247 of 256 tokens equal, 9 near-ties; with block scales too",
            ),
        ),
    ),
    "qwen3_moe": (
        "two_groups",
        layout_rows(
            ("bf16_rest", True, "seen loading and running on a CPU: 124 of 128 tokens equal, 4 near-ties"),
            (
                "linear_fp8_config",
                True,
                "seen loading and running on a CPU: 127 of 128 tokens equal, 1 differs; the router is built without it "
                "(models/qwen3_moe.py:286-296)",
            ),
            ("two_groups", True, "seen booting on a CPU: 250 of 256 tokens equal, 5 near-ties, 1 differs"),
        ),
    ),
}

_NO_SHARED_FUSION = LaunchFlag(
    arguments=("--disable-shared-experts-fusion",),
    when="always",
    reason="a shared expert that is not INT4 would be renamed into an INT4 slot, and dropped",
    evidence="read in models/glm4_moe.py:1012-1032, 1102-1117 (GLM-4's gate does not look at the config); DeepSeek's "
    "gate refuses INT4 (models/deepseek_v2.py:3392), the flag makes it certain",
)
_MLA_FP8_KV = LaunchFlag(
    arguments=("--attention-backend", "flashmla", "--page-size", "64", "--kv-cache-dtype", "fp8_e4m3"),
    when="fp8 kv",
    reason="on Hopper fa3 would convert the whole FP8 pool at every layer",
    evidence="read; not verified on a GPU",
)
_DSA_FP8_KV = LaunchFlag(
    arguments=("--kv-cache-dtype", "fp8_e4m3"),
    when="fp8 kv",
    reason="'auto' becomes BF16 on Hopper",
    evidence="read in arg_groups/overrides.py:529-536",
)
_GQA_FP8_KV = LaunchFlag(
    arguments=("--kv-cache-dtype", "fp8_e4m3"),
    when="fp8 kv",
    reason="'auto' becomes FP8 only where kv_cache_scheme stands in the config",
    evidence="read in ct/compressed_tensors.py:142-151",
)

_SIGNED_SCALES = (
    SignedScales(
        "marlin",
        True,
        "read in kernels/jit/csrc/gemm/marlin_moe/marlin_template.h:205-214, 1384-1386 (__hmul2 by the scale, in groups) and "
        "1618-1627 (once for a row); srt/layers/quantization/marlin_utils.py:311-346 permutes scales and no more. AutoRound's "
        "INT4 checkpoints, half of whose scales are negative, are served by the same kernel in vLLM (vllm#48905)",
    ),
    SignedScales(
        "triton",
        True,
        "seen in Triton's interpreter (float16, groups of 32 and 128, half of the scales negative): as the dense product; "
        "kernels/ops/moe/fused_moe_triton_kernels.py:298",
        when="on Blackwell, or with --moe-runner-backend triton",
        group_sizes=(32, 128),
    ),
    SignedScales(
        "flashinfer_trtllm",
        None,
        "not verified: compiled code without its source; ct/schemes/compressed_tensors_w4a4_mxint4_moe.py permutes BF16 scales",
        when="with --moe-runner-backend flashinfer_trtllm on Blackwell",
        by_default=False,
        group_sizes=(32,),
    ),
)

_SILENT = (
    "a rank's share of moe_intermediate that is no multiple of the group: floor-divided (…_wNa16_moe.py:158)",
    "experts of a layer stored in different ways: the scheme is that of expert 0 (ct/compressed_tensors.py:883)",
    "missing tensors: not reported; compare names offline, or POST /weights_checker",
)
_WARNS_OF_UNKNOWN = "unknown tensor names: a warning in the log (deepseek_weight_loader.py:528-533)"
_SKIPS_UNKNOWN = "unknown tensor names: skipped without a word (models/glm4_moe.py:1238, models/qwen3_moe.py:1266)"


def sglang_contract(family: str) -> Contract:
    """The contract of one family in `FAMILIES`."""
    default, layouts = _LAYOUTS[family]
    dense = [r"re:.*\.mlp\.gate$", r"re:.*\.eh_proj$"]
    if family in GQA_FAMILIES:
        kv_scales, kv_flag, unknown = SGLANG_GQA, _GQA_FP8_KV, _SKIPS_UNKNOWN
    elif family in DSA_FAMILIES:
        kv_scales, kv_flag, unknown = SGLANG_DSA, _DSA_FP8_KV, _WARNS_OF_UNKNOWN
        dense.append(r"re:.*\.indexer\.weights_proj$")
    else:
        kv_scales, kv_flag, unknown = SGLANG_MLA, _MLA_FP8_KV, _WARNS_OF_UNKNOWN
    if family == "kimi_k25":
        dense += [r"re:(?:.*\.)?vision_tower\..+$", r"re:(?:.*\.)?mm_projector\..+$"]
    return Contract(
        server="sglang",
        version=VERSION,
        family=family,
        layouts=layouts,
        default_layout=default,
        kv_scales=kv_scales,
        flags=(kv_flag,) if family == "qwen3_moe" else (_NO_SHARED_FUSION, kv_flag),
        group_sizes={"marlin": (-1, 32, 64, 128), "triton": (32, 128)},
        share_multiples={"marlin": 64, "triton": 8},
        group_evidence="read in layers/quantization/marlin_utils.py:44, 250-256 and ct/compressed_tensors.py:653-661",
        signed_scales=_SIGNED_SCALES,
        symmetric_only=True,
        symmetric_evidence="seen: asymmetric experts fail, their zero points are not transposed",
        act_order_evidence="read: 'weight' loads w2 scales unsplit (…_wNa16_moe.py:141-150), the Triton runner "
        "takes none (ct/compressed_tensors.py:653-661); so actorder is written as null",
        built_dense=tuple(dense),
        silent=(*_SILENT, unknown),
    )
