"""Which family a checkpoint is, and what each of its tensors is.

    identify_family(config)                -> Family            by model_type and architectures
    classify(family, config, tensor name)  -> Identity          component, layer, expert, projection, MTP or not

A tensor name is taken apart in this order:

    language_model.model.layers.12.mlp.experts.5.gate_proj.weight_packed
    '------------' wrapper prefix                          '-----------' part of a stored weight
                   '-------------' layer           '---------------' key of the family's table ({expert} for 5)

Several tensors may store one logical weight: codes, scales, shape, zero points. `logical_name` maps each part to the
weight's own name (``….gate_proj.weight``), and classification is that of the weight.

Layers counted from ``num_hidden_layers`` on are MTP (next-token prediction) layers, whatever they contain.

There is no catch-all: a name that is not in the table raises CheckpointError.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from moepress.errors import CheckpointError
from moepress.formats.config_fields import check_fields, required_number
from moepress.formats.family_tables import FAMILIES, Component, Family, Slot

__all__ = [
    "FAMILIES",
    "Component",
    "Family",
    "Identity",
    "canonical_name",
    "classify",
    "classify_all",
    "identify_family",
    "logical_name",
    "mtp_layers",
    "text_config",
]

Config = Mapping[str, Any]

ADD_A_FAMILY = (
    "moepress recipes families lists those it knows; the guide Add a family says how to add one: a table entry and a tiny "
    "test model"
)

PARTS: Mapping[str, str] = {
    "weight": "weight",
    "weight_scale_inv": "scale",
    "weight_scale": "scale",
    "scale": "scale",
    "weight_packed": "packed",
    "weight_shape": "shape",
    "weight_zero_point": "zero_point",
    "weight_g_idx": "g_idx",
    "input_scale": "input_scale",
}
"""Last component of a tensor name -> its role among the tensors that store one weight."""

_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
_EXPERT = re.compile(r"\.experts\.(\d+)\.")
_BLOCK = re.compile(r"\.blocks\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class Identity:
    """What a tensor is.

    Attributes:
        component: the part of the model.
        layer: decoder layer, counted as the checkpoint does; None outside the decoder layers.
        expert: routed expert; None for everything else, and for a fused tensor that holds all experts of a layer.
        projection: ``gate_proj``, ``up_proj``, ``down_proj``, ``q_a_proj``, … whatever the publisher calls it; None for
            norms, embeddings and the router's bias.
        is_mtp: belongs to an MTP layer.
    """

    component: Component
    layer: int | None
    expert: int | None
    projection: str | None
    is_mtp: bool


def identify_family(config: Config) -> Family:
    """The family of a checkpoint, from its ``config.json``.

    Args:
        config: the parsed ``config.json`` (the outer one, also for wrapped vision-language models).

    Raises:
        CheckpointError: neither ``model_type`` nor ``architectures`` is known, or they name different families; a
            field that shapes are made of is no number that it can be (`config_fields`).
    """
    model_type = config.get("model_type")
    published = config.get("architectures") or ()
    if not isinstance(published, list | tuple) or not all(isinstance(name, str) for name in published):
        raise CheckpointError("architectures is not a list of names", where="config.json: architectures")
    architectures = tuple(published)
    by_type = next((family for family in FAMILIES if model_type in family.model_types), None)
    by_architecture = next((family for family in FAMILIES if set(architectures) & set(family.architectures)), None)
    family = by_type or by_architecture
    if family is None:
        known = ", ".join(sorted(name for family in FAMILIES for name in family.model_types))
        raise CheckpointError(
            f"unknown model family: model_type {model_type!r}, architectures {list(architectures)}; known: {known}",
            where="config.json: model_type",
            hint=ADD_A_FAMILY,
        )
    if (by_type and by_architecture and by_type is not by_architecture) or (by_architecture is None and architectures):
        raise CheckpointError(
            f"config.json contradicts itself: model_type {model_type!r} is {family.title}, "
            f"architectures {list(architectures)} is {by_architecture.title if by_architecture else 'unknown'}",
            where="config.json: model_type, architectures",
            hint=f"{family.title} is published with architectures [{family.architectures[0]!r}]; else: {ADD_A_FAMILY}",
        )
    if family.text_field is not None and not isinstance(config.get(family.text_field), Mapping):
        raise CheckpointError(
            f"{family.title} needs the text model's configuration in {family.text_field!r}",
            where=f"config.json: {family.text_field}",
            hint="download config.json again, or give the text model its own architectures and model_type",
        )
    check_fields(config, text_config(family, config))
    return family


def text_config(family: Family, config: Config) -> Config:
    """The configuration of the text model: ``config`` itself, or the part of a wrapper's that holds it."""
    if family.text_field is None:
        return config
    nested: Config = config[family.text_field]
    return nested


def mtp_layers(family: Family, config: Config) -> range:
    """Indices of the MTP layers that the configuration announces: ``range(num_hidden_layers, …)``, possibly empty."""
    text = text_config(family, config)
    first = required_number(text, "num_hidden_layers")
    return range(first, first + (int(text.get("num_nextn_predict_layers") or 0) if family.mtp else 0))


def logical_name(name: str) -> tuple[str, str]:
    """The weight that a tensor stores, and the tensor's part in it.

    ``….down_proj.weight_packed`` -> (``….down_proj.weight``, ``packed``). Any other name is its own weight.
    """
    module, dot, last = name.rpartition(".")
    if dot and last in PARTS:
        return f"{module}.weight", PARTS[last]
    return name, "weight"


def canonical_name(family: Family, name: str) -> str:
    """The name without the wrapper's prefix: ``model.layers.…``, ``lm_head.weight``, ``vision_tower.…``."""
    for published, canonical in family.prefixes:
        if published and name.startswith(published):
            return canonical + name[len(published) :]
    return name


def classify(family: Family, config: Config, name: str) -> Identity:
    """What the tensor is.

    Args:
        family: from `identify_family`.
        config: the parsed ``config.json``.
        name: a tensor's name, or a logical weight's.

    Raises:
        CheckpointError: the name is not in the family's table, or names a layer or expert beyond the configuration's.
    """
    weight, part = logical_name(name)
    path = canonical_name(family, weight)
    text = text_config(family, config)
    in_layer = _LAYER.fullmatch(path)
    if in_layer is None:
        key = _BLOCK.sub(".blocks.{block}.", path, count=1)
        slot = _find(family.top_slots, key, part)
        if slot is None or (path != weight and slot.component in (Component.VISION, Component.PROJECTOR)):
            raise _unknown(family, name)  # the prefix is the text model's own
        return Identity(slot.component, None, None, slot.projection_name, False)

    layer = int(in_layer[1])
    hidden_layers = required_number(text, "num_hidden_layers")
    is_mtp = layer >= hidden_layers
    expert_match = _EXPERT.search(in_layer[2])
    key = _EXPERT.sub(".experts.{expert}.", in_layer[2], count=1)
    slot = _find(family.mtp_slots if is_mtp else family.layer_slots, key, part)
    if slot is None:
        raise _unknown(family, name)
    if is_mtp and layer not in mtp_layers(family, config):
        announced = len(mtp_layers(family, config))
        raise CheckpointError(
            f"layer {layer} is beyond the configuration: num_hidden_layers {hidden_layers}, MTP layers {announced}",
            where=name,
            hint="set num_nextn_predict_layers in config.json to what the checkpoint holds, or remove the extra layer",
        )
    expert = int(expert_match[1]) if expert_match else None
    if expert is not None and expert >= (count := expert_count(text)):
        raise CheckpointError(f"expert {expert} is beyond the configuration's {count} routed experts", where=name)
    return Identity(slot.component, layer, expert, slot.projection_name, is_mtp)


def classify_all(family: Family, config: Config, names: Iterable[str]) -> dict[str, Identity]:
    """`classify` for a whole checkpoint; unknown names are counted and reported together.

    Raises:
        CheckpointError: as `classify`; the message gives the number of unknown names and the first five.
    """
    found: dict[str, Identity] = {}
    problems: list[tuple[str, CheckpointError]] = []
    for name in names:
        try:
            found[name] = classify(family, config, name)
        except CheckpointError as error:
            problems.append((name, error))
    if len(problems) == 1:
        raise problems[0][1]
    if problems:
        examples = ", ".join([name for name, _ in problems[:5]] + ["…"] * (len(problems) > 5))
        raise CheckpointError(
            f"{len(problems)} tensor names do not belong to {family.title}: {examples}",
            where=problems[0][0],
            hint=problems[0][1].hint,
        )
    return found


def expert_count(text: Config) -> int:
    """Routed experts per layer, from the text model's configuration (three names are in use)."""
    for field in ("n_routed_experts", "num_experts", "num_local_experts"):
        if text.get(field) is not None:
            return int(text[field])
    raise CheckpointError(
        "the configuration has no number of routed experts: tried n_routed_experts, num_experts, num_local_experts",
        where="config.json",
        hint="moepress converts mixture-of-experts models only",
    )


def _find(slots: Mapping[str, Slot], key: str, part: str) -> Slot | None:
    """The slot; a scale or packed part is accepted only for a matrix: nothing else is ever stored quantized."""
    slot = slots.get(key)
    return None if slot is not None and part != "weight" and len(slot.shape) != 2 else slot


def _unknown(family: Family, name: str) -> CheckpointError:
    return CheckpointError(f"unknown tensor name for {family.title}: {name}", where=name, hint=ADD_A_FAMILY)
