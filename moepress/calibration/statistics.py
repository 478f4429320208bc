"""What the tapped tokens say about each expert's inputs: the second moments that GPTQ works with.

For an expert with routed tokens t, x̃_t its input in the run being quantized and x_t in the source run:

    tokens  n  = number of routed tokens
    mass    m  = Σ ω_t                       ω_t = 1, or the router's weight squared: how the error reaches the output
    gram    G  = Σ ω_t · x̃_t x̃_tᵀ            the Hessian of the squared error is 2·G/m
    cross   C  = Σ ω_t · (x_t − x̃_t) x̃_tᵀ    for error-aware targets: W′ = W + W·C·(G + ridge)⁻¹

once for gate and up, which read the same input x, and once for down, which reads a = silu(gate(x)) · up(x). For down,
x̃ goes through gate and up as already quantized, x through the source's. Tokens are paired by their index and routed as
the quantized run routes them: those are the inputs that the quantized expert will meet.

Sums are float32. What is multiplied has the type that the layers compute in: float32, or BF16 on a GPU's tensor cores, whose
sums are float32 too (`quantize.hessian`).

Sums are left as sums: shrinking towards the layer's pooled moments and damping belong to ``quantize``.

Order: tokens in chunks of `TOKENS_PER_CHUNK` by their index in the layer, within a chunk one matrix product per
expert and panel, chunks added in order. On a processor one thread makes each product (`quantize.side_by_side`). So the bits do
not depend on batches, on how experts are cut into blocks, or on how many workers or threads share them.

Memory: [B, D, D] float32 for B experts, twice with cross terms: 205 MB for one expert of hidden size 7168.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch.nn import functional

from moepress.calibration.expert_tap import RoutedTokens, expert_inner, sort_by_expert
from moepress.calibration.layer_fill import ExpertBlock
from moepress.errors import QuantizeError
from moepress.quantize.hessian import add_gram, add_product, add_side_by_side, all_finite, mirror, panels
from moepress.quantize.row_metric import swiglu_slopes
from moepress.quantize.side_by_side import side_by_side, width_on

TOKENS_PER_CHUNK = 16384


@dataclass(frozen=True)
class InputMoments:
    """Sums over the tokens of some experts; D is C for gate and up, I for down.

    Attributes:
        experts: which, consecutive.
        tokens: [B] int64, routed tokens.
        mass: [B] float64, Σ ω; equals `tokens` without router weighting.
        gram: [B, D, D] float32, Σ ω x̃ x̃ᵀ.
        cross: [B, D, D] float32, Σ ω (x − x̃) x̃ᵀ, or None when no source was given.
    """

    experts: range
    tokens: torch.Tensor
    mass: torch.Tensor
    gram: torch.Tensor
    cross: torch.Tensor | None


@dataclass(frozen=True)
class PooledMoments:
    """Sums over all tokens of a layer, whatever expert they go to.

    Attributes:
        tokens: their number.
        gram: [C, C] float32, Σ x̃ x̃ᵀ.
        cross: [C, C] float32, Σ (x − x̃) x̃ᵀ, or None when no source was given.
    """

    tokens: int
    gram: torch.Tensor
    cross: torch.Tensor | None = None


def gate_up_moments(
    routed: RoutedTokens,
    experts: range,
    *,
    source: RoutedTokens | None = None,
    router_weighted: bool = False,
    device: str = "cpu",
) -> InputMoments:
    """Moments of what gate_proj and up_proj read.

    Args:
        routed: the tapped tokens of the run being quantized.
        experts: which experts, consecutive.
        source: the same tokens' inputs in the source run; gives `cross`. Its routing is not used.
        router_weighted: weight each token by its router weight squared.
        device: where to compute; the result is on it.

    Raises:
        QuantizeError: inputs that are not finite.
    """
    sums = _Sums(experts, routed.x.shape[1], with_cross=source is not None, device=device)

    def add(slot: int, rows: _Rows) -> None:
        sums.add(slot, rows.ours, rows.theirs, rows.weight if router_weighted else None)

    _for_each_expert(add, routed, experts, source, device)
    return sums.finished("gate and up")


def down_moments(
    routed: RoutedTokens,
    block: ExpertBlock,
    *,
    source: RoutedTokens | None = None,
    source_block: ExpertBlock | None = None,
    router_weighted: bool = False,
    device: str = "cpu",
) -> InputMoments:
    """Moments of what down_proj reads.

    Args:
        routed: the tapped tokens of the run being quantized.
        block: the experts, with gate and up as the quantized run has them.
        source: the same tokens' inputs in the source run; None = the quantized run's.
        source_block: the same experts with the source's gate and up; gives `cross`.
        router_weighted: weight each token by its router weight squared.
        device: where to compute; the blocks must be on it, the result is.

    Raises:
        QuantizeError: inputs that are not finite.
    """
    sums = _Sums(block.experts, block.down.shape[-1], with_cross=source_block is not None, device=device)

    def add(slot: int, rows: _Rows) -> None:
        inner = expert_inner(rows.ours, block.gate_up[slot].to(rows.ours.dtype))
        target = None
        if source_block is not None:
            theirs = rows.ours if rows.theirs is None else rows.theirs
            target = expert_inner(theirs, source_block.gate_up[slot].to(theirs.dtype))
        sums.add(slot, inner, target, rows.weight if router_weighted else None)

    _for_each_expert(add, routed, block.experts, source, device)
    return sums.finished("down")


def slope_moments(routed: RoutedTokens, block: ExpertBlock) -> torch.Tensor:
    """Σ w² j jᵀ of each expert, float32 [B, 2·I, 2·I]: how far errors in gate and up reach its output.

    j = (u · silu′(g), silu(g)) and w the router's weight, over the tokens routed to it (`quantize.row_metric`).

    Args:
        routed: the tapped tokens of the run being quantized.
        block: the experts, before they are quantized; the result is on their device.

    Raises:
        QuantizeError: inputs that are not finite.
    """
    width, device = 2 * block.down.shape[-1], str(block.down.device)
    total = torch.zeros(len(block.experts), width, width, device=device)

    def add(slot: int, rows: _Rows) -> None:
        gate, up = functional.linear(rows.ours, block.gate_up[slot].to(rows.ours.dtype)).float().chunk(2, dim=-1)
        add_gram(total[slot], swiglu_slopes(gate, up) * rows.weight[:, None])

    _for_each_expert(add, routed, block.experts, None, device)
    for slot, expert in enumerate(block.experts):
        mirror(total[slot])
        if not all_finite(total[slot]):
            raise QuantizeError(f"expert {expert}: gate and up of its inputs are not finite")
    return total


def pooled_moments(routed: RoutedTokens, *, source: RoutedTokens | None = None, device: str = "cpu") -> PooledMoments:
    """Moments of all tokens of the layer: what experts with few tokens are shrunk towards, and `hessian: layer` uses alone.

    Args:
        routed: the tapped tokens of the run being quantized.
        source: the same tokens in the source run; gives `cross`.
        device: where to compute; the result is on it.

    Raises:
        QuantizeError: inputs that are not finite.
    """
    gram = _pooled_gram(routed, None, device)
    cross = None if source is None else pooled_cross(routed, source, device=device)
    return finished_pool(len(routed), gram, cross)


def pooled_panels(routed: RoutedTokens, some: Sequence[int], *, device: str = "cpu") -> list[torch.Tensor]:
    """Some panels of `pooled_moments`' gram, each from its row and column on: the same bits, made anywhere.

    Args:
        some: of `quantize.hessian.panels`.

    Returns:
        Each float32 [rows of the panel, C − its first], of which only what is on or above the diagonal counts.
    """
    gram, hidden = _pooled_gram(routed, some, device), routed.x.shape[1]
    ends = dict(pairwise([*panels(hidden), hidden]))
    return [gram[first : ends[first], first:].contiguous() for first in some]


def pooled_cross(routed: RoutedTokens, source: RoutedTokens, *, device: str = "cpu") -> torch.Tensor:
    """`pooled_moments`' cross, [C, C]; arguments as there."""
    hidden = routed.x.shape[1]
    cross = torch.zeros(hidden, hidden, device=device)
    for start, stop in _chunks(len(routed)):
        ours, theirs = (of.inputs(start, stop).to(device) for of in (routed, source))
        add_side_by_side(add_product, cross, _difference(theirs, ours), ours)
    return cross


def _pooled_gram(routed: RoutedTokens, only: Sequence[int] | None, device: str) -> torch.Tensor:
    hidden = routed.x.shape[1]
    gram = torch.zeros(hidden, hidden, device=device)
    for start, stop in _chunks(len(routed)):
        add_side_by_side(add_gram, gram, routed.inputs(start, stop).to(device), only=only)
    return gram


def finished_pool(tokens: int, gram: torch.Tensor, cross: torch.Tensor | None) -> PooledMoments:
    """Sums that are complete, gram's panels on and above the diagonal; mirrored in place.

    Raises:
        QuantizeError: inputs that are not finite.
    """
    if not (all_finite(gram) and (cross is None or all_finite(cross))):
        raise QuantizeError(
            "the layer's inputs are not finite", hint="the source's weights or the forward pass overflow"
        )
    mirror(gram)
    return PooledMoments(tokens, gram, cross)


def _difference(theirs: torch.Tensor, ours: torch.Tensor, weight: torch.Tensor | None = None) -> torch.Tensor:
    """x − x̃, each row times its weight if there are any, of the type that products take."""
    difference = theirs.float() - ours.float()
    return (difference if weight is None else difference * weight[:, None]).to(ours.dtype)


class _Sums:
    """Running sums of `InputMoments`."""

    def __init__(self, experts: range, width: int, *, with_cross: bool, device: str) -> None:
        self._experts = experts
        self._tokens = torch.zeros(len(experts), dtype=torch.int64)
        self._mass = torch.zeros(len(experts), dtype=torch.float64)
        self._gram = torch.zeros(len(experts), width, width, device=device)
        self._cross = torch.zeros_like(self._gram) if with_cross else None

    def add(self, slot: int, ours: torch.Tensor, theirs: torch.Tensor | None, weight: torch.Tensor | None) -> None:
        """Add one expert's rows of one chunk: ours, theirs [n, D]; weight [n], not yet squared."""
        self._tokens[slot] += len(ours)
        self._mass[slot] += len(ours) if weight is None else weight.double().square().sum().cpu()
        scaled = ours if weight is None else (ours * weight[:, None]).to(ours.dtype)
        add_gram(self._gram[slot], scaled)
        if self._cross is not None and theirs is not None:
            add_product(self._cross[slot], _difference(theirs, ours, weight), scaled)

    def finished(self, what: str) -> InputMoments:
        """The sums, after a look for NaN and infinity."""
        for slot, expert in enumerate(self._experts):
            mirror(self._gram[slot])
            sums = [self._gram[slot], *([] if self._cross is None else [self._cross[slot]])]
            if not all(all_finite(total) for total in sums):
                raise QuantizeError(
                    f"expert {expert}: the inputs of {what} are not finite ({int(self._tokens[slot])} tokens)",
                    hint="the source's weights or the forward pass overflow",
                )
        return InputMoments(self._experts, self._tokens, self._mass, self._gram, self._cross)


@dataclass(frozen=True)
class _Rows:
    """One expert's tokens of one chunk, as they are stored: x̃ [n, C], x [n, C] of the source run or None, weight [n]."""

    ours: torch.Tensor
    theirs: torch.Tensor | None
    weight: torch.Tensor


def _for_each_expert(
    add: Callable[[int, _Rows], None], routed: RoutedTokens, experts: range, source: RoutedTokens | None, device: str
) -> None:
    """``add(slot, rows)`` of every expert that has tokens, chunk after chunk; on a processor experts side by side."""
    for start, stop in _chunks(len(routed)):
        x, expert, weight = routed.read(start, stop)
        order = sort_by_expert(expert, routed.num_experts)
        x = x.to(device)
        paired = None if source is None else source.inputs(start, stop).to(device)

        def one(slot: int) -> None:
            tokens, slots = order.of(experts[slot])  # noqa: B023 (done before the next chunk begins)
            there = tokens.to(device)
            theirs = None if paired is None else paired[there]  # noqa: B023
            add(slot, _Rows(x[there], theirs, weight[tokens, slots].to(device)))  # noqa: B023

        reached = [slot for slot, index in enumerate(experts) if len(order.of(index)[0])]
        side_by_side(one, reached, width_on(device))


def _chunks(tokens: int) -> Iterator[tuple[int, int]]:
    for start in range(0, tokens, TOKENS_PER_CHUNK):
        yield start, min(start + TOKENS_PER_CHUNK, tokens)
