"""Shard headers: honest ones, and what becomes of them; judged by the safetensors library.

What moepress accepts, the library must accept too, with the same tensors at the same places. What it refuses although the
library accepts it must be one of the things that are refused knowingly: a repeated name, a name or a shape that other
readers cannot hold, a length that the file does not have. Reading a header must never ask for bytes beyond the file.
"""

from __future__ import annotations

import json
import random
from typing import Any

from safetensors import SafetensorError, deserialize

from fuzz.bounded import Wrong
from fuzz.wild import TEXTS, edit_bytes, edit_tree, to_text
from moepress.errors import FormatError
from moepress.formats.dtypes import DTYPES
from moepress.formats.header import MAX_HEADER_BYTES, ShardHeader, fetch_header

BITS = {name: dtype.bits for name, dtype in DTYPES.items()}
KNOWINGLY = (
    *("the same name twice", "its entry has", "control character", "empty name", "__metadata__"),
    *("dimensions", "64 bits", "64-bit index", "ends each row"),
)
"""Words of our refusals where the library is content."""


def honest(rng: random.Random) -> tuple[dict[str, Any], int]:
    """A header that is right, and the number of bytes of its data."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}} if rng.random() < 0.7 else {}
    position = 0
    for i in range(rng.choice((0, 1, 1, 2, 3, 5))):
        dtype = rng.choice(list(BITS))
        shape = [rng.choice((0, 1, 2, 3, 4, 8, 12)) for _ in range(rng.choice((0, 1, 2, 2, 3)))]
        if BITS[dtype] % 8:
            shape = [*shape, rng.choice((4, 8))]
        size = BITS[dtype]
        for dimension in shape:
            size *= dimension
        header[f"model.layers.{i}.weight" if rng.random() < 0.9 else rng.choice(("a", "é", "x" * 200))] = {
            "dtype": dtype,
            "shape": shape,
            "data_offsets": [position, position + size // 8],
        }
        position += size // 8
    return header, position


def make(rng: random.Random) -> bytes:
    """A whole file."""
    if rng.random() < 0.01:
        return rng.choice(TEXTS)[: rng.choice((8, 64, 200_000))]
    header, size = honest(rng)
    edits = rng.choice((0, 1, 1, 1, 2, 3))
    for _ in range(edits):
        if rng.random() < 0.6:
            edit_tree(rng, header)
    text = to_text(rng, header)
    if rng.random() < 0.3:
        text += b" " * rng.choice((1, 7, 8, 64))
    length = len(text)
    if edits and rng.random() < 0.1:
        length = rng.choice((0, 1, 2, length - 1, length + 1, length + size, 10**8, 10**8 + 1, 2**32, 2**63, 2**64 - 1))
    raw = length.to_bytes(8, "little", signed=False) + text + rng.randbytes(size)
    if edits and rng.random() < 0.4:
        raw = edit_bytes(rng, raw)
    return raw


def judge(raw: bytes) -> str:
    """Reads a file as moepress does, and compares with the library.

    Raises:
        FormatError: moepress refuses it, as it may.
        Wrong: the two disagree where they must not, or bytes beyond the file were asked for.
    """

    def read_range(start: int, end: int) -> bytes:
        if not 0 <= start <= end <= len(raw) or end - start > MAX_HEADER_BYTES + 8:
            raise Wrong(f"asks for bytes beyond the file: {start}..{end} of {len(raw)}")
        return raw[start:end]

    theirs = library(raw)
    try:
        ours = fetch_header(read_range, file_bytes=len(raw), name="model.safetensors")
    except FormatError as error:
        if theirs is not None and not any(words in error.what for words in KNOWINGLY):
            raise Wrong(f"refuses what the library accepts: {error.what}") from error
        raise
    if theirs is None:
        raise Wrong("accepts what the library refuses")
    if placed(ours) != theirs:
        raise Wrong("reads other tensors than the library")
    return "accepted, as by the library"


def library(raw: bytes) -> dict[str, tuple[str, tuple[int, ...], int]] | None:
    """Name -> (dtype, shape, bytes) by the safetensors library; None where it refuses."""
    try:
        return {name: (part["dtype"], tuple(part["shape"]), len(part["data"])) for name, part in deserialize(raw)}
    except (SafetensorError, ValueError):
        return None


def placed(header: ShardHeader) -> dict[str, tuple[str, tuple[int, ...], int]]:
    return {entry.name: (entry.dtype, entry.shape, entry.nbytes) for entry in header.entries}


def case(seed: int, number: int) -> bytes:
    """Case ``number`` of a seed."""
    return make(random.Random(f"headers/{seed}/{number}"))


def seeds_for_coverage() -> list[bytes]:
    """Honest files, from which a coverage-guided run starts."""
    rng = random.Random(0)
    files = []
    for _ in range(50):
        header, size = honest(rng)
        text = json.dumps(header).encode()
        files.append(len(text).to_bytes(8, "little") + text + bytes(size))
    return [*files, *(text[:1000] for text in TEXTS)]
