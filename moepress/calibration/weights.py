"""Where calibration gets weights: a name in, a decoded float32 tensor out.

    WeightSource.names()      logical names, as published: model.layers.3.mlp.experts.7.down_proj.weight
    WeightSource.load(name)   float32 [logical shape] or a band of its rows, decoded at the moment of use

The seam exists so that the forward pass never knows how a weight is stored: block FP8, channel FP8, packed INT4 and
BF16 look the same from here, and so do a source checkpoint and the one pressed from it. Nothing is cached: a second
`load` reads again, because whoever streams a model must decide alone what stays in memory.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

import torch


class WeightSource(Protocol):
    """Anything that can give a model's weights by name."""

    def names(self) -> Collection[str]:
        """Every logical weight name, as published."""
        ...

    def load(self, name: str, rows: slice | None = None, *, device: str = "cpu") -> torch.Tensor:
        """The weight, decoded: float32, contiguous, owned by the caller.

        Args:
            name: one of `names`.
            rows: a range of the first dimension (of fused experts: experts); None = the whole, logical shape.
            device: where the weight is wanted; what is stored in a byte travels there as a byte.

        Raises:
            CheckpointError: there is no such weight.
        """
        ...

    def expect(self, names: Collection[str], rows: slice | None = None) -> None:
        """These will be loaded next: they may be read meanwhile. Returns at once, and changes nothing but time and memory."""
        ...
