"""FP8 or BF16 rows to packed INT4 in one compiled pass, for round-to-nearest conversions on the CPU.

    stored row ── decode ──► values [C] ── per group: max|w| → s ──► codes, error sums ── nibbles ──► int32 words
                                    one row of float32 (28 KB for 7,168 columns): it never leaves the nearest caches

It is `chain` for one row after the other: `formats.fp8` → `quantize.rtn` → `formats.int4`, and a test holds it to
that chain bit for bit. The chain works in tiles that travel through the second-level cache three times, with a byte a
code; this pass takes a third to a half of its time. The formulas stand here a second time because a compiled kernel
must be whole in its own file (`quantize.compiled`), and because formats and quantize do not know each other.

How it comes to run in vectors:

- **FP8.** A code's fields, shifted into those of a float32 and with the difference of the biases added, are the value x of
  a code that has its implicit leading one. A subnormal code has none; its value is 2x − 2^-6. The lesser of the two is
  right for both kinds. (Shifting alone gives every value times 2^-120, but subnormal codes as subnormal floats, and
  those cost an Intel core a hundred cycles each.)
- **Peaks** come out of knock-out rounds over the whole row, not from a loop for each group.
- **A strip** of ``STRIP`` columns is rounded as ``LANES`` lanes side by side, four columns each. A strip's buffers are one
  array at fixed distances: the compiler then knows that they do not overlap and needs no checks at run time.
- **A code** is 1.5 · 2^23 + 8 + q: adding that rounds half to even, and its last four bits are the nibble, code + 8.
- **Sums** go to lanes of float32 for one row (four values a step, 14 steps in 7,168 columns) and from there to lanes of
  float64. That is good to about seven digits, and equal at every vector width, as no addition is reassociated.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from moepress.quantize.compiled import kernel
from moepress.quantize.rounding_kernel import MAGNITUDE, NOT_FINITE, SMALLEST_NORMAL, ZERO_GROUP

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int32]
Fp8Codes = npt.NDArray[np.int8]
Bf16Bits = npt.NDArray[np.uint16]
Bytes = npt.NDArray[np.uint8]
Words = npt.NDArray[np.uint32]

LANES = 128
STRIP = 4 * LANES
_SCALE = 0  # where things are in the strip's array: the scale of every column,
_SHIFTED = STRIP  # 1.5 · 2^23 + 8 + code,
_ERROR = 2 * STRIP  # and lanes of Σ error²,
_ENERGY = _ERROR + LANES  # Σ w²
_WORST = _ENERGY + LANES  # and max |error|
_STRIP_END = _WORST + LANES

_TO_NIBBLE = np.float32(1.5 * 2**23 + 8)
_SIGN_AND_FIELDS = np.int32(-0x79000000 + 0x00F00000)  # 0x87F00000
_BIAS = np.int32((127 - 7) << 23)
_SMALLEST_NORMAL_FP8 = np.float32(2.0**-6)
_EVEN_BYTES = np.uint64(0x00FF00FF00FF00FF)
_EVEN_PAIRS = np.uint64(0x0000FFFF0000FFFF)
_LOW_WORD = np.uint64(0xFFFFFFFF)


@kernel
def press_fp8_rows(
    stored: Fp8Codes,
    block_scales: Floats,
    block: tuple[int, int],
    first_row: int,
    packed: Words,
    scales: Bf16Bits,
    divisor: float,
) -> tuple[float, float, float, int, int]:
    """Rows of a block-scaled FP8 weight, rounded to nearest and packed.

    Args:
        stored: int8 [r, C], the bits of e4m3 codes, C-contiguous, C a multiple of 8; rows ``first_row`` and on.
        block_scales: float32 [ceil(R / block rows), ceil(C / block columns)] of the whole weight, finite.
        block: rows and columns that share a block scale.
        packed: uint32 [r, C / 8], written.
        scales: uint16 [r, G], BF16 bits; written as bf16(max|w| / divisor), or read when ``divisor`` is 0. G divides C
            into groups of an even number of columns.
        divisor: 7.5, or 0 where scales are given.

    Returns:
        Σ error², Σ w², largest |error|, count of NaN codes, count of products that overflow. With a count above 0 the
        rest means nothing.
    """
    values, bits, peaks, row_scales, strip, nibbles, totals = _buffers(stored.shape[1], scales.shape[1])
    columns = stored.shape[1]
    nans, infinities = 0, 0
    for r in range(stored.shape[0]):
        nans += count_fp8_nans(stored[r])
        _decode_fp8_row(stored[r], block_scales[(first_row + r) // block[0]], block[1], values, bits)
        if not _take_scales(bits, columns, peaks, divisor, scales[r], row_scales):
            infinities += _count_not_finite(bits, columns)[1]
        _round_row(values, columns, row_scales, strip, nibbles, totals)
        _pack_row(nibbles, packed[r])
    return totals[0].sum(), totals[1].sum(), float(strip[_WORST:].max()), nans, infinities


@kernel
def press_bf16_rows(
    stored: Bf16Bits, packed: Words, scales: Bf16Bits, divisor: float
) -> tuple[float, float, float, int, int]:
    """Rows of a BF16 weight; as `press_fp8_rows`, but ``stored`` is uint16 [r, C], BF16 bits.

    Returns:
        Σ error², Σ w², largest |error|, NaN count, infinity count.
    """
    values, bits, peaks, row_scales, strip, nibbles, totals = _buffers(stored.shape[1], scales.shape[1])
    columns = stored.shape[1]
    nans, infinities = 0, 0
    for r in range(stored.shape[0]):
        _widen_bf16(stored[r], bits)
        if not _take_scales(bits, columns, peaks, divisor, scales[r], row_scales):
            more = _count_not_finite(bits, columns)
            nans, infinities = nans + more[0], infinities + more[1]
        _round_row(values, columns, row_scales, strip, nibbles, totals)
        _pack_row(nibbles, packed[r])
    return totals[0].sum(), totals[1].sum(), float(strip[_WORST:].max()), nans, infinities


@kernel
def decode_fp8_rows(
    stored: Fp8Codes, block_scales: Floats, block: tuple[int, int], first_row: int, out: Floats, out_bits: Ints
) -> int:
    """Rows to float32 [r, C]; ``out_bits`` is the memory of ``out`` as int32. Arguments as in `press_fp8_rows`.

    Returns:
        Count of NaN codes.
    """
    nans = 0
    for r in range(stored.shape[0]):
        nans += count_fp8_nans(stored[r])
        _decode_fp8_row(stored[r], block_scales[(first_row + r) // block[0]], block[1], out[r], out_bits[r])
    return nans


@kernel
def fp8_rows_to_bf16(
    stored: Fp8Codes, block_scales: Floats, block: tuple[int, int], first_row: int, out: Bf16Bits
) -> int:
    """Rows to BF16 bits, uint16 [r, C], rounded once, half to even. Arguments as in `press_fp8_rows`.

    Returns:
        Count of NaN codes.
    """
    columns = stored.shape[1]
    values = np.empty(columns, np.float32)
    bits = values.view(np.int32)
    nans = 0
    for r in range(stored.shape[0]):
        nans += count_fp8_nans(stored[r])
        _decode_fp8_row(stored[r], block_scales[(first_row + r) // block[0]], block[1], values, bits)
        for c in range(columns):
            out[r, c] = np.uint16((bits[c] + np.int32(0x7FFF) + ((bits[c] >> 16) & 1)) >> 16)
    return nans


@kernel
def widen_bf16_rows(stored: Bf16Bits, out_bits: Ints) -> None:
    """BF16 bits, uint16 [r, C], to the bits of the same values in float32, int32 [r, C]."""
    for r in range(stored.shape[0]):
        _widen_bf16(stored[r], out_bits[r])


@kernel
def _buffers(columns: int, groups: int) -> tuple[Floats, Ints, Ints, Floats, Floats, Bytes, Doubles]:
    """For one row: values (padded to whole strips with zeros) and their bits, peaks, scales; a strip; nibbles; sums."""
    padded = -(-columns // STRIP) * STRIP
    values = np.zeros(padded, np.float32)
    return (
        values,
        values.view(np.int32),
        np.empty((2, columns // 2), np.int32),
        np.empty(groups, np.float32),
        np.zeros(_STRIP_END, np.float32),
        np.zeros(padded, np.uint8),
        np.zeros((2, LANES), np.float64),
    )


@kernel
def count_fp8_nans(codes: Fp8Codes) -> int:
    """Codes 0x7F and 0xFF among int8 [n]."""
    largest = np.int8(0)
    for c in range(codes.size):
        largest = max(largest, np.int8(codes[c] & np.int8(0x7F)))
    count = 0
    if largest == np.int8(0x7F):
        for c in range(codes.size):
            count += (codes[c] & np.int8(0x7F)) == np.int8(0x7F)
    return count


@kernel
def _count_not_finite(bits: Ints, columns: int) -> tuple[int, int]:
    nans, infinities = 0, 0
    for c in range(columns):
        magnitude = bits[c] & MAGNITUDE
        nans += magnitude > NOT_FINITE
        infinities += magnitude == NOT_FINITE
    return nans, infinities


@kernel
def _decode_fp8_row(row: Fp8Codes, block_scales: Floats, block_columns: int, values: Floats, bits: Ints) -> None:
    start = 0
    for b in range(block_scales.size):
        end = min(start + block_columns, row.size)
        _decode_fp8(row, np.uint64(start), np.uint64(end), block_scales[b], values, bits)
        start = end


@kernel
def _decode_fp8(row: Fp8Codes, start: np.uint64, end: np.uint64, scale: np.float32, values: Floats, bits: Ints) -> None:
    """Columns ``start`` to ``end``, under one block scale. The positions are unsigned, so that no index can wrap."""
    for i in range(end - start):
        fields = (np.int32(row[start + i]) << np.int32(20)) & _SIGN_AND_FIELDS  # copies of the sign are masked away
        bits[start + i] = fields + _BIAS
    for i in range(end - start):
        x = values[start + i]
        size = abs(x)
        values[start + i] = min(size, (size + size) - _SMALLEST_NORMAL_FP8) * math.copysign(scale, x)


@kernel
def _widen_bf16(row: Bf16Bits, bits: Ints) -> None:
    for c in range(row.size):
        bits[c] = np.int32(row[c]) << 16


@kernel
def _take_scales(bits: Ints, columns: int, peaks: Ints, divisor: float, stored: Bf16Bits, row_scales: Floats) -> bool:
    """A row's scales, read or made. False when they were made and a value of the row is not finite."""
    scale_bits = row_scales.view(np.int32)
    if divisor == 0:
        for g in range(row_scales.size):
            scale_bits[g] = np.int32(stored[g]) << 16
        return True
    peaks_of_groups = _peaks(bits, columns, columns // row_scales.size, peaks)
    largest = np.int32(0)
    for g in range(row_scales.size):
        scale_bits[g] = peaks_of_groups[g]
        largest = max(largest, peaks_of_groups[g])
    for g in range(row_scales.size):
        row_scales[g] = row_scales[g] / np.float32(divisor)
    for g in range(row_scales.size):  # to BF16, half to even; what is no normal number becomes 2^-7
        rounded = (scale_bits[g] + np.int32(0x7FFF) + ((scale_bits[g] >> 16) & 1)) & np.int32(-65536)
        scale_bits[g] = rounded if rounded >= SMALLEST_NORMAL else ZERO_GROUP
    for g in range(row_scales.size):
        stored[g] = np.uint16(scale_bits[g] >> 16)
    return bool(largest < NOT_FINITE)


@kernel
def _peaks(bits: Ints, count: int, width: int, buffers: Ints) -> Ints:
    """Bits of max|w| of every group of ``width`` columns: neighbour against neighbour until one of a group is left."""
    a: Ints = buffers[0]
    b: Ints = buffers[1]
    count, width = count // 2, width // 2
    _first_round(bits, a, count)
    while width % 2 == 0:
        count, width = count // 2, width // 2
        _next_round(a, b, count)
        a, b = b, a
    if width > 1:  # an odd number: the rest of a group one by one
        for g in range(count // width):
            largest = np.int32(0)
            for j in range(width):
                largest = max(largest, a[g * width + j])
            b[g] = largest
        a, b = b, a
    return a


@kernel
def _first_round(bits: Ints, a: Ints, count: int) -> None:
    for j in range(count):
        a[j] = max(bits[2 * j] & MAGNITUDE, bits[2 * j + 1] & MAGNITUDE)


@kernel
def _next_round(a: Ints, b: Ints, count: int) -> None:
    for j in range(count):
        b[j] = max(a[2 * j], a[2 * j + 1])


@kernel
def _round_row(
    values: Floats, columns: int, row_scales: Floats, strip: Floats, nibbles: Bytes, totals: Doubles
) -> None:
    bits = strip.view(np.int32)
    width = columns // row_scales.size
    group, group_end = 0, width
    for start in range(0, columns, STRIP):
        end, at = min(start + STRIP, columns), start
        while at < end:
            if at == group_end:
                group, group_end = group + 1, group_end + width
            stop = min(end, group_end)
            _fill(strip, np.uint64(_SCALE + at - start), np.uint64(stop - at), row_scales[group])
            at = stop
        _fill(strip, np.uint64(_SCALE + end - start), np.uint64(start + STRIP - end), np.float32(1.0))
        _round_strip(values, np.uint64(start), strip)
        _take_nibbles(bits, nibbles, np.uint64(start))
    _drain(strip, np.uint64(_ERROR), totals[0])
    _drain(strip, np.uint64(_ENERGY), totals[1])


@kernel
def _fill(strip: Floats, start: np.uint64, count: np.uint64, scale: np.float32) -> None:
    for i in range(count):
        strip[start + i] = scale


@kernel
def _shift(value: np.float32, scale: np.float32) -> np.float32:
    return min(max(value / scale, np.float32(-8.0)), np.float32(7.0)) + _TO_NIBBLE


@kernel
def _round_strip(values: Floats, start: np.uint64, strip: Floats) -> None:
    for i in range(LANES):
        at = start + np.uint64(i)
        w0, w1 = values[at], values[at + np.uint64(LANES)]
        w2, w3 = values[at + np.uint64(2 * LANES)], values[at + np.uint64(3 * LANES)]
        s0, s1 = strip[i + _SCALE], strip[i + _SCALE + LANES]
        s2, s3 = strip[i + _SCALE + 2 * LANES], strip[i + _SCALE + 3 * LANES]
        t0, t1, t2, t3 = _shift(w0, s0), _shift(w1, s1), _shift(w2, s2), _shift(w3, s3)
        strip[i + _SHIFTED], strip[i + _SHIFTED + LANES] = t0, t1
        strip[i + _SHIFTED + 2 * LANES], strip[i + _SHIFTED + 3 * LANES] = t2, t3
        d0, d1 = w0 - (t0 - _TO_NIBBLE) * s0, w1 - (t1 - _TO_NIBBLE) * s1
        d2, d3 = w2 - (t2 - _TO_NIBBLE) * s2, w3 - (t3 - _TO_NIBBLE) * s3
        strip[i + _ERROR] += (d0 * d0 + d1 * d1) + (d2 * d2 + d3 * d3)
        strip[i + _ENERGY] += (w0 * w0 + w1 * w1) + (w2 * w2 + w3 * w3)
        strip[i + _WORST] = max(strip[i + _WORST], max(max(abs(d0), abs(d1)), max(abs(d2), abs(d3))))


@kernel
def _take_nibbles(strip_bits: Ints, nibbles: Bytes, start: np.uint64) -> None:
    for i in range(STRIP):
        nibbles[start + np.uint64(i)] = np.uint8(strip_bits[i + _SHIFTED] & np.int32(15))


@kernel
def _pack_row(nibbles: Bytes, words: Words) -> None:
    """Eight nibbles, a byte each, are one 64-bit load; three folds make a word of them, the first column lowest."""
    eights = nibbles.view(np.uint64)
    for j in range(words.size):
        x = eights[j]
        x = (x | (x >> np.uint64(4))) & _EVEN_BYTES
        x = (x | (x >> np.uint64(8))) & _EVEN_PAIRS
        words[j] = np.uint32((x | (x >> np.uint64(16))) & _LOW_WORD)


@kernel
def _drain(strip: Floats, start: np.uint64, total: Doubles) -> None:
    """Moves a row's lanes into the totals."""
    for i in range(LANES):
        total[i] += np.float64(strip[start + np.uint64(i)])
    for i in range(LANES):
        strip[start + np.uint64(i)] = np.float32(0.0)
