"""The seam: where a mixture-of-experts block hands its tokens to its experts.

In transformers 5 every such block calls ``experts(hidden_states, top_k_index, top_k_weights)``, whatever the family,
the router or the shared experts around it. `ExpertTap` stands there instead of the experts: it keeps what came in and
gives zeros back. The rest of the layer (attention, norms, router, shared experts, residual) runs as it is, so

    layer(h) = partial(h) + Σ_k w_k · expert_{idx_k}(x)          partial(h): the layer with the tap in place

and the sum can be done later, with any weights: the source's, or quantized ones, one block of experts at a time.

Tokens are kept without padding, in sample order: token t of the layer is the t-th real token of the calibration set.
That index is the same in every layer and every run, which is what pairs a source run with a quantized one.

    x       [T, C]   inputs of the experts
    expert  [T, K]   int32, the experts that token goes to (distinct within a token)
    weight  [T, K]   float32, router weights as the block would apply them (scaling factor included)

Summation order: every token adds its experts in ascending expert index, in float32. It does not depend on how the
experts are cut into blocks or the tokens into batches.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import nn
from torch.nn import functional

from moepress.calibration.activations import Activations, Scratch
from moepress.calibration.layer_fill import ExpertBlock
from moepress.quantize.side_by_side import in_windows, side_by_side, width_on

WORTH_A_THREAD = 1 << 20
"""Multiply-adds of one expert's batch from which on experts are computed side by side."""

Made = TypeVar("Made")
TapInputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class ExpertTap(nn.Module):
    """Stands in for a block's experts: remembers the inputs of each thread's last call, contributes nothing."""

    def __init__(self) -> None:
        super().__init__()
        self._calls = threading.local()

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        self._calls.inputs = (hidden_states, top_k_index, top_k_weights)
        return torch.zeros_like(hidden_states)

    def take(self) -> TapInputs:
        """(x [t, C], expert [t, K], weight [t, K]) of this thread's call since its last `take`."""
        taken: TapInputs | None = getattr(self._calls, "inputs", None)
        if taken is None:
            raise RuntimeError("the block did not call its experts")
        self._calls.inputs = None
        return taken


@dataclass(frozen=True)
class RoutedTokens:
    """What one layer's experts are given, for all real tokens of the calibration set.

    Attributes:
        x: [T, C].
        expert: [T, K] int32.
        weight: [T, K] float32.
        num_experts: routed experts of the layer.
        divisor: [C], what the norm before the experts is divided by; None = nothing. What is stored stays as it was tapped.
    """

    x: Activations
    expert: Activations
    weight: Activations
    num_experts: int
    divisor: torch.Tensor | None = None

    @classmethod
    def allocate(
        cls, scratch: Scratch, *, tokens: int, hidden: int, top_k: int, num_experts: int, dtype: torch.dtype
    ) -> RoutedTokens:
        return cls(
            x=scratch.allocate((tokens, hidden), dtype),
            expert=scratch.allocate((tokens, top_k), torch.int32),
            weight=scratch.allocate((tokens, top_k), torch.float32),
            num_experts=num_experts,
        )

    def __len__(self) -> int:
        return len(self.x)

    def write(self, start: int, inputs: TapInputs) -> None:
        """Keep the tokens of one batch, padding already removed, as tokens `start` and on."""
        x, expert, weight = inputs
        self.x.write(start, x)
        self.expert.write(start, expert)
        self.weight.write(start, weight)

    def read(self, start: int, stop: int) -> TapInputs:
        """(x [t, C] in the stored type, expert [t, K] int32, weight [t, K] float32); only to be read."""
        return self.inputs(start, stop), self.expert.read(start, stop), self.weight.read(start, stop)

    def inputs(self, start: int, stop: int) -> torch.Tensor:
        """x [t, C] alone; only to be read."""
        x = self.x.read(start, stop)
        return x if self.divisor is None else x / self.divisor.to(x.device, x.dtype)

    def tokens_per_expert(self) -> list[int]:
        """Routed tokens of every expert of the layer."""
        chosen = self.expert.read(0, len(self)).reshape(-1).long()
        return [int(count) for count in torch.bincount(chosen, minlength=self.num_experts)]

    def smoothed(self, scales: torch.Tensor) -> RoutedTokens:
        """The same tokens as they come out of the norm ÷ `scales` [C]: a view of the same arrays, released once."""
        return replace(self, divisor=scales)

    def release(self) -> None:
        """Give the memory or the files back."""
        for array in (self.x, self.expert, self.weight):
            array.release()


@dataclass(frozen=True)
class ExpertOrder:
    """The (token, expert) pairs of a batch, sorted by expert, then by token.

    Attributes:
        tokens: [t·K] int64, token of each pair.
        slots: [t·K] int64, which of the token's K experts it is.
        starts: num_experts + 1 numbers; the pairs of expert e are starts[e]:starts[e + 1].
    """

    tokens: torch.Tensor
    slots: torch.Tensor
    starts: tuple[int, ...]

    def of(self, expert: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(tokens, slots) of one expert, tokens ascending and distinct."""
        pairs = slice(self.starts[expert], self.starts[expert + 1])
        return self.tokens[pairs], self.slots[pairs]


def sort_by_expert(expert: torch.Tensor, num_experts: int) -> ExpertOrder:
    """Sort a batch's pairs once, so that every expert's tokens are one slice.

    Args:
        expert: [t, K] integer, expert of each token and slot.
        num_experts: routed experts of the layer.
    """
    flat = expert.reshape(-1).long()
    order = torch.argsort(flat, stable=True)
    counts = torch.bincount(flat, minlength=num_experts)
    starts = torch.cat([counts.new_zeros(1), counts.cumsum(0)]).tolist()
    top_k = expert.shape[-1]
    return ExpertOrder(order // top_k, order % top_k, tuple(int(start) for start in starts))


def experts_forward(inputs: TapInputs, order: ExpertOrder, block: ExpertBlock, out: torch.Tensor) -> None:
    """out += Σ over the block's experts of w · down(silu(gate(x)) · up(x)), for the tokens routed to them.

    One sort for the whole batch, then one gather and three matrix products per expert, as many experts side by side as
    there are threads; `experts_forward_plain` is the twin that transformers' own loop follows.

    Args:
        inputs: (x [t, C], expert [t, K], weight [t, K] float32) on the block's device.
        order: `sort_by_expert` of the same `expert`.
        block: weights, in the type to compute in.
        out: [t, C] float32, added to.
    """
    x, _, weight = inputs

    def one(slot: int) -> tuple[torch.Tensor, torch.Tensor]:
        tokens, slots = order.of(block.first + slot)
        inner = expert_inner(x[tokens].to(block.gate_up.dtype), block.gate_up[slot])
        return tokens, functional.linear(inner, block.down[slot]).float() * weight[tokens, slots, None]

    for made in each_expert(one, order, block):
        add_rows(out, made)


def each_expert(one: Callable[[int], Made], order: ExpertOrder, block: ExpertBlock) -> Iterator[Sequence[Made]]:
    """``one(slot)`` of the block's experts that have tokens, side by side, in order.

    In windows, since all that is made of one is held; of several a thread, since some experts have many more tokens.
    """
    slots = [slot for slot, expert in enumerate(block.experts) if order.starts[expert] < order.starts[expert + 1]]
    tokens = order.starts[block.experts.stop] - order.starts[block.first]
    of_one = tokens * block.down[0].numel() // max(len(slots), 1)
    at_once = width_on(block.down.device) if of_one >= WORTH_A_THREAD else 1
    for some in in_windows(slots, 4 * at_once if at_once > 1 else 1):
        yield side_by_side(one, some, at_once)


def add_rows(total: torch.Tensor, parts: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """total[tokens] += rows for each (tokens, rows) in order. Tokens of a part are distinct: one addition per row and part,
    so there is no other order to depend on."""

    def band(columns: slice) -> None:
        for tokens, rows in parts:
            total[:, columns].index_add_(0, tokens, rows[:, columns])

    bands = min(len(parts), width_on(total.device))
    wide = -(-total.shape[1] // bands)
    side_by_side(band, [slice(first, first + wide) for first in range(0, total.shape[1], wide)], bands)


def expert_inner(x: torch.Tensor, gate_up: torch.Tensor) -> torch.Tensor:
    """silu(x·Wgᵀ) · (x·Wuᵀ): what down_proj is given. x [n, C], gate_up [2·I, C] -> [n, I]."""
    gate, up = functional.linear(x, gate_up).chunk(2, dim=-1)
    return functional.silu(gate) * up


def experts_forward_plain(inputs: TapInputs, block: ExpertBlock) -> torch.Tensor:
    """The same sum, expert by expert, searching each one's tokens: [t, C] float32. For tests."""
    x, expert, weight = inputs
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for slot, index in enumerate(block.experts):
        tokens, slots = torch.where(expert == index)
        gate = x[tokens] @ block.gate_up[slot, : block.down.shape[-1]].T
        up = x[tokens] @ block.gate_up[slot, block.down.shape[-1] :].T
        out[tokens] += (gate * torch.sigmoid(gate) * up) @ block.down[slot].T * weight[tokens, slots, None]
    return out
