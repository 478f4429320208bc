"""MLA and sparse (DSA) attention on SGLang's torch_native backend.

MLA runs in the absorbed form, with the up-projection dequantized to bfloat16 as on CUDA. A DSA layer attends to all
tokens: the indexer picks the `index_topk` best of the tokens before, so up to that length picking changes nothing.
Plain rotary embeddings (GLM-5) are built as on other devices; SGLang's CPU factory knows yarn only.
"""

# ruff: noqa: ARG001 - the functions keep the signatures of those they replace
from __future__ import annotations

import torch

from . import dequantize


def _up_projection(weight, scale, block):
    """CUDA splits kv_b_proj after dequantizing it; the CPU path would round it again, to one scale for all of it."""
    return dequantize.fp8(weight, scale, block), torch.ones(1)


def _attend_to_all(self, x, q_lora, positions, forward_batch, layer_id, return_indices=True):
    longest = int(positions.max()) + 1
    if longest > self.index_topk:
        raise NotImplementedError(
            f"moepress CPU lab: a request of {longest} tokens; past index_topk={self.index_topk} attention is sparse"
        )


def _as_on_hopper(device=None):
    """Arguments of a DSA model are resolved by compute capability; the answers of an H200 are wanted here."""
    return 9, 0


def _rope(yarn):
    def build(head_size, rotary_dim, max_position, base, is_neox_style, rope_scaling, dtype, partial, device):
        from sglang.srt.layers.rotary_embedding.factory import get_rope

        given = (head_size, rotary_dim, max_position, base, is_neox_style, rope_scaling, dtype, partial)
        return get_rope(*given) if rope_scaling is None else yarn(*given, device)

    return build


def _absorbed(attention, forward_batch):
    from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import AttnForwardMethod

    return AttnForwardMethod.MLA


def replacements():
    return {
        "torch.cuda.get_device_capability": _as_on_hopper,
        "sglang.srt.models.deepseek_common.deepseek_weight_loader.block_quant_to_tensor_quant": _up_projection,
        "sglang.srt.layers.attention.dsa.dsa_indexer.Indexer.forward_native": _attend_to_all,
    }


def prepare():
    from sglang.srt.layers.rotary_embedding import factory
    from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry

    factory.get_rope_cpu = _rope(factory.get_rope_cpu)
    AttentionBackendRegistry.register("torch_native", _absorbed)
