"""What the receipts of an output say about its weights: the errors, methods and reasons, one record per weight.

A receipt is written per shard (`journal`); here they are one table, keyed by the source's weight name. The records of
quantized experts become the map of errors: layer → projection → relative error ‖W − Ŵ‖ / ‖W‖ in the order of experts.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moepress.convert.journal import STATE_FOLDER, read_json
from moepress.errors import ConvertError
from moepress.formats.families import Family, classify

PUBLISHED_RECEIPTS = "moepress_receipts.json.gz"
"""All receipts in one, beside published weights: ``{"report_sha256": …, "receipts": {shard: receipt}}``."""

ErrorMap = dict[int, dict[str, list[float]]]


def weight_records(out: Path) -> dict[str, dict[str, Any]]:
    """Every weight's record, by its name in the source; of a published copy from its one file of receipts, empty without.

    Raises:
        ConvertError: a receipt is not readable.
    """
    records: dict[str, dict[str, Any]] = {}
    for path in sorted((out / STATE_FOLDER / "receipts").glob("*.json")):
        records |= read_json(path)["weights"]
    if not records:
        for receipt in published_receipts(out).values():
            records |= receipt["weights"]
    return records


def published_receipts(out: Path) -> dict[str, dict[str, Any]]:
    """Receipts by shard of a published copy (`PUBLISHED_RECEIPTS`); empty in a folder that is none.

    Raises:
        ConvertError: the file is not readable.
    """
    path = out / PUBLISHED_RECEIPTS
    if not path.exists():
        return {}
    try:
        return dict(json.loads(gzip.decompress(path.read_bytes()))["receipts"])
    except (OSError, ValueError, EOFError, KeyError, TypeError) as error:
        raise ConvertError(f"cannot be read: {error!r}", where=str(path), hint="download it again") from error


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
