"""Activations of all calibration samples: in memory up to a byte budget, in files beyond it.

    512 samples × 2048 tokens × hidden 7168 × float32 = 30 GB, and error-aware targets need two of them.

One `Scratch` owns the budget and the folder. An `Activations` is a plain array [rows, …] that is read and written in
ranges of rows (samples or tokens). In a file, rows follow each other as in memory, native byte order, no header; ranges
are moved with pread and pwrite, not mapped, so that resident memory is what is being worked on and nothing else.

The files are scratch: never synced, deleted on release and on close, and worth nothing after a crash.
"""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

import torch

from moepress.errors import ConvertError


class Activations:
    """An array of rows, in memory or in a file. Made by `Scratch.allocate`.

    Attributes:
        shape: [rows, …].
        dtype: element type.
        path: the file, or None when it is in memory.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        path: Path | None,
        scratch: Scratch | None,
        memory: torch.Tensor | None = None,
    ) -> None:
        self.shape = shape
        self.dtype = dtype
        self.path = path
        self._scratch = scratch
        if memory is None and path is None:
            memory = torch.zeros(shape, dtype=dtype)
        self._memory = memory
        self._descriptor = -1
        if path is not None:
            self._descriptor = os.open(path, os.O_RDWR)
            os.ftruncate(self._descriptor, self.nbytes)

    @classmethod
    def elsewhere(cls, rows: torch.Tensor) -> Activations:
        """Rows [n, …] that live in somebody else's memory and budget, or on a device."""
        return cls(tuple(rows.shape), rows.dtype, None, None, rows)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def __len__(self) -> int:
        return self.shape[0]

    def read(self, start: int, stop: int) -> torch.Tensor:
        """Rows start..stop−1, [stop − start, …], on the CPU unless they live elsewhere. Only to be read: in memory it is a view."""
        self._check(start, stop)
        if self._memory is not None:
            return self._memory[start:stop]
        rows = torch.empty(stop - start, *self.shape[1:], dtype=self.dtype)
        self._transfer(os.preadv, rows, start)
        return rows

    def write(self, start: int, rows: torch.Tensor) -> None:
        """Replace rows from `start` on by `rows` [n, …], cast to the array's type, from any device."""
        self._check(start, start + len(rows))
        if self._memory is not None:
            self._memory[start : start + len(rows)] = rows.to(device=self._memory.device, dtype=self.dtype)
            return
        self._transfer(os.pwritev, rows.to(device="cpu", dtype=self.dtype).contiguous(), start)

    def copied(self, scratch: Scratch) -> Activations:
        """The same rows in an array of their own."""
        other = scratch.allocate(self.shape, self.dtype)
        for row in range(len(self)):
            other.write(row, self.read(row, row + 1))
        return other

    def release(self) -> None:
        """Give the memory back, or delete the file. May be called twice."""
        if self._scratch is not None:
            self._scratch.forget(self)
        self._memory = None
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
        if self.path is not None:
            self.path.unlink(missing_ok=True)

    def _transfer(self, move: Callable[[int, list[memoryview], int], int], rows: torch.Tensor, start: int) -> None:
        flat = rows.reshape(-1).view(torch.uint8).numpy().data
        position = start * (self.nbytes // max(len(self), 1))
        done = 0
        while done < len(flat):
            try:
                moved = move(self._descriptor, [flat[done:]], position + done)
            except OSError as error:
                raise ConvertError(f"activations: {error.strerror or error}", where=str(self.path)) from error
            if moved <= 0:
                raise ConvertError(f"activations: the file ended {len(flat) - done} bytes early", where=str(self.path))
            done += moved

    def _check(self, start: int, stop: int) -> None:
        if self._memory is None and self._descriptor < 0:
            raise RuntimeError("these activations were released")
        if not 0 <= start <= stop <= len(self):
            raise IndexError(f"rows {start}..{stop} of {len(self)}")


class Scratch:
    """A budget of memory, and a folder for what does not fit. A context manager: closing deletes everything.

    Args:
        folder: where files go; made on first use. Local disk, not a network file system.
        memory_bytes: how much all arrays together may keep in memory.
    """

    def __init__(self, folder: Path, *, memory_bytes: int) -> None:
        self.folder = folder
        self.memory_bytes = memory_bytes
        self._held: dict[int, Activations] = {}

    @property
    def in_memory(self) -> int:
        """Bytes held in memory now."""
        return sum(array.nbytes for array in self._held.values() if array.path is None)

    @property
    def in_files(self) -> int:
        """Bytes held in files now."""
        return sum(array.nbytes for array in self._held.values() if array.path is not None)

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> Activations:
        """A new array, zero everywhere.

        Args:
            shape: [rows, …].
            dtype: element type.

        Raises:
            ConvertError: the folder cannot be written, or has too little room.
        """
        nbytes = math.prod(shape) * dtype.itemsize
        path = None if self.in_memory + nbytes <= self.memory_bytes else self._file(nbytes)
        array = Activations(shape, dtype, path, self)
        self._held[id(array)] = array
        return array

    def forget(self, array: Activations) -> None:
        """Called by `Activations.release`."""
        self._held.pop(id(array), None)

    def close(self) -> None:
        """Release every array."""
        for array in list(self._held.values()):
            array.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _file(self, nbytes: int) -> Path:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            filesystem = os.statvfs(self.folder)
            free = filesystem.f_bavail * filesystem.f_frsize
            if nbytes > free:
                raise ConvertError(
                    f"activations need {nbytes:,} bytes of scratch, {free:,} are free",
                    where=str(self.folder),
                    hint="use fewer or shorter calibration samples, more memory, or a larger scratch folder",
                )
            descriptor, name = tempfile.mkstemp(prefix="activations-", suffix=".bin", dir=self.folder)
        except OSError as error:
            raise ConvertError(f"no scratch file: {error.strerror or error}", where=str(self.folder)) from error
        os.close(descriptor)
        return Path(name)
