"""The inner loops of polishing on the CPU: refit the scales and move the codes of one block of columns.

Layout as in gptq_kernel.py: [column, row], tiles of ``LANES`` rows. With D = W − Q s and P = D (H + δI), one step in
a row changes the loss tr(D (H + δI) Dᵀ) by

    scale of a group by t:  −2 t Σ_k q_k P_k + t² Σ_jk q_j h_jk q_k        best t = Σ q P / Σ q h q, rounded so that s
        + t is BF16
    code of a column by i:  −2 i s P_k + (i s)² h_kk                       best i = P_k / (h_kk s), rounded to an
        integer

and is taken only when that is negative, so the loss cannot rise. P comes in for the whole block, fresh from one
matrix product; what changes inside the block is kept as a list of changes to D and added where it is read.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from moepress.quantize.compiled import kernel

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int32]
Codes = npt.NDArray[np.int8]

LANES = 256
SMALLEST_NORMAL = np.int32(0x00800000)
TO_INTEGER = np.float32(12582912.0)  # 1.5 · 2^23


@kernel
def _add_products(sums: Floats, values: Floats, factors: Floats) -> None:
    """sums[lane] += Σ_j values[j, lane] · factors[j], in the order of j."""
    lanes = sums.size
    whole = values.shape[0] - values.shape[0] % 4
    for j in range(0, whole, 4):
        a, b, c, d = values[j], values[j + 1], values[j + 2], values[j + 3]
        fa, fb, fc, fd = factors[j], factors[j + 1], factors[j + 2], factors[j + 3]
        for lane in range(lanes):
            sums[lane] = (((sums[lane] + a[lane] * fa) + b[lane] * fb) + c[lane] * fc) + d[lane] * fd
    for j in range(whole, values.shape[0]):
        a, fa = values[j], factors[j]
        for lane in range(lanes):
            sums[lane] += a[lane] * fa


@kernel
def _round_to_bf16(bits: Ints) -> None:
    for i in range(bits.size):
        bits[i] = (bits[i] + np.int32(0x7FFF) + ((bits[i] >> 16) & 1)) & np.int32(-65536)


@kernel
def _refit_group(
    codes: Codes,
    gradient: Floats,
    h: Floats,
    first: int,
    s: Floats,
    change: Floats,
    gained: Doubles,
    buffers: tuple[Floats, Ints],
) -> None:
    """Refit one group's scales on one tile.

    Args:
        codes: int8 [width, lanes], the group's codes.
        gradient: float32 [B, lanes], P of the block.
        h: float32 [B, B], the block of H + δI.
        first: the group's first column in the block.
        s: float32 [lanes], scales, replaced where that lowers the loss.
        change: float32 [B, lanes], what was already added to D in this block; this group's part is added.
        gained: float64 [lanes], how much the loss fell, added to.
        buffers: float32 [width + 4, lanes] of scratch and its bits.
    """
    scratch, scratch_bits = buffers
    width, lanes = codes.shape
    q, sums, slope, bend, moved = (
        scratch[:width],
        scratch[width],
        scratch[width + 1],
        scratch[width + 2],
        scratch[width + 3],
    )
    for k in range(width):
        row, code = q[k], codes[k]
        for lane in range(lanes):
            row[lane] = np.float32(code[lane])
    slope[:] = np.float32(0.0)
    bend[:] = np.float32(0.0)
    for k in range(width):
        sums[:] = gradient[first + k]
        _add_products(sums, change, h[first + k])
        row = q[k]
        for lane in range(lanes):
            slope[lane] += row[lane] * sums[lane]
        sums[:] = np.float32(0.0)
        _add_products(sums, q, h[first + k, first : first + width])
        for lane in range(lanes):
            bend[lane] += row[lane] * sums[lane]
    for lane in range(lanes):
        moved[lane] = s[lane] + (slope[lane] / bend[lane] if bend[lane] > 0 else np.float32(0.0))
        moved[lane] = max(moved[lane], np.float32(0.0))
    bits = scratch_bits[width + 3]
    _round_to_bf16(bits)
    for lane in range(lanes):
        step = moved[lane] - s[lane]
        gain = step * (np.float32(2.0) * slope[lane] - step * bend[lane])
        taken = gain > 0 and bits[lane] >= SMALLEST_NORMAL
        moved[lane] = step if taken else np.float32(0.0)
        gained[lane] += np.float64(gain) if taken else 0.0
    for k in range(width):
        row, changed = q[k], change[first + k]
        for lane in range(lanes):
            changed[lane] -= moved[lane] * row[lane]
    for lane in range(lanes):
        s[lane] += moved[lane]


@kernel
def _move_codes(
    codes: Codes,
    s: Floats,
    gradient: Floats,
    pivot: np.float32,
    change: Floats,
    gained: Doubles,
    limits: tuple[np.float32, np.float32],
) -> None:
    """Move one column's codes on one tile to the best integer. ``gradient`` is P_k now, ``change`` D's row."""
    qmin, qmax = limits
    half = np.float32(0.5) * pivot
    inverse = np.float32(1.0) / pivot
    for lane in range(codes.size):
        code = np.float32(codes[lane])
        aim = code + gradient[lane] * inverse / s[lane]
        best = (min(max(aim, qmin), qmax) + TO_INTEGER) - TO_INTEGER
        step = (code - best) * s[lane]
        gain = np.float32(-2.0) * step * (gradient[lane] + half * step)
        taken = gain > 0
        codes[lane] = np.int8(np.int32(best)) if taken else codes[lane]
        change[lane] += step if taken else np.float32(0.0)
        gained[lane] += np.float64(gain) if taken else 0.0


@kernel
def polish_block(
    gradient: Floats,
    h: Floats,
    codes: Codes,
    scales: Floats,
    width: int,
    refit: bool,
    limits: tuple[np.float32, np.float32],
    change: Floats,
) -> float:
    """Refit the scales of a block's groups, then move its codes.

    Args:
        gradient: float32 [B, R], P = D (H + δI) of the block's columns.
        h: float32 [B, B], the block of H + δI.
        codes: int8 [B, R], in and out.
        scales: float32 [G, R], in and out; column k of the block uses row k // width.
        width: columns per row of ``scales``.
        refit: whether the block holds its groups whole and their scales may change.
        limits: qmin, qmax.
        change: float32 [B, R], written: new D minus old D.

    Returns:
        How much tr(D (H + δI) Dᵀ) fell, ≥ 0.
    """
    block, rows = gradient.shape
    total = 0.0
    for start in range(0, rows, LANES):
        lanes = min(LANES, rows - start)
        here = slice(start, start + lanes)
        p, moved = np.empty((block, lanes), np.float32), np.zeros((block, lanes), np.float32)
        q = np.empty((block, lanes), np.int8)
        gained, sums = np.zeros(lanes, np.float64), np.empty(lanes, np.float32)
        scratch = np.empty((width + 4, lanes), np.float32)
        for k in range(block):
            p[k] = gradient[k, here]
            q[k] = codes[k, here]
        if refit:
            for g in range(scales.shape[0]):
                first = g * width
                _refit_group(
                    q[first : first + width],
                    p,
                    h,
                    first,
                    scales[g, here],
                    moved,
                    gained,
                    (scratch, scratch.view(np.int32)),
                )
        for k in range(block):
            sums[:] = p[k]
            _add_products(sums, moved, h[k])
            _move_codes(q[k], scales[k // width, here], sums, h[k, k], moved[k], gained, limits)
        for k in range(block):
            codes[k, here] = q[k]
            change[k, here] = moved[k]
        total += gained.sum()
    return total
