"""What a pulled folder holds: ``DIR/.moepress/pull.json``, written anew after every file.

    {"repo": "org/name", "revision": "main", "commit": "8d1f…", "endpoint": "https://huggingface.co",
     "files": {"model-00001-of-00163.safetensors": {"size": …, "checksum": "…", "mtime_ns": …}}}

A file that is in the ledger, with the size and time it had then, was hashed once and is not hashed again: 700 GB take
twenty minutes to read. A file that is not there, or was touched since, is hashed before it is believed. The commit is the
folder's: another revision goes into another folder.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moepress.errors import HubError
from moepress.formats.atomic import atomic_write_json
from moepress.hub.listing import RemoteFile, Snapshot

LEDGER = Path(".moepress") / "pull.json"


@dataclass
class Ledger:
    """The record of one folder. Not thread-safe: the caller locks."""

    folder: Path
    repo: str
    revision: str | None
    commit: str
    endpoint: str
    files: dict[str, dict[str, Any]] = field(default_factory=dict)

    def holds(self, file: RemoteFile) -> bool:
        """The file is there as it was when its checksum was last seen right."""
        known = self.files.get(file.name)
        if known is None or known["checksum"] != file.checksum:
            return False
        try:
            status = (self.folder / file.name).stat()
        except OSError:
            return False
        return status.st_size == file.size and status.st_mtime_ns == known["mtime_ns"]

    def add(self, file: RemoteFile) -> None:
        """Records a file whose checksum was just seen right, and writes the ledger."""
        status = (self.folder / file.name).stat()
        self.files[file.name] = {"size": file.size, "checksum": file.checksum, "mtime_ns": status.st_mtime_ns}
        self.write()

    def forget(self, name: str) -> None:
        """The file was removed on purpose."""
        if self.files.pop(name, None) is not None:
            self.write()

    def write(self) -> None:
        path = self.folder / LEDGER
        path.parent.mkdir(parents=True, exist_ok=True)
        data = {name: getattr(self, name) for name in ("repo", "revision", "commit", "endpoint", "files")}
        atomic_write_json(path, data)


def read_ledger(folder: Path) -> Ledger | None:
    """The folder's ledger; None if it was not pulled by us.

    Raises:
        HubError: the ledger is damaged.
    """
    path = folder / LEDGER
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        return Ledger(folder, data["repo"], data["revision"], data["commit"], data["endpoint"], dict(data["files"]))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise HubError(
            f"the record of what was pulled is damaged: {error}", where=str(path), hint=f"rm {path}"
        ) from error


def ledger_for(folder: Path, snapshot: Snapshot, endpoint: str) -> Ledger:
    """The folder's ledger, begun if it has none.

    Raises:
        HubError: the folder holds another repository, or another commit of this one.
    """
    known = read_ledger(folder)
    if known is None:
        return Ledger(folder, snapshot.repo, snapshot.address.revision, snapshot.commit, endpoint)
    if known.repo != snapshot.repo:
        raise HubError(
            f"the folder holds {known.repo}, not {snapshot.repo}", where=str(folder), hint="choose another folder"
        )
    if known.commit != snapshot.commit:
        raise HubError(
            f"the folder holds commit {known.commit[:12]} of {known.repo}, and {snapshot.commit[:12]} was asked for",
            where=str(folder),
            hint=f"choose another folder; to complete this one: moepress pull {known.repo}@{known.commit} {folder}",
        )
    return known


@dataclass(frozen=True)
class Origin:
    """Where a folder's files came from."""

    repo: str
    commit: str


_CACHED = re.compile(r"models--([^/]+?)--([^/]+)")


def read_origin(folder: Path) -> Origin | None:
    """Repository and commit of a folder that `pull` filled, or of a snapshot in the Hub's cache; None if unknown."""
    ledger = read_ledger(folder)
    if ledger is not None:
        return Origin(ledger.repo, ledger.commit)
    real = folder.resolve()
    if real.parent.name == "snapshots" and (match := _CACHED.fullmatch(real.parent.parent.name)):
        return Origin(f"{match[1]}/{match[2]}", real.name)
    return None
