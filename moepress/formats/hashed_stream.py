"""Bytes to a file and through SHA-256 at the speed of the slower of the two, and in one buffer of memory.

    large data:  the caller's memory --+--> a thread: sha256.update        (hashlib lets go of the GIL)
                                       +--> this thread: write             --every FLUSH_BYTES--> a thread: fdatasync
    small data:  gathered in one buffer of BUFFER_BYTES, which then goes the same way

Nothing large is copied: hash and write look at the same memory side by side, and the call returns when both are done
with it. Small writes (a 16-byte ``weight_shape`` beside a 7 MB ``weight_packed``) are gathered, so the kernel and the
hashing thread only see large ones. A ring of buffers with a writing thread of its own was tried instead: copying and
handing over took 1.4 times the CPU time.

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
GATHER_BELOW = 1 << 20
FLUSH_BYTES = 256 << 20


class HashedStream:
    """Sequential writer with a running SHA-256. Use from one thread; several streams may run side by side.

    Args:
        descriptor: a file open for writing, at its start. Not closed here.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._digest = hashlib.sha256()
        self._gathered = np.empty(BUFFER_BYTES, dtype=np.uint8)
        self._filled = 0
        self._unflushed = 0
        self._flush: Future[None] | None = None
        self._hashing = ThreadPoolExecutor(max_workers=1, thread_name_prefix="shard-sha256")
        self._flushing = ThreadPoolExecutor(max_workers=1, thread_name_prefix="shard-flush")

    def write(self, data: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
        """Take over ``data``: when this returns, nothing looks at it any more.

        Args:
            data: uint8 [n], contiguous.

        Raises:
            OSError: this or an earlier part could not be written.
        """
        if data.size >= GATHER_BELOW:
            self._write_gathered()
            self._hash_and_write(data.data)
            return
        if self._filled + data.size > BUFFER_BYTES:
            self._write_gathered()
        self._gathered[self._filled : self._filled + data.size] = data
        self._filled += data.size

    def finish(self) -> str:
        """Write what is still gathered; the hex SHA-256 of everything. The last fsync is the caller's.

        Raises:
            OSError: some part could not be written.
        """
        self._write_gathered()
        if self._flush:
            self._flush.result()
        return self._digest.hexdigest()

    def close(self) -> None:
        """Stop the threads."""
        for pool in (self._hashing, self._flushing):
            pool.shutdown(wait=True, cancel_futures=True)

    def _write_gathered(self) -> None:
        if self._filled:
            self._hash_and_write(self._gathered[: self._filled].data)
            self._filled = 0

    def _hash_and_write(self, data: memoryview) -> None:
        hashed = self._hashing.submit(self._digest.update, data)
        try:
            for at in range(0, data.nbytes, BUFFER_BYTES):
                self._write_out(data[at : at + BUFFER_BYTES])
        finally:
            hashed.result()

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
