"""Block-FP8 weights to packed INT4 with ``max`` scales, in plain torch: the twin of triton_fp8.py, on any device.

    w = code · scale of its block        s = bf16(max|w| / 7.5) of its group        q = clamp(round(w / s), −8, 7)

A conversion rounds on the processor (`convert.press.fused`), where one pass over the source keeps up with a disk. This is for
sources that are on a device already, and what the fused kernel is held to.
"""

from __future__ import annotations

import torch

from moepress.quantize.grid import Grid, usable_scales


def press_fp8_plain(
    codes: torch.Tensor, blocks: torch.Tensor, block: tuple[int, int], grid: Grid
) -> tuple[torch.Tensor, torch.Tensor]:
    """FP8 to packed INT4.

    Args:
        codes: float8_e4m3fn [R, C], contiguous; NaN codes must have been refused.
        blocks: float32 [ceil(R / block rows), ceil(C / block columns)], finite, not negative.
        block: rows and columns per FP8 scale.
        grid: four bits; groups of a multiple of eight columns.

    Returns:
        packed int32 [R, C / 8] as compressed-tensors packs, and scales bfloat16 [R, G].
    """
    rows, columns = codes.shape
    width = grid.width(columns)
    spread = blocks.repeat_interleave(block[0], 0)[:rows].repeat_interleave(block[1], 1)[:, :columns]
    groups = (codes.float() * spread).view(rows, -1, width)
    s = usable_scales(groups.abs().amax(-1) / grid.half_range)
    q = (groups / s[..., None]).clamp(grid.qmin, grid.qmax).round()
    nibbles = q.view(rows, -1, 8).to(torch.int64) + 8
    words = (nibbles << (4 * torch.arange(8, device=codes.device))).sum(-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32), s.to(torch.bfloat16)
