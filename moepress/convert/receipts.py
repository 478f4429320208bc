"""What the receipts of an output say about its weights: the errors, methods and reasons, one record per weight.

A receipt is written per shard (`journal`); here they are one table, keyed by the source's weight name. The records of
quantized experts become the map of errors: layer → projection → relative error ‖W − Ŵ‖ / ‖W‖ in the order of experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moepress.convert.journal import STATE_FOLDER, read_json
from moepress.formats.families import Family, classify

ErrorMap = dict[int, dict[str, list[float]]]


def weight_records(out: Path) -> dict[str, dict[str, Any]]:
    """Every weight's record, by its name in the source; empty where the state folder is gone (a published copy).

    Raises:
        ConvertError: a receipt is not readable.
    """
    records: dict[str, dict[str, Any]] = {}
    for path in sorted((out / STATE_FOLDER / "receipts").glob("*.json")):
        records |= read_json(path)["weights"]
    return records


def expert_errors(records: Mapping[str, Mapping[str, Any]], family: Family, config: Mapping[str, Any]) -> ErrorMap:
    """Relative error of every quantized expert matrix, by layer and projection, in the order of experts.

    Args:
        records: from `weight_records`.
        config: the parsed ``config.json`` of the source or the output; names mean the same in both.
    """
    found: dict[int, dict[str, dict[int, float]]] = {}
    for name, record in records.items():
        identity = classify(family, config, name)
        if record["action"] == "quantize" and identity.layer is not None and identity.expert is not None:
            of_layer = found.setdefault(identity.layer, {})
            of_layer.setdefault(identity.projection or "", {})[identity.expert] = record["relative_error"] or 0.0
    return {
        layer: {projection: [errors[expert] for expert in sorted(errors)] for projection, errors in sorted(by.items())}
        for layer, by in sorted(found.items())
    }
