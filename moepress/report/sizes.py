"""Bytes before and after, by component, and what became of every kind of weight.

The two tables answer two questions. Sizes come from the headers of both checkpoints, so they are what lies on the disk.
Fates come from the receipts, one record a weight, so each line is a decision with its reason and its error.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass

from moepress.formats.families import classify
from moepress.formats.inspection import Inspection, inspect_checkpoint
from moepress.report.output import PressedOutput

TITLES = {
    "routed_expert": "Routed experts",
    "shared_expert": "Shared experts",
    "dense_mlp": "Dense MLP",
    "attention": "Attention",
    "indexer": "Sparse indexer",
    "router": "Router",
    "norm": "Norms",
    "embedding": "Embedding",
    "lm_head": "Output head",
    "mtp_projection": "MTP projection",
    "vision": "Vision tower",
    "projector": "Vision projector",
}

_ACTIONS = {"keep": "kept", "bf16": "to BF16", "rescale": "rescaled"}


@dataclass(frozen=True)
class SizeRow:
    """One component. `before` is None where the source's headers are not there."""

    component: str
    parameters: int
    before_form: str | None
    before: int | None
    after_form: str
    after: int


@dataclass(frozen=True)
class FateRow:
    """One kind of weight and what became of it. Errors are relative, of the quantized ones."""

    component: str
    what: str
    weights: int
    error_mean: float | None
    error_max: float | None
    fewest_tokens: int | None
    is_fallback: bool


def title(component: str) -> str:
    """``routed_expert (MTP)`` → ``Routed experts (MTP)``."""
    name, _, rest = component.partition(" ")
    return f"{TITLES.get(name, name)} {rest}".strip()


def size_rows(output: PressedOutput) -> list[SizeRow]:
    """By component, largest first; MTP components last."""
    after = _by_component(output.inspection)
    before = {}
    if output.source_checkpoint is not None:
        before = _by_component(inspect_checkpoint(output.source_checkpoint))
    rows = []
    for component in [*after, *(name for name in before if name not in after)]:
        old, new = before.get(component), after.get(component)
        rows.append(
            SizeRow(
                component=title(component),
                parameters=(new or old or (0, "", 0))[2],
                before_form=old[1] if old else None,
                before=old[0] if old else None,
                after_form=new[1] if new else "absent",
                after=new[0] if new else 0,
            )
        )
    return rows


def fate_rows(output: PressedOutput) -> list[FateRow]:
    """By component and decision, most weights first. From the report's counts alone where the receipts are gone."""
    if not output.records:
        quantized = output.report["quantized"]
        grid = output.recipe.weights
        rows = [
            FateRow("all", reason, count, None, None, None, False) for reason, count in output.report["kept"].items()
        ]
        if quantized["weights"]:
            what = f"INT{grid.num_bits}, group {grid.group_size}, {grid.algorithm}"
            mean, worst = quantized["relative_error_mean"], quantized["relative_error_max"]
            rows.insert(0, FateRow("Routed experts", what, quantized["weights"], mean, worst, None, False))
        return rows
    groups: dict[tuple[str, str, bool], list[tuple[float | None, int | None]]] = {}
    for name, record in output.records.items():
        identity = classify(output.family, output.checkpoint.config, name)
        component = title(identity.component.value + (" (MTP)" if identity.is_mtp else ""))
        fallback = record["decision"] == "fallback"
        what = f"{_ACTIONS.get(record['action'], record['action'])} ({record.get('reason', '')})"
        if record["action"] == "quantize":
            what = f"INT{record['num_bits']}, group {record['group_size']}, {record['method']}"
            if fallback:
                what += f" in place of {record.get('asked', '?')}"
        seen = record.get("tokens")
        entry = (record.get("relative_error"), None if seen is None else int(seen))
        groups.setdefault((component, what, fallback), []).append(entry)
    rows = []
    for (component, what, fallback), entries in groups.items():
        errors = [error for error, _ in entries if error is not None]
        tokens = [count for _, count in entries if count is not None]
        rows.append(
            FateRow(
                component=component,
                what=what,
                weights=len(entries),
                error_mean=statistics.fmean(errors) if errors else None,
                error_max=max(errors, default=None),
                fewest_tokens=min(tokens, default=None),
                is_fallback=fallback,
            )
        )
    return sorted(rows, key=lambda row: (row.error_mean is None, -row.weights, row.component))


def _by_component(inspection: Inspection) -> dict[str, tuple[int, str, int]]:
    """Component → bytes, forms in words (largest first), parameters."""
    found: dict[str, tuple[int, str, int]] = {}
    for row in inspection.rows:
        size, form, parameters = found.get(row.component, (0, "", 0))
        forms = _joined((form, row.stored_as))
        found[row.component] = (size + row.bytes, forms, parameters + row.parameters)
    return dict(sorted(found.items(), key=lambda item: ("(MTP)" in item[0], -item[1][0])))


def _joined(forms: Iterable[str]) -> str:
    return "; ".join(form for form in forms if form)
