"""The name plan: every output tensor, its shard, and its place in the shard, made once and never derived again.

All sizes are known from headers (INT4 words, BF16 scales and shapes depend on the source's shape alone), so shard names
with their final count exist before any work starts; writers only fill them in. Rules:

* the quantized experts of a layer fill shards of their own, split evenly when one is not enough;
  in the order of experts, gate before up before down, which is the order in which calibration finishes them;
  what calibration rescales for them (``weights.awq.norm``) comes first;
* everything else fills shards in the source's order;
* inside a shard, a weight's tensors stay together: ``weight_packed``, ``weight_scale``, ``weight_shape``.

For one quantized weight [R, C] with group size g (compressed-tensors, symmetric pack-quantized):

    weight_packed  int32 [R, ceil(C / 8)]     weight_scale  BF16 [R, C / g]     weight_shape  int64 [2] = (R, C)
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from moepress.convert.decide import FP8_KINDS, Action, Decision
from moepress.errors import PlanRefused
from moepress.formats.dtypes import nbytes
from moepress.recipe import MAX_SHARD_BYTES, Recipe

PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
"""Order of an expert's matrices in a shard."""


@dataclass(frozen=True, slots=True)
class OutputTensor:
    """One tensor of the output: safetensors name, dtype and shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return nbytes(self.dtype, self.shape)


@dataclass(frozen=True, slots=True)
class WeightPlan:
    """One logical weight of the source and the tensors it becomes, in file order."""

    name: str
    action: Action
    outputs: tuple[OutputTensor, ...]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.outputs)


@dataclass(frozen=True, slots=True)
class ShardPlan:
    """One output shard: the unit of work. ``label`` is for people; ``layer`` is set where it holds a layer's experts.

    ``added``: tensors that come from no weight of the source (KV scales).
    """

    name: str
    label: str
    weights: tuple[WeightPlan, ...]
    layer: int | None = None
    added: tuple[OutputTensor, ...] = ()

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def tensors(self) -> tuple[OutputTensor, ...]:
        return (*(tensor for weight in self.weights for tensor in weight.outputs), *self.added)


def plan_outputs(decision: Decision, recipe: Recipe, *, fp8_scale_suffix: str | None) -> WeightPlan:
    """The tensors one weight becomes.

    Args:
        fp8_scale_suffix: how the target layout names the scale of a kept FP8 weight
            (``weight_scale_inv`` or ``weight_scale``); None: as the source does.
    """
    stored, action = decision.stored, decision.action
    if action == "quantize":
        return WeightPlan(stored.name, action, _packed(stored.name, stored.shape, recipe))
    if action == "bf16":
        return WeightPlan(stored.name, action, (OutputTensor(stored.name, "BF16", stored.shape),))
    if action == "rescale":
        dtype = "F32" if stored.parts["weight"].dtype == "F32" else "BF16"
        return WeightPlan(stored.name, action, (OutputTensor(stored.name, dtype, stored.shape),))
    if stored.kind in FP8_KINDS:
        weight, scale = stored.parts["weight"], stored.parts["scale"]
        scale_name = f"{_module(stored.name)}.{fp8_scale_suffix}" if fp8_scale_suffix else scale.name
        scale_dtype = "F32" if stored.scale_encoding == "e8m0" else scale.dtype
        scale_shape = (scale.shape[0], 1) if stored.kind == "fp8_channel" and len(scale.shape) == 1 else scale.shape
        first = (
            OutputTensor(weight.name, weight.dtype, weight.shape),
            OutputTensor(scale_name, scale_dtype, scale_shape),
        )
        rest = tuple(
            OutputTensor(r.name, r.dtype, r.shape)
            for role, r in stored.parts.items()
            if role not in ("weight", "scale")
        )
        return WeightPlan(stored.name, action, first + rest)
    return WeightPlan(stored.name, action, tuple(OutputTensor(r.name, r.dtype, r.shape) for r in stored.parts.values()))


def _packed(name: str, shape: tuple[int, ...], recipe: Recipe) -> tuple[OutputTensor, ...]:
    rows, columns = shape
    group = recipe.weights.group_size if recipe.weights.group_size > 0 else columns
    if columns % group:
        raise PlanRefused(
            f"{columns} columns are not a multiple of the group size {group}",
            where=name,
            hint="--set weights.group_size=32",
        )
    module = _module(name)
    return (
        OutputTensor(f"{module}.weight_packed", "I32", (rows, math.ceil(columns / 8))),
        OutputTensor(f"{module}.weight_scale", "BF16", (rows, columns // group)),
        OutputTensor(f"{module}.weight_shape", "I64", (2,)),
    )


def _module(name: str) -> str:
    return name.removesuffix(".weight")


def assign_shards(
    weights: Sequence[tuple[Decision, WeightPlan]], *, shard_size: int, kv_scales: Sequence[OutputTensor] = ()
) -> tuple[ShardPlan, ...]:
    """Puts every weight into a shard and names the shards with five digits, ``model-00001-of-00042.safetensors``.

    Args:
        weights: in the source's order.
        shard_size: upper bound of a shard's tensor bytes; a single larger weight gets a shard of its own.
        kv_scales: tensors of KV scales, which get a shard of their own, the last one.

    Raises:
        PlanRefused: one weight alone is too large for any shard the Hub takes.
    """
    for _, plan in weights:
        if plan.nbytes >= MAX_SHARD_BYTES:
            raise PlanRefused(
                f"one weight needs {plan.nbytes:,} bytes; the Hub takes files below 50 GB", where=plan.name
            )
    kept = [plan for _, plan in weights if plan.action not in ("quantize", "rescale")]
    layers: dict[int, list[tuple[tuple[int, int], WeightPlan]]] = {}
    for number, (decision, plan) in enumerate(weights):
        identity = decision.identity
        if plan.action == "quantize":
            place = (identity.expert or 0, PROJECTIONS.index(identity.projection or ""))
            layers.setdefault(identity.layer or 0, []).append((place, plan))
        elif plan.action == "rescale":
            layers.setdefault(identity.layer or 0, []).append(((-1, number), plan))
    groups: list[tuple[str, int | None, list[WeightPlan]]]
    groups = [("kept tensors", None, part) for part in _split(kept, shard_size)]
    for layer in sorted(layers):
        ordered = [plan for _, plan in sorted(layers[layer], key=lambda item: item[0])]
        groups += [(f"layer {layer} experts", layer, part) for part in _split(ordered, shard_size)]
    count = len(groups) + bool(kv_scales)
    shards = [
        ShardPlan(f"model-{number:05d}-of-{count:05d}.safetensors", label, tuple(part), layer)
        for number, (label, layer, part) in enumerate(groups, start=1)
    ]
    if kv_scales:
        name = f"model-{count:05d}-of-{count:05d}.safetensors"
        shards.append(ShardPlan(name, "KV scales", (), added=tuple(kv_scales)))
    return tuple(shards)


def _split(weights: Sequence[WeightPlan], limit: int) -> Iterable[list[WeightPlan]]:
    """Cuts a run of weights into the fewest parts that fit, about equally large."""
    total = sum(weight.nbytes for weight in weights)
    target = total / max(1, math.ceil(total / limit))
    part: list[WeightPlan] = []
    size = 0
    for weight in weights:
        if part and (size + weight.nbytes > limit or size >= target):
            yield part
            part, size = [], 0
        part.append(weight)
        size += weight.nbytes
    if part:
        yield part
