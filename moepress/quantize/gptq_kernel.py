"""The inner loops of GPTQ on the CPU, in the transposed layout.

Everything here is [column, row]: the rows of a weight are independent problems, so they are the SIMD lanes, and a
column is a contiguous run of them. Reordering columns is then picking rows of the array, which costs nothing.

``round_block`` is the sequential heart. For the columns of one block, last to first (factor.py has the derivation):

    w'_k = w_k + (Σ_{j>k} D_j U_kj) / U_kk        q_k = round(w'_k / s_k)        D_k = w_k − q_k s_k

The sum over columns after the block comes in as ``feedback``, from one matrix product; the sum inside the block is
done here, on tiles of ``LANES`` rows that stay in the first-level cache. No addition is reassociated and nothing is
fused, so a row's codes depend neither on the tile it falls into nor on the vector width.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from moepress.quantize.compiled import kernel

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int32]
Indices = npt.NDArray[np.int64]
Codes = npt.NDArray[np.int8]

LANES = 256
MAGNITUDE = np.int32(0x7FFFFFFF)
NOT_FINITE = np.int32(0x7F800000)
TO_INTEGER = np.float32(12582912.0)  # 1.5 · 2^23: adding and subtracting it rounds half to even


@kernel
def count_not_finite(bits: Ints) -> tuple[int, int]:
    """NaN and infinity counts of a float32 matrix given as its bits, int32 [R, C]."""
    nans, infinities = 0, 0
    for r in range(bits.shape[0]):
        row, largest = bits[r], np.int32(0)
        for c in range(row.size):
            largest = max(largest, row[c] & MAGNITUDE)
        if largest >= NOT_FINITE:
            for c in range(row.size):
                nans += (row[c] & MAGNITUDE) > NOT_FINITE
                infinities += (row[c] & MAGNITUDE) == NOT_FINITE
    return nans, infinities


@kernel
def gather_upper(hessian: Floats, order: Indices, shift: float, out: Floats) -> None:
    """The upper triangle of H[order][:, order] + shift · I.

    Args:
        hessian: float32 [C, C], symmetric; both triangles are read.
        order: int64 [C], a permutation.
        shift: added to the diagonal.
        out: float32 [C, C]; diagonal and above written, the rest set to zero.
    """
    for i in range(order.size):
        row, target = hessian[order[i]], out[i]
        target[:i] = np.float32(0.0)
        for j in range(i, order.size):
            target[j] = row[order[j]]
        target[i] += np.float32(shift)


@kernel
def _add_products(sums: Floats, errors: Floats, factors: Floats, first: int) -> None:
    """sums[lane] += Σ_j errors[j, lane] · factors[j], j from the last down to ``first``."""
    lanes = sums.size
    j = errors.shape[0] - 1
    while j - 3 >= first:
        a, b, c, d = errors[j], errors[j - 1], errors[j - 2], errors[j - 3]
        fa, fb, fc, fd = factors[j], factors[j - 1], factors[j - 2], factors[j - 3]
        for lane in range(lanes):
            sums[lane] = (((sums[lane] + a[lane] * fa) + b[lane] * fb) + c[lane] * fc) + d[lane] * fd
        j -= 4
    while j >= first:
        a, fa = errors[j], factors[j]
        for lane in range(lanes):
            sums[lane] += a[lane] * fa
        j -= 1


@kernel
def _round_column(
    w: Floats, s: Floats, sums: Floats, pivot: np.float32, limits: tuple[np.float32, np.float32], here: Floats, q: Codes
) -> None:
    """One column of one tile: codes into ``q``, D into ``here``, U_kk (w' − q s) into ``sums``."""
    qmin, qmax = limits
    inverse = np.float32(1.0) / pivot
    for lane in range(here.size):
        sums[lane] = w[lane] + sums[lane] * inverse
    for lane in range(here.size):
        here[lane] = (min(max(sums[lane] / s[lane], qmin), qmax) + TO_INTEGER) - TO_INTEGER
    for lane in range(here.size):
        q[lane] = np.int8(np.int32(here[lane]))
    for lane in range(here.size):
        value = here[lane] * s[lane]
        sums[lane] = (sums[lane] - value) * pivot
        here[lane] = w[lane] - value


@kernel
def round_block(
    weight: Floats,
    columns: Indices,
    groups: Indices,
    scales: Floats,
    upper: Floats,
    feedback: Floats,
    limits: tuple[np.float32, np.float32],
    codes: Codes,
    errors: Floats,
) -> tuple[float, float]:
    """Round the columns of one block, last to first, each making up for the errors of those after it.

    Args:
        weight: float32 [C, R], the target, columns in their own order; read only.
        columns: int64 [B], which column of ``weight`` each column of the block is.
        groups: int64 [B], the scale group of each.
        scales: float32 [G, R].
        upper: float32 [B, B], the block's diagonal piece of U; what is below its diagonal is not read.
        feedback: float32 [B, R], Σ D_j U_kj over columns j after the block; overwritten.
        limits: qmin, qmax.
        codes: int8 [C, R], the block's columns written, in ``weight``'s order.
        errors: float32 [B, R], D of the block, written.

    Returns:
        Σ_k U_kk² Σ_rows (w'_k − q_k s_k)², what these columns add to tr(D (H + δI) Dᵀ); and their Σ D².
    """
    block, rows = feedback.shape
    tile = np.empty((block, LANES), np.float32)
    lost, left = np.zeros(LANES, np.float64), np.zeros(LANES, np.float64)
    for start in range(0, rows, LANES):
        if rows - start < LANES:
            tile = np.empty((block, rows - start), np.float32)
        lanes = slice(start, start + tile.shape[1])
        for k in range(block - 1, -1, -1):
            sums, here, factors, pivot = feedback[k, lanes], tile[k], upper[k], upper[k, k]
            _add_products(sums, tile, factors, k + 1)
            w, s, q = weight[columns[k], lanes], scales[groups[k], lanes], codes[columns[k], lanes]
            _round_column(w, s, sums, pivot, limits, here, q)
            errors[k, lanes] = here
            for lane in range(here.size):
                step, d = np.float64(sums[lane]), np.float64(here[lane])
                lost[lane] += step * step
                left[lane] += d * d
    return float(lost.sum()), float(left.sum())
