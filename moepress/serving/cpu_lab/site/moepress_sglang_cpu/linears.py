"""FP8 linears: `quant_method: fp8` (and linear_fp8_config) and compressed-tensors float-quantized."""

# ruff: noqa: ARG001 - the functions keep the signatures of those they replace
from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812

from . import dequantize

_FP8 = "sglang.srt.layers.quantization.fp8.Fp8LinearMethod."
_CT_FP8 = (
    "sglang.srt.layers.quantization.compressed_tensors.schemes.compressed_tensors_w8a8_fp8.CompressedTensorsW8A8Fp8."
)


def _per_row(scale, layer):
    """Per-tensor scales, one for each part of a fused linear, spread over the part's rows."""
    if scale.numel() != len(layer.logical_widths):
        return scale
    return scale.view(-1).repeat_interleave(torch.tensor(layer.logical_widths)).unsqueeze(1)


def _fp8_after_loading(self, layer):
    if not self.is_checkpoint_fp8_serialized:
        raise NotImplementedError("moepress CPU lab: quantizing linears to FP8 while loading")
    if self.block_quant:
        layer.cpu_lab_weight = dequantize.fp8(layer.weight.data, layer.weight_scale_inv.data, self.weight_block_size)
    else:
        layer.cpu_lab_weight = dequantize.fp8(layer.weight.data, _per_row(layer.weight_scale.data, layer), None)


def _ct_after_loading(self, layer):
    scale, block = layer.weight_scale.data, self.weight_block_size
    if block is None:
        scale = _per_row(scale, layer) if str(self.strategy) == "tensor" else scale.view(-1, 1)
    layer.cpu_lab_weight = dequantize.fp8(layer.weight.data, scale, block)


def _linear(self, layer, x, bias=None):
    return F.linear(x, layer.cpu_lab_weight, bias)


def replacements():
    return {
        _FP8 + "process_weights_after_loading": _fp8_after_loading,
        _FP8 + "apply": _linear,
        _CT_FP8 + "process_weights_after_loading": _ct_after_loading,
        _CT_FP8 + "apply_weights": _linear,
    }


def prepare():
    pass
