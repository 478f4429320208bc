"""How a layer-streamed run uses the machine: what it computes on and in, and how much it holds at once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from moepress.calibration.memory import STORED_BYTES, dense_samples
from moepress.quantize.products import Precision


@dataclass(frozen=True)
class RunSettings:
    """How a forward pass uses the machine.

    Attributes:
        batch_size: samples whose tokens go through the experts together. Part of the result's last bits, so part of a run's
            fingerprint.
        device: where layers live and compute; activations stay in main memory or files.
        dtype: what layers compute in. Statistics are float32 whatever this says.
        products: what float32 layers multiply in (`quantize.products`).
        expert_bytes: decoded experts held at once, in bytes of `dtype`; one expert is always held.
        dense_at_once: batches of the dense part in work at once, on a processor; None = as many as threads. Changes no bit.
    """

    batch_size: int = 8
    device: str = "cpu"
    dtype: torch.dtype = torch.float32
    products: Precision = "float32"
    expert_bytes: int = 4 << 30
    dense_at_once: int | None = None

    @property
    def ahead_bytes(self) -> int:
        """Most bytes that may be read ahead: a block of experts as it is stored, in BF16 at the most."""
        return self.expert_bytes // self.dtype.itemsize * STORED_BYTES

    def batches(self, samples: int) -> Iterator[tuple[int, int]]:
        """(start, stop) of the batches that every pass over `samples` samples uses."""
        return _cut(samples, self.batch_size)

    def dense_batches(self, samples: int, length: int) -> list[tuple[int, int]]:
        """(start, stop) of the batches that go through the dense part of a layer: no larger than a thread needs them."""
        return list(_cut(samples, dense_samples(self.batch_size, length)))

    def on_device(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows of activations, on the run's device and in its type."""
        return rows.to(self.device, self.dtype)


def _cut(samples: int, size: int) -> Iterator[tuple[int, int]]:
    for start in range(0, samples, size):
        yield start, min(start + size, samples)
