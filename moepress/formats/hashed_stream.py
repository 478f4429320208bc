"""Bytes to a file and through SHA-256 at the speed of the slower of the two, in a few buffers of memory.

    caller --copy--> ring of buffers --+--> a thread: sha256.update     (hashlib lets go of the GIL)
                                       +--> a thread: write             --every FLUSH_BYTES--> a thread: fdatasync

Small writes (a 16-byte ``weight_shape`` beside a 7 MB ``weight_packed``) are gathered, so the kernel sees only large
ones. A buffer is reused when both threads are done with it, which is also what holds the caller back when the disk is
slow: memory stays at BUFFERS · BUFFER_BYTES whatever the file's size.

Dirty pages are flushed as they come, beside the writing, instead of all at the end: else a shard's last fsync is a
stall with the disk busy and everything else waiting, and gigabytes of unwritten pages push out of memory what the
next layer wants to read.
"""

from __future__ import annotations

import hashlib
import os
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

BUFFER_BYTES = 8 << 20
BUFFERS = 4
FLUSH_BYTES = 256 << 20


class HashedStream:
    """Sequential writer with a running SHA-256. Use from one thread; several streams may run side by side.

    Args:
        descriptor: a file open for writing, at its start. Not closed here.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._digest = hashlib.sha256()
        self._ring = [np.empty(BUFFER_BYTES, dtype=np.uint8) for _ in range(BUFFERS)]
        self._pending: list[list[Future[None]]] = [[] for _ in range(BUFFERS)]
        self._current = 0
        self._filled = 0
        self._unflushed = 0
        self._flush: Future[None] | None = None
        self._hashing = ThreadPoolExecutor(max_workers=1, thread_name_prefix="shard-sha256")
        self._writing = ThreadPoolExecutor(max_workers=1, thread_name_prefix="shard-write")
        self._flushing = ThreadPoolExecutor(max_workers=1, thread_name_prefix="shard-flush")
        self.file_bytes = 0

    def write(self, data: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
        """Take over ``data``: when this returns, its content was copied and the caller may change it.

        Args:
            data: uint8 [n], contiguous.

        Raises:
            OSError: this or an earlier part could not be written.
        """
        done = 0
        while done < data.size:
            count = min(BUFFER_BYTES - self._filled, data.size - done)
            self._ring[self._current][self._filled : self._filled + count] = data[done : done + count]
            self._filled += count
            done += count
            if self._filled == BUFFER_BYTES:
                self._hand_over()
        self.file_bytes += data.size

    def finish(self) -> str:
        """Wait until everything is written; the hex SHA-256 of it. The last fsync is the caller's.

        Raises:
            OSError: some part could not be written.
        """
        self._hand_over()
        for slot in range(BUFFERS):
            self._wait(slot)
        if self._flush:
            self._flush.result()
        return self._digest.hexdigest()

    def close(self) -> None:
        """Stop the threads; after an error, without writing what is still waiting."""
        for pool in (self._writing, self._hashing, self._flushing):
            pool.shutdown(wait=True, cancel_futures=True)

    def _hand_over(self) -> None:
        full = self._ring[self._current][: self._filled]
        if self._filled:
            self._pending[self._current] = [
                self._hashing.submit(self._digest.update, full.data),
                self._writing.submit(self._write_out, full.data),
            ]
        self._current = (self._current + 1) % BUFFERS
        self._filled = 0
        self._wait(self._current)

    def _wait(self, slot: int) -> None:
        for future in self._pending[slot]:
            future.result()
        self._pending[slot] = []

    def _write_out(self, data: memoryview) -> None:
        while data:
            written = os.write(self._descriptor, data)
            self._unflushed += written
            data = data[written:]
        if self._unflushed >= FLUSH_BYTES and (self._flush is None or self._flush.done()):
            if self._flush:
                self._flush.result()  # the kernel reports a failed write-back once, to whoever asks
            self._flush = self._flushing.submit(os.fdatasync, self._descriptor)
            self._unflushed = 0
