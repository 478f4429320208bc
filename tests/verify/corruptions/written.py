"""Writing in a copy whose files are links, and making every checksum agree with what was written."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fuzz.small import INDEX, Tensor, shard_bytes
from moepress.formats.sealed_json import content_digest, sealed

Corrupt = Callable[[Path], None]
REPORT = "moepress_report.json"


def put(path: Path, raw: bytes) -> None:
    path.unlink(missing_ok=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(raw)


def load(path: Path) -> Any:
    return json.loads(path.read_text())


def store(path: Path, value: Any) -> None:
    put(path, json.dumps(value).encode())


def reseal(out: Path) -> None:
    """Every checksum says what is there now: an adversary's, or a bug's that wrote checksum and mistake together."""
    report = load(out / REPORT)
    for shard in report["shards"]:
        if (out / shard).exists():
            report["shards"][shard] = hashlib.sha256((out / shard).read_bytes()).hexdigest()
            path = receipt(out, shard)
            size = (out / shard).stat().st_size
            store(path, sealed({**load(path), "sha256": report["shards"][shard], "file_bytes": size}))
    for name in ("config.json", INDEX):
        report["content_sha256"][name] = content_digest(load(out / name))
    store(out / REPORT, sealed(report))


def receipt(out: Path, shard: str) -> Path:
    return out / ".moepress" / "receipts" / f"{shard}.json"


def read_shard(path: Path) -> dict[str, Tensor]:
    raw = path.read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    return {
        name: Tensor(e["dtype"], e["shape"], raw[start + e["data_offsets"][0] : start + e["data_offsets"][1]])
        for name, e in json.loads(raw[8:start]).items()
        if name != "__metadata__"
    }


def tensors(edit: Callable[[dict[str, Tensor]], None], name: str) -> Corrupt:
    """Edits the shard that holds ``name``; index and checksums follow."""

    def corrupt(out: Path) -> None:
        index = load(out / INDEX)
        shard = index["weight_map"][name]
        before = read_shard(out / shard)
        held = read_shard(out / shard)
        edit(held)
        put(out / shard, shard_bytes(held))
        for gone in before.keys() - held.keys():
            del index["weight_map"][gone]
        index["weight_map"] |= dict.fromkeys(held, shard)
        index["metadata"]["total_size"] += sum(len(t.data) for t in held.values()) - sum(
            len(t.data) for t in before.values()
        )
        store(out / INDEX, index)
        reseal(out)

    return corrupt


def document(name: str, edit: Callable[[Any], Any], *, resealed: bool = False) -> Corrupt:
    """Edits a JSON file; ``edit`` returns the new value, or None for the one it changed."""

    def corrupt(out: Path) -> None:
        value = load(out / name)
        changed = edit(value)
        store(out / name, value if changed is None else changed)
        if resealed:
            reseal(out)

    return corrupt
