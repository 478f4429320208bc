"""Group peaks, scale search and rounding as compiled passes over memory that is in cache.

Rounding walks one row at a time: largest magnitude of each group → scale → codes → error sums, in tiles of ``TILE``
columns whose working set stays in the first-level cache. Sums go to ``TILE`` independent float64 lanes: SIMD at any
vector width, and the same bits at every one, because no addition is ever reassociated.

The scale search puts ``LANES`` groups side by side (a transposed copy of their weights, lane = group) and walks their
weights once per candidate k, so there is nothing to reduce:

    error_k = Σ_j h_j (w_j − s_k · clamp(round(w_j / s_k)))²,   in the order of j;  least wins, the first of equals

h is 1 for plain rounding and diag(H) for GPTQ. The transposed copy costs one pass and is paid back by 17 candidates. What a
lane is tried with is one array at fixed distances, so that the compiler need not ask at run time whether buffers overlap.

Two tricks let the loops vectorise without ``fastmath``. Magnitudes are compared as integers: the bits of |x| order
like |x|, and NaN and inf are the values from 0x7f800000 up, so they are found for free. Rounding half to even is
adding and subtracting 1.5 · 2^23, exact for the clamped range, as torch.round does it. Inner loops index slices from
zero: an index that could be negative would cost a check that keeps a loop scalar.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from moepress.errors import QuantizeError
from moepress.quantize.compiled import kernel

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int32]
Indices = npt.NDArray[np.int64]
Codes = npt.NDArray[np.int8]
Bf16Bits = npt.NDArray[np.uint16]

Limits = tuple[np.float32, np.float32]

TILE = 512
LANES = 64
_INVERSE, _SUM = LANES, 2 * LANES  # where a candidate's inverse and error are, in the array of what is being tried
MAGNITUDE = np.int32(0x7FFFFFFF)
NOT_FINITE = np.int32(0x7F800000)
SMALLEST_NORMAL = np.int32(0x00800000)
ZERO_GROUP = np.int32(0x3C000000)  # 2^-7
TO_INTEGER = np.float32(12582912.0)  # 1.5 · 2^23


@kernel
def _round_to_bf16(bits: Ints, ulps: np.int32) -> None:
    """Bits of float32 values ≥ 0: rounded to BF16 half to even, then ``ulps`` BF16 steps up; unusable → ZERO_GROUP."""
    for i in range(bits.size):
        rounded = ((bits[i] + np.int32(0x7FFF) + ((bits[i] >> 16) & 1)) & np.int32(-65536)) + (ulps << 16)
        bits[i] = rounded if rounded >= SMALLEST_NORMAL else ZERO_GROUP


@kernel
def _peak(bits: Ints) -> np.int32:
    """Bits of max|x|; NOT_FINITE or more when x holds an infinity or a NaN."""
    largest = np.int32(0)
    for j in range(bits.size):
        largest = max(largest, bits[j] & MAGNITUDE)
    return largest


@kernel
def _count_not_finite(bits: Ints) -> tuple[int, int]:
    nans, infinities = 0, 0
    for j in range(bits.size):
        magnitude = bits[j] & MAGNITUDE
        nans += magnitude > NOT_FINITE
        infinities += magnitude == NOT_FINITE
    return nans, infinities


@kernel
def group_peaks(bits: Ints, peaks: Ints) -> tuple[int, int]:
    """Largest magnitude of every group.

    Args:
        bits: int32 [N, width], the bits of N groups of float32 weights, C-contiguous.
        peaks: int32 [N], written: bits of max|w|.

    Returns:
        NaN count, infinity count.
    """
    nans, infinities = 0, 0
    for g in range(bits.shape[0]):
        peaks[g] = _peak(bits[g])
        if peaks[g] >= NOT_FINITE:
            more = _count_not_finite(bits[g])
            nans, infinities = nans + more[0], infinities + more[1]
    return nans, infinities


@kernel
def _error(w: np.float32, h: np.float32, s: np.float32, inverse: np.float32, limits: Limits) -> np.float32:
    q = (min(max(w * inverse, limits[0]), limits[1]) + TO_INTEGER) - TO_INTEGER
    d = w - q * s
    return h * (d * d)


@kernel
def _add_one(w: Floats, h: Floats, at: np.uint64, tried: Floats, limits: Limits) -> None:
    """Adds the error of weight ``at`` / LANES of every lane's group to the lane's sum; ``tried`` as in `search_groups`."""
    for lane in range(LANES):
        i = at + np.uint64(lane)
        tried[lane + _SUM] += _error(w[i], h[i], tried[lane], tried[lane + _INVERSE], limits)


@kernel
def _add_eight(w: Floats, h: Floats, at: np.uint64, tried: Floats, limits: Limits) -> None:
    """Eight times `_add_one`, in the same order, with the sum in a register in between."""
    for lane in range(LANES):
        i0 = at + np.uint64(lane)
        i1, i2, i3 = i0 + np.uint64(LANES), i0 + np.uint64(2 * LANES), i0 + np.uint64(3 * LANES)
        i4, i5 = i0 + np.uint64(4 * LANES), i0 + np.uint64(5 * LANES)
        i6, i7 = i0 + np.uint64(6 * LANES), i0 + np.uint64(7 * LANES)
        s, inverse = tried[lane], tried[lane + _INVERSE]
        total = tried[lane + _SUM] + _error(w[i0], h[i0], s, inverse, limits)
        total = total + _error(w[i1], h[i1], s, inverse, limits)
        total = total + _error(w[i2], h[i2], s, inverse, limits)
        total = total + _error(w[i3], h[i3], s, inverse, limits)
        total = total + _error(w[i4], h[i4], s, inverse, limits)
        total = total + _error(w[i5], h[i5], s, inverse, limits)
        total = total + _error(w[i6], h[i6], s, inverse, limits)
        tried[lane + _SUM] = total + _error(w[i7], h[i7], s, inverse, limits)


@kernel
def search_groups(
    w: Floats,
    h: Floats,
    which: Indices,
    peaks: Floats,
    divisors: Floats,
    ulps: Ints,
    limits: Limits,
    scales: Floats,
    errors: Floats,
) -> None:
    """Least-error BF16 scale of chosen groups, among bf16(peak / divisor) moved by ``ulps`` BF16 steps.

    Args:
        w: float32 [N, width], groups of weights, C-contiguous.
        h: float32 [M, width], importance of each weight; group i uses row i mod M.
        which: int64 [n], the groups to look at.
        peaks: float32 [N], max|w| of each group, finite.
        divisors, ulps: float32 [K] and int32 [K], the candidates.
        limits: qmin, qmax.
        scales, errors: float32 [N]; a group's entries are replaced when a candidate's error is less than ``errors``
            says.
    """
    width = w.shape[1]
    wt, ht = (
        np.zeros(width * LANES, np.float32),
        np.zeros(width * LANES, np.float32),
    )  # weight j of lane l at j·LANES + l
    tried = np.zeros(3 * LANES, np.float32)  # per lane: the candidate scale, its inverse, the error so far
    tried_bits = tried[:LANES].view(np.int32)
    best, least = np.empty(LANES, np.float32), np.empty(LANES, np.float32)
    top = np.zeros(LANES, np.float32)
    for start in range(0, which.size, LANES):
        count = min(LANES, which.size - start)
        for lane in range(count):
            group = which[start + lane]
            row, importance = w[group], h[group % h.shape[0]]
            for j in range(width):
                wt[j * LANES + lane] = row[j]
            if start == 0 or h.shape[0] > 1:
                for j in range(width):
                    ht[j * LANES + lane] = importance[j]
            top[lane], best[lane], least[lane] = peaks[group], scales[group], errors[group]
        for k in range(divisors.size):
            for lane in range(LANES):
                tried[lane] = top[lane] / divisors[k]
            _round_to_bf16(tried_bits, ulps[k])
            for lane in range(LANES):
                tried[lane + _INVERSE] = np.float32(1.0) / tried[lane]
                tried[lane + _SUM] = np.float32(0.0)
            for j in range(0, width - 7, 8):
                _add_eight(wt, ht, np.uint64(j * LANES), tried, limits)
            for j in range(width - width % 8, width):
                _add_one(wt, ht, np.uint64(j * LANES), tried, limits)
            for lane in range(LANES):
                better = tried[lane + _SUM] < least[lane]
                best[lane] = tried[lane] if better else best[lane]
                least[lane] = tried[lane + _SUM] if better else least[lane]
        for lane in range(count):
            group = which[start + lane]
            scales[group], errors[group] = best[lane], least[lane]


@kernel
def _round_row(
    w: Floats, codes: Codes, scales: Floats, lanes: tuple[Doubles, Doubles, Floats], limits: tuple[float, float]
) -> None:
    """Codes of one row under given scales; squared error, squared weight and largest error added to ``lanes``."""
    error_lanes, weight_lanes, worst_lanes = lanes
    qmin, qmax = np.float32(limits[0]), np.float32(limits[1])
    width = w.size // scales.size
    spread, shifted = np.empty(TILE, np.float32), np.empty(TILE, np.float32)
    shifted_bits = shifted.view(np.int32)
    for start in range(0, w.size, TILE):
        x, q = w[start : start + TILE], codes[start : start + TILE]
        count = x.size
        for g in range(start // width, (start + count - 1) // width + 1):
            part, s = spread[max(g * width - start, 0) : min((g + 1) * width - start, count)], scales[g]
            for c in range(part.size):
                part[c] = s
        for c in range(count):
            shifted[c] = min(max(x[c] / spread[c], qmin), qmax) + TO_INTEGER
        for c in range(count):
            q[c] = np.int8(shifted_bits[c])
        for c in range(count):
            spread[c] = x[c] - (shifted[c] - TO_INTEGER) * spread[c]
        for c in range(count):
            d, v = np.float64(spread[c]), np.float64(x[c])
            error_lanes[c] += d * d
            weight_lanes[c] += v * v
        for c in range(count):
            worst_lanes[c] = max(worst_lanes[c], abs(spread[c]))


@kernel
def round_rows(
    w: Floats, bits: Ints, codes: Codes, scales: Bf16Bits, divisor: float, limits: tuple[float, float]
) -> tuple[float, float, float, int, int]:
    """Codes of every row of ``w``, and its scales too when ``divisor`` is not 0.

    Args:
        w: float32 [R, C], C-contiguous; read only.
        bits: int32 [R, C], the same memory as ``w``.
        codes: int8 [R, C], written.
        scales: uint16 [R, G], BF16 bits; read when ``divisor`` is 0, else written as bf16(max|w| / divisor).
        limits: qmin, qmax.

    Returns:
        Σ error², Σ w², largest |error|, NaN count, infinity count. With a count above 0 the rest means nothing.
    """
    rows, columns = w.shape
    groups = scales.shape[1]
    width = columns // groups
    row_scales = np.empty(groups, np.float32)
    row_bits = row_scales.view(np.int32)
    lanes = (np.zeros(TILE, np.float64), np.zeros(TILE, np.float64), np.zeros(TILE, np.float32))
    nans, infinities = 0, 0
    for r in range(rows):
        row, stored = bits[r], scales[r]
        if divisor == 0:
            for g in range(groups):
                row_bits[g] = np.int32(stored[g]) << 16
        else:
            peak = np.int32(0)
            for g in range(groups):
                row_bits[g] = _peak(row[g * width : (g + 1) * width])
                peak = max(peak, row_bits[g])
            if peak >= NOT_FINITE:
                more = _count_not_finite(row)
                nans, infinities = nans + more[0], infinities + more[1]
                continue
            for g in range(groups):
                row_scales[g] = row_scales[g] / np.float32(divisor)
            _round_to_bf16(row_bits, np.int32(0))
            for g in range(groups):
                stored[g] = np.uint16(row_bits[g] >> 16)
        _round_row(w[r], codes[r], row_scales, lanes, limits)
    return lanes[0].sum(), lanes[1].sum(), float(lanes[2].max()), nans, infinities


@kernel
def measure_rows(w: Floats, codes: Codes, scales: Bf16Bits) -> tuple[float, float, float]:
    """Σ (w − q s)², Σ w², max |w − q s| of given codes.

    Args:
        w: float32 [R, C], C-contiguous.
        codes: int8 [R, C].
        scales: uint16 [R, G], BF16 bits.
    """
    rows, columns = w.shape
    groups = scales.shape[1]
    width = columns // groups
    row_scales = np.empty(groups, np.float32)
    row_bits = row_scales.view(np.int32)
    error, energy, worst = np.zeros(width, np.float64), np.zeros(width, np.float64), np.zeros(width, np.float32)
    for r in range(rows):
        for g in range(groups):
            row_bits[g] = np.int32(scales[r, g]) << 16
        for g in range(groups):
            x, q, s = w[r, g * width : (g + 1) * width], codes[r, g * width : (g + 1) * width], row_scales[g]
            for j in range(width):
                d = x[j] - np.float32(q[j]) * s
                error[j] += np.float64(d) * np.float64(d)
                energy[j] += np.float64(x[j]) * np.float64(x[j])
                worst[j] = max(worst[j], abs(d))
    return error.sum(), energy.sum(), float(worst.max())


def refuse_not_finite(nans: int, infinities: int, count: int) -> None:
    """Raise a ``QuantizeError`` that counts what is not finite, if anything is."""
    if nans or infinities:
        raise QuantizeError(
            f"{nans:,} NaN and {infinities:,} infinite values among {count:,} weights",
            hint="the source is damaged here: look for FP8 NaN bytes (0x7F, 0xFF) and infinite scales",
        )
