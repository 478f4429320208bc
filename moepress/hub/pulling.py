"""A snapshot into a folder: disk first, then file by file, and none under its name before its checksum was right.

    Hub  -->  DIR/.moepress/incoming/PROCESS/NAME  -->  SHA-256 (git SHA-1)  -->  fsync, rename  -->  DIR/NAME  -->  ledger

A process has a folder of its own for what is still arriving, because locks on network file systems are granted to
everybody: two pulls of one checkpoint cost twice the bandwidth and never mix their bytes. A file that is there already,
by another download or a clone, is hashed and kept if it is right; if not, it is fetched again and that is said (a Git LFS
pointer, a cut shard, a dangling link of a cache). Wrong bytes are fetched a second time, past any cache; twice wrong is an
error. What resumes is the file: a stopped pull fetches only files that were not finished.

What is fetched is the checkpoint: shards, index, config, side files. Weights in other formats stay where they are.
"""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from huggingface_hub import hf_hub_download
from tqdm import tqdm

from moepress import __version__
from moepress.errors import HubError
from moepress.formats.atomic import sync_folder, write_error
from moepress.formats.checkpoint import Checkpoint
from moepress.formats.foreign_bytes import LFS_POINTER
from moepress.formats.shard_index import INDEX_NAME, list_some
from moepress.formats.side_files import CONFIG_NAME, is_weights
from moepress.formats.sources import LocalFolder, why_unusable
from moepress.hub.connection import endpoint, explained
from moepress.hub.ledger import Ledger, ledger_for
from moepress.hub.listing import RemoteFile, Snapshot, checksum_of

WORKERS = 4
"""Files on their way at once. hf-xet opens many connections for each."""

INCOMING = Path(".moepress") / "incoming"
SLACK_BYTES = 64 << 20
STALE_SECONDS = 24 * 3600.0


class Watcher(Protocol):
    """Told what a pull does, from whatever thread does it."""

    def begin(self, total: int, done: int) -> None: ...
    def label(self, text: str) -> None: ...
    def add(self, count: int) -> None: ...
    def note(self, text: str) -> None: ...


class Silent:
    def begin(self, total: int, done: int) -> None: ...
    def label(self, text: str) -> None: ...
    def add(self, count: int) -> None: ...
    def note(self, text: str) -> None: ...


@dataclass(frozen=True)
class Pulled:
    """A folder that holds the checkpoint. Bytes and files that were fetched now, and that were there before."""

    folder: Path
    snapshot: Snapshot
    fetched: tuple[str, ...]
    kept: tuple[str, ...]
    left: tuple[str, ...]
    seconds: float
    warnings: tuple[str, ...] = ()

    @property
    def fetched_bytes(self) -> int:
        return sum(self.snapshot.files[name].size for name in self.fetched)

    def as_json(self) -> dict[str, Any]:
        return {
            "folder": str(self.folder),
            "repo": self.snapshot.repo,
            "commit": self.snapshot.commit,
            "fetched": list(self.fetched),
            "fetched_bytes": self.fetched_bytes,
            "kept": list(self.kept),
            "left_on_the_hub": list(self.left),
            "seconds": round(self.seconds, 3),
        }


def files_of(checkpoint: Checkpoint, snapshot: Snapshot) -> list[RemoteFile]:
    """What makes the checkpoint: small files first, then the shards in order."""
    small = {CONFIG_NAME, *checkpoint.side_files} | ({INDEX_NAME} & snapshot.files.keys())
    return [snapshot.files[name] for name in (*sorted(small), *checkpoint.shards)]


def pull(
    checkpoint: Checkpoint, snapshot: Snapshot, folder: Path, *, workers: int = WORKERS, watcher: Watcher | None = None
) -> Pulled:
    """Fetches what is missing of a checkpoint, and checks what is there.

    Args:
        checkpoint, snapshot: from `reading.open_hub_checkpoint`.
        folder: new, empty, or one that holds parts of this checkpoint.
        workers: files at once.

    Raises:
        HubError: too little disk; another checkpoint's files in the folder; no access; bytes that stay wrong.
    """
    started = time.monotonic()
    watcher = watcher or Silent()
    wanted = files_of(checkpoint, snapshot)
    fetcher = Fetcher(snapshot, folder, watcher)
    _refuse_strangers(folder, wanted, snapshot)
    missing = [file for file in wanted if not fetcher.is_here(file)]
    check_space(missing, folder)
    total = sum(file.size for file in wanted)
    watcher.begin(total, total - sum(file.size for file in missing))
    with fetcher:
        fetcher.fetch_all(missing, workers)
    left = [name for name in snapshot.files if name not in {file.name for file in wanted}]
    gone = {file.name for file in missing}
    kept = tuple(file.name for file in wanted if file.name not in gone)
    fetched = tuple(file.name for file in missing)
    seconds = time.monotonic() - started
    return Pulled(folder, snapshot, fetched, kept, tuple(left), seconds, checkpoint.warnings)


def check_space(missing: Iterable[RemoteFile], folder: Path) -> None:
    """Refuses a pull that would fill the disk, before it begins.

    Raises:
        HubError: with both numbers.
    """
    place = folder.absolute()
    while not place.exists():
        place = place.parent
    needed, free = sum(file.size for file in missing), shutil.disk_usage(place).free
    if needed and needed + SLACK_BYTES > free:
        raise HubError(
            f"{needed:,} bytes are still to come and {free:,} are free",
            where=str(place),
            hint="free some space, choose a folder on another disk, or press shards as they land: moepress convert --stream",
        )


def _refuse_strangers(folder: Path, wanted: list[RemoteFile], snapshot: Snapshot) -> None:
    """Weights that are not of this checkpoint would be a second model in the folder."""
    if folder.exists() and not folder.is_dir():
        raise HubError("a file, not a folder", where=str(folder), hint="choose a folder")
    if not folder.exists():
        return
    names = {file.name for file in wanted}
    strangers = [name for name in LocalFolder(folder).list_files() if is_weights(name) and name not in names]
    if strangers:
        raise HubError(
            f"the folder holds {len(strangers)} weight files that are not of {snapshot.repo}: {list_some(strangers)}",
            where=str(folder),
            hint="choose another folder, or move them away",
        )


class Fetcher:
    """Fetches files of one snapshot into one folder. Use as a context manager; methods may be called from threads.

    Args:
        snapshot: which commit.
        folder: its place; made on the first fetch.
        watcher: told about bytes and oddities.

    Raises:
        HubError: the folder belongs to another commit.
    """

    def __init__(self, snapshot: Snapshot, folder: Path, watcher: Watcher) -> None:
        self.snapshot, self.folder = snapshot, folder
        self._watcher = watcher
        self._endpoint = endpoint()
        self.ledger: Ledger = ledger_for(folder, snapshot, self._endpoint)
        self._incoming = folder / INCOMING / f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
        self._lock = threading.Lock()
        self._stopped = threading.Event()

    def __enter__(self) -> Fetcher:
        _remove_stale(self.folder / INCOMING)
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        shutil.rmtree(self._incoming, ignore_errors=True)
        parent = self._incoming.parent
        if parent.is_dir() and not any(parent.iterdir()):
            parent.rmdir()

    def is_here(self, file: RemoteFile) -> bool:
        """Whether the right bytes are in place; hashes them where nobody has yet, and says what is there instead."""
        if self.ledger.holds(file):
            return True
        path = self.folder / file.name
        if not os.path.lexists(path):
            return False
        wrong = _what_is_wrong(path, file)
        if wrong is None:
            with self._lock:
                self.ledger.add(file)
            return True
        self._watcher.note(f"{file.name} is here but {wrong}; it is fetched again")
        return False

    def forget(self, name: str) -> None:
        """The file was removed on purpose."""
        with self._lock:
            self.ledger.forget(name)

    def fetch_all(self, files: list[RemoteFile], workers: int) -> None:
        """Fetches files side by side, the first ones first; the first error stops the rest.

        Raises:
            HubError: see `fetch`.
        """
        with ThreadPoolExecutor(max_workers=workers, thread_name_prefix="pull") as pool:
            futures = [pool.submit(self.fetch, file) for file in files]
            try:
                done, _ = wait(futures, return_when=FIRST_EXCEPTION)
                for future in done:
                    future.result()
            except BaseException:
                self.stop()
                pool.shutdown(wait=False, cancel_futures=True)
                raise

    def stop(self) -> None:
        """Downloads that are under way end at their next chunk."""
        self._stopped.set()

    def fetch(self, file: RemoteFile) -> None:
        """Fetches one file, checks it, gives it its name, and records it.

        Raises:
            HubError: no access; the bytes are wrong twice.
        """
        self._watcher.label(file.name)
        try:
            arrived = self._download(file, again=False)
            if checksum_of(arrived, file) != file.checksum:
                self._watcher.add(-file.size)
                self._watcher.note(f"{file.name} arrived with wrong bytes; it is fetched a second time")
                arrived.unlink()
                arrived = self._download(file, again=True)
                if (found := checksum_of(arrived, file)) != file.checksum:
                    arrived.unlink()
                    raise HubError(
                        f"{file.name}: arrived twice with wrong bytes: checksum {found}, the Hub's is {file.checksum}",
                        where=f"{self.snapshot.repo} at {self.snapshot.commit[:12]}",
                        hint="a proxy or disk that alters bytes does this; nothing of this file was kept",
                    )
            self._place(arrived, file)
        except OSError as error:
            raise write_error(self.folder / file.name, error) from error

    def _download(self, file: RemoteFile, *, again: bool) -> Path:
        if self._stopped.is_set():
            raise HubError("stopped")
        told = 0

        def add(count: int) -> None:
            nonlocal told
            told += count
            self._watcher.add(count)

        with explained(self.snapshot.repo, self.snapshot.commit):
            path = hf_hub_download(
                self.snapshot.repo,
                file.name,
                revision=self.snapshot.commit,
                local_dir=self._incoming,
                force_download=again,
                endpoint=self._endpoint,
                library_name="moepress",
                library_version=__version__,
                tqdm_class=_bar(add, self._stopped),
            )
        self._watcher.add(file.size - told)  # what came out of the Hub's cache, or twice
        return Path(path)

    def _place(self, arrived: Path, file: RemoteFile) -> None:
        target = self.folder / file.name
        target.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(arrived, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        arrived.rename(target)
        sync_folder(target.parent)
        with self._lock:
            self.ledger.add(file)


def _what_is_wrong(path: Path, file: RemoteFile) -> str | None:
    """In words that follow 'is here but'; None if the bytes are right."""
    if not path.is_file():
        return f"is {why_unusable(path)}" if path.exists() else why_unusable(path)
    size = path.stat().st_size
    if size != file.size:
        with path.open("rb") as stream:
            if stream.read(len(LFS_POINTER)) == LFS_POINTER:
                return f"is a Git LFS pointer, not the file itself of {file.size:,} bytes"
        return f"has {size:,} of {file.size:,} bytes"
    found = checksum_of(path, file)
    return (
        None
        if found == file.checksum
        else f"has other bytes (checksum {found[:12]}…, the Hub's is {file.checksum[:12]}…)"
    )


def _remove_stale(incoming: Path) -> None:
    """What a killed pull left behind: of a process of this machine that is gone, or of another machine and a day old."""
    if not incoming.is_dir():
        return
    for folder in incoming.iterdir():
        host, _, rest = folder.name.rpartition("-")[0].rpartition("-")
        if host == socket.gethostname():
            dead = not Path(f"/proc/{rest}").exists()
        else:
            dead = time.time() - folder.stat().st_mtime > STALE_SECONDS
        if dead:
            shutil.rmtree(folder, ignore_errors=True)


def _bar(add: Callable[[int], None], stopped: threading.Event) -> type[Any]:
    """A progress bar's class that draws nothing, tells us of bytes, and ends a download that is no longer wanted."""

    class Told(tqdm):  # type: ignore[misc]
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **{**options, "disable": True})

        def update(self, n: float | None = 1) -> bool | None:
            if stopped.is_set():
                raise HubError("stopped")
            add(int(n or 0))
            return None

        def update_transfer(self, n: float | None = 1) -> None:
            """hf-xet counts what comes over the line here, and what is put together in `update`: only that is told."""

    return Told
