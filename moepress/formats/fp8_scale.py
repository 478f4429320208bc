"""Scales of FP8 weights as float32 arrays: decoded from what the file holds, and looked at. numpy alone.

    F32, BF16, F16        the numbers themselves
    F8_E8M0, or U8 where the configuration says that bytes are E8M0        2^(byte − 127); 255 is NaN

A scale that is wrong is wrong for thousands of weights at once, and nothing after it would notice, so what cannot be meant
is refused here. Zero is allowed: encoders write it for blocks that are all zero (`fp8` checks that they are).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from moepress.errors import FormatError

Floats = np.ndarray[Any, np.dtype[np.float32]]
Bytes = np.ndarray[Any, np.dtype[np.uint8]]


def scale_values(raw: Bytes, dtype: str, shape: tuple[int, ...], *, e8m0: bool, name: str) -> Floats:
    """A stored scale as float32 of its shape.

    Args:
        raw: uint8 [nbytes], the tensor's bytes.
        dtype: as the header spells it.
        e8m0: whether bytes are exponents.
        name: what to call the tensor in an error.

    Raises:
        FormatError: a dtype that scales do not have; E8M0's NaN.
    """
    if e8m0:
        return decode_e8m0_bytes(raw, name=name).reshape(shape)
    if dtype == "F32":
        return raw.view(np.float32).reshape(shape)
    if dtype == "BF16":
        return (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32).reshape(shape)
    if dtype == "F16":
        return raw.view(np.float16).astype(np.float32).reshape(shape)
    raise FormatError(f"a scale of FP8 weights is F32, BF16, F16 or E8M0, this one is {dtype}", where=name)


def decode_e8m0_bytes(exponents: Bytes, *, name: str) -> Floats:
    """Powers of two stored as exponent bytes: uint8, any shape → float32, the same shape, newly allocated.

    2^(byte − 127), exact also for byte 0 (2^-127, subnormal).

    Raises:
        FormatError: a byte is 255, E8M0's NaN.
    """
    if not_a_number := int(np.count_nonzero(exponents == 255)):
        raise FormatError(f"{not_a_number} of {exponents.size} E8M0 scales are NaN (byte 255)", where=name)
    bits = exponents.astype(np.uint32) << 23  # float32's own exponent field; 2^-127 has none
    bits[exponents == 0] = 0x0040_0000
    return bits.view(np.float32)


def check_scale_values(scale: Floats, *, name: str) -> None:
    """Refuse scales that cannot be meant.

    Args:
        scale: float32, any shape.
        name: what to call the tensor in the error.

    Raises:
        FormatError: a scale is NaN, infinite or negative; or every one is 32 or more. The last means weights in the ten
            thousands in every block, which no trained linear layer has: it is what E8M0 bytes look like as numbers.
    """
    total = scale.size
    if not_finite := total - int(np.count_nonzero(np.isfinite(scale))):
        raise FormatError(f"{not_finite} of {total} scales are NaN or infinite", where=name)
    if negative := int(np.count_nonzero(scale < 0)):
        raise FormatError(f"{negative} of {total} scales are negative", where=name)
    if total and float(scale.min()) >= 32:
        raise FormatError(
            f"scales of {float(scale.min()):g} to {float(scale.max()):g}: weights beyond 14,000 in every block",
            where=name,
            hint="these look like E8M0 exponent bytes stored as numbers (120 for 2^-7); download the checkpoint again",
        )
