"""What is finished, and whose run this is: the folder ``OUT/.moepress``.

    .moepress/plan.json            the name plan and the resume key
    .moepress/receipts/<shard>.json   one per finished unit, written after its shard is on disk
    .moepress/run.lock             host, process and start time of the run that owns the folder

Resume is plan minus receipts. A receipt is written only after the shard was fsynced and renamed, so a shard without a
receipt is not finished, whatever its size. The lock is a file created exclusively, not an advisory lock: ``flock``
succeeds for everybody on some network file systems.
"""

from __future__ import annotations

import json
import os
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from moepress.convert.plan import ConversionPlan
from moepress.errors import ConvertError, MoepressError, PlanRefused
from moepress.formats.atomic import atomic_write_json, write_all, write_error
from moepress.formats.sealed_json import seal_problem, sealed
from moepress.formats.shard_index import list_some
from moepress.formats.sources import TEMPORARY_SUFFIX

STATE_FOLDER = ".moepress"


class Journal:
    """The receipts of one output folder.

    Args:
        out: the output folder; created on :meth:`open`.
        plan: what is to be done. Its ``key`` must equal the key of what was begun here before.
    """

    def __init__(self, out: Path, plan: ConversionPlan) -> None:
        self.out = out
        self.plan = plan
        self.state = out / STATE_FOLDER
        self.receipts_folder = self.state / "receipts"

    def check(self) -> None:
        """Refuses a folder that is the source, holds something else, or belongs to another plan. Changes nothing.

        Raises:
            PlanRefused: with what is there and what to do.
        """
        source = Path(self.plan.source)
        out, src = self.out.resolve(), source.resolve()
        if out == src or src in out.parents or out in src.parents:
            raise PlanRefused(
                "output and source are the same folder, or one lies inside the other",
                where=f"{self.out} → {out}; {source} → {src}",
                hint="choose an output folder beside the source",
            )
        if not self.out.exists():
            return
        if not self.out.is_dir():
            raise PlanRefused("the output is a file, not a folder", where=str(self.out))
        if not (self.state / "plan.json").exists():
            strangers = sorted(entry.name for entry in self.out.iterdir() if not _is_ours_unfinished(entry))
            if strangers:
                raise PlanRefused(
                    f"the output folder is not empty: {list_some(strangers)}",
                    where=str(self.out),
                    hint="choose an empty or new folder",
                )
            return
        begun = read_json(self.state / "plan.json")
        if begun.get("key") != self.plan.key:
            raise PlanRefused(
                f"the folder was begun with something else:\n    {_difference(begun, self.plan)}",
                where=str(self.out),
                hint="choose another output folder, or delete this one to start over",
            )
        self._refuse_strangers()

    def _refuse_strangers(self) -> None:
        """Files of ours are known by name; anything else would be shipped by accident."""
        known = {shard.name for shard in self.plan.shards} | set(self.plan.side_files) | set(FINAL_FILES)
        strangers = []
        for path in sorted(self.out.rglob("*")):
            relative = path.relative_to(self.out).as_posix()
            if path.is_dir() or relative.startswith(f"{STATE_FOLDER}/") or path.name.endswith(TEMPORARY_SUFFIX):
                continue
            if relative not in known:
                strangers.append(relative)
        if strangers:
            raise PlanRefused(
                f"the output folder holds what does not belong to this plan: {list_some(strangers)}",
                where=str(self.out),
                hint="move them away, then run the same command again",
            )

    @contextmanager
    def open(self) -> Iterator[None]:
        """Takes the folder for this process: checks, locks, removes temporary files of a dead run, writes the plan."""
        self.check()
        try:
            self.receipts_folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise write_error(self.receipts_folder, error) from error
        with _exclusive(self.state / "run.lock"):
            self.check()
            self._sweep()
            atomic_write_json(self.state / "plan.json", sealed(self.plan.as_json()))
            try:
                yield
            finally:
                self._sweep()

    def _sweep(self) -> None:
        """Removes temporary files: of a dead run before, of workers that died in this one after."""
        for path in self.out.rglob(f"*{TEMPORARY_SUFFIX}"):
            path.unlink(missing_ok=True)

    def receipt(self, shard_name: str) -> dict[str, Any] | None:
        """The receipt of a finished unit, or None if the unit has still to be done.

        A receipt that was changed, or whose shard is missing or has another size, is an error: somebody changed the folder.
        """
        path = self.receipts_folder / f"{shard_name}.json"
        if not path.exists():
            return None
        receipt = read_json(path)
        if receipt.get("plan_key") != self.plan.key:
            raise ConvertError(
                "a receipt belongs to another plan", where=str(path), hint="delete the output folder to start over"
            )
        problem = seal_problem(receipt)
        if problem is None and receipt.get("unit") != shard_name:
            problem = f"is that of {receipt.get('unit')}"
        if problem:
            raise ConvertError(
                f"the receipt of {shard_name} {problem}",
                where=str(path),
                hint=f"delete {path} to press this shard again",
            )
        shard = self.out / shard_name
        size = shard.stat().st_size if shard.exists() else None
        if size != receipt["file_bytes"]:
            found = "is missing" if size is None else f"has {size:,} bytes"
            raise ConvertError(
                f"{shard_name} {found}; its receipt says {receipt['file_bytes']:,} bytes",
                where=str(path),
                hint=f"delete {path} to press this shard again",
            )
        return receipt

    def write_receipt(self, shard_name: str, receipt: dict[str, Any]) -> None:
        """Marks a unit as finished. Call only after its shard is durable."""
        atomic_write_json(self.receipts_folder / f"{shard_name}.json", sealed(receipt))

    def forget(self, shard_name: str) -> None:
        """Marks a unit as not finished, whatever lies there of it."""
        (self.receipts_folder / f"{shard_name}.json").unlink(missing_ok=True)


def begun_plan(out: Path) -> dict[str, Any]:
    """The plan that the folder was begun with, as it was kept; empty where nothing was begun, as in a published copy.

    Raises:
        ConvertError: it cannot be read.
    """
    path = out / STATE_FOLDER / "plan.json"
    return read_json(path) if path.exists() else {}


def begun_calibration(out: Path) -> str | None:
    """Digest of the calibration tokens that the folder was begun with; None where nothing was, or without any.

    Raises:
        ConvertError: its plan cannot be read.
    """
    found = begun_plan(out).get("calibration")
    return found if isinstance(found, str) else None


FINAL_FILES = ("config.json", "model.safetensors.index.json", "moepress_report.json")
"""What ``finish`` writes beside the shards and the side files."""


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a state file.

    Raises:
        ConvertError: unreadable or not an object.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, ValueError, RecursionError) as error:
        raise ConvertError(
            f"cannot be read: {error}", where=str(path), hint="delete the output folder to start over"
        ) from error
    if not isinstance(data, dict):
        raise ConvertError("is not a JSON object", where=str(path), hint="delete the output folder to start over")
    return data


def _is_ours_unfinished(entry: Path) -> bool:
    """The state folder of a run that died before its plan was written, or a temporary file."""
    return entry.name == STATE_FOLDER or entry.name.endswith(TEMPORARY_SUFFIX)


def _difference(begun: dict[str, Any], plan: ConversionPlan) -> str:
    """Names the fields in which two plans differ, the recipe's by their path; of another recipe not what its name implies."""
    now = plan.as_json()
    parts = []
    for field in ("moepress", "source", "source_fingerprint", "calibration"):
        if begun.get(field) != now[field]:
            parts.append(f"{field} {_short(begun.get(field))} → {_short(now[field])}")
    old, new = begun.get("recipe"), now["recipe"]
    if isinstance(old, dict):
        implied = {"description", "families"} if old.get("name") != new["name"] else set()
        for path in sorted({*_flat(old), *_flat(new)} - implied):
            before, after = _flat(old).get(path), _flat(new).get(path)
            if before != after:
                parts.append(f"{path} {_short(before)} → {_short(after)}")
    return "\n    ".join(parts) or "its name plan differs"


def _short(value: object) -> str:
    """A value for people: of a SHA-256 the first twelve digits."""
    return f"{value[:12]}…" if isinstance(value, str) and re.fullmatch("[0-9a-f]{64}", value) else repr(value)


def _flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            out |= _flat(value, f"{prefix}{key}.")
        else:
            out[prefix + key] = value
    return out


@contextmanager
def _exclusive(path: Path) -> Iterator[None]:
    """Owns a lock file for the time of the block; a lock left by a dead process of this host is taken over.

    Raises:
        ConvertError: another living run, or a run on another host, owns the folder.
    """
    me = {"host": socket.gethostname(), "pid": os.getpid(), "started": _process_start(os.getpid())}
    for _ in range(2):
        try:
            descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o644)
        except FileExistsError:
            _refuse_if_alive(path)
            path.unlink(missing_ok=True)
            continue
        except OSError as error:
            raise write_error(path, error) from error
        try:
            write_all(descriptor, memoryview(json.dumps(me).encode()), path)
        except MoepressError:
            path.unlink(missing_ok=True)
            raise
        finally:
            os.close(descriptor)
        break
    else:
        raise ConvertError("another run took the output folder at the same moment", where=str(path))
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def _refuse_if_alive(path: Path) -> None:
    try:
        owner = json.loads(path.read_text())
        host, pid, started = owner["host"], int(owner["pid"]), owner["started"]
    except FileNotFoundError:
        return
    except OSError as error:
        raise ConvertError(
            f"the lock of the output folder cannot be read: {error.strerror}", where=str(path)
        ) from error
    except (ValueError, KeyError, TypeError):
        host, pid, started = socket.gethostname(), -1, None  # cut short by a crash: nobody lives behind it
    if host != socket.gethostname():
        raise ConvertError(
            f"a run on host {host} (process {pid}) owns the output folder",
            where=str(path),
            hint=f"if that run is dead, delete {path} and run the same command again",
        )
    if pid > 0 and _process_start(pid) == started and started is not None:
        raise ConvertError(
            f"process {pid} is writing this output folder now",
            where=str(path),
            hint="wait for it, or stop it and run the same command again",
        )


def _process_start(pid: int) -> str | None:
    """Start time of a process in clock ticks since boot (field 22 of /proc/PID/stat), None if it is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()
    return None if fields[0] == "Z" else fields[19]
