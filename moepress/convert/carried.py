"""What a source brings along that the server would not read as it is meant: refused while planning.

Packed INT4 and KV scales are carried, not made here, so no rule of the recipe has looked at them:

    zero points             the server's INT4 experts are symmetric
    g_idx (act order)       experts of several ranks need their scales unsplit then
    packed INT4 elsewhere   attention and shared experts are built dense (MLA absorbs kv_b_proj)
    k_scale, v_scale …      dropped without a word, or multiplied on reading and never divided on writing
    kv_cache_scheme         in a description that is carried whole, it turns the FP8 cache on, at a scale of 1.0
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from moepress.convert.decide import Decision
from moepress.errors import PlanRefused
from moepress.formats.families import Component
from moepress.formats.kv_contract import SCALE_ENDINGS
from moepress.formats.quantization_config import parse_source_quantization
from moepress.formats.runtime_contract import Contract

KV_SCALES = SCALE_ENDINGS


def check_carried(config: Mapping[str, Any], decisions: Mapping[str, Decision], contract: Contract) -> None:
    """Holds every carried weight, and a description that is carried with them, against the contract.

    Args:
        config: the source's config.json.

    Raises:
        PlanRefused: with every kind that does not fit, each with a count and up to three names.
    """
    packed = {name: d for name, d in decisions.items() if d.stored.kind == "int4_packed"}
    problems = []
    if contract.symmetric_only:
        problems += _kind(
            "INT4 weights have zero points, and the server's are symmetric",
            (name for name, d in packed.items() if "zero_point" in d.stored.parts),
        )
    problems += _kind(
        f"INT4 weights have an activation order ({contract.act_order_evidence})",
        (name for name, d in packed.items() if "g_idx" in d.stored.parts),
    )
    problems += _kind(
        "INT4 weights are no routed experts, and the server builds those modules dense",
        (name for name, d in packed.items() if d.identity.component is not Component.ROUTED_EXPERT),
    )
    if contract.kv_scales.emission != "checkpoint":
        problems += _kind(
            f"KV scales, whose effect in this server is: {contract.kv_scales.effect} ({contract.kv_scales.evidence})",
            (name for name in decisions if name.endswith(KV_SCALES)),
        )
        carried_whole = not any(d.action == "quantize" for d in decisions.values())
        if carried_whole and parse_source_quantization(config).kv_cache_scheme:
            problems.append("a kv_cache_scheme in config.json: the KV cache would be FP8 at a scale of 1.0")
    if problems:
        raise PlanRefused(
            f"the source holds what {contract.server} {contract.version} does not read as it is meant:\n  "
            + "\n  ".join(problems),
            where=contract.family,
            hint="convert the publisher's FP8 or BF16 checkpoint; KV scales and their scheme have to be taken out",
        )


def _kind(what: str, names: Iterable[str]) -> list[str]:
    found = list(names)
    if not found:
        return []
    return [f"{len(found)} {what}: {', '.join(found[:3])}{' …' if len(found) > 3 else ''}"]
