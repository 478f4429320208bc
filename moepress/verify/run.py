"""The whole verification: files, checksums, configuration, then every tensor, in threads."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from moepress.errors import CheckpointError
from moepress.formats.checkpoint import Checkpoint, open_checkpoint
from moepress.formats.families import Family, classify, identify_family
from moepress.formats.same_model import two_models
from moepress.formats.storage import StoredWeight, resolve_storage
from moepress.verify.census import check_census, check_uniform_experts
from moepress.verify.configuration import check_configuration
from moepress.verify.files import REPORT, OutputFiles, check_checksums, check_side_files, read_output
from moepress.verify.findings import Findings
from moepress.verify.kv import check_kv, recorded_contract
from moepress.verify.kv_pair import kv_differences
from moepress.verify.other_source import refuse_another_model, refuse_other_numbers
from moepress.verify.tensors import WeightCheck, check_alone


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
        CheckpointError: there is no such folder, or the source is unusable or another model. Whatever is wrong with the
            output is a problem in the result instead.
    """
    started = time.monotonic()
    watcher = watcher or Silent()
    if not out.is_dir():
        raise CheckpointError(
            "no such folder", where=str(out), hint="moepress verify OUT --source SRC, where OUT is what convert wrote"
        )
    findings = Findings()
    checkpoint = open_checkpoint(source) if source is not None else None
    output = None
    with findings.examining(str(out)):
        output = read_output(out, findings)
    checked: list[str] = []
    if output is not None and checkpoint is not None:
        refuse_another_model(output, checkpoint)
    if output is not None:
        checked += _check(output, checkpoint, findings, threads or os.cpu_count() or 1, watcher)
        if same_kv_as is not None:
            checked += _compare_kv(output, same_kv_as, findings)
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
        list(pool.map(partial(_checksums, output, findings), output.shards))
        checked = [
            f"{len(output.shards)} shards: index, headers and SHA-256 agree with {len(output.receipts)} receipts"
        ]
        family = _family(output, findings)
        if family is None:
            return checked
        storage = resolve_storage(source) if source is not None else {}
        if source is not None and not len(findings):  # the output is as it was written: what differs is the source
            refuse_other_numbers(output, source, storage, partial(_differs, output, source, storage, family))
        with findings.examining("config.json"):
            check_configuration(output, source, family, findings)
        carried = output.report.get("layout") == "source"
        described = (
            "the source's own description, by which every tensor can be read"
            if carried
            else "compressed-tensors reads every linear module as it is stored"
        )
        checked.append(f"config.json: {described}")
        with findings.examining("KV scales"):
            checked += check_kv(output, family, findings)
        with findings.examining("config.json"):
            check_census(output, findings)
            check_uniform_experts(output, family, findings)
        if source is None or source.folder is None:
            with findings.examining("scales"):
                check_alone(output, findings)
            return checked
        check_side_files(output, source.folder, source.side_files, findings)
        checked.append(f"{len(source.side_files)} side files are the source's, byte for byte")
        with findings.examining(REPORT):
            checked.append(_compare_weights(output, source, storage, family, findings, pool, watcher))
    return checked


def _checksums(output: OutputFiles, findings: Findings, shard: str) -> None:
    with findings.examining(shard):
        check_checksums(output, shard, findings)


def _compare_weights(
    output: OutputFiles,
    source: Checkpoint,
    storage: dict[str, StoredWeight],
    family: Family,
    findings: Findings,
    pool: ThreadPoolExecutor,
    watcher: Watcher,
) -> str:
    """Every weight of the source in the output, and nothing besides. What was compared, in words."""
    weights = WeightCheck(output, source, storage, family, findings)
    claimed = {str(name) for name in (output.report.get("kv_cache") or {}).get("tensors", ())}

    def compare(stored: StoredWeight) -> list[str]:
        with findings.examining(stored.name):
            return weights.check(stored)
        return []

    watcher.begin(sum(stored.nbytes for stored in storage.values()))
    packed = 0
    for stored, names in zip(storage.values(), pool.map(compare, storage.values()), strict=True):
        claimed.update(names)
        packed += any(name.endswith(".weight_packed") for name in names) and stored.kind != "int4_packed"
        watcher.advance(stored.nbytes)
    for name in output.tensors:
        if name not in claimed:
            findings.problem(name, "comes from no weight of the source")
    pressed = f"; {packed:,} quantized ones are as close as their receipts say" if packed else ""
    if packed and weights.algorithm == "rtn":
        pressed += ", every code the nearest and every scale one of the recipe's"
    return f"{len(storage) - packed:,} kept weights equal the source, folded KV scales aside{pressed}"


def _differs(
    output: OutputFiles, source: Checkpoint, storage: dict[str, StoredWeight], family: Family, stored: StoredWeight
) -> bool:
    """Whether one weight, looked at by itself, is not what the output was made from."""
    findings = Findings()
    with findings.examining(stored.name):
        WeightCheck(output, source, storage, family, findings).check(stored)
    return len(findings) > 0


def _family(output: OutputFiles, findings: Findings) -> Family | None:
    """The family that config.json names, if every tensor is one of its; None and a finding otherwise."""
    with findings.examining("config.json"):
        family = identify_family(output.config)
        for name in output.tensors:
            classify(family, output.config, name)
        return family
    return None


def _compare_kv(output: OutputFiles, same_kv_as: str | Path, findings: Findings) -> list[str]:
    """What the other side of a pair caches is what this one caches."""
    try:
        mine = open_checkpoint(output.folder)
        resolve_storage(mine)
        contract = recorded_contract(output, identify_family(mine.config), findings)
    except CheckpointError as error:
        findings.problem("KV cache", f"not compared with {same_kv_as}: {error.what}")
        return []
    if contract is None:
        return []
    other = open_checkpoint(same_kv_as)
    names = (str(output.folder), str(same_kv_as))
    if problem := two_models(mine.config, other.config, names=names):
        raise CheckpointError(problem, where="--same-kv-as", hint="both sides of a pair come from one source")
    for difference in kv_differences(mine, other, contract.kv_scales, names=names):
        findings.problem(difference.where, difference.what)
    return [f"KV cache: every layer holds what it holds in {same_kv_as}"]
