"""Stored weights back to bfloat16, one rounding: (stored value × scale) in float32, then bfloat16."""

from __future__ import annotations

import torch


def int4_transposed(packed: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """INT4 experts as SGLang's loader holds them (input dimension first).

    Args:
        packed: [E, K/8, N] int32, eight codes per word along K, low nibble first, code + 8.
        scale: [E, K/g, N] bfloat16.

    Returns:
        [E, N, K] bfloat16.
    """
    experts, words, columns = packed.shape
    shifts = torch.arange(0, 32, 4, dtype=torch.int32).view(1, 1, 8, 1)
    codes = ((packed.unsqueeze(2) >> shifts) & 15).sub_(8)
    groups = scale.shape[1]
    grouped = codes.view(experts, groups, words * 8 // groups, columns).float() * scale.float().unsqueeze(2)
    return grouped.view(experts, words * 8, columns).transpose(1, 2).to(torch.bfloat16).contiguous()


def fp8(weight: torch.Tensor, scale: torch.Tensor, block: list[int] | None) -> torch.Tensor:
    """FP8 matrices: block, per-channel or per-tensor scales.

    Args:
        weight: [..., R, C] float8_e4m3fn.
        scale: [..., ceil(R/block), ceil(C/block)] float32; without `block`, anything that broadcasts to [..., R, C].
        block: rows and columns of a block, or None.

    Returns:
        [..., R, C] bfloat16.
    """
    if block is not None:
        rows, columns = weight.shape[-2:]
        scale = scale.repeat_interleave(block[0], -2)[..., :rows, :].repeat_interleave(block[1], -1)[..., :columns]
    return (weight.float() * scale.float()).to(torch.bfloat16)
