"""One block ahead: what will be loaded next is read while something else is computed.

    expect([a, b, c])   returns at once; one thread reads a, b and c in this order, as they are stored
    rows(a)             has been read: at once · is being read: waits · was not begun: is read here, the thread goes on with b

On a CUDA device the thread reads into pinned memory and starts the copy as well (`side_stream`). What a weight is decoded
to is made by whoever takes it, so a block ahead costs a byte a weight for FP8, two for BF16.

Held: what was expected last and not taken yet, at most `limit_bytes`. What does not fit, or lies in a file that is still
arriving from the Hub, is announced to the kernel alone. Expecting something else forgets what nobody took. An error of the
thread is raised where its tensor is taken, and is the one that reading there would have given.

All calls come from one thread.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch

from moepress.calibration.side_stream import SideStream, Wait
from moepress.formats.checkpoint import TensorRef
from moepress.formats.reader import TensorReader


@dataclass(frozen=True)
class Part:
    """Rows ``first`` to ``last`` of a stored tensor; ``travels``: to the device, as it is stored."""

    ref: TensorRef
    first: int
    last: int
    travels: bool

    @property
    def nbytes(self) -> int:
        rows = self.ref.shape[0] if self.ref.shape else 1
        return self.ref.nbytes * (self.last - self.first) // max(rows, 1)


Key = tuple[str, str, int, int]


class ReadAhead:
    """A reader of the same tensors as `reader`, some of which are there already. Gives the same bytes and errors.

    Args:
        reader: reads what was not expected, too. Stays open until this is closed.
        limit_bytes: most bytes, as stored, that may wait to be taken; 0 = read nothing ahead.
        device: where parts that travel are wanted.
    """

    def __init__(self, reader: TensorReader, *, limit_bytes: int, device: str = "cpu") -> None:
        self._reader, self._limit = reader, limit_bytes
        self._copies = SideStream(device) if limit_bytes else None
        self._thread: ThreadPoolExecutor | None = None
        self._waiting: dict[Key, Future[Wait]] = {}

    def expect(self, parts: Iterable[Part]) -> None:
        """These will be asked for next, in about this order. Forgets what was expected before and nobody took."""
        self.forget()
        held = 0
        for part in parts:
            held += part.nbytes
            if held > self._limit or not self._reader.is_here(part.ref):
                self._reader.read_ahead(part.ref, slice(part.first, part.last))
                continue
            if self._thread is None:
                self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="read-ahead")
            key = _key(part.ref, part.first, part.last)
            self._waiting[key] = self._thread.submit(self._read, part)

    def tensor(self, ref: TensorRef, *, pinned: bool = False) -> torch.Tensor:
        """A tensor as stored, owned by the caller. On the device already, if it was expected to travel there."""
        taken = self._take(ref, 0, ref.shape[0] if ref.shape else 1)
        return self._reader.tensor(ref, pinned=pinned) if taken is None else taken

    def rows(self, ref: TensorRef, r0: int, r1: int, *, pinned: bool = False) -> torch.Tensor:
        """Rows of the first dimension, as `tensor`."""
        taken = self._take(ref, r0, r1)
        return self._reader.rows(ref, r0, r1, pinned=pinned) if taken is None else taken

    def forget(self) -> None:
        """Drops everything that nobody took; what is being read is dropped when it has been."""
        for future in self._waiting.values():
            future.cancel()
        self._waiting.clear()

    def close(self) -> None:
        """Ends the thread, after the read that it is in."""
        self.forget()
        if self._thread is not None:
            self._thread.shutdown(wait=True, cancel_futures=True)

    def _take(self, ref: TensorRef, first: int, last: int) -> torch.Tensor | None:
        future = self._waiting.pop(_key(ref, first, last), None)
        if future is None or future.cancel():
            return None
        return future.result()()

    def _read(self, part: Part) -> Wait:
        copies = self._copies if part.travels else None
        pinned = copies is not None and copies.copies
        if part.ref.shape:
            read = self._reader.rows(part.ref, part.first, part.last, pinned=pinned)
        else:
            read = self._reader.tensor(part.ref, pinned=pinned)
        return (lambda: read) if copies is None else copies.there(read)


def _key(ref: TensorRef, first: int, last: int) -> Key:
    return ref.shard, ref.name, first, last
