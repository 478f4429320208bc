"""Every Triton kernel against its plain twin: on a CUDA device, or in Triton's interpreter.

In an environment with Triton alone beside torch and pytest:  TRITON_INTERPRET=1 python -m pytest tests/quantize/test_triton.py
"""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed (it comes with torch for CUDA)", allow_module_level=True)
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

from moepress.quantize.fp8_to_int4 import press_fp8_plain
from moepress.quantize.grid import Grid, dequantize
from moepress.quantize.polish import move_codes_plain
from moepress.quantize.rtn import rtn_plain
from moepress.quantize.scale_search import search_scales_plain
from moepress.quantize.triton_fp8 import press_fp8_triton
from moepress.quantize.triton_polish import move_codes_triton
from moepress.quantize.triton_scales import search_scales_triton

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize(
    ("rows", "columns", "width", "importances"), [(5, 128, 32, 2), (3, 256, 128, 1), (4, 96, -1, 2)]
)
def test_searched_scales_agree_bit_for_bit(rows: int, columns: int, width: int, importances: int) -> None:
    weight = torch.randn(2, rows, columns, generator=seeded(0)) * 0.02
    weight[0, 1] = 0.0
    importance = torch.rand(importances, columns, generator=seeded(1)) ** 4
    grid = Grid(4, width)
    size = grid.width(columns)
    h = importance.expand(2, -1)[:, None].expand(-1, rows, -1).reshape(-1, size)
    expected = search_scales_plain(weight.view(-1, size), h, columns // size, grid).view(2, rows, -1)
    found = search_scales_triton(weight.to(DEVICE), importance.to(DEVICE), grid)
    assert torch.equal(found.cpu(), expected)


def test_a_row_that_was_on_the_grid_comes_back_exactly() -> None:
    codes = torch.randint(-7, 8, (1, 3, 128), generator=seeded(2), dtype=torch.int8)
    codes[..., 0] = 7
    codes[0, 1, 32:64] = codes[0, 1, 32:64].clamp(-2, 2)
    scales = (torch.rand(1, 3, 4, generator=seeded(3)) * 0.01 + 0.01).bfloat16()
    weight = dequantize(codes, scales)
    found = search_scales_triton(weight.to(DEVICE), torch.ones(1, 128, device=DEVICE), Grid(4, 32)).cpu()
    served = (weight.view(1, 3, 4, 32) / found[..., None]).round().clamp(-8, 7) * found[..., None]
    assert torch.equal(served.view_as(weight), weight)


@pytest.mark.parametrize(("block", "rows", "width"), [(64, 40, 32), (24, 70, 24)])
def test_moved_codes_agree_bit_for_bit(block: int, rows: int, width: int) -> None:
    g = seeded(4)
    gradient = torch.randn(2, block, rows, generator=g) * 0.05
    a = torch.randn(2, block, 2 * block, generator=g)
    h = a @ a.transpose(1, 2) / block
    codes = torch.randint(-8, 8, (2, block + 8, rows), generator=g, dtype=torch.int8)
    scales = torch.rand(2, 2 + block // width, rows, generator=g) * 0.02 + 0.01
    here, there = codes.clone(), codes.clone().to(DEVICE)
    steps, moved = torch.empty_like(gradient), torch.empty_like(gradient, device=DEVICE)
    # as `polish` gives them: a block of columns of a larger array
    expected = move_codes_plain(gradient.clone(), h, here[:, 4 : 4 + block], scales[:, 1:], width, Grid(4, 32), steps)
    found = move_codes_triton(
        gradient.to(DEVICE), h.to(DEVICE), there[:, 4 : 4 + block], scales.to(DEVICE)[:, 1:], width, Grid(4, 32), moved
    )
    assert bool((here != codes).any())
    assert torch.equal(there.cpu(), here)
    assert torch.equal(moved.cpu(), steps)
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-9, atol=0)


@pytest.mark.parametrize(("rows", "width"), [(144, 32), (40, 128)])
def test_fp8_to_int4_agrees_bit_for_bit(rows: int, width: int) -> None:
    bits = torch.randint(0, 256, (rows, 256), generator=seeded(5), dtype=torch.uint8)
    bits[(bits & 0x7F) == 0x7F] = 0x12  # no NaN
    bits[3] = 0
    codes = bits.view(torch.float8_e4m3fn)
    blocks = torch.rand(-(-rows // 128), 2, generator=seeded(6)) * 1e-3
    grid = Grid(4, width)
    packed, scales = press_fp8_plain(codes, blocks, (128, 128), grid)
    found = press_fp8_triton(codes.to(DEVICE), blocks.to(DEVICE), (128, 128), grid)
    assert torch.equal(found[0].cpu(), packed)
    assert torch.equal(found[1].cpu().view(torch.int16), scales.view(torch.int16))
    spread = blocks.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)
    rounded = rtn_plain(codes.float() * spread, grid)
    unpacked = ((packed[..., None] >> (4 * torch.arange(8, dtype=torch.int32))) & 0xF).flatten(-2) - 8
    assert torch.equal(unpacked.to(torch.int8), rounded.codes)
    assert torch.equal(scales, rounded.scales)
