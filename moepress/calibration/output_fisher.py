"""How much an error in each layer's output costs the model's predictions: one backward pass, layer by layer.

    F_l [C, C] = mean over tokens of δ_l δ_lᵀ,    δ_l = ∂/∂h_l Σ_t log p(y_t),    y_t drawn from p, the model's own prediction

h_l [T, C] is what layer l leaves in the residual stream. With labels drawn from the model, E[δ δᵀ] is the Fisher information:
the curvature of the KL divergence, KL(p ‖ p + Δ) ≈ ½ mean eᵀ F e for an error e in h_l. Sequences stay whole, so δ_t holds
what token t does to all tokens after it, through attention, routers' weights and all.

    forward    as `layer_runner` does it, but every layer's input is kept: [N, S, C] a layer, in files beyond the budget
    head       δ = through the final norm from head · (onehot(y) − p), `ROWS` tokens of logits at a time
    backward   last layer to first: F_l += δ δᵀ;  δ ← δ · ∂h_l/∂h_{l−1}, by torch's autograd through the one layer in memory

A layer's routed experts come in blocks, so their part is summed first: every expert's gradient by the tapped x and router weights,
written out (`experts_gradient`); then one pass through the rest of the layer (attention, norms, router, shared experts) with
what has come together. What a router does not choose has no gradient, as in training.

Held at once: one layer, one block of experts, for each thread one batch with its graph. How experts are cut into blocks changes
no bit. Labels are drawn by a generator of their own for every sample. There is no padding in calibration samples.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

import torch
from torch.nn import functional

from moepress.calibration.activations import Activations
from moepress.calibration.expert_tap import ExpertOrder, RoutedTokens, TapInputs, add_rows, each_expert, sort_by_expert
from moepress.calibration.layer_fill import ExpertBlock
from moepress.calibration.layer_runner import OpenLayer
from moepress.calibration.stream import Stream
from moepress.calibration.streamed_model import ROWS, StreamedModel, heads_at_once
from moepress.errors import QuantizeError
from moepress.quantize.hessian import add_gram, add_side_by_side, all_finite, mirror
from moepress.quantize.products import products_in
from moepress.quantize.row_metric import swiglu_slopes
from moepress.quantize.side_by_side import in_windows, side_by_side


@dataclass(frozen=True)
class OutputFisher:
    """One layer's.

    Attributes:
        layer: its index.
        fisher: float32 [C, C], F; positive semidefinite.
        tokens: that it is the mean of.
    """

    layer: int
    fisher: torch.Tensor
    tokens: int


def output_fishers(
    model: StreamedModel,
    token_ids: torch.Tensor,
    layers: Collection[int],
    *,
    seed: int = 0,
) -> Iterator[OutputFisher]:
    """F of the outputs of some layers of the main model, last to first.

    Args:
        model: the source.
        token_ids: [N, S] int64, samples without padding.
        layers: of which; the backward pass ends at the first of them.
        seed: of the labels.

    Raises:
        QuantizeError: a gradient that is not finite, named by layer.
    """
    first = min(layers)
    stream, inputs = model.embed(token_ids), {}
    for index in range(model.num_layers):
        if index > first:
            inputs[index] = stream.copied(model.scratch)
        model.run_layer(index, stream)
    gradient = _at_the_head(model, stream, seed)
    stream.release()
    for index in range(model.num_layers - 1, first - 1, -1):
        if index in layers:
            yield _fisher(index, gradient, model)
        if index > first:
            with model.open_layer(index) as layer:
                _through_layer(layer, inputs.pop(index), gradient, model)
    gradient.release()


def _at_the_head(model: StreamedModel, stream: Stream, seed: int) -> Activations:
    """δ of the last layer's output, [N, S, C] float32; `stream` as that layer left it."""
    gradient = model.scratch.allocate(stream.hidden.shape, torch.float32)
    head, norm = model.head(), model.final_norm()

    def one(sample: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed + sample)
        hidden = model.settings.on_device(stream.hidden.read(sample, sample + 1))[0]
        parts = []
        for rows in torch.split(hidden, ROWS):
            leaf = rows.detach().clone().requires_grad_(True)
            with torch.enable_grad():
                normed = norm(leaf)
            p = (normed.detach() @ head.T).float().softmax(-1)
            drawn = torch.multinomial(p.cpu(), 1, generator=generator).to(p.device)
            towards = p.neg_().scatter_add_(1, drawn, torch.ones_like(drawn, dtype=p.dtype))
            parts.append(torch.autograd.grad(normed, leaf, towards.to(head.dtype) @ head)[0].float())
        return torch.cat(parts)[None]

    at_once = heads_at_once(head.device)
    for samples in in_windows(range(len(stream.hidden)), at_once):
        for sample, made in zip(samples, side_by_side(one, samples, at_once), strict=True):
            gradient.write(sample, made)
    return gradient


def _fisher(index: int, gradient: Activations, model: StreamedModel) -> OutputFisher:
    samples, length, hidden = gradient.shape
    total = torch.zeros(hidden, hidden, device=model.settings.device)
    for start, stop in model.settings.batches(samples):
        add_side_by_side(add_gram, total, gradient.read(start, stop).reshape(-1, hidden).to(total.device))
    if not all_finite(total):
        raise QuantizeError(f"layer {index}: the gradient of its output is not finite", where="output_fishers")
    mirror(total)
    return OutputFisher(index, total / (samples * length), samples * length)


def _through_layer(layer: OpenLayer, stream: Stream, gradient: Activations, model: StreamedModel) -> None:
    """`gradient` by the layer's output becomes that by its input. `stream`: its input; released."""
    kept = stream.copied(model.scratch) if layer.is_sparse else stream
    routed = layer.dense_part(kept) if layer.is_sparse else None
    through = () if routed is None else _through_experts(layer, routed, gradient, model)
    if kept is not stream:
        kept.release()
    length = stream.hidden.shape[1]

    def one(batch: tuple[int, int]) -> torch.Tensor:
        rows = (batch[0] * length, batch[1] * length)
        towards = (gradient.read(*batch), *(part.read(*rows) for part in through))
        return layer.dense_gradient(*layer.read_batch(stream, *batch), towards)

    for (start, _), made in layer.side_by_side(one, layer.dense_batches(stream)):
        gradient.write(start, made)
    stream.release()
    for part in (*through, *([] if routed is None else [routed])):
        part.release()


def _through_experts(
    layer: OpenLayer, routed: RoutedTokens, gradient: Activations, model: StreamedModel
) -> tuple[Activations, Activations]:
    """The gradient by what the experts were given, [T, C] by x and [T, K] by router weights, float32."""
    by_x = model.scratch.allocate(routed.x.shape, torch.float32)
    by_weight = model.scratch.allocate(routed.weight.shape, torch.float32)
    samples, length, hidden = gradient.shape
    settings = model.settings
    for experts in layer.expert_blocks():
        block = layer.load_experts(experts)
        for start, stop in settings.batches(samples):
            rows = (start * length, stop * length)
            x, expert, weight = (part.to(settings.device) for part in routed.read(*rows))
            order = sort_by_expert(expert, routed.num_experts)
            arriving = gradient.read(start, stop).reshape(-1, hidden).to(settings.device)
            sums = [part.read(*rows).to(settings.device, copy=True) for part in (by_x, by_weight)]
            with products_in(settings.products):
                experts_gradient((x, expert, weight), order, block, arriving, *sums)
            for part, total in zip((by_x, by_weight), sums, strict=True):
                part.write(rows[0], total)
    return by_x, by_weight


def experts_gradient(
    inputs: TapInputs,
    order: ExpertOrder,
    block: ExpertBlock,
    arriving: torch.Tensor,
    by_x: torch.Tensor,
    by_weight: torch.Tensor,
) -> None:
    """The gradient through `experts_forward`, expert after expert, so that it does not depend on how they are cut into blocks.

    Args:
        inputs, order, block: as `experts_forward` takes them.
        arriving: [t, C], the gradient by the experts' summed output.
        by_x: [t, C] float32, added to.
        by_weight: [t, K] float32, added to.
    """
    x, _, weight = inputs

    def one(slot: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        tokens, slots = order.of(block.first + slot)
        gate_up, down = block.gate_up[slot], block.down[slot]
        gate, up = functional.linear(x[tokens].to(gate_up.dtype), gate_up).chunk(2, dim=-1)
        towards_inner = arriving[tokens].to(down.dtype) @ down
        through = (functional.silu(gate) * up * towards_inner).float().sum(-1)
        slopes = swiglu_slopes(gate, up) * (towards_inner * weight[tokens, slots, None].to(down.dtype)).repeat(1, 2)
        return tokens, slots, through, (slopes @ gate_up).float()

    for made in each_expert(one, order, block):
        for tokens, slots, through, _ in made:
            by_weight[tokens, slots] += through
        add_rows(by_x, [(tokens, rows) for tokens, _, _, rows in made])
