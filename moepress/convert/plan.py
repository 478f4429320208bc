"""The plan: decisions, name plan, resume key; everything that can be refused is refused here.

The resume key is the SHA-256 of what fixes the output's bytes: the source's fingerprint (names, sizes and headers of its
shards, its configuration), the recipe with all defaults written out, the name plan, and the version of the pressing code.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from typing import Any

from moepress.convert.carried import KV_SCALES, check_carried
from moepress.convert.decide import Decision, decide, rescaling_rule, rule
from moepress.convert.description import Description, describe
from moepress.convert.kv.plan import KvPlan, plan_kv
from moepress.convert.kv.taken import TakenScales
from moepress.convert.layout import ShardPlan, assign_shards, plan_outputs
from moepress.errors import CheckpointError, PlanRefused
from moepress.formats.architecture import BF16, StoredAs, WeightSpec, expected_weights
from moepress.formats.checkpoint import Checkpoint
from moepress.formats.families import Family, identify_family
from moepress.formats.runtime_contract import Contract, contract_for, doubtful_signed_scales
from moepress.formats.sizes import tensor_parallel_problems
from moepress.formats.storage import StoredWeight, resolve_storage
from moepress.recipe import Recipe

PRESS_VERSION = 4
"""Changes when the same recipe and source would press other bytes; then an old run cannot be resumed."""

SHOWN_PROBLEMS = 3
"""Of a split over ranks; a model that is too small for it has a dozen, all of one kind."""

MAY_BE_THERE = (*KV_SCALES, "rotary_emb.inv_freq")
"""Ends of names that some tools add: never expected; carried where the server reads them (`carried`)."""


@dataclass(frozen=True)
class ConversionPlan:
    """What a conversion will do, complete before it starts.

    ``decisions`` is keyed by the source's logical weight name; ``description`` is how the output will describe itself.
    """

    source: str
    source_fingerprint: str
    source_bytes: int
    family: Family
    recipe: Recipe
    description: Description
    decisions: dict[str, Decision]
    shards: tuple[ShardPlan, ...]
    side_files: tuple[str, ...]
    warnings: tuple[str, ...]
    calibration: str | None
    kv: KvPlan
    key: str

    @property
    def layout(self) -> str:
        """The quantization layout's name."""
        return self.description.layout

    @property
    def output_bytes(self) -> int:
        """Bytes of all output tensors, without headers and side files."""
        return sum(shard.nbytes for shard in self.shards)

    @property
    def total_parameters(self) -> int:
        """Logical parameters (packed words count as the weights they hold, scales not at all)."""
        return sum(_count(decision.stored.shape) for decision in self.decisions.values())

    def with_calibration(self, digest: str) -> ConversionPlan:
        """The same plan for other calibration tokens: nothing changes but the resume key.

        Args:
            digest: SHA-256 of the tokens.
        """
        key = _key(self.source_fingerprint, self.recipe, self.description, self.shards, digest, self.kv)
        return replace(self, calibration=digest, key=key)

    def as_json(self) -> dict[str, Any]:
        """The plan as it is kept in ``.moepress/plan.json``."""
        return {
            "moepress": PRESS_VERSION,
            "key": self.key,
            "source": self.source,
            "source_fingerprint": self.source_fingerprint,
            "family": self.family.key,
            "layout": self.description.layout,
            "calibration": self.calibration,
            "kv_cache": self.kv.as_json(),
            "recipe": json.loads(self.recipe.canonical_json()),
            "output_bytes": self.output_bytes,
            "shards": [
                {"name": s.name, "label": s.label, "bytes": s.nbytes, "weights": len(s.weights)} for s in self.shards
            ],
        }


def make_plan(
    checkpoint: Checkpoint, recipe: Recipe, *, calibration: str | None = None, taken: TakenScales | None = None
) -> ConversionPlan:
    """Plans a conversion from headers and configuration; reads no tensor.

    Args:
        calibration: SHA-256 of the calibration tokens, where the recipe needs any; part of the resume key.
        taken: KV scales of another output, in place of measured ones.

    Raises:
        CheckpointError, PlanRefused: with the first reason why it cannot work.
    """
    family = identify_family(checkpoint.config)
    storage = resolve_storage(checkpoint)
    check_census(checkpoint, storage)
    decisions = decide(checkpoint, storage, family, recipe)
    check_parallel(checkpoint.config, recipe)
    contract = contract_for(recipe.serving.server, recipe.serving.version, family.key)
    check_carried(checkpoint.config, decisions, contract)
    description = describe(checkpoint.config, family, recipe, decisions, taken)
    weights = [(d, plan_outputs(d, recipe, fp8_scale_suffix=description.fp8_scale_suffix)) for d in decisions.values()]
    kv = plan_kv(checkpoint.config, family, recipe, contract, decisions, taken)
    shards = assign_shards(weights, shard_size=recipe.output.shard_size, kv_scales=tuple(kv.tensors.values()))
    fingerprint = source_fingerprint(checkpoint)
    return ConversionPlan(
        source=checkpoint.location,
        source_fingerprint=fingerprint,
        source_bytes=checkpoint.total_bytes,
        family=family,
        recipe=recipe,
        description=description,
        decisions=decisions,
        shards=shards,
        side_files=checkpoint.side_files,
        warnings=(*checkpoint.warnings, *_carried_experts(recipe, decisions), *_untried(recipe, contract)),
        calibration=calibration,
        kv=kv,
        key=_key(fingerprint, recipe, description, shards, calibration, kv),
    )


def _carried_experts(recipe: Recipe, decisions: dict[str, Decision]) -> tuple[str, ...]:
    """A recipe that quantizes, and a source in which that was done before: hours of copying that somebody may not want."""
    if recipe.weights.algorithm == "keep" or any(decision.action == "quantize" for decision in decisions.values()):
        return ()
    return (
        "the experts are INT4 already: they are carried bit for bit, nothing is quantized and nothing gets smaller",
    )


def _untried(recipe: Recipe, contract: Contract) -> tuple[str, ...]:
    """What the recipe asks for that a kernel of its server, taken without being told to, is not known to take."""
    if not recipe.weights.signed_scales:
        return ()
    return tuple(
        f"weights.signed_scales: some scales will be negative, and {contract.server} {contract.version}'s kernel "
        f"{row.kernel}{f' ({row.when})' if row.when else ''} is not known to take them; look at the answers there "
        "(moepress validate, moepress evaluate) before relying on the result"
        for row in doubtful_signed_scales(contract, recipe.weights.group_size)
    )


def check_census(checkpoint: Checkpoint, storage: dict[str, StoredWeight]) -> None:
    """The checkpoint holds exactly the weights its configuration announces: layers, experts and MTP included.

    Raises:
        CheckpointError: naming up to five missing or unexpected weights, with counts.
    """
    specs = expected_weights(checkpoint.config)
    expected = {spec.name: spec.shape for spec in specs}
    fused = [stored for stored in storage.values() if stored.kind == "fused_experts"]
    if fused:
        raise CheckpointError(
            f"{len(fused)} tensors hold the experts of a layer fused in 3-D, the first {fused[0].name} {list(fused[0].shape)};"
            " servers read compressed-tensors experts one by one",
            where=checkpoint.location,
            hint="use the published checkpoint (one tensor per expert); transformers' save_pretrained fuses experts",
        )
    missing = [spec.name for spec in specs if spec.copy_of is None and spec.name not in storage]
    unexpected = [name for name in storage if name not in expected and not name.endswith(MAY_BE_THERE)]
    problems = []
    if missing:
        problems.append(f"{len(missing):,} of {len(expected):,} weights are missing: {_some(missing)}")
    if unexpected:
        problems.append(f"{len(unexpected):,} weights are not announced by config.json: {_some(unexpected)}")
    wrong = [n for n, shape in expected.items() if n in storage and storage[n].shape != tuple(shape)]
    if wrong:
        name = wrong[0]
        problems.append(
            f"{len(wrong):,} weights have another shape than config.json says: {_some(wrong)}"
            f" (the first is {list(storage[name].shape)}, expected {list(expected[name])})"
        )
    if problems:
        raise CheckpointError(
            "; ".join(problems),
            where=checkpoint.location,
            hint="download the missing shards again, or correct config.json",
        )


def pressed_specs(config: dict[str, Any], recipe: Recipe) -> list[WeightSpec]:
    """The weights that a configuration implies, stored as the recipe would have them. From configuration alone."""
    kinds = {"bf16": "dense", "f32": "dense", "int4": "int4_packed"}
    published = expected_weights(config)
    stored_as = [kinds.get(spec.published.kind, spec.published.kind) for spec in published]
    actions = [
        rule(kind, spec.published.kind, spec.shape, spec.identity, recipe)[0]
        for spec, kind in zip(published, stored_as, strict=True)
    ]
    if recipe.smooths_norms:
        pressed = {s.identity.layer for s, action in zip(published, actions, strict=True) if action == "quantize"}
        for i, spec in enumerate(published):
            changed = spec.identity.layer in pressed and rescaling_rule(
                spec.name, stored_as[i], spec.shape, spec.identity
            )
            actions[i] = changed[0] if changed else actions[i]
    quantized = StoredAs("int4", recipe.weights.group_size)
    return [
        replace(spec, published={"keep": spec.published, "quantize": quantized}.get(action, _in_full(spec.published)))
        for spec, action in zip(published, actions, strict=True)
    ]


def _in_full(published: StoredAs) -> StoredAs:
    """BF16, or F32 where it was that."""
    return published if published.kind == "f32" else BF16


def check_parallel(config: dict[str, Any], recipe: Recipe) -> None:
    """Groups and blocks must fall on the cuts between ranks: servers divide without a word.

    Raises:
        PlanRefused: with the problems, and the largest number of ranks that has none.
    """
    ranks, specs = recipe.serving.tensor_parallel, pressed_specs(config, recipe)
    problems = tensor_parallel_problems(config, specs, tp=ranks)
    if problems:
        fewer = (ranks // part for part in range(2, ranks + 1) if ranks % part == 0)
        fits = next((tp for tp in fewer if not tensor_parallel_problems(config, specs, tp=tp)), None)
        more = f"; and {len(problems) - SHOWN_PROBLEMS} more" if len(problems) > SHOWN_PROBLEMS else ""
        raise PlanRefused(
            f"the result cannot be served on {ranks} tensor-parallel ranks: {'; '.join(problems[:SHOWN_PROBLEMS])}{more}",
            where="serving.tensor_parallel",
            hint="--set weights.group_size=32, or another --set serving.tensor_parallel"
            if fits is None
            else f"--set serving.tensor_parallel={fits} fits",
        )


def source_fingerprint(checkpoint: Checkpoint) -> str:
    """SHA-256 over the configuration and every shard's name, size and tensor table. Contents are digested while they are read."""
    digest = hashlib.sha256(_canonical(checkpoint.config))
    for name in sorted(checkpoint.shards):
        header = checkpoint.shards[name]
        entries = [(e.name, e.dtype, e.shape, e.start, e.end) for e in header.entries]
        digest.update(_canonical([name, header.file_bytes, entries]))
    return digest.hexdigest()


def _key(
    fingerprint: str,
    recipe: Recipe,
    description: Description,
    shards: tuple[ShardPlan, ...],
    calibration: str | None,
    kv: KvPlan,
) -> str:
    names = [[s.name, [[t.name, t.dtype, t.shape] for t in s.tensors]] for s in shards]
    return hashlib.sha256(
        _canonical(
            [
                PRESS_VERSION,
                fingerprint,
                recipe.canonical_json(),
                description.quantization_config,
                names,
                calibration,
                kv.key(),
            ]
        )
    ).hexdigest()


def _canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (" …" if len(names) > 5 else "")


def _count(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count
