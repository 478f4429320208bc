"""What becomes of every weight, decided from names and headers before any byte is read.

Each logical weight of the source gets exactly one :class:`Decision`, a value with its reason:

    quantize  → integers by the recipe
    keep      → the source's bytes, unchanged (FP8 codes with their scale, packed INT4, BF16, F32 …)
    bf16      → FP8 decoded and rounded once to BF16
    rescale   → times AWQ's powers of two, in BF16 or F32 (``weights.awq.norm``): the norm before the experts and its readers

A weight that no rule covers is an error, and so is a recipe that quantizes nothing: silence is how other tools lost layers.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import Literal

from moepress.convert.kv.fold import Fold
from moepress.errors import PlanRefused
from moepress.formats.checkpoint import Checkpoint
from moepress.formats.families import Component, Family, Identity, classify_all
from moepress.formats.storage import StoredWeight
from moepress.recipe import Recipe

Action = Literal["quantize", "keep", "bf16", "rescale"]

EXPERTS_NORM = "post_attention_layernorm.weight"
"""Every family's name of the norm that feeds router, shared and routed experts."""

FP8_KINDS = frozenset({"fp8_block", "fp8_channel", "fp8_tensor"})

_ALWAYS_KEPT = {
    Component.ROUTER: "router: rounding it would send tokens to other experts",
    Component.NORM: "norm: vectors are not quantized",
    Component.EMBEDDING: "embedding: always as in the source",
    Component.LM_HEAD: "output head: always as in the source",
    Component.VISION: "vision tower: always as in the source",
    Component.PROJECTOR: "vision projector: always as in the source",
}


@dataclass(frozen=True, slots=True)
class Decision:
    """One weight's fate: ``action`` and the ``reason`` a person would want to read.

    ``fold``: a KV scale, powers of two by row, that goes into a weight that is kept or becomes BF16; known after calibration.
    """

    stored: StoredWeight
    identity: Identity
    action: Action
    reason: str
    fold: Fold | None = None


def decide(
    checkpoint: Checkpoint, storage: dict[str, StoredWeight], family: Family, recipe: Recipe
) -> dict[str, Decision]:
    """One decision for every logical weight of ``storage``.

    Raises:
        CheckpointError: a name the family does not know (from ``classify``).
        PlanRefused: nothing would be quantized, or the recipe is for another family.
    """
    if family.key not in recipe.families:
        raise PlanRefused(
            f"recipe {recipe.name!r} is for {', '.join(recipe.families)}; this checkpoint is {family.key}",
            where=checkpoint.location,
            hint="moepress recipes list",
        )
    identities = classify_all(family, checkpoint.config, storage)
    decisions = {}
    for name, stored in storage.items():
        main = stored.parts.get("weight") or stored.parts["packed"]
        action, reason = rule(stored.kind, main.dtype, stored.shape, identities[name], recipe)
        decisions[name] = Decision(stored, identities[name], action, reason)
    if not recipe.keeps_experts:  # then KV scales have to be folded, which the plan knows
        _refuse_nothing_to_do(checkpoint, decisions)
    if recipe.smooths_norms:
        layers = {d.identity.layer for d in decisions.values() if d.action == "quantize"}
        for name, d in decisions.items():
            if d.identity.layer in layers and (
                changed := rescaling_rule(name, d.stored.kind, d.stored.shape, d.identity)
            ):
                decisions[name] = replace(d, action=changed[0], reason=changed[1])
    return decisions


def rule(kind: str, dtype: str, shape: tuple[int, ...], identity: Identity, recipe: Recipe) -> tuple[Action, str]:
    """The recipe's word on one weight and the reason; the first rule that fits wins.

    Args:
        kind: how the source stores it (`StoredWeight.kind`).
        dtype: of the stored numbers, for the reason.
        shape: logical.
    """
    if kind == "int4_packed":
        return "keep", "packed INT4 in the source already: carried bit for bit"
    if identity.component is Component.ROUTED_EXPERT and len(shape) == 2:
        return _expert_rule(kind, identity, recipe)
    if kind not in FP8_KINDS:
        return "keep", _ALWAYS_KEPT.get(identity.component, f"{identity.component.value}: {dtype} in the source")
    wish, field = _wish(identity, recipe)
    if wish == "bf16":
        return "bf16", f"{field}: bf16"
    return "keep", f"{field}: source"


def rescaling_rule(name: str, kind: str, shape: tuple[int, ...], identity: Identity) -> tuple[Action, str] | None:
    """What ``weights.awq.norm`` makes of a weight of a layer whose experts are quantized; None: nothing.

    FP8 blocks and rows have no room for a factor per column, so FP8 readers become BF16; a shared expert's three matrices
    do so together, because servers load it as one module.

    Args:
        name: the weight's.
        kind: how the source stores it.
        shape: logical.

    Raises:
        PlanRefused: a shared expert that is packed INT4 and would have to be rescaled.
    """
    if identity.component is Component.NORM and name.endswith(EXPERTS_NORM):
        return "rescale", "weights.awq.norm: the norm ÷ s"
    if identity.component is Component.ROUTER and len(shape) == 2:
        return "rescale", "weights.awq.norm: router × s"
    if identity.component is not Component.SHARED_EXPERT or len(shape) != 2:
        return None
    if kind == "int4_packed":
        raise PlanRefused(
            "weights.awq.norm would have to rescale a shared expert that is packed INT4",
            where=name,
            hint="--set weights.awq.norm=false",
        )
    if identity.projection != "down_proj":
        return "rescale", "weights.awq.norm: shared expert × s"
    return ("bf16", "weights.awq.norm: beside gate and up, which FP8 cannot hold") if kind in FP8_KINDS else None


def _expert_rule(kind: str, identity: Identity, recipe: Recipe) -> tuple[Action, str]:
    if recipe.keeps_experts:
        return "keep", "weights.algorithm: keep"
    if not identity.is_mtp or recipe.mtp.experts == "quantize":
        return "quantize", f"routed expert: INT{recipe.weights.num_bits}"
    if recipe.mtp.experts == "bf16" and kind in FP8_KINDS:
        return "bf16", "mtp.experts: bf16"
    return "keep", f"mtp.experts: {recipe.mtp.experts}"


def _wish(identity: Identity, recipe: Recipe) -> tuple[str, str]:
    """The recipe's word on an FP8 weight that is not a routed expert."""
    if identity.is_mtp:
        return recipe.mtp.rest, "mtp.rest"
    fields = {
        Component.ATTENTION: (recipe.rest.attention, "rest.attention"),
        Component.INDEXER: (recipe.rest.indexer, "rest.indexer"),
        Component.SHARED_EXPERT: (recipe.rest.shared_experts, "rest.shared_experts"),
        Component.DENSE_MLP: (recipe.rest.dense_mlp, "rest.dense_mlp"),
    }
    return fields.get(identity.component, ("source", f"{identity.component.value}"))


def _refuse_nothing_to_do(checkpoint: Checkpoint, decisions: dict[str, Decision]) -> None:
    """A run that would change no expert is a mistake, unless the experts are packed INT4 already and are carried as they are."""
    if any(d.action == "quantize" or d.stored.kind == "int4_packed" for d in decisions.values()):
        return
    kinds = Counter(f"{d.identity.component.value} {d.stored.kind}" for d in decisions.values())
    raise PlanRefused(
        f"nothing to quantize: no routed expert was found ({', '.join(f'{n} {kind}' for kind, n in kinds.most_common(5))})",
        where=checkpoint.location,
        hint=f"moepress inspect {checkpoint.location}",
    )
