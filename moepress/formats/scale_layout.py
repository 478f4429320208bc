"""Which numbers of a weight share a scale: shapes only, no tensors.

    block  (b, d): scale [ceil(R/b), ceil(C/d)]     value[r, c] uses scale[r // b, c // d]; the last ones are cut off
    channel:       scale [R] or [R, 1]              = blocks of (1, C)
    tensor:        scale [], [1] or [1, 1]          = one block of (R, C)
    group of g:    scale [R, C/g]                   packed INT4; groups are whole

The size of a block or group always comes from the configuration, never from the two shapes. 576 rows under 5 scales
would "fit" blocks of ceil(576/5) = 116, and every row past the first 116 would get the wrong scale with nothing raised.
So the declared size gives the shape that the scale must have, and any other shape is an error: also one scale per row or
for the whole tensor, where the configuration speaks of blocks. A block scale that was cut to its first number has the
shape of a scale per tensor, and every block but the first would be decoded with another's.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Literal

from moepress.errors import FormatError

Fp8Layout = Literal["fp8_block", "fp8_channel", "fp8_tensor"]
FP8_LAYOUTS: tuple[Fp8Layout, ...] = ("fp8_block", "fp8_channel", "fp8_tensor")
Block = tuple[int, int]


def block_scale_shape(rows: int, columns: int, block: Block) -> tuple[int, int]:
    """Shape of the scale of a ``[rows, columns]`` weight in blocks, the last of which may be cut off."""
    return -(-rows // block[0]), -(-columns // block[1])


def fp8_layout(
    shape: tuple[int, ...], scale_shape: tuple[int, ...], blocks: Iterable[Block], layouts: Collection[Fp8Layout]
) -> tuple[Fp8Layout, Block | None] | None:
    """How an FP8 weight is scaled.

    Args:
        shape: ``[R, C]``, or ``[E, R, C]`` for fused experts (then the scale has E in front, too).
        scale_shape: of the scale beside it.
        blocks: every declared block size.
        layouts: those that the configuration allows (`SourceQuantization.fp8_layouts`).

    Returns:
        The layout and its block size, or None when the shapes fit no declared layout.
    """
    experts, (rows, columns) = shape[:-2], shape[-2:]
    for block in blocks if "fp8_block" in layouts else ():
        if scale_shape == (*experts, *block_scale_shape(rows, columns, block)):
            return "fp8_block", block
    if "fp8_channel" in layouts and scale_shape in ((*experts, rows), (*experts, rows, 1)):
        return "fp8_channel", None
    if "fp8_tensor" in layouts and scale_shape in (experts, (*experts, 1), (*experts, 1, 1)):
        return "fp8_tensor", None
    return None


def rows_and_columns_per_scale(shape: tuple[int, int], scale_shape: tuple[int, ...], block: Block | None) -> Block:
    """The block that `fp8_layout` amounts to, for a decoder that knows nothing but blocks.

    Args:
        shape: ``[R, C]`` of the whole weight.
        scale_shape: of its scale.
        block: the declared size; None for one scale per channel or per tensor.

    Raises:
        FormatError: the scale does not have the shape that this asks for.
    """
    rows, columns = shape
    found = fp8_layout(shape, scale_shape, () if block is None else (block,), FP8_LAYOUTS)
    if found is None or (block is not None and found[0] != "fp8_block"):
        needed = "one scale per channel or per tensor" if block is None else _needs(shape, block)
        raise FormatError(
            f"scale of shape {list(scale_shape)} beside a weight of shape {list(shape)}; expected {needed}"
        )
    if block is not None:
        return block
    return (1 if found[0] == "fp8_channel" else max(rows, 1), max(columns, 1))


def _needs(shape: tuple[int, int], block: Block) -> str:
    return f"{list(block_scale_shape(*shape, block))} for blocks of {block[0]}×{block[1]}"


def packed_words(columns: int) -> int:
    """int32 words in a packed row of ``columns`` 4-bit codes."""
    return -(-columns // 8)


def grouped_columns(words: int, groups: int, group_sizes: Iterable[int]) -> tuple[int, int] | None:
    """True width of a packed INT4 weight whose groups have a declared size.

    Args:
        words: int32 words per row.
        groups: scales per row.
        group_sizes: every declared group size; -1 (the whole row) is passed over, as it says nothing about the width.

    Returns:
        (columns, group size), or None when no declared size gives both numbers.
    """
    for group_size in group_sizes:
        if group_size > 0 and words == packed_words(groups * group_size):
            return groups * group_size, group_size
    return None
