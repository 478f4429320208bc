"""What became of a tensor, as a value: Quantized, Kept, Folded, Rescaled or Fallback.

Nothing is silent: a plan decides every tensor, a receipt records the decision, and the report and the model card count
them. A Fallback is a tensor that is quantized, but by a plainer method than was asked for; its reason names the
numbers that forced it.
"""

from __future__ import annotations

from dataclasses import dataclass

from moepress.quantize.fidelity import Fidelity
from moepress.quantize.grid import Grid


@dataclass(frozen=True, slots=True)
class Quantized:
    """Quantized as asked.

    Args:
        method: "rtn", "gptq", ...
        grid: bits and group size.
        fidelity: error sums against the source weight.
        details: numbers of the method worth a line in the receipt: tokens seen, damping used, loss.
    """

    method: str
    grid: Grid
    fidelity: Fidelity
    details: tuple[tuple[str, float], ...] = ()

    def as_json(self) -> dict[str, object]:
        return {
            "decision": "quantized",
            "method": self.method,
            "num_bits": self.grid.num_bits,
            "group_size": self.grid.group_size,
            **self.fidelity.as_json(),
            **dict(self.details),
        }


@dataclass(frozen=True, slots=True)
class Kept:
    """Carried over byte for byte, and why."""

    reason: str

    def as_json(self) -> dict[str, object]:
        return {"decision": "kept", "reason": self.reason}


@dataclass(frozen=True, slots=True)
class Folded:
    """Carried over with a KV scale in it: rows times powers of two, so that no bit of a weight is lost.

    Args:
        reason: why it is carried.
        bands: (rows, exponent), repeated until the weight's rows end.
    """

    reason: str
    bands: tuple[tuple[int, int], ...]

    def as_json(self) -> dict[str, object]:
        return {"decision": "folded", "reason": self.reason, "fold": [list(band) for band in self.bands]}


@dataclass(frozen=True, slots=True)
class Rescaled:
    """Not quantized, but multiplied by AWQ's factors, powers of two, so that no bit of a weight is lost.

    Args:
        reason: what it belongs to.
        alpha: the exponent that was found; 0 where the identity was best and the values are the source's.
        gain: loss of the experts' rounding with the factors over that without, ≤ 1.
    """

    reason: str
    alpha: float
    gain: float

    def as_json(self) -> dict[str, object]:
        return {
            "decision": "rescaled",
            "reason": self.reason,
            "awq_norm_alpha": self.alpha,
            "awq_norm_gain": self.gain,
        }


@dataclass(frozen=True, slots=True)
class Fallback:
    """Quantized by a plainer method than asked.

    Args:
        asked: the method the recipe names.
        used: the method that was used.
        reason: what forced it, with numbers.
        grid: bits and group size.
        fidelity: error sums against the source weight.
    """

    asked: str
    used: str
    reason: str
    grid: Grid
    fidelity: Fidelity

    def as_json(self) -> dict[str, object]:
        return {
            "decision": "fallback",
            "asked": self.asked,
            "method": self.used,
            "reason": self.reason,
            "num_bits": self.grid.num_bits,
            "group_size": self.grid.group_size,
            **self.fidelity.as_json(),
        }


Decision = Quantized | Kept | Folded | Rescaled | Fallback
