"""One shard, streamed: the header first, then tensor after tensor, and the file appears when it is whole and re-read.

The header's offsets follow from names, dtypes and shapes alone, so they are written before any tensor exists, and
memory holds one buffer (`hashed_stream`) where the usual save_file holds the shard. In return the tensors must come
in `ShardWriter.order`. The digest that a receipt and the Hub want is taken on the way, not by reading the file again.

What is promised about the file is in `atomic`: temporary name, fsync, rename. Here is added: exactly the bytes that
the header declares, the header read back from the file and compared, and the free space looked at before the work.
(Space is not reserved: fallocate gained nothing measurable, and where a file system lacks it, libc's stand-in writes
to every block.)
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from moepress.errors import ConvertError, FormatError
from moepress.formats.atomic import atomic_file, atomic_write_json, atomic_write_text, copy_file, write_error
from moepress.formats.dtypes import nbytes
from moepress.formats.hashed_stream import HashedStream
from moepress.formats.header import encode_header, file_order, parse_header
from moepress.formats.shard_index import list_some, write_index
from moepress.formats.tensor_bytes import ByteArray, bytes_of

__all__ = ["ShardWriter", "atomic_write_json", "atomic_write_text", "copy_file", "write_index"]


class ShardWriter:
    """Writes one safetensors file. Use as a context manager, from one thread; several writers may run side by side.

    Args:
        path: the file's final name; its folder must exist. A file of that name is replaced, in one step, at the end.
        tensors: (name, dtype, shape) of every tensor, in the order the caller would like to write them.
        metadata: goes under ``__metadata__``; loaders want ``{"format": "pt"}``.

    Attributes:
        order: names in the order in which they must be written; the caller's, as far as alignment allows.
        sha256: of the whole file, in hex; set when the block has ended.
        file_bytes: size of the whole file, known from the start.

    Raises:
        FormatError: names, dtypes or shapes that no header can hold; at the end of the block, tensors that are missing.
        ConvertError: the disk is full or the operating system refuses; nothing is left behind.
    """

    def __init__(
        self, path: Path, tensors: Sequence[tuple[str, str, tuple[int, ...]]], metadata: Mapping[str, str]
    ) -> None:
        self.path = path
        self._tensors = file_order([(name, dtype, tuple(shape)) for name, dtype, shape in tensors])
        self._header = encode_header(self._tensors, metadata)
        self._sizes = [nbytes(dtype, shape) for _, dtype, shape in self._tensors]
        self.order = tuple(name for name, _, _ in self._tensors)
        self.file_bytes = len(self._header) + sum(self._sizes)
        self.sha256 = ""
        self._next = 0  # position in order of the tensor being written
        self._part = 0  # bytes of it that came so far
        self._failed = False

    def __enter__(self) -> ShardWriter:
        self._check_space()
        with ExitStack() as opened:
            self._descriptor = opened.enter_context(atomic_file(self.path))
            self._stream = HashedStream(self._descriptor)
            opened.callback(self._stream.close)
            self._send(np.frombuffer(self._header, dtype=np.uint8))
            opened.push(self._finish)
            # Open until __exit__ unwinds it: finish, stop the threads, then flush and rename, or remove.
            self._opened = opened.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._opened.__exit__(kind, error, trace)

    def write(self, name: str, data: Any) -> None:
        """Write a whole tensor; its content is taken over before this returns.

        Args:
            name: the next of `order` (tensors of no bytes may be passed over).
            data: a torch tensor of the declared dtype and shape; a numpy array of them, or of uint8 for raw bytes; or
                bytes, or any contiguous buffer.

        Raises:
            FormatError: not this tensor's turn, or not its dtype, shape or number of bytes.
            ConvertError: the disk is full or the operating system refuses.
        """
        self._turn(name)
        if self._part:
            raise FormatError(f"{self._where(name)}: was begun in parts, and is now written whole")
        self._take(name, data, whole=True)

    def write_chunk(self, name: str, data: Any) -> None:
        """Write the next part of a tensor: as `write`, but only the dtype of tensors and arrays is checked.

        Raises:
            FormatError: not this tensor's turn, another dtype, or more bytes than the tensor has.
            ConvertError: the disk is full or the operating system refuses.
        """
        self._turn(name)
        self._take(name, data, whole=False)

    def _where(self, name: str) -> str:
        return f"{self.path.name}: tensor {name!r}"

    def _turn(self, name: str) -> None:
        while self._next < len(self.order) and self.order[self._next] != name and not self._sizes[self._next]:
            self._next += 1
        if self._next == len(self.order) or self.order[self._next] != name:
            due = repr(self.order[self._next]) if self._next < len(self.order) else "nothing more"
            known = "is written out of order" if name in self.order else "is not one of this shard's"
            raise FormatError(f"{self._where(name)} {known}; due is {due}", hint="write in ShardWriter.order")

    def _take(self, name: str, data: Any, *, whole: bool) -> None:
        _, dtype, shape = self._tensors[self._next]
        try:
            raw = bytes_of(data, dtype=dtype, shape=shape if whole else None)
        except FormatError as error:
            raise FormatError(f"{self._where(name)}: {error.what}", hint=error.hint) from None
        size = self._sizes[self._next]
        if self._part + raw.size > size or (whole and raw.size != size):
            came = f"{raw.size:,} bytes came" + (f" after {self._part:,}" if self._part else "")
            raise FormatError(f"{self._where(name)}: {came}, {dtype} {list(shape)} has {size:,}")
        self._send(raw)
        self._part += raw.size
        if self._part == size:
            self._next, self._part = self._next + 1, 0

    def _send(self, raw: ByteArray) -> None:
        try:
            self._stream.write(raw)
        except OSError as error:
            self._failed = True
            raise write_error(self.path, error) from error

    def _finish(
        self, _kind: type[BaseException] | None, error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        if error is not None:
            return
        if self._failed:
            raise ConvertError(f"{self.path.name}: an earlier write failed", where=str(self.path))
        while self._next < len(self.order) and not self._sizes[self._next]:
            self._next += 1
        if left := self.order[self._next :]:
            begun = f"; of the first {self._part:,} bytes came" if self._part else ""
            raise FormatError(f"{self.path.name}: {len(left)} tensors were not written: {list_some(left)}{begun}")
        try:
            digest = self._stream.finish()
            self._read_back()
        except OSError as failure:
            raise write_error(self.path, failure) from failure
        self.sha256 = digest

    def _read_back(self) -> None:
        """The header as the file has it, not as it was meant: whoever opens the shard later sees this."""
        raw = os.pread(self._descriptor, len(self._header), 0)
        header = parse_header(raw, file_bytes=os.fstat(self._descriptor).st_size, name=self.path.name)
        if raw != self._header or header.file_bytes != self.file_bytes:
            raise FormatError(f"{self.path.name}: its header reads back differently than it was written")

    def _check_space(self) -> None:
        try:
            space = os.statvfs(self.path.parent)
        except OSError as error:
            raise write_error(self.path, error) from error
        left = space.f_bavail * space.f_frsize
        if left < self.file_bytes:
            raise ConvertError(
                f"{self.path.name}: needs {self.file_bytes:,} bytes, {left:,} are left in {self.path.parent}",
                where=str(self.path),
                hint="free some space and run the same command again: finished files are kept",
            )
