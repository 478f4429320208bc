"""The files of an output: complete, named by the index, unchanged since they were written."""

from __future__ import annotations

import filecmp
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from moepress.convert.journal import STATE_FOLDER
from moepress.convert.receipts import PUBLISHED_RECEIPTS, published_receipts
from moepress.errors import ConvertError
from moepress.formats.sealed_json import DIGEST, content_digest, seal_problem
from moepress.formats.shard_index import INDEX_NAME
from moepress.results import REPORT_NAME, SIGNATURE_NAME
from moepress.verify.findings import Findings

INDEX = INDEX_NAME
REPORT = REPORT_NAME
STATE = STATE_FOLDER
PACKED = ("weight_packed", "weight_scale", "weight_shape")
"""What compressed-tensors stores of an INT4 weight."""
SCALE_NAMES = ("weight_scale_inv", "weight_scale")
"""What FP8 scales are called: by block-FP8 publishers, and by compressed-tensors."""


@dataclass(frozen=True)
class OutputFiles:
    """What the output folder holds, as the safetensors library reads it.

    ``tensors`` maps a name to (shard, dtype, shape); dtype in safetensors' words.
    """

    folder: Path
    config: dict[str, Any]
    report: dict[str, Any]
    receipts: dict[str, dict[str, Any]]
    tensors: dict[str, tuple[str, str, tuple[int, ...]]]
    shards: tuple[str, ...]


def read_output(folder: Path, findings: Findings) -> OutputFiles | None:
    """Opens everything and holds index, shards and receipts against each other. None when there is nothing to go on with."""
    config = _json(folder / "config.json", findings)
    index = _json(folder / INDEX, findings)
    if config is None or index is None:
        return None
    on_disk = sorted(path.name for path in folder.glob("*.safetensors") if path.is_file())
    for path in folder.glob("*.safetensors"):
        if path.name not in on_disk:
            findings.problem(path.name, "is no regular file")
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict):
        findings.problem(INDEX, "has no weight_map")
        return None
    named = sorted({str(shard) for shard in weight_map.values()})
    for shard in named:
        if shard not in on_disk:
            findings.problem(shard, "named by the index, not in the folder")
    for shard in on_disk:
        if shard not in named:
            findings.problem(shard, "in the folder, not named by the index")
    tensors: dict[str, tuple[str, str, tuple[int, ...]]] = {}
    total = 0
    for shard in on_disk:
        try:
            with safe_open(folder / shard, framework="pt") as file:
                if (file.metadata() or {}).get("format") != "pt":
                    findings.problem(shard, "its header does not say format 'pt', and transformers refuses it")
                for name in file.keys():  # noqa: SIM118 (not a dict)
                    if name in tensors:
                        findings.problem(name, f"in two shards, {tensors[name][0]} and {shard}")
                    part = file.get_slice(name)
                    tensors[name] = (shard, part.get_dtype(), tuple(part.get_shape()))
        except (SafetensorError, OSError) as error:
            findings.problem(shard, f"the safetensors library cannot open it: {error}")
            continue
        total += _data_bytes(folder / shard)
    for name, shard in weight_map.items():
        if name not in tensors:
            findings.problem(name, f"in the index ({shard}), in no shard")
        elif tensors[name][0] != shard:
            findings.problem(name, f"is in {tensors[name][0]}, the index says {shard}")
    for name in tensors:
        if name not in weight_map:
            findings.problem(name, f"in {tensors[name][0]}, not in the index")
    metadata = index.get("metadata")
    claimed = metadata.get("total_size") if isinstance(metadata, dict) else None
    if claimed != total:
        findings.problem(INDEX, f"total_size is {claimed}, the tensors have {total} bytes")
    report = _json(folder / REPORT, findings) or {}
    state: dict[str, dict[str, Any]] = {REPORT: report} if report else {}
    receipts = _receipts(folder, state, findings)
    _check_seals(state, {"config.json": config, INDEX: index}, findings)
    return OutputFiles(folder, config, report, receipts, tensors, tuple(on_disk))


def check_checksums(output: OutputFiles, shard: str, findings: Findings) -> None:
    """SHA-256 and size of one shard against the report and its receipt."""
    checksums = output.report.get("shards")
    expected = checksums.get(shard) if isinstance(checksums, dict) else None
    receipt = output.receipts.get(shard)
    digest = hashlib.sha256()
    with (output.folder / shard).open("rb", buffering=0) as file:
        buffer = bytearray(4 << 20)
        while count := file.readinto(buffer):
            digest.update(memoryview(buffer)[:count])
    if expected is None:
        findings.problem(shard, f"{REPORT} has no checksum for it")
    elif digest.hexdigest() != expected:
        findings.problem(shard, f"SHA-256 is {digest.hexdigest()}, {REPORT} says {expected}")
    if receipt is not None and receipt.get("sha256") != digest.hexdigest():
        findings.problem(shard, f"SHA-256 is {digest.hexdigest()}, its receipt says {receipt.get('sha256')}")


def check_side_files(output: OutputFiles, source: Path, names: tuple[str, ...], findings: Findings) -> None:
    """Every side file of the source is there, byte for byte, and nothing else is.

    In a published copy the card stands where the source's README was, and the Hub's .gitattributes where its own was.
    """
    published = (output.folder / PUBLISHED_RECEIPTS).exists()
    replaced = {"README.md", ".gitattributes"} if published else set()
    for name in names:
        if name in replaced:
            continue
        if not (output.folder / name).is_file():
            findings.problem(name, "a side file of the source that the output lacks")
        elif not filecmp.cmp(source / name, output.folder / name, shallow=False):
            findings.problem(name, "differs from the source's")
    known = {*names, *output.shards, "config.json", INDEX, REPORT, SIGNATURE_NAME} | replaced
    known |= {PUBLISHED_RECEIPTS} if published else set()
    for path in sorted(output.folder.rglob("*")):
        relative = path.relative_to(output.folder).as_posix()
        if path.is_file() and relative not in known and not relative.startswith(f"{STATE}/"):
            findings.problem(relative, "a file that neither the source nor moepress put there")


def _check_seals(state: dict[str, dict[str, Any]], written: dict[str, dict[str, Any]], findings: Findings) -> None:
    """Report, plan and receipts, and by the report config and index, say what they said when they were written.

    Where nothing has a digest, the output was written before there were any.

    Args:
        state: report, plan and receipts by their place.
        written: config and index by their name.
    """
    if not any(DIGEST in part for part in state.values()):
        return
    for place, part in state.items():
        if problem := seal_problem(part):
            findings.problem(place, problem)
    digests = state.get(REPORT, {}).get("content_sha256")
    for name, content in written.items():
        expected = digests.get(name) if isinstance(digests, dict) else None
        if expected is None:
            findings.problem(name, f"{REPORT} has no checksum of what it says")
        elif content_digest(content) != expected:
            findings.problem(name, f"says something else than when it was written, by the checksum in {REPORT}")


def _receipts(folder: Path, state: dict[str, dict[str, Any]], findings: Findings) -> dict[str, dict[str, Any]]:
    """Receipts by shard: the state folder's, or those published with the weights; none where neither is there.

    Args:
        state: gets plan and receipts, by their place.
    """
    inside = folder / STATE
    if not inside.is_dir() or (folder / PUBLISHED_RECEIPTS).exists():
        try:
            published = published_receipts(folder)
        except ConvertError as error:
            findings.problem(PUBLISHED_RECEIPTS, error.what)
            return {}
        state |= {f"{PUBLISHED_RECEIPTS}, {shard}": receipt for shard, receipt in published.items()}
        return published
    plan = _json(inside / "plan.json", findings) or {}
    if plan:
        state[f"{STATE}/plan.json"] = plan
    known = sorted(path.name.removesuffix(".json") for path in (inside / "receipts").glob("*.json"))
    planned = [str(shard.get("name")) for shard in plan.get("shards") or () if isinstance(shard, dict)]
    receipts = {}
    for shard in sorted({*known, *planned}):
        receipt = _json(inside / "receipts" / f"{shard}.json", findings)
        if receipt is None:
            continue
        place = f"{STATE}/receipts/{shard}.json"
        if shard not in planned:
            findings.problem(place, "a receipt of a shard that is not in the plan")
        state[place] = receipt
        if receipt.get("plan_key") != plan.get("key"):
            findings.problem(shard, "its receipt belongs to another plan")
        if receipt.get("unit") != shard:
            findings.problem(place, f"is the receipt of {receipt.get('unit')}")
        if isinstance(receipt.get("weights"), dict):
            receipts[shard] = receipt
        else:
            findings.problem(place, "has no weights")
    return receipts


def _json(path: Path, findings: Findings) -> dict[str, Any] | None:
    if path.exists() and not path.is_file():  # a pipe would wait for its writer
        findings.problem(path.name, "is no regular file")
        return None
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        findings.problem(path.name, "is missing")
    except (OSError, ValueError, RecursionError) as error:
        findings.problem(path.name, f"cannot be read: {error}")
    else:
        if isinstance(data, dict):
            return data
        findings.problem(path.name, "is not a JSON object")
    return None


def _data_bytes(path: Path) -> int:
    """Bytes of a shard's tensors: the file without its header."""
    with path.open("rb") as file:
        return path.stat().st_size - 8 - int.from_bytes(file.read(8), "little")
