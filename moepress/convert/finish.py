"""The last step: side files, report, config and, last of all, the index. Only then is the folder a checkpoint.

Nothing of the source's index, configuration or weights is copied, so a stale list of shards or a second quantization_config
cannot survive; everything else travels byte for byte.
"""

from __future__ import annotations

import copy
import statistics
from typing import Any

from moepress.convert.journal import Journal
from moepress.convert.kv.scales import KvScales
from moepress.convert.output_config import output_config
from moepress.convert.plan import ConversionPlan
from moepress.errors import ConvertError
from moepress.formats.atomic import atomic_write_json, copy_file
from moepress.formats.checkpoint import Checkpoint
from moepress.formats.sealed_json import content_digest, sealed
from moepress.formats.shard_index import INDEX_NAME, index_content
from moepress.hub.ledger import read_origin

WORST = 20
"""How many of the worst weights a report names."""

NOTES = (
    "method",
    "tokens",
    "shrinkage",
    "dampening_frac",
    "loss",
    "passes",
    "target_change",
    "weighed_by",
    "awq_alpha",
)
"""What a receipt may know of a weight beside its errors, repeated for the worst ones."""


def finish(
    checkpoint: Checkpoint, plan: ConversionPlan, journal: Journal, kv: KvScales | None = None
) -> dict[str, Any]:
    """Completes the output folder and returns the report.

    Args:
        kv: the KV scales, all measured; None where there are none.

    Raises:
        ConvertError: a unit has no receipt.
    """
    receipts = []
    for shard in plan.shards:
        receipt = journal.receipt(shard.name)
        if receipt is None:
            raise ConvertError(
                f"{shard.name} was never finished", where=str(journal.out), hint="run the same command again"
            )
        receipts.append(receipt)
    side_files = {name: copy_file(checkpoint.path(name), journal.out / name) for name in plan.side_files}
    report = make_report(plan, receipts, side_files)
    report["source"] = _origin(checkpoint)
    report["kv_cache"] = kv.as_json() if kv is not None else plan.kv.as_json()
    config = output_config(checkpoint, plan)
    index = index_content(
        {tensor.name: shard.name for shard in plan.shards for tensor in shard.tensors},
        total_size=plan.output_bytes,
        total_parameters=plan.total_parameters,
    )
    report["content_sha256"] = {"config.json": content_digest(config), INDEX_NAME: content_digest(index)}
    report = sealed(report)
    atomic_write_json(journal.out / "moepress_report.json", report)
    atomic_write_json(journal.out / "config.json", config)
    atomic_write_json(journal.out / INDEX_NAME, index)
    return report


def _origin(checkpoint: Checkpoint) -> dict[str, str] | None:
    """Repository and commit that the source was pulled from; None where nobody wrote it down."""
    origin = read_origin(checkpoint.folder) if checkpoint.folder is not None else None
    return None if origin is None else {"repo": origin.repo, "commit": origin.commit}


def make_report(plan: ConversionPlan, receipts: list[dict[str, Any]], side_files: dict[str, str]) -> dict[str, Any]:
    """What happened, for people and for the model card: sizes, counts, errors, fallbacks, checksums. No times, no paths."""
    weights = {name: record for receipt in receipts for name, record in receipt["weights"].items()}
    quantized = {name: w for name, w in weights.items() if w["action"] == "quantize"}
    fallbacks = {name: w for name, w in weights.items() if w["decision"] == "fallback"}
    errors = {name: w["relative_error"] or 0.0 for name, w in quantized.items()}
    kept: dict[str, int] = {}
    for record in weights.values():
        if record["action"] != "quantize":
            reason = f"{record['action']}: {record['reason']}"
            kept[reason] = kept.get(reason, 0) + 1
    return {
        "recipe": copy.deepcopy(plan.as_json()["recipe"]),
        "gates": plan.recipe.gates.model_dump(mode="json"),
        "evaluation": plan.recipe.evaluation.model_dump(mode="json"),
        "family": plan.family.key,
        "layout": plan.layout,
        "calibration_sha256": plan.calibration,
        "plan_key": plan.key,
        "source_bytes": plan.source_bytes,
        "output_bytes": plan.output_bytes,
        "total_parameters": plan.total_parameters,
        "quantized": {
            "weights": len(quantized),
            "parameters": sum(_numel(plan, name) for name in quantized),
            "relative_error_mean": statistics.fmean(errors.values()) if errors else None,
            "relative_error_max": max(errors.values(), default=None),
            "worst": [
                {
                    "weight": name,
                    "relative_error": errors[name],
                    "sqnr_db": weights[name]["sqnr_db"],
                    **{note: weights[name][note] for note in NOTES if note in weights[name]},
                }
                for name in sorted(errors, key=lambda name: (-errors[name], name))[:WORST]
            ],
        },
        "kept": dict(sorted(kept.items())),
        "fallbacks": {name: w["reason"] for name, w in sorted(fallbacks.items())},
        "shards": {receipt["unit"]: receipt["sha256"] for receipt in receipts},
        "side_files": side_files,
    }


def broken_limits(plan: ConversionPlan, report: dict[str, Any]) -> list[str]:
    """The recipe's limits that a finished conversion does not keep, in words; empty when all is well."""
    limits, quantized = plan.recipe.limits, report["quantized"]
    problems = []
    worst = quantized["relative_error_max"]
    if worst is not None and worst > limits.max_relative_error:
        name = quantized["worst"][0]["weight"]
        problems.append(
            f"relative error {worst:.3f} of {name} is above limits.max_relative_error {limits.max_relative_error}"
        )
    if quantized["weights"]:
        share = len(report["fallbacks"]) / quantized["weights"]
        if share > limits.max_fallback_share:
            problems.append(
                f"{len(report['fallbacks'])} of {quantized['weights']} weights used a fallback ({share:.1%}), above "
                f"limits.max_fallback_share {limits.max_fallback_share:.1%}"
            )
    return problems


def _numel(plan: ConversionPlan, name: str) -> int:
    rows, columns = plan.decisions[name].stored.shape
    return rows * columns
