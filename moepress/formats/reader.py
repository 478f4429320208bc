"""Tensor bytes off the disk: parallel preads into memory the caller already has.

    read_into(ref, out):  [start, end) is cut into PIECE_BYTES  -->  `threads` preadv calls  -->  the pieces of out

A map of the file looks free and is not: every 4 KiB page is a fault taken by the thread that computes, read-ahead
guesses, and a file that shrinks is a SIGBUS instead of an error. preadv lets go of the GIL, asks for megabytes, keeps
several requests in front of the disk, and copies into reused buffers. The price is one copy out of the page cache,
which a mapped file pays as soon as the tensor must be owned.

Descriptors: one per shard, opened at its first tensor. Positions are arguments of pread, so any number of threads may
read any tensors at once.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np

from moepress.errors import CheckpointError, FormatError
from moepress.formats.checkpoint import Checkpoint, TensorRef
from moepress.formats.sources import why_unusable
from moepress.formats.tensor_bytes import ByteArray, byte_view, torch_dtype, torch_shape

if TYPE_CHECKING:
    import torch

PIECE_BYTES = 4 << 20
CHUNK_BYTES = 16 << 20

ADVISED_BYTES = 128 << 10
"""Linux's usual read-ahead window: of a longer request for pages, older and newer kernels read just this much."""


class TensorReader:
    """Reads tensors of a local checkpoint. Thread-safe; use as a context manager.

    Args:
        checkpoint: its headers say where the bytes are.
        threads: preads in flight at once for one large tensor.

    Raises:
        CheckpointError: from any method: a shard is gone, unreadable, or changed since its header was read.
    """

    def __init__(self, checkpoint: Checkpoint, *, threads: int = 4) -> None:
        self._checkpoint = checkpoint
        self._descriptors: dict[str, int] = {}
        self._lock = threading.Lock()
        self._closed = False
        self._pool = ThreadPoolExecutor(max_workers=threads, thread_name_prefix="tensor-read")

    def __enter__(self) -> TensorReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the files. No other thread may still be reading."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        with self._lock:
            self._closed = True
            for descriptor in self._descriptors.values():
                os.close(descriptor)
            self._descriptors.clear()

    def read_into(self, ref: TensorRef, out: memoryview | ByteArray, *, offset: int = 0) -> None:
        """Fill ``out`` with a tensor's bytes.

        Args:
            ref: the tensor.
            out: writable, contiguous; decides how many bytes are read.
            offset: first byte, counted from the tensor's start.

        Raises:
            FormatError: more bytes are asked for than the tensor has.
        """
        if not out.nbytes:
            return
        view = (out if isinstance(out, memoryview) else out.data).cast("B")
        if view.nbytes <= PIECE_BYTES:
            self._pread(*self._locate(ref, view.nbytes, offset), view, ref)
        else:
            _finish(self._start(ref, view, offset))

    def bytes(self, ref: TensorRef) -> ByteArray:
        """A tensor's bytes: uint8 [nbytes], owned by the caller."""
        out = np.empty(ref.nbytes, dtype=np.uint8)
        self.read_into(ref, out)
        return out

    def tensor(self, ref: TensorRef, *, pinned: bool = False) -> torch.Tensor:
        """A tensor as stored: its dtype and shape (F4: half the columns, two values each), owned by the caller.

        Args:
            pinned: in memory that a GPU can copy from by itself, which torch keeps and gives out again.

        Raises:
            FormatError: torch has no such dtype.
        """
        return self._read_tensor(ref, torch_shape(ref.dtype, ref.shape), 0, pinned)

    def rows(self, ref: TensorRef, r0: int, r1: int, *, pinned: bool = False) -> torch.Tensor:
        """Rows ``r0`` up to ``r1`` of the first dimension, reading only their bytes.

        Args:
            ref: a tensor of at least one dimension. Rows of a matrix [R, C]; whole experts of a fused [E, R, C].
            r0, r1: 0 <= r0 <= r1 <= shape[0].
            pinned: as in `tensor`.

        Returns:
            As `tensor`, with r1 - r0 rows; owned by the caller.

        Raises:
            FormatError: rows that the tensor does not have; torch has no such dtype.
        """
        shape = torch_shape(ref.dtype, ref.shape)
        if not shape or not 0 <= r0 <= r1 <= shape[0]:
            raise FormatError(f"{ref.name}: rows {r0}..{r1} of a tensor of shape {list(ref.shape)}", where=ref.shard)
        row_bytes = ref.nbytes // shape[0] if shape[0] else 0
        return self._read_tensor(ref, (r1 - r0, *shape[1:]), r0 * row_bytes, pinned)

    def is_here(self, ref: TensorRef) -> bool:
        """Reading a tensor waits for nothing but the disk: its file is not still arriving."""
        return self._checkpoint.is_here(ref.shard)

    def read_ahead(self, ref: TensorRef, rows: slice | None = None) -> None:
        """Asks the kernel to read a tensor, or some of its rows, into its page cache. Does not wait for the bytes.

        Only in a file that is open already: opening one may mean to wait until it has arrived. In pieces, since a kernel reads
        no more for one request than its read-ahead window, and forgets the rest.
        """
        with self._lock:
            descriptor = self._descriptors.get(ref.shard)
        if descriptor is None or not hasattr(os, "posix_fadvise"):
            return
        per_row = ref.nbytes // ref.shape[0] if ref.shape and ref.shape[0] else ref.nbytes
        first, last, _ = (rows or slice(None)).indices(ref.shape[0] if ref.shape else 1)
        if last > first:
            start, length = ref.start + first * per_row, (last - first) * per_row
            for at in range(start, start + length, ADVISED_BYTES):
                piece = min(ADVISED_BYTES, start + length - at)
                os.posix_fadvise(descriptor, at, piece, os.POSIX_FADV_WILLNEED)

    def chunks(self, ref: TensorRef, chunk_bytes: int = CHUNK_BYTES) -> Iterator[ByteArray]:
        """A tensor's bytes in order, in two reused buffers: the next chunk is read while this one is used.

        Args:
            ref: the tensor.
            chunk_bytes: size of each chunk but the last. Memory is twice this.

        Yields:
            uint8 arrays, valid until the next is asked for.
        """
        if not ref.nbytes:
            return
        buffers = [np.empty(min(chunk_bytes, ref.nbytes), dtype=np.uint8) for _ in range(2)]
        reading = self._start(ref, buffers[0].data, 0)
        try:
            for start in range(0, ref.nbytes, chunk_bytes):
                _finish(reading)
                ready = buffers[0][: ref.nbytes - start]
                buffers.reverse()
                if left := ref.nbytes - start - ready.nbytes:
                    reading = self._start(ref, buffers[0][:left].data, start + ready.nbytes)
                yield ready
        finally:
            wait(reading)

    def _read_tensor(self, ref: TensorRef, shape: tuple[int, ...], offset: int, pinned: bool) -> torch.Tensor:
        import torch  # not before somebody wants a tensor: bytes alone need none of its seconds

        try:
            tensor = torch.empty(shape, dtype=torch_dtype(ref.dtype), pin_memory=pinned)
        except FormatError as error:
            raise FormatError(f"{ref.name}: {error.what}", where=ref.shard) from None
        self.read_into(ref, byte_view(tensor), offset=offset)
        return tensor

    def _locate(self, ref: TensorRef, length: int, offset: int) -> tuple[int, int]:
        """(descriptor, position in the file) of a part of a tensor."""
        if offset < 0 or offset + length > ref.nbytes:
            raise FormatError(
                f"{ref.name}: bytes {offset:,}..{offset + length:,} of a tensor of {ref.nbytes:,}", where=ref.shard
            )
        return self._descriptor(ref.shard), ref.start + offset

    def _start(self, ref: TensorRef, view: memoryview, offset: int) -> list[Future[None]]:
        """Begin to fill ``view``, which must stay alive until the futures are done."""
        descriptor, position = self._locate(ref, view.nbytes, offset)
        return [
            self._pool.submit(self._pread, descriptor, position + at, view[at : at + PIECE_BYTES], ref)
            for at in range(0, view.nbytes, PIECE_BYTES)
        ]

    def _pread(self, descriptor: int, position: int, view: memoryview, ref: TensorRef) -> None:
        while view:
            try:
                count = os.preadv(descriptor, [view], position)
            except OSError as error:
                raise CheckpointError(
                    f"{ref.shard}: cannot be read at byte {position:,}: {error.strerror}", where=ref.name
                ) from error
            if not count:
                raise self._changed(ref.shard, f"ends at byte {position:,}, inside {ref.name}")
            view = view[count:]
            position += count

    def _changed(self, shard: str, how: str) -> CheckpointError:
        path = self._checkpoint.path(shard)
        return CheckpointError(
            f"{shard}: changed since its header was read: {how}",
            where=str(path),
            hint="something is writing to this folder; wait for it, then start again",
        )

    def _descriptor(self, shard: str) -> int:
        with self._lock:
            known = self._descriptors.get(shard)
        if known is not None:
            return known
        path = self._checkpoint.path(
            shard
        )  # waits for a shard that is still arriving: without the lock, for nobody else
        with self._lock:
            if self._closed:
                raise CheckpointError(f"{shard}: the reader is closed", where=self._checkpoint.location)
            known = self._descriptors.get(shard)
            if known is None:
                known = self._descriptors[shard] = self._open(shard, path)
            return known

    def _open(self, shard: str, path: Path) -> int:
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise CheckpointError(f"{shard}: {why_unusable(path)}", where=str(path)) from error
        size, expected = os.fstat(descriptor).st_size, self._checkpoint.shards[shard].file_bytes
        if size != expected:
            os.close(descriptor)
            raise self._changed(shard, f"{size:,} bytes instead of {expected:,}")
        return descriptor


def _finish(reading: list[Future[Any]]) -> None:
    """All of them, before the first error: until then they write into the caller's memory."""
    wait(reading)
    for future in reading:
        future.result()
