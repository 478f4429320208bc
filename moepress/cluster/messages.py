"""What travels between the run and its workers: tensors as the bits they are made of.

Ray moves numpy arrays out of band: one copy into shared memory, none out of it. Torch tensors would be pickled. numpy has
no bfloat16, so a tensor travels as integers of the same width, with the name of its own type.

    Sent           a tensor
    SentBatch      hidden states [n, S, C], which positions are tokens [n, S], carried top-k indices [n, S, k] or None
    SentTokens     x [t, C], expert [t, K], weight [t, K]
    SentDense      what a batch became (`layer_runner.DenseBatch`)
    SentInputs     the small part of a layer's inputs (`expert_block.LayerInputs`); the tokens travel beside it
    SentBlock      quantized experts (`expert_block.PressedBlock`)
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from moepress.calibration.activations import Activations
from moepress.calibration.expert_tap import RoutedTokens, TapInputs
from moepress.calibration.layer_runner import DenseBatch
from moepress.calibration.statistics import PooledMoments
from moepress.convert.calibrated.expert_block import LayerInputs, PressedBlock
from moepress.quantize.fidelity import Fidelity
from moepress.quantize.grid import Grid, QuantizedWeight

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Sent:
    """A tensor on its way. ``bits``: its elements as integers; ``dtype``: what they are."""

    bits: np.ndarray[Any, Any]
    dtype: torch.dtype


SentBatch = tuple[Sent, Sent, Sent | None]
SentTokens = tuple[Sent, Sent, Sent]
SentDense = tuple[Sent, SentTokens | None, Sent | None]


def send(tensor: torch.Tensor) -> Sent:
    """A tensor [...] of any device and type, ready to be moved; the memory is shared with it where it can be."""
    plain = tensor.detach().to("cpu").contiguous()
    return Sent(plain.view(_BITS[plain.dtype.itemsize]).numpy(), plain.dtype)


def receive(sent: Sent) -> torch.Tensor:
    """The tensor again, owned: what lies in shared memory is read-only and is copied."""
    bits = sent.bits if sent.bits.flags.writeable else sent.bits.copy()
    return torch.from_numpy(bits).view(sent.dtype)


def look(sent: Sent) -> torch.Tensor:
    """The tensor where it lies, in shared memory. Only to be read: writing to it would kill the process."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch has no read-only tensors, and says so
        return torch.from_numpy(sent.bits).view(sent.dtype)


def send_tokens(tokens: TapInputs) -> SentTokens:
    """Tapped tokens, ready to be moved."""
    x, expert, weight = tokens
    return send(x), send(expert), send(weight)


def receive_tokens(sent: SentTokens) -> TapInputs:
    """Tapped tokens again, owned."""
    x, expert, weight = sent
    return receive(x), receive(expert), receive(weight)


def send_dense(batch: DenseBatch) -> SentDense:
    """What a batch became, ready to be moved."""
    routed = None if batch.routed is None else send_tokens(batch.routed)
    return send(batch.hidden), routed, None if batch.topk is None else send(batch.topk)


def receive_dense(sent: SentDense) -> DenseBatch:
    """What a batch became, again."""
    hidden, routed, topk = sent
    return DenseBatch(
        receive(hidden), None if routed is None else receive_tokens(routed), None if topk is None else receive(topk)
    )


@dataclass(frozen=True)
class SentInputs:
    """A layer's inputs without their tokens.

    Attributes:
        num_experts: routed experts of the layer.
        pooled_tokens, pooled_gram, pooled_cross: `statistics.PooledMoments`.
        norm: what the norm before the experts is divided by, [C]; None = nothing.
        fisher: `LayerInputs.fisher`.
    """

    num_experts: int
    pooled_tokens: int
    pooled_gram: Sent
    pooled_cross: Sent | None
    norm: Sent | None
    fisher: Sent | None

    @classmethod
    def of(cls, inputs: LayerInputs) -> SentInputs:
        norm = None if inputs.ours.divisor is None else send(inputs.ours.divisor)
        pooled = inputs.pooled
        cross = None if pooled.cross is None else send(pooled.cross)
        fisher = None if inputs.fisher is None else send(inputs.fisher)
        return cls(inputs.ours.num_experts, pooled.tokens, send(pooled.gram), cross, norm, fisher)

    def with_tokens(self, ours: Sequence[Sent], source: Sequence[Sent], device: str) -> LayerInputs:
        """The whole again; the tokens stay where they are. Arguments as `routed_where_it_lies`; () = no source run."""
        cross = None if self.pooled_cross is None else receive(self.pooled_cross).to(device)
        pooled = PooledMoments(self.pooled_tokens, receive(self.pooled_gram).to(device), cross)
        mine = routed_where_it_lies(ours, num_experts=self.num_experts, norm=self.norm)
        theirs = routed_where_it_lies(source, num_experts=self.num_experts, norm=self.norm) if source else None
        return LayerInputs(mine, theirs, pooled, None if self.fisher is None else receive(self.fisher))


def routed_where_it_lies(tokens: Sequence[Sent], *, num_experts: int, norm: Sent | None) -> RoutedTokens:
    """Tapped tokens of a whole layer, in shared memory, only to be read.

    Args:
        tokens: (x, expert, weight).
        num_experts, norm: as in `SentInputs`.
    """
    x, expert, weight = (Activations.elsewhere(look(part)) for part in tokens)
    return RoutedTokens(x, expert, weight, num_experts, None if norm is None else receive(norm))


@dataclass(frozen=True)
class SentWeight:
    """A stack of quantized matrices on its way (`grid.QuantizedWeight`)."""

    codes: Sent
    scales: Sent
    grid: Grid
    fidelity: tuple[Fidelity, ...]

    @classmethod
    def of(cls, weight: QuantizedWeight) -> SentWeight:
        return cls(send(weight.codes), send(weight.scales), weight.grid, weight.fidelity)

    def received(self) -> QuantizedWeight:
        return QuantizedWeight(receive(self.codes), receive(self.scales), self.grid, self.fidelity)


@dataclass(frozen=True)
class SentBlock:
    """Quantized experts on their way."""

    experts: range
    gate_up: SentWeight
    down: SentWeight
    records: Mapping[tuple[int, str], dict[str, Any]]

    @classmethod
    def of(cls, block: PressedBlock) -> SentBlock:
        return cls(block.experts, SentWeight.of(block.gate_up), SentWeight.of(block.down), block.records)

    def received(self) -> PressedBlock:
        """The block again."""
        return PressedBlock(self.experts, self.gate_up.received(), self.down.received(), self.records)
