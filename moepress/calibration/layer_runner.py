"""One decoder layer in memory, and all samples through it.

    with model.open_layer(7) as layer:            dense part of the layer read, decoded and filled
        routed = layer.dense_part(stream)         h ← attention, norms, router, shared experts; experts tapped
        layer.experts(stream, routed)             h ← h + routed experts, a block of them at a time

The two halves are separate because calibration happens between them: the tapped tokens give the statistics, the block
is quantized, and the second half runs with the quantized weights. Several streams may go through one open layer (a
source run and a quantized run), so its weights are decoded once.

Held at once: the dense part of one layer, one block of experts (`RunSettings.expert_bytes`), the next block as it is stored
(`RunSettings.ahead_bytes`), one batch of samples, and the streams' activations [N, S, C] (in files beyond the scratch
budget). None of it grows with the number of layers.

On a processor batches go through the dense part side by side, and experts through the other, each by one thread
(`quantize.side_by_side`). So the bits are the same from run to run for the same batch size and machine type, whatever the
number of threads, of workers, or of experts in a block.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import nn

from moepress.calibration.activations import Activations
from moepress.calibration.decoder import CacheView
from moepress.calibration.device import stays_on_device
from moepress.calibration.expert_tap import ExpertTap, RoutedTokens, TapInputs, experts_forward, sort_by_expert
from moepress.calibration.forward_arguments import LayerContext, forward_arguments
from moepress.calibration.layer_fill import ExpertBlock, LayerNames, expect_experts, load_experts
from moepress.calibration.stream import Stream
from moepress.quantize.products import Precision, products_in
from moepress.quantize.side_by_side import in_windows, side_by_side, width_on

Batch = TypeVar("Batch")
Made = TypeVar("Made")

ExpertWeights = Callable[[range], ExpertBlock]
"""Gives the weights of consecutive experts of the open layer: the source's, or quantized ones."""


@dataclass(frozen=True)
class DenseBatch:
    """What the dense part of a layer gives for some samples.

    Attributes:
        hidden: [n, S, C].
        routed: (x [t, C], expert [t, K], weight [t, K]) of the real tokens; None for a dense layer.
        topk: [n, S, k] indices to carry on, where the family carries them.
    """

    hidden: torch.Tensor
    routed: TapInputs | None
    topk: torch.Tensor | None


class OpenLayer:
    """One decoder layer in memory. Made by ``StreamedModel.open_layer``.

    Args:
        module: on meta, routed experts replaced by the tap.
        fill: gives it its weights. Called when somebody first computes with it: who only hands out work never does.

    Attributes:
        index: of the layer.
        is_sparse: it has routed experts.
    """

    def __init__(
        self,
        index: int,
        module: nn.Module,
        fill: Callable[[], None],
        tap: ExpertTap | None,
        names: LayerNames,
        context: LayerContext,
    ) -> None:
        self.index = index
        self._module = module
        self._fill: Callable[[], None] | None = fill
        self.is_sparse = tap is not None
        self._tap = tap
        self._names = names
        self._context = context

    @property
    def module(self) -> nn.Module:
        """transformers' decoder layer, filled.

        Raises:
            CheckpointError: shapes that differ from the configuration's.
        """
        if self._fill is not None:
            fill, self._fill = self._fill, None
            fill()
            self.expect_experts()
        return self._module

    @property
    def device(self) -> str:
        """Where it computes."""
        return self._context.settings.device

    @property
    def cache_view(self) -> CacheView:
        """What the layer's attention gives to a KV cache."""
        return self._context.classes.cache

    @property
    def rope_dim(self) -> int:
        """MLA: columns of the rotated key; 0 otherwise."""
        return int(getattr(self._context.config, "qk_rope_head_dim", 0))

    def batches(self, stream: Stream) -> Iterator[tuple[int, int]]:
        """(start, stop) of the samples of each batch for the experts."""
        return self._context.settings.batches(len(stream.hidden))

    def dense_batches(self, stream: Stream) -> list[tuple[int, int]]:
        """(start, stop) of the samples of each batch for the dense part."""
        return self._context.settings.dense_batches(len(stream.hidden), stream.hidden.shape[1])

    def side_by_side(
        self, work: Callable[[Batch], Made], batches: Sequence[Batch], *, products: Precision | None = None
    ) -> Iterator[tuple[Batch, Made]]:
        """Each batch and what ``work`` makes of it, in order; as many in work, or made and not taken, as may be at once.

        Args:
            products: what they multiply in; None = what the run does.
        """
        settings = self._context.settings
        at_once = width_on(settings.device)
        at_once = min(at_once, settings.dense_at_once or at_once)
        _ = self.module  # filled before threads compute with it
        for some in in_windows(batches, at_once):
            with products_in(products or settings.products):
                made = side_by_side(work, some, at_once)
            yield from zip(some, made, strict=True)

    @torch.no_grad()
    def dense_part(self, stream: Stream) -> RoutedTokens | None:
        """Everything but the routed experts, for all samples; `stream.hidden` is replaced.

        Returns:
            The tokens on their way to the experts, without padding, in sample order; None for a dense layer, which is
            then complete. The caller releases them.
        """
        routed = self.allocate_routed(stream)

        def one(batch: tuple[int, int]) -> DenseBatch:
            return self.dense_batch(*self.read_batch(stream, *batch))

        for (start, _), made in self.side_by_side(one, self.dense_batches(stream)):
            self.write_batch(stream, routed, start, made)
        return routed

    def read_batch(
        self, stream: Stream, start: int, stop: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """What `dense_batch` takes of the samples start..stop−1."""
        topk = None if stream.topk is None else stream.topk.read(start, stop)
        return stream.hidden.read(start, stop), stream.real(start, stop), topk

    @torch.no_grad()
    def dense_batch(self, hidden: torch.Tensor, real: torch.Tensor, topk: torch.Tensor | None) -> DenseBatch:
        """Everything but the routed experts, for one batch. Depends on nothing else, so batches may run anywhere.

        Call it through `side_by_side`, for bits that no number of threads changes.

        Args:
            hidden: [n, S, C], the layer's inputs; only read.
            real: [n, S] bool, which positions are tokens.
            topk: [n, S, k] int32, carried from sparse attention's last indexer.
        """
        hidden = self._context.settings.on_device(hidden)
        out, carried = self._forward(hidden, topk)
        routed = None
        if self._tap is not None:
            flat = real.reshape(-1).to(out.device)
            x, expert, weight = self._tap.take()
            routed = (x[flat], expert[flat], weight[flat])
        return DenseBatch(out, routed, carried)

    def dense_gradient(
        self, hidden: torch.Tensor, real: torch.Tensor, topk: torch.Tensor | None, towards: tuple[torch.Tensor, ...]
    ) -> torch.Tensor:
        """The gradient of what `dense_batch` gives by what it is given, [n, S, C]; by torch's autograd, for no weight.

        Args:
            hidden, real, topk: as `dense_batch` takes them.
            towards: the gradient by its hidden states [n, S, C]; of a sparse layer also that by the tapped x [t, C] and by
                the router's weights [t, K].
        """
        leaf = self._context.settings.on_device(hidden).detach().requires_grad_(True)
        with torch.enable_grad():
            out, _ = self._forward(leaf, topk)
            given = [out]
            if self._tap is not None:
                x, _, weight = self._tap.take()
                flat = real.reshape(-1).to(out.device)
                given += [x[flat], weight[flat]]
        arriving = [each.to(out.device, to.dtype) for each, to in zip(towards, given, strict=True)]
        with products_in(self._context.settings.products):
            return torch.autograd.grad(given, leaf, arriving)[0]

    def _forward(self, hidden: torch.Tensor, topk: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The module's hidden states, and the indices to carry on."""
        with products_in(self._context.settings.products):
            out = self.module(hidden, **forward_arguments(self._context, hidden, topk))
        hidden, carried = out if self._context.classes.carries_topk else (out, None)
        return hidden, carried

    def write_batch(self, stream: Stream, routed: RoutedTokens | None, start: int, batch: DenseBatch) -> None:
        """Puts what `dense_batch` gave for the samples from `start` on into the stream and the tapped tokens."""
        stream.hidden.write(start, batch.hidden)
        if batch.topk is not None:
            if stream.topk is None:
                shape = (len(stream.hidden), *batch.topk.shape[1:])
                stream.topk = self._context.scratch.allocate(shape, torch.int32)
            stream.topk.write(start, batch.topk)
        if routed is not None and batch.routed is not None:
            routed.write(stream.first_token(start), batch.routed)

    @torch.no_grad()
    def experts(self, stream: Stream, routed: RoutedTokens, weights: ExpertWeights | None = None) -> None:
        """Add the routed experts' outputs to `stream.hidden`.

        Args:
            stream: after `dense_part`.
            routed: what that returned.
            weights: gives the experts' weights, asked for in ascending blocks; None = the source's.
        """
        device = self._context.settings.device
        if stays_on_device(device, 4 * math.prod(routed.x.shape)):  # else they cross PCIe twice for every block
            total = Activations.elsewhere(torch.zeros(routed.x.shape, device=device))
        else:
            total = self._context.scratch.allocate(routed.x.shape, torch.float32)
        for experts in self.expert_blocks():
            self._add_block(stream, routed, (weights or self.load_and_expect)(experts), total)
        self.add_total(stream, total)
        total.release()

    def add_total(self, stream: Stream, total: Activations) -> None:
        """stream.hidden += the experts' summed outputs, [T, C] float32 by token."""
        for start, stop in self.batches(stream):
            self.add_outputs(stream, start, stop, total.read(stream.first_token(start), stream.first_token(stop)))

    def add_outputs(self, stream: Stream, start: int, stop: int, outputs: torch.Tensor) -> None:
        """Adds the experts' summed outputs [t, C] float32 to the hidden states of the samples start..stop−1."""
        hidden = stream.hidden.read(start, stop).to(torch.float32, copy=True)
        hidden[stream.real(start, stop)] += outputs.to(hidden.device)
        stream.hidden.write(start, hidden)

    @torch.no_grad()
    def experts_batches(self, batches: Sequence[TapInputs], weights: ExpertWeights | None = None) -> list[torch.Tensor]:
        """The routed experts' summed outputs for batches of tokens: what `experts` adds to them. Every block is loaded once.

        Args:
            batches: (x [t, C], expert [t, K], weight [t, K]) each; cut as `batches` cuts them, for the same bits.
            weights: as in `experts`.

        Returns:
            [t, C] float32 for each, on the device.
        """
        settings, count = self._context.settings, self._context.num_experts
        out = [torch.zeros(x.shape, dtype=torch.float32, device=settings.device) for x, _, _ in batches]
        for experts in self.expert_blocks():
            block = (weights or self.load_and_expect)(experts).to(settings.device, settings.dtype)
            for tokens, total in zip(batches, out, strict=True):
                x, expert, weight = (part.to(settings.device) for part in tokens)
                with products_in(settings.products):
                    experts_forward((x, expert, weight), sort_by_expert(expert, count), block, total)
        return out

    def load_experts(self, experts: range, *, dtype: torch.dtype | None = None) -> ExpertBlock:
        """The source's weights of consecutive experts, decoded and stacked.

        Args:
            dtype: None = what the run computes in.
        """
        settings, source = self._context.settings, self._context.source
        return load_experts(self._names, source, experts, device=settings.device, dtype=dtype or settings.dtype)

    def load_and_expect(self, experts: range, *, dtype: torch.dtype | None = None, again: bool = False) -> ExpertBlock:
        """`load_experts`, in ascending blocks; what comes after this one is read while it is computed with.

        Args:
            again: after the last block the first will be wanted once more; otherwise it is the next layer.
        """
        block = self.load_experts(experts, dtype=dtype)
        if experts.stop < self._context.num_experts:
            self.expect_experts(range(experts.stop, min(experts.stop + len(experts), self._context.num_experts)))
        elif again:
            self.expect_experts(range(len(experts)))
        else:
            self._context.source.expect(self._context.following)
        return block

    def expect_experts(self, experts: range | None = None) -> None:
        """These experts will be loaded next; None = the first block. Changes nothing but time."""
        if self.is_sparse:
            expect_experts(self._names, self._context.source, experts or next(self.expert_blocks()))
        else:
            self._context.source.expect(self._context.following)

    def expert_blocks(self) -> Iterator[range]:
        """Ranges of experts that fit `RunSettings.expert_bytes`, ascending."""
        inner, hidden = self._names.expert_shape
        settings = self._context.settings
        size = max(1, settings.expert_bytes // (3 * inner * hidden * settings.dtype.itemsize))
        for first in range(0, self._context.num_experts, size):
            yield range(first, min(first + size, self._context.num_experts))

    @torch.no_grad()
    def attention(self, stream: Stream, start: int, stop: int, cache: object | None = None) -> torch.Tensor:
        """The output of the layer's attention block, before the residual: [stop − start, S, C].

        To be called before `dense_part`: it reads the layer's inputs and changes nothing.

        Args:
            stream: the layer's inputs.
            start, stop: samples.
            cache: stands where transformers' KV cache stands (see `kv_cache.CacheProbe`).
        """
        hidden = self._context.settings.on_device(stream.hidden.read(start, stop))
        out = self.module.get_submodule("self_attn")(
            hidden_states=self.module.get_submodule("input_layernorm")(hidden),
            past_key_values=cache,
            **forward_arguments(self._context, hidden, None if stream.topk is None else stream.topk.read(start, stop)),
        )
        attended: torch.Tensor = out[0]
        return attended

    def allocate_routed(self, stream: Stream) -> RoutedTokens | None:
        """Room for what `dense_part` taps; None for a dense layer."""
        if self._tap is None:
            return None
        config = self._context.config
        return RoutedTokens.allocate(
            self._context.scratch,
            tokens=stream.tokens,
            hidden=config.hidden_size,
            top_k=config.num_experts_per_tok,
            num_experts=self._context.num_experts,
            dtype=self._context.settings.dtype,
        )

    def _add_block(self, stream: Stream, routed: RoutedTokens, block: ExpertBlock, total: Activations) -> None:
        device = self._context.settings.device
        block = block.to(device, self._context.settings.dtype)
        for start, stop in self.batches(stream):
            first, last = stream.first_token(start), stream.first_token(stop)
            x, expert, weight = (part.to(device) for part in routed.read(first, last))
            out = total.read(first, last).to(device, copy=True)
            with products_in(self._context.settings.products):
                experts_forward((x, expert, weight), sort_by_expert(expert, routed.num_experts), block, out)
            total.write(first, out)
