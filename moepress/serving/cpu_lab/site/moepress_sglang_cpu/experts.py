"""Expert kernels: INT4 (compressed-tensors) and FP8 (both config styles), run as SGLang's own bfloat16 expert loop.

The parameters stay as loaded, so that /weights_checker hashes what came from the checkpoint (a GPU repacks them for
Marlin). The bfloat16 copies are plain attributes, not parameters.
"""

# ruff: noqa: ARG001 - the functions keep the signatures of those they replace
from __future__ import annotations

from . import dequantize

_CT = "sglang.srt.layers.quantization.compressed_tensors.schemes."
_INT4 = _CT + "compressed_tensors_wNa16_moe.CompressedTensorsWNA16MoE."
_CT_FP8 = _CT + "compressed_tensors_w8a8_fp8_moe.CompressedTensorsW8A8Fp8MoE."
_FP8 = "sglang.srt.layers.quantization.fp8.Fp8MoEMethod."


class _DenseExperts:
    """What SGLang's expert loop reads of a layer: two stacks of bfloat16 weights."""

    def __init__(self, layer, w13, w2):
        self.num_experts = layer.num_experts
        self.w13_weight, self.w2_weight = w13, w2


def _int4_after_loading(self, layer):
    if not self.sym:
        raise NotImplementedError(
            "moepress CPU lab: asymmetric INT4 experts (SGLang 0.5.23 loads their zero points wrongly)"
        )
    layer.cpu_lab_experts = _DenseExperts(
        layer,
        dequantize.int4_transposed(layer.w13_weight_packed.data, layer.w13_weight_scale.data),
        dequantize.int4_transposed(layer.w2_weight_packed.data, layer.w2_weight_scale.data),
    )


def _fp8_after_loading(self, layer):
    def dense(name):
        scale = getattr(layer, f"{name}_weight_scale_inv", None)
        if scale is None:
            scale = getattr(layer, f"{name}_weight_scale")
        return dequantize.fp8(getattr(layer, f"{name}_weight").data, scale.data, self.weight_block_size)

    layer.cpu_lab_experts = _DenseExperts(layer, dense("w13"), dense("w2"))


def _keep_runner_config(self, layer, moe_runner_config):
    self.moe_runner_config = moe_runner_config


def _apply(self, layer, dispatch_output):
    from sglang.srt.layers.moe.fused_moe_native import moe_forward_native
    from sglang.srt.layers.moe.token_dispatcher import StandardCombineInput

    hidden = moe_forward_native(
        layer.cpu_lab_experts, dispatch_output.hidden_states, dispatch_output.topk_output, self.moe_runner_config
    )
    return StandardCombineInput(hidden_states=hidden)


def replacements():
    return {
        _INT4 + "process_weights_after_loading": _int4_after_loading,
        _INT4 + "create_moe_runner": _keep_runner_config,
        _INT4 + "apply_weights": _apply,
        _CT_FP8 + "process_weights_after_loading": _fp8_after_loading,
        _CT_FP8 + "create_moe_runner": _keep_runner_config,
        _CT_FP8 + "apply_weights": _apply,
        _FP8 + "process_weights_after_loading": _fp8_after_loading,
        _FP8 + "create_moe_runner": _keep_runner_config,
        _FP8 + "apply": _apply,
    }


def prepare():
    pass
