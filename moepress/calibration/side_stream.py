"""Copies to and from a CUDA device beside what is computed there; on any other device there is nothing to do beside.

    pinned memory ──(side stream)──► device        begun by the thread that reads, waited for by the stream that computes
    device ──(side stream)──► pinned memory        begun when the computing stream is done with it, waited for by whoever writes

A copy on the computing stream would wait for every kernel that was started before it, and every kernel after it for the copy.
What crosses between the streams is told to torch's allocator (``record_stream``), so that no memory is given out again
while the other stream still uses it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

Wait = Callable[[], torch.Tensor]
"""Gives the tensor, once it may be used."""


class SideStream:
    """A stream of copies of one device.

    Args:
        device: a torch device; only ``cuda`` has streams.
    """

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)
        self.copies = self.device.type == "cuda"
        self._stream = torch.cuda.Stream(self.device) if self.copies else None  # type: ignore[no-untyped-call]

    def there(self, rows: torch.Tensor) -> Wait:
        """Begins to copy rows in pinned memory to the device. The wait does not hold up the thread, only its stream."""
        if self._stream is None:
            return lambda: rows
        with torch.cuda.stream(self._stream):
            moved = rows.to(self.device, non_blocking=True)
        arrived = self._stream.record_event()

        def wait() -> torch.Tensor:
            computing = torch.cuda.current_stream(self.device)
            computing.wait_event(arrived)
            moved.record_stream(computing)
            return moved

        return wait

    def here(self, tensor: torch.Tensor) -> Wait:
        """Begins to copy a tensor of the device to main memory. The wait holds up the thread until it is whole."""
        if self._stream is None:
            return tensor.cpu
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            moved = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
        tensor.record_stream(self._stream)
        arrived = self._stream.record_event()

        def wait() -> torch.Tensor:
            arrived.synchronize()
            return moved

        return wait
