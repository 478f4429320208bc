"""What can be wrong with the numbers of one tensor, its dtype and its shape: any tensor, then packed words and their scales."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from fuzz.small import Tensor


def lowest_bit(t: Tensor) -> None:
    t.data = bytes([t.data[0] ^ 1]) + t.data[1:]


def sign(t: Tensor) -> None:
    t.data = t.data[:-1] + bytes([t.data[-1] ^ 0x80])


def zeros(t: Tensor) -> None:
    t.data = bytes(len(t.data))


def nan(t: Tensor) -> None:
    size = {"F8_E4M3": 1, "BF16": 2, "F32": 4}[t.dtype]
    t.data = {1: b"\x7f", 2: b"\xc0\x7f", 4: b"\x00\x00\xc0\x7f"}[size] + t.data[size:]


def rows_swapped(t: Tensor) -> None:
    step = len(t.data) // t.shape[0]
    t.data = t.data[step : 2 * step] + t.data[:step] + t.data[2 * step :]


def row_missing(t: Tensor) -> None:
    t.data = t.data[: len(t.data) // t.shape[0] * (t.shape[0] - 1)]
    t.shape = [t.shape[0] - 1, *t.shape[1:]]


def row_more(t: Tensor) -> None:
    t.data += t.data[: len(t.data) // t.shape[0]]
    t.shape = [t.shape[0] + 1, *t.shape[1:]]


def shape_reversed(t: Tensor) -> None:
    t.shape = t.shape[::-1] if t.shape[::-1] != t.shape else [*t.shape, 1]


def relabelled(t: Tensor) -> None:
    t.dtype = {"BF16": "F16", "F32": "I32", "F8_E4M3": "U8", "I32": "U32", "I64": "U64"}[t.dtype]


def widened(t: Tensor) -> None:
    """The same numbers in a wider type."""
    if t.dtype == "BF16":
        t.data = (np.frombuffer(t.data, np.uint16).astype(np.uint32) << 16).tobytes()
        t.dtype = "F32"
    elif t.dtype == "F32":
        t.data = np.frombuffer(t.data, np.float32).astype(np.float64).tobytes()
        t.dtype = "F64"


def doubled(t: Tensor) -> None:
    if t.dtype == "F32":
        t.data = (np.frombuffer(t.data, np.float32) * 2).tobytes()
    else:
        bits = np.frombuffer(t.data, np.uint16)
        t.data = np.where(bits & 0x7F80, bits + 0x80, bits).astype(np.uint16).tobytes()


# packed weights


def nibbles_reversed(t: Tensor) -> None:
    raw = np.frombuffer(t.data, np.uint8)
    t.data = ((raw << 4) | (raw >> 4)).tobytes()


def bytes_reversed(t: Tensor) -> None:
    t.data = np.frombuffer(t.data, np.uint32).byteswap().tobytes()


def twos_complement(t: Tensor) -> None:
    """Codes as two's complement instead of plus 8."""
    t.data = (np.frombuffer(t.data, np.uint32) ^ np.uint32(0x88888888)).tobytes()


def negated(t: Tensor) -> None:
    raw = np.frombuffer(t.data, np.uint32)
    codes = (raw[:, None] >> (4 * np.arange(8, dtype=np.uint32))) & 15
    codes = np.clip(16 - codes, 0, 15)
    t.data = (codes << (4 * np.arange(8, dtype=np.uint32))).sum(1).astype(np.uint32).tobytes()


def one_code(t: Tensor) -> None:
    raw = np.frombuffer(t.data, np.uint32).copy()
    raw[3] ^= 0x10
    t.data = raw.tobytes()


def codes_shifted(t: Tensor) -> None:
    """Every code one place to the right."""
    t.data = np.roll(np.frombuffer(t.data, np.uint32), 1).tobytes()


def bf16_first(value: int) -> Callable[[Tensor], None]:
    def put_first(t: Tensor) -> None:
        t.data = value.to_bytes(2, "little") + t.data[2:]

    return put_first


def scale_one_step(t: Tensor) -> None:
    t.data = (int.from_bytes(t.data[:2], "little") + 1).to_bytes(2, "little") + t.data[2:]


def scales_transposed(t: Tensor) -> None:
    rows, groups = t.shape
    t.data = np.frombuffer(t.data, np.uint16).reshape(rows, groups).T.copy().tobytes()


def scales_finer(t: Tensor) -> None:
    """Groups half as wide, each scale twice: the same numbers, and not what config.json says."""
    rows, groups = t.shape
    t.data = np.frombuffer(t.data, np.uint16).repeat(2).tobytes()
    t.shape = [rows, 2 * groups]


def true_shape(values: list[int]) -> Callable[[Tensor], None]:
    def put_shape(t: Tensor) -> None:
        t.data = np.array(values, np.int64).tobytes()

    return put_shape


def swapped(a: str, b: str) -> Callable[[dict[str, Tensor]], None]:
    def edit(held: dict[str, Tensor]) -> None:
        for part in ("weight_packed", "weight_scale"):
            held[f"{a}.{part}"], held[f"{b}.{part}"] = held[f"{b}.{part}"], held[f"{a}.{part}"]

    return edit
