"""One layer's KV scales and the figures they were decided by; what the journal keeps and the report repeats."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class LayerScales:
    """One layer's KV scales and what they were decided by.

    Attributes:
        layer: index.
        scale: cached tensor -> s; what is stored is x / s.
        reason: cached tensor -> why this one.
        amax: cached tensor -> largest magnitude, float32.
        clipped_at_one, below_normal_at_one: cached tensor -> share of all values at 1.0.
        clipped, below_normal: the same at `scale`.
        attention_error_at_one, attention_error: of the attention block's output, relative.
    """

    layer: int
    scale: Mapping[str, float]
    reason: Mapping[str, str]
    amax: Mapping[str, float]
    clipped_at_one: Mapping[str, float]
    below_normal_at_one: Mapping[str, float]
    clipped: Mapping[str, float]
    below_normal: Mapping[str, float]
    attention_error_at_one: float
    attention_error: float

    @property
    def exponents(self) -> dict[str, int]:
        """Cached tensor -> a, for scales that are 2^a."""
        return {name: math.frexp(scale)[1] - 1 for name, scale in self.scale.items()}
