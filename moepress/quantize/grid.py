"""The integer grid a weight is rounded to, and how its scales are made.

A weight of shape [R, C] is cut along its columns into groups of ``group_size``. Each group of each row has one scale
s, stored in BF16, and its weights become signed codes q of ``num_bits`` bits; the served value is q · s. There is no
zero point: servers take symmetric experts only.

    qmin = −2^(b−1), qmax = 2^(b−1) − 1                  b = 4: codes −8 … 7
    s    = bf16(max|w| / ((2^b − 1) / 2))                b = 4: max|w| / 7.5, the convention of compressed-tensors
    q    = clamp(w / s, qmin, qmax) rounded half to even, the division in float32

With ``signed_scales`` a group may have s < 0: the same grid mirrored, codes from 8 |s| down to −7 |s|.

Dividing by 7.5 spends the range evenly on both signs: a largest weight of +7.5 s is cut to 7 and one of −7.5 s rounds
to −8, half a step off either way.

A group whose scale would not be a normal BF16 number (all weights zero, or below about 9e-38) gets the scale 2^-7 and
codes 0: the value that compressed-tensors puts there, valid for every server, and no weight comes back as NaN.

Codes are kept as int8, one code a byte, until they are packed. All of it is checked against compressed-tensors' own
``calculate_qparams`` and ``quantize`` in the tests, code for code.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from moepress.errors import QuantizeError
from moepress.quantize.fidelity import Fidelity

if TYPE_CHECKING:
    import torch

Scale = Literal["max", "mse"]
"""How a group's scale is chosen: by its largest weight, or for the least squared error."""

GROUP_SIZES = (32, 64, 128, -1)
"""Group sizes that servers have kernels for; −1 is one group per row."""

SMALLEST_SCALE = 2.0**-126
"""The smallest normal BF16 (and float32) number."""

ZERO_GROUP_SCALE = 2.0**-7
"""The scale of a group without a usable one: the BF16 epsilon, as in compressed-tensors."""


@dataclass(frozen=True, slots=True)
class Grid:
    """A symmetric integer grid.

    Args:
        num_bits: bits per code, 3 to 8.
        group_size: columns that share one scale: 32, 64, 128, or −1 for a whole row.
        signed_scales: a scale may be negative, which puts a group's largest positive weight on the code −8.

    Raises:
        QuantizeError: for any other value.
    """

    num_bits: int = 4
    group_size: int = 32
    signed_scales: bool = False

    def __post_init__(self) -> None:
        if not 3 <= self.num_bits <= 8:
            raise QuantizeError(f"num_bits is {self.num_bits}, outside 3 to 8", where="grid.num_bits")
        if self.group_size not in GROUP_SIZES:
            raise QuantizeError(
                f"group_size is {self.group_size}, not one of {', '.join(map(str, GROUP_SIZES))}",
                where="grid.group_size",
            )

    @property
    def qmin(self) -> int:
        """The least code."""
        return -(1 << (self.num_bits - 1))

    @property
    def qmax(self) -> int:
        """The greatest code."""
        return (1 << (self.num_bits - 1)) - 1

    @property
    def half_range(self) -> float:
        """What a group's largest magnitude is divided by for its ``max`` scale: 7.5 for four bits."""
        return (self.qmax - self.qmin) / 2

    def width(self, columns: int) -> int:
        """Columns per group in a weight of ``columns`` columns.

        Raises:
            QuantizeError: the groups do not fill the columns, or there are none.
        """
        size = columns if self.group_size == -1 else self.group_size
        if size < 1 or columns % size:
            raise QuantizeError(
                f"{columns} columns cannot be cut into groups of {self.group_size}",
                where="grid.group_size",
                hint=f"group sizes that fit: {', '.join(str(g) for g in GROUP_SIZES if g == -1 or not columns % g)}",
            )
        return size

    def groups(self, columns: int) -> int:
        """Groups per row in a weight of ``columns`` columns."""
        return columns // self.width(columns)


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """Codes and scales of one weight, or of a stack of them. The tensors belong to whoever holds the value.

    Args:
        codes: int8 [..., R, C], each in ``grid.qmin`` … ``grid.qmax``.
        scales: bfloat16 [..., R, C / group width], each a normal number, positive unless ``grid.signed_scales``.
        grid: the grid they are on.
        fidelity: error sums against the source, one for each of the [R, C] matrices in the stack, in order.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    grid: Grid
    fidelity: tuple[Fidelity, ...]

    def dequantize(self) -> torch.Tensor:
        """The served values q · s, float32 [..., R, C], newly allocated. Exact: 8-bit times 8-bit significands."""
        return dequantize(self.codes, self.scales)


def dequantize(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """q · s in float32.

    Args:
        codes: int8 [..., R, C].
        scales: bfloat16 or float32 [..., R, G], G dividing C.
    """
    import torch

    values = torch.empty(codes.shape, dtype=torch.float32, device=codes.device)
    if codes.dim() < 3 or codes.is_cuda:
        stacked = [(values, codes, scales)]
    else:  # matrix by matrix, each while it is in the cache
        stacked = list(zip(*(each.flatten(0, -3) for each in (values, codes, scales)), strict=True))
    for value, code, scale in stacked:
        value.copy_(code)
        value.view(*scale.shape, -1).mul_(scale.float().unsqueeze(-1))
    return values


def usable_scales(scales: torch.Tensor, *, ulps: int = 0) -> torch.Tensor:
    """Round float32 scales to BF16 and put ``ZERO_GROUP_SCALE`` where the result is not a normal number.

    Args:
        scales: float32, any shape, finite, not negative.
        ulps: BF16 steps to move each rounded scale by.

    Returns:
        float32, the same shape, every value a positive normal BF16 number.
    """
    import torch

    rounded = scales.to(torch.bfloat16)
    if ulps:
        rounded = (rounded.view(torch.int16) + ulps).view(torch.bfloat16)
    return torch.where(rounded.float() < SMALLEST_SCALE, ZERO_GROUP_SCALE, rounded.float())
