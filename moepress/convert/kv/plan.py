"""What is planned for KV scales before anything is measured: how they are handed over, for which layers, and why.

    emission     asks the recipe, then the runtime contract; what the contract says is inert or harmful is refused
    layers       every layer of the checkpoint that has attention, the MTP layers too (the draft model caches as well)
    left         cached tensors that folding cannot reach in this storage, with the reason
    tensors      for ``checkpoint``: the scales that will be written, under the names that the server reads

Which weights are folded, and by how much, is only known after calibration; which may be is known here. The values are
fixed by what the resume key holds: source, calibration text, recipe and this plan.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from moepress.convert.decide import Decision
from moepress.convert.kv.fold import AttentionShape, layer_folds, straddled
from moepress.convert.kv.taken import OPTION, TakenScales
from moepress.convert.layout import OutputTensor
from moepress.errors import PlanRefused
from moepress.formats.families import Family, text_config
from moepress.formats.kv_contract import SCALE_ENDINGS, KvEmission
from moepress.formats.runtime_contract import Contract, contract_for
from moepress.recipe import Recipe

ATTENTION = ".self_attn."


@dataclass(frozen=True)
class KvPlan:
    """KV scales of a conversion, before calibration.

    Attributes:
        emission: how scales are handed over.
        reason: why that.
        shape: of the model's attention.
        layers: indices of the layers to measure; empty for ``none``.
        left: cached tensor -> why it keeps the scale 1.0 in this output.
        tensors: (layer, cached tensor) -> the scale's tensor, for ``checkpoint``.
        taken: scales of another output, used as they are; None: they are measured.
    """

    emission: KvEmission
    reason: str
    shape: AttentionShape
    layers: tuple[int, ...] = ()
    left: Mapping[str, str] = field(default_factory=dict)
    tensors: Mapping[tuple[int, str], OutputTensor] = field(default_factory=dict)
    taken: TakenScales | None = None

    def as_json(self) -> dict[str, Any]:
        """For the plan file and the report."""
        return {
            "emission": self.emission,
            "reason": self.reason,
            "layers": list(self.layers),
            "left": dict(self.left),
            "tensors": [tensor.name for tensor in self.tensors.values()],
        }

    def key(self) -> list[Any]:
        """What of it decides bytes: part of the resume key."""
        key = [self.emission, list(self.layers), sorted(self.left)]
        return key if self.taken is None else [*key, self.taken.digest()]

    def lines(self, *, own_pass: bool) -> list[str]:
        """What ``plan`` says about it. ``own_pass``: nothing else in the conversion runs the model."""
        if self.emission == "none":
            return [f"KV scales: none ({self.reason})"]
        how = {
            "folded": "powers of two in the weights on both sides of the cache, where it pays",
            "checkpoint": f"{len(self.tensors)} tensors in the files, kv_cache_scheme in config.json",
        }[self.emission]
        if self.taken is not None:
            return [f"KV scales: {self.emission}: {how}; {len(self.layers)} layers, as in {self.taken.place}"]
        cost = "; this takes a pass of its own over the source model, on top of the time below" if own_pass else ""
        lines = [f"KV scales: {self.emission}: {how}; {len(self.layers)} layers to measure{cost} ({self.reason})"]
        return lines + [f"KV scales: {name} stays at 1.0: {why}" for name, why in self.left.items()]


def emission_for(recipe: Recipe, contract: Contract, taken: TakenScales | None = None) -> tuple[KvEmission, str]:
    """How KV scales are handed over, and why.

    Args:
        taken: those of another output, which then decide.

    Raises:
        PlanRefused: the recipe, or the other output, asks for what this server drops or gets wrong.
    """
    wish, server = recipe.kv_cache.scales, f"{contract.server} {contract.version}"
    scales = contract.kv_scales
    if taken is not None:
        if wish not in ("auto", taken.emission):
            raise PlanRefused(
                f"the recipe wants KV scales that are {wish}, and those of {taken.place} are {taken.emission}",
                where=OPTION,
                hint=f"--set kv_cache.scales={taken.emission}",
            )
        if (refusal := scales.refusal(taken.emission)) is not None:
            raise PlanRefused(
                f"KV scales of {taken.place} are {taken.emission}, which does not work with {server} and "
                f"{contract.family}: {refusal}",
                where=OPTION,
            )
        return taken.emission, "as in the other side of the pair"
    if wish != "auto":
        if (refusal := scales.refusal(wish)) is not None:
            allowed = [other for other in ("folded", "checkpoint", "none") if scales.refusal(other) is None]  # type: ignore[arg-type]
            raise PlanRefused(
                f"kv_cache.scales: {wish} does not work with {server} and {contract.family}: {refusal}",
                where="kv_cache.scales",
                hint=f"--set kv_cache.scales={allowed[0]}",
            )
        return wish, f"kv_cache.scales: {wish}"
    if scales.emission == "none":
        return "none", f"{server}, {contract.family}: {scales.refusal('folded') or scales.evidence}"
    if not recipe.calibrated and not recipe.keeps_experts:
        return "none", "rounding needs no calibration pass; --set kv_cache.scales=folded or =checkpoint adds one"
    effect = {
        "used": "the server applies k_scale and v_scale from the files",
        "inert": "the server ignores scales in the files",
        "wrong unless 1.0": "the server would misapply scales in the files",
        "not verified": "what the server does with scales in the files is not verified",
    }[scales.effect]
    return scales.emission, f"{server}, {contract.family}: {effect}"


def reads_calibration_text(family: Family, recipe: Recipe, taken: TakenScales | None = None) -> bool:
    """The conversion needs calibration samples: for its algorithm, or for KV scales alone.

    Args:
        taken: KV scales of another output, which need none.

    Raises:
        PlanRefused: as `emission_for`, or no contract for this server and family.
    """
    contract = contract_for(recipe.serving.server, recipe.serving.version, family.key)
    return recipe.calibrated or (taken is None and emission_for(recipe, contract)[0] != "none")


def plan_kv(
    config: Mapping[str, Any],
    family: Family,
    recipe: Recipe,
    contract: Contract,
    decisions: Mapping[str, Decision],
    taken: TakenScales | None = None,
) -> KvPlan:
    """Plans KV scales from names and shapes.

    Args:
        config: the source's config.json.
        decisions: of every weight.
        taken: scales of another output.

    Raises:
        PlanRefused: as `emission_for`; the source brings scales of its own; what was taken does not fit these weights;
            or the experts are kept and there is nothing to fold, so that the output would be the source.
    """
    emission, reason = emission_for(recipe, contract, taken)
    if recipe.keeps_experts and (emission == "none" or (taken is not None and taken.folds_nothing)):
        raise nothing_to_fold(
            f"no KV scale is handed over ({reason})" if taken is None else f"{taken.place} folds none"
        )
    shape = AttentionShape.of(family.attention, text_config(family, config))
    if emission == "none":
        return KvPlan(emission, reason, shape)
    brought = [name for name in decisions if name.endswith(SCALE_ENDINGS)]
    if brought:
        raise PlanRefused(
            f"the source has {len(brought)} KV scales of its own, the first {brought[0]}; they would not fit new ones",
            where="kv_cache.scales",
            hint="--set kv_cache.scales=none",
        )
    attention = attention_weights(decisions)
    layers = tuple(sorted(attention))
    if emission == "folded":
        left = _left(shape, attention)
        if taken is not None:
            _check_taken(taken, shape, layers, left)
        return KvPlan(emission, reason, shape, layers, left, taken=taken)
    if not any(decision.action == "quantize" for decision in decisions.values()):
        raise PlanRefused(
            "scales in the files need a quantization_config of ours, and nothing is quantized here",
            where="kv_cache.scales",
            hint="--set kv_cache.scales=folded" if recipe.keeps_experts else "--set kv_cache.scales=none",
        )
    if taken is not None:
        _check_taken(taken, shape, layers, {})
    tensors = {}
    for layer in layers:
        prefix = next(iter(attention[layer].values())).stored.name.partition(ATTENTION)[0] + ATTENTION
        for cached, suffix in contract.kv_scales.written:
            tensors[layer, cached] = OutputTensor(prefix + suffix, "F32", (1,))
    return KvPlan(emission, reason, shape, layers, tensors=tensors, taken=taken)


def nothing_to_fold(why: str) -> PlanRefused:
    """What is raised where experts are kept and no KV scale changes a weight: a copy is no conversion."""
    return PlanRefused(
        f"nothing to do: experts are kept, and {why}; the output would be the source",
        where="weights.algorithm",
        hint="the source itself fills such a cache: moepress serve --prefill SRC --decode OUT",
    )


def _check_taken(taken: TakenScales, shape: AttentionShape, layers: tuple[int, ...], left: Mapping[str, str]) -> None:
    """Another output's scales fit these weights: the same layers and cached tensors, and room for every fold."""
    problems = []
    if set(taken.layers) != set(layers):
        odd = sorted(set(taken.layers) ^ set(layers))
        problems.append(f"layers {odd[:5]} have attention in one of the two alone")
    names = {name for layer in taken.layers.values() for name in layer.scale}
    if names != {*shape.cached}:
        problems.append(f"it has scales for {', '.join(sorted(names))}; this model caches {', '.join(shape.cached)}")
    for name, why in left.items():
        there = [index for index, layer in taken.layers.items() if layer.scale.get(name, 1.0) != 1.0]
        if there:
            problems.append(f"it folds {name} in layer {there[0]}, which these weights cannot: {why}")
    if problems:
        raise PlanRefused(
            f"the KV scales of {taken.place} do not fit:\n  " + "\n  ".join(problems),
            where=OPTION,
            hint="convert this side first, and the other with --same-kv-as this one",
        )


def attention_weights(decisions: Mapping[str, Decision]) -> dict[int, dict[str, Decision]]:
    """layer -> name inside ``self_attn`` -> decision."""
    found: dict[int, dict[str, Decision]] = {}
    for name, decision in decisions.items():
        _, inside, rest = name.partition(ATTENTION)
        if inside and decision.identity.layer is not None:
            found.setdefault(decision.identity.layer, {})[rest] = decision
    return found


def _left(shape: AttentionShape, attention: Mapping[int, Mapping[str, Decision]]) -> dict[str, str]:
    """Cached tensors that cannot be folded into these weights: asked of every layer, with two exponents that differ."""
    left: dict[str, str] = {}
    for name in shape.cached:
        for layer, weights in attention.items():
            for inner, fold in layer_folds(shape, weights, {name: 1}).items():
                decision = weights[inner]
                if decision.action == "keep" and (why := straddled(decision.stored, fold)) is not None:
                    left.setdefault(name, f"{why} (layer {layer}); --set rest.attention=bf16 would allow it")
    return left
