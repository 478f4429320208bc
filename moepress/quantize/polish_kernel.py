"""Moving the codes of one block of columns on the CPU, and refitting a group's scales: the heart of polish.py, compiled.

Layout as in gptq_kernel.py: [column, row], tiles of ``LANES`` rows. Columns are visited in order; what earlier
columns of the block have moved reaches a column's gradient when it is its turn, so each tile's sums stay in the
first-level cache. Nothing is reassociated or fused: the codes are those of ``polish.move_codes_plain``, bit for bit.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from moepress.quantize.compiled import kernel

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]
Codes = npt.NDArray[np.int8]

LANES = 256
SMALLEST_SCALE = np.float32(2.0**-126)
TO_INTEGER = np.float32(12582912.0)  # 1.5 · 2^23: adding and subtracting it rounds half to even


@kernel
def _add_products(sums: Floats, values: Floats, factors: Floats, count: int) -> None:
    """sums[lane] += Σ_{j < count} values[j, lane] · factors[j], in the order of j."""
    lanes = sums.size
    whole = count - count % 4
    for j in range(0, whole, 4):
        a, b, c, d = values[j], values[j + 1], values[j + 2], values[j + 3]
        fa, fb, fc, fd = factors[j], factors[j + 1], factors[j + 2], factors[j + 3]
        for lane in range(lanes):
            sums[lane] = (((sums[lane] + a[lane] * fa) + b[lane] * fb) + c[lane] * fc) + d[lane] * fd
    for j in range(whole, count):
        a, fa = values[j], factors[j]
        for lane in range(lanes):
            sums[lane] += a[lane] * fa


@kernel
def _move_column(
    codes: Codes,
    s: Floats,
    gradient: Floats,
    pivot: np.float32,
    limits: tuple[np.float32, np.float32],
    step: Floats,
    gained: Doubles,
) -> None:
    """One column of one tile: codes to the best integer; the change of D into ``step``, the gain to ``gained``."""
    qmin, qmax = limits
    half = np.float32(0.5) * pivot
    for lane in range(codes.size):
        code = np.float32(codes[lane])
        best = (min(max(code + gradient[lane] / pivot / s[lane], qmin), qmax) + TO_INTEGER) - TO_INTEGER
        move = (code - best) * s[lane]
        gain = np.float32(-2.0) * move * (gradient[lane] + half * move)
        taken = gain > 0
        codes[lane] = np.int8(np.int32(best)) if taken else codes[lane]
        step[lane] = move if taken else np.float32(0.0)
        gained[lane] += np.float64(gain) if taken else 0.0


@kernel
def move_codes(
    gradient: Floats,
    h: Floats,
    codes: Codes,
    scales: Floats,
    width: int,
    limits: tuple[np.float32, np.float32],
    steps: Floats,
) -> float:
    """Move the codes of a block, column by column, each to the integer that is best given all the others.

    Args:
        gradient: float32 [B, R], P = D (H + δI) of the block's columns; overwritten.
        h: float32 [B, B], the block of H + δI.
        codes: int8 [B, R], in and out.
        scales: float32 [G, R]; column k of the block uses row k // width.
        width: columns per row of ``scales``.
        limits: qmin, qmax.
        steps: float32 [B, R], written: new D minus old D.

    Returns:
        How much tr(D (H + δI) Dᵀ) fell, ≥ 0.
    """
    block, rows = gradient.shape
    total = 0.0
    tile, gained = np.empty((block, LANES), np.float32), np.empty(LANES, np.float64)
    for start in range(0, rows, LANES):
        if rows - start < LANES:
            tile, gained = np.empty((block, rows - start), np.float32), np.empty(rows - start, np.float64)
        here = slice(start, start + tile.shape[1])
        gained[:] = 0.0
        for k in range(block):
            sums, factors = gradient[k, here], h[k]
            _add_products(sums, tile, factors, k)
            _move_column(codes[k, here], scales[k // width, here], sums, h[k, k], limits, tile[k], gained)
            steps[k, here] = tile[k]
        total += gained.sum()
    return total


@kernel
def refit_group(
    gradient: Floats, products: Floats, codes: Codes, scales: Floats, change: Floats, signed: bool
) -> float:
    """The best scale of a group in every row, given its codes and all that is outside the group.

    Args:
        gradient: float32 [width, R], P of the group's columns; read only.
        products: float32 [width, R], h q of the group's columns and codes.
        codes: int8 [width, R].
        scales: float32 [R], BF16 numbers, in and out.
        change: float32 [width, R], written: new D minus old D.
        signed: a scale may become negative.

    Returns:
        How much tr(D (H + δI) Dᵀ) fell, ≥ 0.
    """
    width, rows = codes.shape
    total = 0.0
    slope, bend = np.empty(LANES, np.float32), np.empty(LANES, np.float32)
    moved = np.empty(LANES, np.float32)
    bits = moved.view(np.int32)
    for start in range(0, rows, LANES):
        count = min(LANES, rows - start)
        here = slice(start, start + count)
        slope[:] = np.float32(0.0)
        bend[:] = np.float32(0.0)
        for k in range(width):
            q, p, hq = codes[k, here], gradient[k, here], products[k, here]
            for lane in range(count):
                code = np.float32(q[lane])
                slope[lane] += code * p[lane]
                bend[lane] += code * hq[lane]
        s = scales[here]
        for lane in range(count):
            moved[lane] = s[lane] + (slope[lane] / bend[lane] if bend[lane] > 0 else np.float32(0.0))
        for lane in range(count):  # to BF16, half to even: the sign bit is above what is added
            bits[lane] = (bits[lane] + np.int32(0x7FFF) + ((bits[lane] >> 16) & 1)) & np.int32(-65536)
        for lane in range(count):
            step = moved[lane] - s[lane]
            gain = step * (np.float32(2.0) * slope[lane] - step * bend[lane])
            size = abs(moved[lane]) if signed else moved[lane]
            taken = gain > 0 and size >= SMALLEST_SCALE
            slope[lane] = step if taken else np.float32(0.0)
            total += np.float64(gain) if taken else 0.0
            s[lane] = s[lane] + slope[lane]
        for k in range(width):
            q, d = codes[k, here], change[k, here]
            for lane in range(count):
                d[lane] = np.float32(q[lane]) * -slope[lane]
    return total
