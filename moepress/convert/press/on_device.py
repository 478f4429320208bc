"""A piece rounded on a CUDA device: what is stored travels there, and packed words come back.

    thread 1   read ─► copy ─► decode, scales, round, pack, error sums ─► copy back
    thread 2            read ─► copy ─► …                                            each on a stream of its own

So while one piece is computed another is on its way and a third is read; the pool's window bounds how many there are. A weight
costs a byte (two in BF16) on the way there and half a byte and its share of a scale on the way back; on the device some sixty
bytes of memory traffic, a tenth of what PCIe takes. Nothing is gained where the disk is slower than the processor, which is why
only ``--device cuda`` rounds there, not ``auto``.

Codes and scales are those of `fused` and `chain`, bit for bit; error sums differ in their last digits.
"""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager, nullcontext

import torch
import xxhash

from moepress.convert.press.pieces import Piece, Pressed, as_bytes
from moepress.errors import QuantizeError
from moepress.formats.checkpoint import TensorRef
from moepress.formats.int4 import pack_int4
from moepress.formats.load import load_weight
from moepress.formats.reader import TensorReader
from moepress.formats.tensor_bytes import byte_view
from moepress.quantize.grid import Grid
from moepress.quantize.rtn import rtn
from moepress.recipe import Recipe

_streams = threading.local()


def quantize(piece: Piece, reader: TensorReader, recipe: Recipe, device: str) -> Pressed:
    """Rows of an expert's matrix, rounded to nearest on a device. Safe to call from several threads.

    Raises:
        FormatError: FP8 codes or scales that cannot be right, or numbers that are not finite, named.
        QuantizeError: NaN or infinity, named, with its rows.
    """
    stored = piece.decision.stored
    grid = Grid(recipe.weights.num_bits, recipe.weights.group_size, recipe.weights.signed_scales)
    read = _Digested(reader)
    with _stream_of_this_thread(device):
        values = load_weight(read, stored, rows=slice(piece.first, piece.last), device=device)
        try:
            rounded = rtn(values, grid, scale=recipe.weights.scale)
        except QuantizeError as error:
            place = f"{stored.name}, rows {piece.first} to {piece.last}"
            raise QuantizeError(error.what, where=place, hint=error.hint) from error
        words, scales = pack_int4(rounded.codes).cpu(), rounded.scales.cpu()
    (fidelity,) = rounded.fidelity
    outputs = (as_bytes(words.numpy()), as_bytes(scales.view(torch.uint16).numpy()))
    return Pressed(outputs, read.digest.hexdigest(), fidelity, torch.device(device).type)


class _Digested:
    """A `load.TensorSource` that digests what it gives, in the order in which it is asked."""

    def __init__(self, reader: TensorReader) -> None:
        self._reader = reader
        self.digest = xxhash.xxh3_128()

    def tensor(self, ref: TensorRef, *, pinned: bool = False) -> torch.Tensor:
        return self._seen(self._reader.tensor(ref, pinned=pinned))

    def rows(self, ref: TensorRef, r0: int, r1: int, *, pinned: bool = False) -> torch.Tensor:
        return self._seen(self._reader.rows(ref, r0, r1, pinned=pinned))

    def _seen(self, tensor: torch.Tensor) -> torch.Tensor:
        self.digest.update(byte_view(tensor).data)
        return tensor


def _stream_of_this_thread(device: str) -> AbstractContextManager[object]:
    if torch.device(device).type != "cuda":
        return nullcontext()
    if not hasattr(_streams, "stream"):
        _streams.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return torch.cuda.stream(_streams.stream)
