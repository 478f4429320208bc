"""The element types of a safetensors header, and how many bytes a tensor of them takes.

    nbytes = bits · Π shape / 8

Two facts hide in that line. Sub-byte types (F4, F6) state the *logical* shape, two or more values to a byte, where
torch holds the same F4 bytes as half as many columns of ``float4_e2m1fn_x2``; an odd last dimension would share a
byte between two rows, and readers have cut it silently, so it is refused. And the product is taken in Python's
integers, so a header cannot make it overflow into something small.

The table is the one of the format (safetensors 0.8); a name that is not in it is an error, never a guess.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from types import MappingProxyType

from moepress.errors import FormatError

MAX_DIMENSIONS = 64
"""More than numpy or torch can index."""

MAX_ELEMENTS = 2**63 - 1
"""The largest size a signed 64-bit index can address."""


@dataclass(frozen=True, slots=True)
class DType:
    """One element type.

    Attributes:
        name: as the header spells it, for example ``F8_E4M3``.
        bits: size of one element, in bits.
        torch_name: attribute of ``torch``, for example ``float8_e4m3fn``; None if torch has no such type.
    """

    name: str
    bits: int
    torch_name: str | None

    @property
    def alignment(self) -> int:
        """Bytes a tensor's start must be a multiple of, so that a mapped file can be read in place."""
        return max(1, self.bits // 8)


DTYPES: Mapping[str, DType] = MappingProxyType(
    {
        dtype.name: dtype
        for dtype in (
            DType("C64", 64, "complex64"),
            DType("F64", 64, "float64"),
            DType("I64", 64, "int64"),
            DType("U64", 64, "uint64"),
            DType("F32", 32, "float32"),
            DType("I32", 32, "int32"),
            DType("U32", 32, "uint32"),
            DType("F16", 16, "float16"),
            DType("BF16", 16, "bfloat16"),
            DType("I16", 16, "int16"),
            DType("U16", 16, "uint16"),
            DType("F8_E4M3", 8, "float8_e4m3fn"),
            DType("F8_E4M3FNUZ", 8, "float8_e4m3fnuz"),
            DType("F8_E5M2", 8, "float8_e5m2"),
            DType("F8_E5M2FNUZ", 8, "float8_e5m2fnuz"),
            DType("F8_E8M0", 8, "float8_e8m0fnu"),
            DType("I8", 8, "int8"),
            DType("U8", 8, "uint8"),
            DType("BOOL", 8, "bool"),
            DType("F6_E2M3", 6, None),
            DType("F6_E3M2", 6, None),
            DType("F4", 4, "float4_e2m1fn_x2"),
        )
    }
)
"""Every element type a header may name, widest first."""


def nbytes(dtype: str, shape: tuple[int, ...]) -> int:
    """Bytes of a tensor, from what its header says.

    Args:
        dtype: a name in `DTYPES`.
        shape: the header's shape, so logical for sub-byte types. Empty for a scalar; zeros give zero bytes.

    Raises:
        FormatError: unknown dtype, a negative or absurd dimension, or a sub-byte row that ends inside a byte.
    """
    known = DTYPES.get(dtype)
    if known is None:
        raise FormatError(f"unknown dtype {dtype!r}; a safetensors header knows {', '.join(DTYPES)}")
    if len(shape) > MAX_DIMENSIONS:
        raise FormatError(f"a shape of {len(shape)} dimensions; no framework holds more than {MAX_DIMENSIONS}")
    if any(not 0 <= dimension <= MAX_ELEMENTS for dimension in shape):
        raise FormatError(f"shape {list(shape)} has a dimension that is negative or does not fit 64 bits")
    # Zeros are left out of this product: [0, 2^62, 2^62] holds nothing, and still has strides that overflow.
    if prod(dimension for dimension in shape if dimension) > MAX_ELEMENTS:
        raise FormatError(f"shape {list(shape)} has more elements than a 64-bit index can count")
    if known.bits % 8 and (shape[-1] if shape else 1) * known.bits % 8:
        raise FormatError(
            f"shape {list(shape)} of {dtype} ({known.bits} bits) ends each row inside a byte",
            hint=f"the shape counts single values: its last number must be a multiple of {2 if known.bits == 4 else 4}",
        )
    return prod(shape) * known.bits // 8
