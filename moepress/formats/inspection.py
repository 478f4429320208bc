"""What a checkpoint is, from headers and configuration alone: the table behind ``moepress inspect``."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import Any

from moepress.formats.checkpoint import Checkpoint
from moepress.formats.families import Family, classify, identify_family
from moepress.formats.storage import StoredWeight, resolve_storage


@dataclass(frozen=True, slots=True)
class InspectionRow:
    """One line: all weights of a component that are stored in the same way.

    ``weights`` counts logical weights, ``tensors`` stored tensors (a scale is one), ``parameters`` logical parameters.
    """

    component: str
    stored_as: str
    weights: int
    tensors: int
    parameters: int
    bytes: int


@dataclass(frozen=True)
class Inspection:
    """A checkpoint's facts; ``rows`` add up to the whole."""

    location: str
    family: Family
    model_type: str
    architecture: str
    rows: tuple[InspectionRow, ...]
    shards: int
    side_files: tuple[str, ...]
    warnings: tuple[str, ...]

    @property
    def parameters(self) -> int:
        return sum(row.parameters for row in self.rows)

    @property
    def bytes(self) -> int:
        return sum(row.bytes for row in self.rows)

    def as_json(self) -> dict[str, Any]:
        return {
            "location": self.location,
            "family": self.family.key,
            "architecture": self.architecture,
            "model_type": self.model_type,
            "parameters": self.parameters,
            "bytes": self.bytes,
            "shards": self.shards,
            "rows": [{slot: getattr(row, slot) for slot in InspectionRow.__slots__} for row in self.rows],
            "side_files": list(self.side_files),
            "warnings": list(self.warnings),
        }


def inspect_checkpoint(checkpoint: Checkpoint) -> Inspection:
    """Classifies every weight and adds up what is stored how.

    Raises:
        CheckpointError: an unknown family, an unknown name, or a tensor whose format cannot be told.
    """
    family = identify_family(checkpoint.config)
    sums: dict[tuple[int, str, str], Counter[str]] = {}
    for name, stored in resolve_storage(checkpoint).items():
        identity = classify(family, checkpoint.config, name)
        label = f"{identity.component.value}{' (MTP)' if identity.is_mtp else ''}"
        row = sums.setdefault((int(identity.is_mtp), label, describe_storage(stored)), Counter())
        row["weights"] += 1
        row["tensors"] += len(stored.parts)
        row["parameters"] += math.prod(stored.shape)
        row["bytes"] += sum(part.nbytes for part in stored.parts.values())
    rows = [
        InspectionRow(label, how, s["weights"], s["tensors"], s["parameters"], s["bytes"])
        for (_, label, how), s in sorted(sums.items(), key=lambda item: (item[0][0], -item[1]["bytes"]))
    ]
    return Inspection(
        location=checkpoint.location,
        family=family,
        model_type=str(checkpoint.config.get("model_type")),
        architecture=str((checkpoint.config.get("architectures") or ["?"])[0]),
        rows=tuple(rows),
        shards=len(checkpoint.shards),
        side_files=checkpoint.side_files,
        warnings=checkpoint.warnings,
    )


def describe_storage(stored: StoredWeight) -> str:
    """How one weight is stored, in a few words: ``FP8 e4m3, 128×128 blocks``."""
    main = stored.parts.get("weight") or stored.parts["packed"]
    fp8 = {"F8_E4M3": "FP8 e4m3", "F8_E5M2": "FP8 e5m2"}.get(main.dtype, main.dtype)
    if stored.kind == "fp8_block" and stored.block:
        scale = " E8M0 scales" if stored.scale_encoding == "e8m0" else ""
        return f"{fp8}, {stored.block[0]}×{stored.block[1]} blocks{scale}"
    if stored.kind == "fp8_channel":
        return f"{fp8}, one scale a row"
    if stored.kind == "fp8_tensor":
        return f"{fp8}, one scale"
    if stored.kind == "int4_packed":
        return f"INT4 packed, group {stored.group_size}"
    if stored.kind == "fused_experts":
        return f"{main.dtype}, experts fused in 3-D"
    return main.dtype
