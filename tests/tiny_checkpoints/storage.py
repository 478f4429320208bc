"""How publishers store a matrix: block FP8, per-channel FP8, packed INT4; and the value that is then stored.

Every function takes a float32 matrix w [R, C] and returns (tensors by suffix, float32 value of what is stored [R, C]):

    fp8_block    codes F8_E4M3 [R, C], scale [ceil(R/128), ceil(C/128)]         value = codes · scale of its block
    fp8_channel  codes F8_E4M3 [R, C], scale [R, 1]                             value = codes · scale of its row
    int4         words I32 [R, ceil(C/8)], scale BF16 [R, C/32], shape [2]      value = codes · scale of its group

Scales are rounded to their stored dtype first and divided by afterwards, so codes and scales fit each other.
"""

from __future__ import annotations

import torch

E4M3_MAX = 448.0
BLOCK = 128
GROUP = 32

Stored = dict[str, torch.Tensor]


def fp8_block(w: torch.Tensor, scale_dtype: str) -> tuple[Stored, torch.Tensor]:
    """128 × 128 blocks, ragged at the edges. ``scale_dtype``: F32, BF16, or power-of-two as UE8M0_F32, F8_E8M0, U8."""
    rows, columns = w.shape
    amax = torch.zeros(-(-rows // BLOCK), -(-columns // BLOCK))
    for i in range(amax.shape[0]):
        for j in range(amax.shape[1]):
            amax[i, j] = w[i * BLOCK : (i + 1) * BLOCK, j * BLOCK : (j + 1) * BLOCK].abs().max()
    stored_scale, scale = _round_scale(amax / E4M3_MAX, scale_dtype)
    each = scale.repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :columns]
    codes = (w / each).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale_inv": stored_scale}, codes.float() * each


def fp8_channel(w: torch.Tensor, scale_dtype: str) -> tuple[Stored, torch.Tensor]:
    """One scale per row. ``scale_dtype``: F32 or BF16."""
    stored_scale, scale = _round_scale(w.abs().amax(1, keepdim=True) / E4M3_MAX, scale_dtype)
    codes = (w / scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale": stored_scale}, codes.float() * scale


def int4(w: torch.Tensor, shape_dtype: torch.dtype) -> tuple[Stored, torch.Tensor]:
    """Groups of 32 along the input dimension, symmetric on -7…7; words low nibble first, offset +8."""
    rows, columns = w.shape
    grouped = w.view(rows, columns // GROUP, GROUP)
    scale = (grouped.abs().amax(2) / 7).to(torch.bfloat16)
    codes = (grouped / scale.float()[..., None]).round().clamp(-7, 7).to(torch.int32)
    nibbles = (codes.view(rows, columns) + 8).view(rows, columns // 8, 8).to(torch.int64)
    words = (nibbles << (4 * torch.arange(8))).sum(2)
    packed = torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)
    shape = torch.tensor([rows, columns], dtype=shape_dtype)
    value = (codes.float() * scale.float()[..., None]).view(rows, columns)
    return {"weight_packed": packed, "weight_scale": scale, "weight_shape": shape}, value


def _round_scale(scale: torch.Tensor, dtype: str) -> tuple[torch.Tensor, torch.Tensor]:
    """(the scale as it is stored, its float32 value)."""
    if dtype == "F32":
        return scale, scale
    if dtype == "BF16":
        return scale.to(torch.bfloat16), scale.to(torch.bfloat16).float()
    exponent = torch.ceil(torch.log2(scale))  # up, so that no code has to be clipped
    value = torch.exp2(exponent)
    byte = (exponent + 127).to(torch.uint8)
    return {"UE8M0_F32": value, "F8_E8M0": byte.view(torch.float8_e8m0fnu), "U8": byte}[dtype], value
