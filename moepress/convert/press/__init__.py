"""One piece of one weight, from source bytes to output bytes: kept, widened to BF16, or quantized.

    kept                          bytes as they are, looked at on the way                                   (here)
    FP8 or BF16 → INT4, FP8 → BF16     one compiled pass, numpy and no torch                  (`press.fused`)
    anything else                 decode, quantize, pack, one after the other, in tensors     (`press.chain`)
    quantized, on a GPU           the same in tensors there, for who asked for it             (`press.on_device`)

The last three give the same bytes where they can. A conversion of an FP8 checkpoint that is rounded to nearest never
imports torch, whose start takes longer than pressing a gigabyte.
"""

from __future__ import annotations

import numpy as np
import xxhash

from moepress.convert.decide import FP8_KINDS
from moepress.convert.press.fused import fused_bf16, fused_int4
from moepress.convert.press.kernel import count_fp8_nans
from moepress.convert.press.pieces import NAN_HINT, Piece, Pressed, Scratch, as_bytes
from moepress.errors import FormatError
from moepress.formats.fp8_scale import decode_e8m0_bytes
from moepress.formats.reader import TensorReader
from moepress.recipe import Recipe


def press(piece: Piece, reader: TensorReader, recipe: Recipe, scratch: Scratch, device: str = "cpu") -> Pressed:
    """Presses one piece. Safe to call from several threads, each with its own scratch.

    Args:
        device: where weights are quantized; what is kept or widened stays in main memory.

    Raises:
        FormatError: FP8 codes or scales that cannot be right, named.
        QuantizeError: NaN or infinity in a weight that is to be quantized, named.
    """
    if piece.decision.action == "keep":
        return _keep(piece, reader)
    widen = piece.decision.action == "bf16"
    if not widen and device != "cpu":
        from moepress.convert.press import on_device

        return on_device.quantize(piece, reader, recipe, device)
    pressed = fused_bf16(piece, reader, scratch) if widen else fused_int4(piece, reader, recipe, scratch)
    if pressed is not None:
        return pressed
    from moepress.convert.press import chain

    if widen:
        return chain.to_bf16(piece, reader, scratch)
    return chain.quantize(piece, reader, recipe, scratch)


def _keep(piece: Piece, reader: TensorReader) -> Pressed:
    """Bytes as they are. Two things are looked at on the way: NaN codes in FP8, and E8M0 scales, which become float32."""
    stored = piece.decision.stored
    ref = stored.parts[piece.part]
    data = np.empty(piece.last - piece.first, np.uint8)
    reader.read_into(ref, data, offset=piece.first)
    digest = xxhash.xxh3_128_hexdigest(data.data)
    is_fp8 = stored.kind in FP8_KINDS and piece.part == "weight"
    if is_fp8 and (bad := count_fp8_nans(data.view(np.int8))):
        raise FormatError(f"{bad} FP8 codes are NaN (0x7F or 0xFF)", where=stored.name, hint=NAN_HINT)
    if stored.scale_encoding == "e8m0" and piece.part == "scale":
        data = as_bytes(decode_e8m0_bytes(data, name=ref.name))
    if piece.decision.fold is not None and piece.part == ("scale" if stored.kind in FP8_KINDS else "weight"):
        from moepress.convert.press.chain import folded

        data = folded(piece, data)
    return Pressed((data,), digest, None)
