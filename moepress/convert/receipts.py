"""What the receipts of an output say about its weights: the errors, methods and reasons, one record per weight.

A receipt is written per shard (`journal`); here they are one table, keyed by the source's weight name. The records of
quantized experts become the map of errors: layer → projection → relative error ‖W − Ŵ‖ / ‖W‖ in the order of experts.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moepress.convert.journal import STATE_FOLDER, read_json
from moepress.errors import ConvertError
from moepress.formats.families import Family, classify

PUBLISHED_RECEIPTS = "moepress_receipts.json.gz"
"""All receipts in one, beside published weights: ``{"report_sha256": …, "receipts": {shard: receipt}}``."""

MOST_RECEIPT_BYTES = 200_000_000
"""Ten times those of the largest published models: gzip may announce a thousand times its own size."""

_DAMAGED = "the file was changed after it was written: convert again, or fetch it again"

ErrorMap = dict[int, dict[str, list[float]]]


def weight_records(out: Path) -> dict[str, dict[str, Any]]:
    """Every weight's record, by its name in the source; of a published copy from its one file of receipts, empty without.

    Raises:
        ConvertError: a receipt is not readable.
    """
    records: dict[str, dict[str, Any]] = {}
    for path in sorted((out / STATE_FOLDER / "receipts").glob("*.json")):
        records |= _weights(read_json(path), path)
    if not records:
        for receipt in published_receipts(out).values():
            records |= _weights(receipt, out / PUBLISHED_RECEIPTS)
    return records


def _weights(receipt: Any, path: Path) -> dict[str, dict[str, Any]]:
    """A receipt's records, each with the fields that everybody reads."""
    weights = receipt.get("weights") if isinstance(receipt, dict) else None
    if not isinstance(weights, dict):
        raise ConvertError("a receipt without its weights", where=str(path), hint=_DAMAGED)
    for name, record in weights.items():
        if not _is_record(record):
            raise ConvertError(
                f"the record of {name[:200]!r} says nothing that a record says", where=str(path), hint=_DAMAGED
            )
    return weights


def _is_record(record: Any) -> bool:
    if not isinstance(record, dict) or not isinstance(record.get("action"), str):
        return False
    error = record.get("relative_error", "missing" if record["action"] == "quantize" else None)
    return error is None or (isinstance(error, int | float) and not isinstance(error, bool))


def published_receipts(out: Path) -> dict[str, dict[str, Any]]:
    """Receipts by shard of a published copy (`PUBLISHED_RECEIPTS`); empty in a folder that is none.

    Raises:
        ConvertError: the file is not readable.
    """
    path = out / PUBLISHED_RECEIPTS
    if not path.exists():
        return {}
    try:
        with gzip.open(path) as file:
            text = file.read(MOST_RECEIPT_BYTES + 1)
        if len(text) > MOST_RECEIPT_BYTES:
            raise ValueError(f"more than {MOST_RECEIPT_BYTES:,} bytes when unpacked")
        receipts = json.loads(text)["receipts"]
        if not isinstance(receipts, dict) or not all(isinstance(receipt, dict) for receipt in receipts.values()):
            raise ValueError("receipts is not an object of objects")
    except (OSError, ValueError, EOFError, KeyError, TypeError, RecursionError, zlib.error) as error:
        raise ConvertError(f"cannot be read: {error!r}", where=str(path), hint="download it again") from error
    return receipts


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
