"""MLA on SGLang's torch_native backend: the absorbed form, with the up-projection dequantized to bfloat16 as on CUDA."""

from __future__ import annotations

import torch

from . import dequantize


def _up_projection(weight, scale, block):
    """CUDA splits kv_b_proj after dequantizing it; the CPU path would round it again, to one scale for all of it."""
    return dequantize.fp8(weight, scale, block), torch.ones(1)


def replacements():
    return {
        "sglang.srt.models.deepseek_common.deepseek_weight_loader.block_quant_to_tensor_quant": _up_projection,
    }


def prepare():
    from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry
    from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import AttnForwardMethod

    AttentionBackendRegistry.register("torch_native", lambda attention, batch: AttnForwardMethod.MLA)
