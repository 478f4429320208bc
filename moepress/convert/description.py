"""How the output describes itself: the layout, and the ``quantization_config`` that goes with it.

Both are settled while planning. A description is only taken if every linear module of the output would be read the way it
is stored, under every name the server asks for; `formats.quantization_config` proves that.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from moepress.convert.decide import FP8_KINDS, Decision
from moepress.convert.kv.plan import emission_for
from moepress.convert.kv.taken import TakenScales
from moepress.errors import CheckpointError, PlanRefused
from moepress.formats.families import Component, Family, text_config
from moepress.formats.quantization_config import (
    Layout,
    Linears,
    Stored,
    build_quantization_config,
    check_quantization_config,
    ignore_list,
    parse_source_quantization,
)
from moepress.formats.runtime_contract import Contract, contract_for
from moepress.recipe import Recipe

ALL_BF16 = "--set rest.attention=bf16 (and rest.shared_experts, rest.dense_mlp, rest.indexer, mtp.rest)"


@dataclass(frozen=True)
class Description:
    """The layout's name, how it names the scale of a kept FP8 weight (None: as the source does), and the config.

    Layout ``source`` and no config: nothing is quantized here, and the source's own description is carried.
    """

    layout: Layout | Literal["source"]
    fp8_scale_suffix: str | None
    quantization_config: dict[str, Any] | None


def describe(
    config: dict[str, Any],
    family: Family,
    recipe: Recipe,
    decisions: dict[str, Decision],
    taken: TakenScales | None = None,
) -> Description:
    """The first layout that the server takes and that says what the files will hold.

    Args:
        config: the source's config.json.
        taken: KV scales of another output.

    Raises:
        PlanRefused: the recipe's layout, or every layout, cannot describe this output; with the reason for each.
    """
    contract = contract_for(recipe.serving.server, recipe.serving.version, family.key)
    if not any(decision.action == "quantize" for decision in decisions.values()):
        return Description("source", None, None)
    reasons = []
    for layout in _candidates(contract, recipe, decisions):
        support = contract.layout(layout)
        if not support.works:
            reasons.append(
                f"{layout}: {contract.server} {contract.version} does not take it for {family.key} ({support.evidence})"
            )
            continue
        try:
            built = _build(config, family, recipe, decisions, layout, contract, taken)
        except CheckpointError as error:
            reasons.append(f"{layout}: {error.what}")
            continue
        return Description(layout, support.fp8_scale_suffix or "weight_scale", built)
    raise PlanRefused(
        "no quantization layout can describe this output:\n  " + "\n  ".join(reasons),
        where=f"serving.layout={recipe.serving.layout}",
        hint=ALL_BF16,
    )


def _candidates(contract: Contract, recipe: Recipe, decisions: dict[str, Decision]) -> Iterator[Layout]:
    """The recipe's layout alone, or for ``auto``: the contract's default first, then whatever else holds FP8."""
    kept_fp8 = [d for d in decisions.values() if d.action == "keep" and d.stored.kind in FP8_KINDS]
    wish = recipe.serving.layout
    if wish == "bf16_rest" and kept_fp8:
        raise PlanRefused(
            f"layout bf16_rest holds no FP8, but the recipe keeps {len(kept_fp8)} FP8 weights, first {kept_fp8[0].stored.name}",
            where="serving.layout",
            hint=ALL_BF16,
        )
    if wish != "auto":
        yield wish
    elif not kept_fp8:
        yield "bf16_rest"
    else:
        order = dict.fromkeys([contract.default_layout, *(row.layout for row in contract.layouts)])
        yield from (layout for layout in order if layout != "bf16_rest")


def _build(
    config: dict[str, Any],
    family: Family,
    recipe: Recipe,
    decisions: dict[str, Decision],
    layout: Layout,
    contract: Contract,
    taken: TakenScales | None,
) -> dict[str, Any]:
    stored = stored_modules(decisions)
    layers = int(text_config(family, config)["num_hidden_layers"])
    built = build_quantization_config(
        layout=layout,
        group_size=recipe.weights.group_size,
        ignore=ignore_list(
            [name for name, kind in stored.items() if kind == "dense"],
            [name for name, kind in stored.items() if kind != "dense"],
            num_layers=layers,
        ),
        linears=_linears(config, decisions) if layout != "bf16_rest" else None,
        kv_cache_scales=emission_for(recipe, contract, taken)[0] == "checkpoint",
        expert_target=f"re:{family.expert_pattern}",
    )
    check_quantization_config(built, stored, num_layers=layers, built_dense=contract.built_dense)
    return built


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


def _linears(config: dict[str, Any], decisions: dict[str, Decision]) -> Linears:
    """How the kept FP8 weights are stored; one way for all of them, since one group describes them.

    Raises:
        PlanRefused: FP8 weights of two kinds, or of one that no group can describe.
    """
    kinds: dict[tuple[str, tuple[int, int] | None], str] = {}
    for name, decision in decisions.items():
        if decision.action == "keep" and decision.stored.kind in FP8_KINDS:
            kinds.setdefault((decision.stored.kind, decision.stored.block), name)
    if len(kinds) > 1:
        examples = "; ".join(f"{name} is {kind} {block or ''}".strip() for (kind, block), name in kinds.items())
        raise PlanRefused(
            f"the FP8 weights to keep are stored in {len(kinds)} ways, and one config group describes them: {examples}",
            hint=ALL_BF16,
        )
    (kind, block), name = next(iter(kinds.items()))
    if kind == "fp8_tensor":
        raise PlanRefused(
            f"FP8 with one scale per tensor cannot be described beside INT4 experts: {name}", hint=ALL_BF16
        )
    return Linears(block, parse_source_quantization(config).scale_fmt)
