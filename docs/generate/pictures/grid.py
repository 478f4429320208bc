"""One group of weights on the INT4 grid, and its codes in words: decoded, rounded and packed by moepress itself.

The group is 32 e4m3 bytes under one block scale, as a published matrix holds them. Height is the value in steps of the group's
scale, so that the sixteen codes are sixteen lines.
"""

from __future__ import annotations

import torch

from moepress.formats.fp8 import decode_fp8
from moepress.formats.int4 import pack_int4
from moepress.quantize.grid import Grid
from moepress.quantize.rtn import rtn
from pictures.drawing import FAINT, INK, ORANGE, PRESSED, box, dot, line, picture, tile, words

BYTES = bytes.fromhex("e36ce053d8f055e4dbe478e56f60efb45b71f1f1d6ec6f68e166686673edef6d")
"""Drawn once from a normal distribution."""
BLOCK_SCALE = 2.0**-11
LEFT, PITCH, ZERO, STEP = 40, 18, 160, 14


def svg() -> str:
    codes8 = torch.frombuffer(bytearray(BYTES), dtype=torch.uint8).view(torch.float8_e4m3fn).view(1, -1)
    w = decode_fp8(codes8, torch.tensor([[BLOCK_SCALE]]), block=(128, 128), name="a group")
    pressed = rtn(w, Grid(4, 32), scale="mse")
    scale = float(pressed.scales)
    right = LEFT + PITCH * w.shape[1]
    parts = [words(10, 22, "one group: 32 columns of a row of an expert’s matrix", size=13, ink=INK)]
    for code in range(-8, 8):
        y = ZERO - STEP * code
        parts.append(line(LEFT, y, right, y, ink=FAINT, width=1.4 if code == 0 else 0.7))
        if code in (-8, 0, 7):
            parts.append(words(LEFT - 8, y + 4, f"−{-code}" if code < 0 else str(code), size=11, at="end"))
    for i, (value, code) in enumerate(zip(w[0].tolist(), pressed.codes[0].tolist(), strict=True)):
        x, y, on = LEFT + PITCH * (i + 0.5), ZERO - STEP * value / scale, ZERO - STEP * code
        parts += [line(x, y, x, on, ink=ORANGE), dot(x, y, 3.2), tile(x, on, 6)]
    note = right + 20
    parts += [dot(note + 4, 80, 4), words(note + 16, 84, "w, decoded from FP8")]
    parts += [tile(note + 4, 106, 8), words(note + 16, 110, "ŵ = q · s, on the grid")]
    parts += [words(note, 136, "q: 4 bits each, −8 … 7"), words(note, 156, f"s: one BF16 for the 32, {scale:.5f}")]
    parts.append(words(note, 176, f"|ŵ − w| / |w| = {pressed.fidelity[0].relative_error:.1%}"))
    word = int(pack_int4(pressed.codes)[0, 0]) & 0xFFFFFFFF
    parts.append(words(10, 318, "packed: eight codes q + 8 in an int32, low nibble first", size=13, ink=INK))
    for i in range(8):
        said = f"{(word >> (4 * i) & 15) - 8} + 8".replace("-", "−")
        parts.append(box(LEFT + 72 * i, 330, 72, 30, [said], fill=("#fff3e0", PRESSED)[i % 2]))
    parts += [words(LEFT, 378, "bit 0", size=11), words(LEFT + 576, 378, "bit 31", size=11, at="end")]
    parts.append(words(LEFT + 596, 349, f"= 0x{word:08X}", ink=INK))
    return picture("Weights of a group on the INT4 grid, and how codes are packed", 820, 390, parts)
