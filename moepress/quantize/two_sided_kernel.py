"""The inner loops of GPTQ where rows are coupled as well as columns: see two_sided.py for the derivation.

Layout [column, row] as in gptq_kernel.py. Inside a column the rows are a sequence now, so the SIMD lanes are what one
row's error does to all rows after it: one row of G or of its factor, contiguous. Sums that come from outside a tile or a
block are matrix products, made by the caller; here is what is left. Nothing is reassociated or fused, and every loop
has a plain twin in two_sided.py, equal bit for bit.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from moepress.quantize.compiled import kernel

Floats = npt.NDArray[np.float32]
Codes = npt.NDArray[np.int8]
Limits = tuple[np.float32, np.float32]

SMALLEST_SCALE = np.float32(2.0**-126)
TO_INTEGER = np.float32(12582912.0)  # 1.5 · 2^23: adding and subtracting it rounds half to even


@kernel
def round_tile(
    weight: Floats,
    scales: Floats,
    upper: Floats,
    across: Floats,
    lower: Floats,
    down: Floats,
    limits: Limits,
    codes: Codes,
    errors: Floats,
    aims_missed: Floats,
) -> None:
    """Round a tile of columns and rows, last to first both ways.

    Args:
        weight: float32 [B, T], the target.
        scales: float32 [B, T], one for every weight.
        upper: float32 [B, B], the columns' piece of U; below its diagonal it is not read.
        across: float32 [B, T], Σ D_j U_kj over columns after the tile; overwritten.
        lower: float32 [T, T], the rows' piece of V, transposed: lower[q, r] = V_rq; above its diagonal it is not read.
        down: float32 [B, T], Σ a_q V_rq over rows after the tile; overwritten.
        limits: qmin, qmax.
        codes: int8 [B, T], written.
        errors: float32 [B, T], D = weight − value, written.
        aims_missed: float32 [B, T], a = column's aim − value, written.
    """
    columns, rows = weight.shape
    for k in range(columns - 1, -1, -1):
        sums, below, factors = across[k], down[k], upper[k]
        for j in range(columns - 1, k, -1):
            d, u = errors[j], factors[j]
            for r in range(rows):
                sums[r] += d[r] * u
        inverse = np.float32(1.0) / factors[k]
        for r in range(rows):
            sums[r] = weight[k, r] + sums[r] * inverse
        for r in range(rows - 1, -1, -1):
            s, v = scales[k, r], lower[r]
            aim = sums[r] + below[r] / v[r]
            code = (min(max(aim / s, limits[0]), limits[1]) + TO_INTEGER) - TO_INTEGER
            value = code * s
            codes[k, r] = np.int8(np.int32(code))
            errors[k, r] = weight[k, r] - value
            missed = sums[r] - value
            aims_missed[k, r] = missed
            for p in range(r):
                below[p] += v[p] * missed


@kernel
def move_coupled(
    gradient: Floats, h: Floats, g: Floats, codes: Codes, scales: Floats, width: int, limits: Limits, moved: Floats
) -> float:
    """Move the codes of a block, column by column and row by row, each to the integer that is best given all others.

    Args:
        gradient: float32 [B, R], P = G' D H' of the block's columns; overwritten.
        h: float32 [B, B], the block of H'.
        g: float32 [R, R], G'.
        codes: int8 [B, R], in and out.
        scales: float32 [groups, R]; column k of the block uses row k // width.
        width: columns per row of ``scales``.
        limits: qmin, qmax.
        moved: float32 [B, R], written: new D minus old D.

    Returns:
        How much tr(G' D H' Dᵀ) fell, ≥ 0.
    """
    block, rows = gradient.shape
    spread = np.empty((block, rows), np.float32)  # moved · G'
    total = 0.0
    for k in range(block):
        p, z = gradient[k], spread[k]
        for j in range(k):
            before, factor = spread[j], h[k, j]
            for r in range(rows):
                p[r] += before[r] * factor
        for r in range(rows):
            z[r] = np.float32(0.0)
        s, pivot = scales[k // width], h[k, k]
        for r in range(rows):
            slope, bend = p[r] + pivot * z[r], pivot * g[r, r]
            code = np.float32(codes[k, r])
            best = (min(max(code + slope / bend / s[r], limits[0]), limits[1]) + TO_INTEGER) - TO_INTEGER
            step = (code - best) * s[r]
            gain = np.float32(-2.0) * step * (slope + np.float32(0.5) * bend * step)
            if gain > 0:
                codes[k, r] = np.int8(np.int32(best))
                moved[k, r] = step
                total += np.float64(gain)
                row = g[r]
                for q in range(rows):
                    z[q] += row[q] * step
            else:
                moved[k, r] = np.float32(0.0)
    return total


@kernel
def refit_coupled(
    gradient: Floats, products: Floats, g: Floats, codes: Codes, scales: Floats, signed: bool, steps: Floats
) -> float:
    """The best scale of a group in one row after the other, given its codes and all that is outside the group.

    Args:
        gradient: float32 [width, R], P of the group's columns; kept up to date.
        products: float32 [width, R], h q of the group's columns and codes.
        g: float32 [R, R], G'.
        codes: int8 [width, R].
        scales: float32 [R], BF16 numbers, in and out.
        signed: a scale may become negative.
        steps: float32 [R], written: new scale minus old.

    Returns:
        How much tr(G' D H' Dᵀ) fell, ≥ 0.
    """
    width, rows = codes.shape
    total = 0.0
    moved = np.empty(1, np.float32)
    bits = moved.view(np.int32)
    for r in range(rows):
        slope, bend = np.float32(0.0), np.float32(0.0)
        for k in range(width):
            code = np.float32(codes[k, r])
            slope += code * gradient[k, r]
            bend += code * products[k, r]
        bend *= g[r, r]
        moved[0] = scales[r] + (slope / bend if bend > 0 else np.float32(0.0))
        bits[0] = (bits[0] + np.int32(0x7FFF) + ((bits[0] >> 16) & 1)) & np.int32(-65536)  # to BF16, half to even
        step = moved[0] - scales[r]
        gain = step * (np.float32(2.0) * slope - step * bend)
        if gain > 0 and (abs(moved[0]) if signed else moved[0]) >= SMALLEST_SCALE:
            scales[r] = moved[0]
            steps[r] = step
            total += np.float64(gain)
            row = g[r]
            for k in range(width):
                p, factor = gradient[k], products[k, r] * step
                for q in range(rows):
                    p[q] -= row[q] * factor
        else:
            steps[r] = np.float32(0.0)
    return total
