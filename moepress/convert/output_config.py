"""The output's ``config.json``: the source's, with the quantization it now has and no trace of the one it had."""

from __future__ import annotations

import copy
from typing import Any

from moepress.convert.decide import FP8_KINDS, Decision
from moepress.convert.plan import ConversionPlan
from moepress.errors import PlanRefused
from moepress.formats.checkpoint import Checkpoint
from moepress.formats.families import Component, text_config
from moepress.formats.quantization_config import (
    Linears,
    Stored,
    build_quantization_config,
    check_quantization_config,
    ignore_list,
    parse_source_quantization,
)
from moepress.formats.runtime_contract import contract_for

_SERVER_FIELDS = ("quantization_config", "compression_config")
"""Fields of a source's configuration, at the top or in its text part, that describe the source's own storage."""


def output_config(checkpoint: Checkpoint, plan: ConversionPlan) -> dict[str, Any]:
    """The configuration of the converted checkpoint, checked module by module against what the files hold.

    Raises:
        CheckpointError: some module would be read otherwise than it is stored.
    """
    config = copy.deepcopy(checkpoint.config)
    if not any(decision.action == "quantize" for decision in plan.decisions.values()):
        return config  # experts that were INT4 already travel with the description they came with
    for part in (config, text_config(plan.family, config)):
        for field in _SERVER_FIELDS:
            part.pop(field, None)  # type: ignore[attr-defined]
    config["quantization_config"] = quantization_config(checkpoint, plan)
    return config


def quantization_config(checkpoint: Checkpoint, plan: ConversionPlan) -> dict[str, Any]:
    """The compressed-tensors description of the plan's output in the plan's layout."""
    stored = stored_modules(plan.decisions)
    layers = int(text_config(plan.family, checkpoint.config)["num_hidden_layers"])
    contract = contract_for(plan.recipe.serving.server, plan.recipe.serving.version, plan.family.key)
    config = build_quantization_config(
        layout=plan.layout,  # type: ignore[arg-type]
        group_size=plan.recipe.weights.group_size,
        ignore=ignore_list(
            [name for name, kind in stored.items() if kind == "dense"],
            [name for name, kind in stored.items() if kind != "dense"],
            num_layers=layers,
        ),
        linears=_linears(checkpoint, plan) if plan.layout != "bf16_rest" else None,
    )
    check_quantization_config(config, stored, num_layers=layers, built_dense=contract.built_dense)
    return config


def stored_modules(decisions: dict[str, Decision]) -> dict[str, Stored]:
    """Every linear module and how the output stores it."""
    modules: dict[str, Stored] = {}
    for name, decision in decisions.items():
        identity, stored = decision.identity, decision.stored
        if len(stored.shape) != 2 or identity.projection is None or identity.component is Component.EMBEDDING:
            continue
        kind: Stored = "dense"
        if decision.action == "quantize" or stored.kind == "int4_packed":
            kind = "int4"
        elif decision.action == "keep" and stored.kind in FP8_KINDS:
            kind = "fp8"
        modules[name.removesuffix(".weight")] = kind
    return modules


def _linears(checkpoint: Checkpoint, plan: ConversionPlan) -> Linears:
    """How the kept FP8 weights are stored; one way for all of them, since one group describes them.

    Raises:
        PlanRefused: FP8 weights of two kinds.
    """
    kinds = {}
    for name, decision in plan.decisions.items():
        if decision.action == "keep" and decision.stored.kind in FP8_KINDS:
            kinds.setdefault((decision.stored.kind, decision.stored.block), name)
    if len(kinds) > 1:
        examples = "; ".join(f"{name} is {kind} {block or ''}".strip() for (kind, block), name in kinds.items())
        raise PlanRefused(
            f"the FP8 weights to keep are stored in {len(kinds)} ways, and one config group describes them: {examples}",
            hint="--set rest.attention=bf16 (and rest.shared_experts, rest.dense_mlp, rest.indexer, mtp.rest)",
        )
    (kind, block), name = next(iter(kinds.items()))
    if kind == "fp8_tensor":
        raise PlanRefused(f"FP8 with one scale per tensor cannot be kept: {name}", hint="--set rest.attention=bf16 …")
    return Linears(block, parse_source_quantization(checkpoint.config).scale_fmt)
