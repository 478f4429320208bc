"""A checkpoint whose files arrive while they are used: the first to ask for one waits until it is here and checked.

    pool of fetchers:   s3 s4 s5 …   `ahead` shards in front of the last one that was asked for
    readers:            checkpoint.path("s2")  ->  here: at once     not here: wait for it, or fetch it out of turn
    release("s1"):      truncated, then unlinked; the ledger forgets it; asked for again, it is fetched again

Every file goes through `pulling.Fetcher`: nothing is read whose SHA-256 was not the Hub's. Truncating first gives the disk
back at once, although a reader may still hold the file open.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, fields
from pathlib import Path
from types import TracebackType

from moepress.errors import HubError
from moepress.formats.checkpoint import Checkpoint
from moepress.hub.listing import Snapshot
from moepress.hub.pulling import Fetcher, Watcher, files_of

FETCHERS = 3


@dataclass(frozen=True)
class ArrivingCheckpoint(Checkpoint):
    """A checkpoint of which a file's path is known when the file is here."""

    arriving: Arriving

    def path(self, name: str) -> Path:
        """Where a shard or side file is; waits until it is there.

        Raises:
            HubError: it cannot be fetched.
        """
        self.arriving.require(name)
        return super().path(name)

    def is_here(self, name: str) -> bool:
        """Whether a file has arrived; asks for nothing."""
        return self.arriving.has(name)


class Arriving:
    """Fetches a snapshot's files into a folder as they are asked for. Use as a context manager; thread-safe.

    Args:
        checkpoint, snapshot: from `reading.open_hub_checkpoint`.
        folder: where the files come to lie.
        ahead: shards fetched before anybody asks; None fetches on to the end.

    Raises:
        HubError: the folder belongs to another commit.
    """

    def __init__(
        self, checkpoint: Checkpoint, snapshot: Snapshot, folder: Path, watcher: Watcher, *, ahead: int | None
    ) -> None:
        self.folder, self.snapshot, self._ahead = folder, snapshot, ahead
        self._fetcher = Fetcher(snapshot, folder, watcher)
        self._pool = ThreadPoolExecutor(FETCHERS, thread_name_prefix="arriving")
        self._lock = threading.Lock()
        self._order: list[str] = []
        self._next = 0
        self._coming: dict[str, Future[None]] = {}
        known = {field.name: getattr(checkpoint, field.name) for field in fields(Checkpoint)}
        here = {**known, "location": str(folder), "folder": folder}
        self.checkpoint = ArrivingCheckpoint(**here, arriving=self)

    def __enter__(self) -> Arriving:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._fetcher.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._fetcher.stop()
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._fetcher.__exit__(kind, error, trace)

    def fetch_small_files(self) -> None:
        """Config, index and side files: what is not a shard."""
        for file in files_of(self.checkpoint, self.snapshot):
            if file.name not in self.checkpoint.shards:
                self.require(file.name)

    def missing_bytes(self, names: Iterable[str]) -> int:
        """Bytes of these files that are not here."""
        files = [self.snapshot.files[name] for name in names]
        return sum(file.size for file in files if not self._fetcher.is_here(file))

    def expect(self, order: Sequence[str]) -> None:
        """Shards will be asked for in this order: begin to fetch them."""
        with self._lock:
            self._order, self._next = list(order), 0
            self._top_up()

    def require(self, name: str) -> None:
        """Returns when the file is here and its bytes are right.

        Raises:
            HubError: it cannot be fetched, or no such file is in the snapshot.
        """
        if name not in self.snapshot.files:
            raise HubError(f"{name} is not in {self.snapshot.repo}", where=self.snapshot.commit)
        with self._lock:
            if name in self._order[self._next :]:
                self._next = self._order.index(name) + 1
            coming = self._submit(name)
            self._top_up()
        coming.result()

    def has(self, name: str) -> bool:
        """Whether somebody asked for the file and it is here, checked."""
        with self._lock:
            coming = self._coming.get(name)
        return coming is not None and coming.done() and not coming.cancelled() and coming.exception() is None

    def release(self, names: Iterable[str]) -> None:
        """Removes files. One that is asked for again is fetched again."""
        for name in names:
            with self._lock:
                coming = self._coming.pop(name, None)
            if coming is not None:
                coming.result()
            path = self.folder / name
            if path.exists():
                os.truncate(path, 0)
                path.unlink()
            self._fetcher.forget(name)

    def _submit(self, name: str) -> Future[None]:
        if name not in self._coming:
            self._coming[name] = self._pool.submit(self._fetch, name)
        return self._coming[name]

    def _top_up(self) -> None:
        """Begins what should be on its way by now: up to ``ahead`` shards after the last one asked for."""
        until = len(self._order) if self._ahead is None else self._next + self._ahead
        for name in self._order[self._next : until]:
            self._submit(name)

    def _fetch(self, name: str) -> None:
        file = self.snapshot.files[name]
        if not self._fetcher.is_here(file):
            self._fetcher.fetch(file)
