"""The whole verification: files, checksums, configuration, then every tensor, in threads."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from moepress.errors import CheckpointError
from moepress.formats.architecture import expected_weights
from moepress.formats.checkpoint import Checkpoint, open_checkpoint
from moepress.formats.families import Component, Family, classify, identify_family
from moepress.formats.storage import resolve_storage
from moepress.verify.configuration import check_configuration
from moepress.verify.files import OutputFiles, check_checksums, check_side_files, read_output
from moepress.verify.findings import Findings
from moepress.verify.kv import check_kv
from moepress.verify.kv_pair import compare_kv
from moepress.verify.tensors import PACKED, SCALE_NAMES, WeightCheck


class Watcher(Protocol):
    """Told how many source bytes there are, and as they are compared."""

    def begin(self, total: int) -> None: ...
    def advance(self, count: int) -> None: ...


class Silent:
    def begin(self, total: int) -> None: ...
    def advance(self, count: int) -> None: ...


@dataclass(frozen=True)
class Verification:
    """The verdict: no ``problems`` means verified. ``checked`` says in words what was looked at."""

    problems: tuple[str, ...]
    checked: tuple[str, ...]
    tensors: int
    bytes: int
    seconds: float

    def as_json(self) -> dict[str, Any]:
        return {
            "verified": not self.problems,
            "problems": list(self.problems),
            "checked": list(self.checked),
            "tensors": self.tensors,
            "bytes": self.bytes,
            "seconds": round(self.seconds, 3),
        }


def verify(
    out: Path,
    source: str | Path | None = None,
    *,
    same_kv_as: str | Path | None = None,
    threads: int | None = None,
    watcher: Watcher | None = None,
) -> Verification:
    """Re-reads an output with the safetensors library and compressed-tensors, and compares it with its source.

    Args:
        out: a converted checkpoint.
        source: what it was made from; without it, only the output's own consistency is checked.
        same_kv_as: another checkpoint of the same model that shares a KV cache with this one (prefill and decode).
        threads: weights compared at the same time.

    Raises:
        CheckpointError: there is no such folder, or the source itself is unusable. Whatever is wrong with the output is
            a problem in the result instead.
    """
    started = time.monotonic()
    watcher = watcher or Silent()
    if not out.is_dir():
        raise CheckpointError("no such folder", where=str(out))
    findings = Findings()
    checkpoint = open_checkpoint(source) if source is not None else None
    output = read_output(out, findings)
    checked: list[str] = []
    if output is not None:
        checked += _check(output, checkpoint, findings, threads or os.cpu_count() or 1, watcher)
        if same_kv_as is not None:
            checked += compare_kv(out, same_kv_as, findings)
    size = sum((out / shard).stat().st_size for shard in output.shards) if output else 0
    problems = tuple(findings.sentences())
    return Verification(
        problems,
        tuple(checked) if not problems else (),
        len(output.tensors) if output else 0,
        size,
        time.monotonic() - started,
    )


def _check(
    output: OutputFiles, source: Checkpoint | None, findings: Findings, threads: int, watcher: Watcher
) -> list[str]:
    with ThreadPoolExecutor(threads, thread_name_prefix="verify") as pool:
        list(pool.map(lambda shard: check_checksums(output, shard, findings), output.shards))
        checked = [
            f"{len(output.shards)} shards: index, headers and SHA-256 agree with {len(output.receipts)} receipts"
        ]
        try:
            family = identify_family(output.config)
            for name in output.tensors:
                classify(family, output.config, name)
        except CheckpointError as error:
            findings.problem("config.json", error.what)
            return checked
        check_configuration(output, source, family, findings)
        checked.append("config.json: compressed-tensors reads every linear module as it is stored")
        checked += check_kv(output, family, findings)
        _check_census(output, findings)
        _check_uniform_experts(output, family, findings)
        if source is None or source.folder is None:
            return checked
        check_side_files(output, source.folder, source.side_files, findings)
        checked.append(f"{len(source.side_files)} side files are the source's, byte for byte")
        storage = resolve_storage(source)
        weights = WeightCheck(output, source, storage, family, findings)
        watcher.begin(sum(stored.nbytes for stored in storage.values()))
        claimed = {str(name) for name in (output.report.get("kv_cache") or {}).get("tensors", ())}
        packed = 0
        for stored, names in zip(storage.values(), pool.map(weights.check, storage.values()), strict=True):
            claimed.update(names)
            packed += any(name.endswith(".weight_packed") for name in names) and stored.kind != "int4_packed"
            watcher.advance(stored.nbytes)
        for name in output.tensors:
            if name not in claimed:
                findings.problem(name, "comes from no weight of the source")
        checked.append(
            f"{len(storage) - packed:,} kept weights equal the source; {packed:,} quantized ones are as close as their receipts say"
        )
    return checked


def _check_census(output: OutputFiles, findings: Findings) -> None:
    """Every weight that config.json announces is there, whole: servers fill what is missing with random numbers."""
    tensors = output.tensors
    missing = []
    for spec in expected_weights(output.config):
        module = spec.name.removesuffix(".weight")
        packed = [f"{module}.{part}" for part in PACKED]
        if packed[0] in tensors or packed[2] in tensors:  # FP8 too has a weight_scale
            missing += [part for part in packed if part not in tensors]
        elif spec.name not in tensors:
            missing += [spec.name] if spec.copy_of is None else []
        elif tensors[spec.name][1].startswith("F8") and not any(f"{module}.{end}" in tensors for end in SCALE_NAMES):
            missing.append(f"{module}.{SCALE_NAMES[0]}")
    for name in missing[:5]:
        findings.problem(name, "config.json announces it, no shard holds it")
    if len(missing) > 5:
        findings.problem("config.json", f"announces {len(missing):,} tensors that no shard holds")


def _check_uniform_experts(output: OutputFiles, family: Family, findings: Findings) -> None:
    """All experts of a layer are stored alike and all are there: servers look at expert 0 alone."""
    layers: dict[int | None, dict[str, set[int]]] = {}
    for name in output.tensors:
        identity = classify(family, output.config, name)
        if identity.component is Component.ROUTED_EXPERT and identity.expert is not None:
            kind = f"{identity.projection}.{name.rpartition('.')[2]}"
            layers.setdefault(identity.layer, {}).setdefault(kind, set()).add(identity.expert)
    for layer, kinds in layers.items():
        everyone = set().union(*kinds.values())
        for kind, experts in sorted(kinds.items()):
            if experts != everyone:
                missing = sorted(everyone - experts)
                findings.problem(
                    f"layer {layer}", f"{len(missing)} of {len(everyone)} experts have no {kind}, first {missing[0]}"
                )
