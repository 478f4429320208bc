"""Exactly which files are sent, and what their bytes must be when they have arrived.

    shards, index, config, moepress_report.json, side files     from OUT, as they are
    README.md                                                   the card; the source's own stays with the source
    moepress_receipts.json.gz                                   all receipts in one, without times and places
    .eval_results/*.yaml                                        our scores; the source's are scores of other weights

A folder of links to these files is what is handed to huggingface_hub, so that nothing else can slip in: a file in OUT that
is none of these is refused by name.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from moepress.convert.journal import STATE_FOLDER
from moepress.convert.receipts import PUBLISHED_RECEIPTS
from moepress.errors import MoepressError
from moepress.formats.atomic import atomic_file, write_all
from moepress.formats.sealed_json import DIGEST, sealed
from moepress.formats.shard_index import INDEX_NAME, list_some
from moepress.formats.side_files import CONFIG_NAME
from moepress.formats.sources import TEMPORARY_SUFFIX
from moepress.hub.listing import RemoteFile, checksum_of, git_blob_sha1
from moepress.publish.gate import Publishable
from moepress.recipe import MAX_SHARD_BYTES
from moepress.results import REPORT_NAME, SIGNATURE_NAME

CARD_NAME = "README.md"
SCORES = ".eval_results"
"""Folder of scores on the Hub. A source's own are scores of other weights, and are not sent."""

STAGING = Path(STATE_FOLDER) / "publish"
NOT_SENT = frozenset((".gitattributes", CARD_NAME))
"""Side files of the source that are not sent as they are: the Hub makes the first, the card replaces the second."""


@dataclass(frozen=True)
class Sent:
    """A file and its checksums, in hex; the Hub lists large files by the first and small ones by the second (None: a shard's)."""

    name: str
    path: Path
    size: int
    sha256: str
    git_sha1: str | None

    def is_there(self, remote: RemoteFile | None) -> bool:
        """The Hub has just these bytes."""
        if remote is None or remote.size != self.size:
            return False
        if remote.sha256:
            return remote.sha256 == self.sha256
        return remote.git_sha1 == (self.git_sha1 or checksum_of(self.path, remote))


@dataclass(frozen=True)
class Contents:
    """Everything that is sent, by name, sorted; ``folder`` holds links to it."""

    folder: Path
    files: dict[str, Sent]

    @property
    def bytes(self) -> int:
        return sum(file.size for file in self.files.values())


def stage(publishable: Publishable, card: str, scores: Mapping[str, bytes] | None = None) -> Contents:
    """Writes the card and the receipts, and makes the folder of links.

    Args:
        scores: from `eval_results.eval_results`: files by name.

    Raises:
        MoepressError: a file that is not ours, is missing, or is too large for the Hub.
    """
    out, report = publishable.folder, publishable.report
    own = out / STAGING / "own"
    shutil.rmtree(own, ignore_errors=True)
    made = {CARD_NAME: card.encode(), PUBLISHED_RECEIPTS: receipts_bytes(publishable), **(scores or {})}
    for name, data in made.items():
        (own / name).parent.mkdir(parents=True, exist_ok=True)
        _write(own / name, data)
    side = [name for name in report["side_files"] if name not in NOT_SENT and not name.startswith(f"{SCORES}/")]
    paths = {name: out / name for name in (*report["shards"], *side, CONFIG_NAME, INDEX_NAME, REPORT_NAME)}
    if (out / SIGNATURE_NAME).is_file():
        paths[SIGNATURE_NAME] = out / SIGNATURE_NAME
    _refuse_strangers(out, {*paths, *report["side_files"]})
    paths |= {name: own / name for name in made}
    files = {name: _sent(name, paths[name], report["shards"].get(name)) for name in sorted(paths)}
    folder = out / STAGING / "files"
    shutil.rmtree(folder, ignore_errors=True)
    for name, file in files.items():
        link = folder / name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(file.path.absolute(), link.parent.absolute()))
    return Contents(folder, files)


def receipts_bytes(publishable: Publishable) -> bytes:
    """All receipts in one, sealed again without their times: the same receipts give the same bytes."""
    receipts = {}
    for shard, receipt in publishable.receipts.items():
        kept = {field: value for field, value in receipt.items() if field != "seconds"}
        receipts[shard] = sealed(kept) if DIGEST in receipt else kept
    data = {"report_sha256": publishable.digest, "receipts": receipts}
    text = json.dumps(data, sort_keys=True, separators=(",", ":")).encode()
    return gzip.compress(text, mtime=0)


def _sent(name: str, path: Path, sha256: str | None) -> Sent:
    """A shard's SHA-256 is the report's, which was verified; the others are small and hashed now."""
    if not path.is_file():
        raise MoepressError(f"{name} is missing", where=str(path), hint="run convert again: it completes the folder")
    size = path.stat().st_size
    if size >= MAX_SHARD_BYTES:
        raise MoepressError(
            f"{name} has {size:,} bytes; the Hub takes files below {MAX_SHARD_BYTES:,} (decimal)",
            where=str(path),
            hint="convert with a smaller output.shard_size, 5GB for example",
        )
    if sha256 is not None:
        return Sent(name, path, size, sha256, None)
    data = path.read_bytes()
    git = git_blob_sha1(len(data))
    git.update(data)
    return Sent(name, path, size, hashlib.sha256(data).hexdigest(), git.hexdigest())


def _refuse_strangers(out: Path, known: set[str]) -> None:
    strangers = []
    for path in sorted(out.rglob("*")):
        name = path.relative_to(out).as_posix()
        ours = name.startswith(f"{STATE_FOLDER}/") or name.endswith(TEMPORARY_SUFFIX)
        if not path.is_dir() and not ours and name not in known:
            strangers.append(name)
    if strangers:
        raise MoepressError(
            f"{len(strangers)} files in the folder are not of the conversion: {list_some(strangers)}",
            where=str(out),
            hint="move them away; nothing is sent that convert did not write",
        )


def _write(path: Path, data: bytes) -> None:
    with atomic_file(path) as descriptor:
        write_all(descriptor, memoryview(data), path)
