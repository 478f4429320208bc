"""One shard's header: what the file says it holds, believed only when every byte is accounted for.

    8 bytes        N, little-endian
    N bytes        JSON {"__metadata__": {str: str}, name: {"dtype", "shape", "data_offsets": [start, end]}, ...},
                   padded with spaces
    the rest       the tensors; offsets count from here

The usual reader is lenient where a converter cannot be: it accepts a repeated name when both ranges agree, a NUL
inside a name, and writes a tensor called ``__metadata__`` that nobody can read back. Here a header is right only if
the names are unique and printable, each range is exactly as long as dtype and shape need, the ranges cover the data
with no hole and no overlap, and the file ends with the last of them. Anything else is refused by name, before
anything is allocated: a claimed length is compared with the file's size first.

Alignment: the data starts at a multiple of 8, and `file_order` arranges tensors so that each also starts at a
multiple of its element size, without padding, which the format does not allow. Tensors whose byte count is a multiple
of 8 keep the caller's order (so an expert's packed words, scales and shape stay together and can be streamed); the
rest follow, widest element first.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any

from moepress.errors import CheckpointError, FormatError
from moepress.formats.dtypes import DTYPES, nbytes
from moepress.formats.foreign_bytes import SNIFF_BYTES, recognise
from moepress.formats.strict_json import parse_object

MAX_HEADER_BYTES = 100_000_000
"""The format's cap on N. 210,000 names of a Kimi-sized checkpoint would take about 30 MB in one shard."""

FIRST_READ_BYTES = 1 << 16
"""How much is read before N is known: the whole header of a small shard, in one request."""

_METADATA = "__metadata__"
_FIELDS = frozenset(("dtype", "shape", "data_offsets"))
_UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\ud800-\udfff]")
_SURROGATE = re.compile("[\ud800-\udfff]")
_DOWNLOAD_AGAIN = "the file was cut off while it was copied: download this shard again"

_nbytes = lru_cache(maxsize=4096)(nbytes)  # a shard has thousands of tensors and a dozen shapes


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a shard. ``start`` and ``end`` are byte positions in the file, not in the data."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.start

    @property
    def numel(self) -> int:
        """Elements, counted by the header's shape (logical for sub-byte types)."""
        return prod(self.shape)


@dataclass(frozen=True)
class ShardHeader:
    """A checked header.

    Attributes:
        name: the file's name, as the index spells it.
        entries: in file order.
        metadata: ``__metadata__``, empty if absent.
        data_start: byte position of the first tensor.
        file_bytes: size of the file, which is also the end of the last tensor.
    """

    name: str
    entries: tuple[TensorEntry, ...]
    metadata: dict[str, str]
    data_start: int
    file_bytes: int


def check_tensor_name(name: str) -> None:
    """Refuse a name that other readers drop, cut or take for something else.

    Raises:
        FormatError: empty, ``__metadata__``, or with a control character or a lone surrogate in it.
    """
    if not name:
        raise FormatError("a tensor with an empty name")
    if name == _METADATA:
        raise FormatError(
            "a tensor called '__metadata__': the format keeps that name for itself, no reader finds the tensor again"
        )
    if unprintable := _UNPRINTABLE.search(name):
        raise FormatError(
            f"tensor name {name!r} has the control character {unprintable[0]!r} at position {unprintable.start()}",
            hint="C readers stop at it and see another name",
        )


def header_bytes(head: bytes, *, file_bytes: int, name: str) -> int:
    """8 + N: how much of the file is length and header.

    Args:
        head: the first bytes of the file: at least `SNIFF_BYTES`, or all of it.
        file_bytes: the file's whole size.
        name: file name for the errors.

    Raises:
        FormatError: the file cannot be safetensors; says what it looks like instead, and when it is merely cut off.
    """
    claimed = int.from_bytes(head[:8], "little") if len(head) >= 8 else 0
    brace = head[8:9] == b"{"
    if brace and 2 <= claimed <= min(MAX_HEADER_BYTES, file_bytes - 8):
        return 8 + claimed
    if brace and 2 <= claimed <= MAX_HEADER_BYTES:
        raise FormatError(
            f"{name}: ends inside its header: {file_bytes:,} bytes, and the header alone needs {8 + claimed:,}",
            hint=_DOWNLOAD_AGAIN,
        )
    if brace and claimed < file_bytes:
        raise FormatError(
            f"{name}: a header of {claimed:,} bytes; the format allows {MAX_HEADER_BYTES:,}",
            hint="split the tensors over more shards",
        )
    if foreign := recognise(head[:SNIFF_BYTES], file_bytes):
        what = f"{name}: not a safetensors file ({file_bytes:,} bytes) but {foreign.what}"
        raise FormatError(what, hint=foreign.hint)
    raise FormatError(
        f"{name}: not a safetensors file ({file_bytes:,} bytes): it would start with a header of {claimed:,} bytes"
        + ("" if brace else f" whose first byte is {head[8:9]!r} instead of b'{{'"),
        hint="download it again, and compare its SHA-256 with the Hub's",
    )


def _entry(name: str, info: Any, data_start: int) -> TensorEntry:
    check_tensor_name(name)
    if type(info) is not dict or info.keys() != _FIELDS:
        keys = sorted(info) if isinstance(info, dict) else type(info).__name__
        raise FormatError(f"tensor {name!r}: its entry has {keys} instead of dtype, shape and data_offsets")
    dtype, shape, offsets = info["dtype"], info["shape"], info["data_offsets"]
    if type(dtype) is not str:
        raise FormatError(f"tensor {name!r}: dtype is {dtype!r}, not a string")
    # `type(...) is int` and not isinstance: True is an int, and no dimension.
    if type(shape) is not list or not all(type(dimension) is int for dimension in shape):
        raise FormatError(f"tensor {name!r}: shape is {shape!r}, not a list of integers")
    if type(offsets) is not list or len(offsets) != 2 or not all(type(offset) is int for offset in offsets):
        raise FormatError(f"tensor {name!r}: data_offsets is {offsets!r}, not [start, end]")
    start, end = offsets
    try:
        needed = _nbytes(dtype, tuple(shape))
    except FormatError as error:
        raise FormatError(f"tensor {name!r}: {error.what}", hint=error.hint) from None
    if start < 0 or end - start != needed:
        raise FormatError(
            f"tensor {name!r}: data_offsets [{start}, {end}] hold {end - start:,} bytes, "
            f"{dtype} {shape} needs {needed:,}"
        )
    return TensorEntry(name, dtype, tuple(shape), data_start + start, data_start + end)


def _metadata(value: Any) -> dict[str, str]:
    if type(value) is not dict or not all(type(text) is str for text in value.values()):
        raise FormatError("__metadata__ is not an object of strings")
    for text in (*value, *value.values()):
        if surrogate := _SURROGATE.search(text):
            raise FormatError(f"__metadata__ has half a character ({surrogate[0]!r}), which other readers refuse")
    return value


def _check_coverage(entries: list[TensorEntry], data_start: int, file_bytes: int) -> None:
    """Entries sorted by start must tile data_start..file_bytes exactly."""
    position, previous = data_start, ""
    for entry in entries:
        if entry.start > position:
            raise FormatError(
                f"bytes {position - data_start:,}..{entry.start - data_start:,} of the data belong to no tensor "
                f"(a hole before {entry.name!r})"
            )
        if entry.start < position:
            raise FormatError(
                f"tensors {previous!r} and {entry.name!r} overlap: the first ends at byte {position - data_start:,} "
                f"of the data, the second starts at {entry.start - data_start:,}"
            )
        position, previous = entry.end, entry.name
    if file_bytes < position:
        raise FormatError(
            f"{position - file_bytes:,} bytes short: the file has {file_bytes:,} bytes, its header needs {position:,}",
            hint=_DOWNLOAD_AGAIN,
        )
    if file_bytes > position:
        raise FormatError(
            f"{file_bytes - position:,} bytes too long: the file has {file_bytes:,} bytes, "
            f"its header accounts for {position:,}",
            hint="something was appended, or this header belongs to another file: download this shard again",
        )


def parse_header(raw: bytes, *, file_bytes: int, name: str) -> ShardHeader:
    """Check a shard's header against itself and against the file's size.

    Args:
        raw: the file's first 8 + N bytes; more is ignored. For a file that is not safetensors, whatever was read.
        file_bytes: the file's whole size.
        name: file name, for the result and the errors.

    Raises:
        FormatError: any disagreement; the message names the shard, the tensor and the numbers.
    """
    length = header_bytes(raw, file_bytes=file_bytes, name=name)
    if len(raw) < length:
        raise FormatError(f"{name}: {len(raw):,} bytes were read of a header that ends at byte {length:,}")
    try:
        return _parse(raw[8:length], length, file_bytes, name)
    except FormatError as error:
        raise FormatError(f"{name}: {error.what}", where=error.where, hint=error.hint) from None


def _parse(text: bytes, data_start: int, file_bytes: int, name: str) -> ShardHeader:
    header, repeated = parse_object(text, where="its header")
    if repeated:
        raise FormatError(
            f"the header has the same name twice: {', '.join(repr(key) for key in repeated[:5])}"
            + (f" and {len(repeated) - 5} more" if len(repeated) > 5 else ""),
            hint="readers keep the last and lose the other without a word: write or download this shard again",
        )
    metadata = _metadata(header.pop(_METADATA)) if _METADATA in header else {}
    entries = [_entry(tensor, info, data_start) for tensor, info in header.items()]
    entries.sort(key=lambda entry: (entry.start, entry.end))
    _check_coverage(entries, data_start, file_bytes)
    return ShardHeader(name, tuple(entries), metadata, data_start, file_bytes)


def fetch_header(read_range: Callable[[int, int], bytes], *, file_bytes: int, name: str) -> ShardHeader:
    """A shard's header through anything that can read a byte range, in at most two reads.

    Args:
        read_range: (start, end) to the bytes there.
        file_bytes: the file's whole size; nothing past it, and no length above it, is asked for.
        name: file name, for the result and the errors.

    Raises:
        FormatError: as `parse_header`.
    """
    head = read_range(0, min(file_bytes, FIRST_READ_BYTES)) if file_bytes else b""
    length = header_bytes(head, file_bytes=file_bytes, name=name)
    if length > len(head):
        head += read_range(len(head), length)
    return parse_header(head, file_bytes=file_bytes, name=name)


def read_header(path: Path) -> ShardHeader:
    """The checked header of a local file.

    Raises:
        FormatError: as `parse_header`.
        CheckpointError: the file cannot be opened or read.
    """
    try:
        # Unbuffered, so that a small header costs one read of what it needs.
        with path.open("rb", buffering=0) as file:
            file_bytes = file.seek(0, 2)

            def read_range(start: int, end: int) -> bytes:
                file.seek(start)
                return file.read(end - start)

            return fetch_header(read_range, file_bytes=file_bytes, name=path.name)
    except FormatError as error:
        raise FormatError(error.what, where=error.where or str(path), hint=error.hint) from None
    except OSError as error:
        raise CheckpointError(f"{path.name}: cannot be read: {error.strerror}", where=str(path)) from error


def file_order(tensors: Sequence[tuple[str, str, tuple[int, ...]]]) -> list[tuple[str, str, tuple[int, ...]]]:
    """The order in which every tensor starts at a multiple of its element size with no padding between them.

    Args:
        tensors: (name, dtype, shape) in the caller's order, which is kept as far as alignment allows.
    """
    even = [tensor for tensor in tensors if nbytes(tensor[1], tensor[2]) % 8 == 0]
    rest = [tensor for tensor in tensors if nbytes(tensor[1], tensor[2]) % 8]
    return even + sorted(rest, key=lambda tensor: -DTYPES[tensor[1]].alignment)


def encode_header(tensors: Sequence[tuple[str, str, tuple[int, ...]]], metadata: Mapping[str, str]) -> bytes:
    """Length and header of a shard whose tensors follow each other without a gap. The same input gives the same bytes.

    Args:
        tensors: (name, dtype, shape) in file order; see `file_order`.
        metadata: written under ``__metadata__``, sorted; left out if empty. Loaders want ``{"format": "pt"}``.

    Raises:
        FormatError: a name that is reserved, empty, unprintable or repeated; a bad dtype or shape; too large a header.
    """
    header: dict[str, Any] = {}
    if metadata:
        header[_METADATA] = _metadata(dict(sorted(metadata.items())))
    position = 0
    for name, dtype, shape in tensors:
        check_tensor_name(name)
        if name in header:
            raise FormatError(f"tensor {name!r} is listed twice")
        end = position + nbytes(dtype, tuple(shape))
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, end]}
        position = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode("utf-8")
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER_BYTES:
        raise FormatError(
            f"a header of {len(text):,} bytes for {len(header):,} tensors; the format allows {MAX_HEADER_BYTES:,}",
            hint="split the tensors over more shards",
        )
    return len(text).to_bytes(8, "little") + text
