"""Progress of one task: a live line on a terminal, a plain line every few seconds anywhere else. (Converting: `convert_view`.)"""

from __future__ import annotations

import sys
import threading
import time
from types import TracebackType
from typing import Any

from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from moepress.commands.console import duration, stderr, throughput
from moepress.commands.stopping import stop_if_asked

LOG_EVERY = 10.0
"""Seconds between progress lines where there is no terminal."""


class Bar:
    """One task: a live bar on a terminal, a plain line every few seconds elsewhere, nothing when quiet.

    ``in_bytes``: what is counted are bytes, and a rate is worth showing.
    """

    def __init__(self, *, quiet: bool, in_bytes: bool = True) -> None:
        self._quiet, self._in_bytes = quiet, in_bytes
        self._live: Progress | None = None
        self._task: TaskID | None = None
        self._total = self._done = self._before = 0
        self._label = ""
        self._started = self._logged = time.monotonic()

    def __enter__(self) -> Any:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def start(self, label: str, total: int, done: int = 0) -> None:
        """Begins; ``done`` bytes were finished by an earlier run and do not count for the rate."""
        self._label, self._total, self._done, self._before = label, total, done, done
        self._started = self._logged = time.monotonic()
        if not self._quiet and sys.stderr.isatty():
            columns = (
                TextColumn("{task.description}", markup=False),
                BarColumn(bar_width=30),
                TextColumn("{task.percentage:>3.0f}%"),
                TextColumn("{task.fields[rate]}"),
                TimeElapsedColumn(),
                TextColumn("left"),
                TimeRemainingColumn(),
            )
            self._live = Progress(*columns, console=stderr, transient=True)
            self._task = self._live.add_task(label, total=total, completed=done, rate="")
            self._live.start()

    def label(self, text: str) -> None:
        self._label = text
        if self._live is not None and self._task is not None:
            self._live.update(self._task, description=text)

    def add(self, count: int) -> None:
        stop_if_asked()
        self._done += count
        now = time.monotonic()
        rate = (self._done - self._before) / max(1e-3, now - self._started)
        if self._live is not None and self._task is not None:
            self._live.update(self._task, completed=self._done, rate=self._rate(rate))
        elif not self._quiet and now - self._logged > LOG_EVERY:
            self._logged = now
            left = duration((self._total - self._done) / max(1e-9, rate))
            parts = [f"{self._done / max(1, self._total):.0%}", self._rate(rate), f"{left} left"]
            stderr.print(f"{self._label}: {', '.join(part for part in parts if part)}")

    def _rate(self, rate: float) -> str:
        return throughput(rate) if self._in_bytes else ""


class VerifyProgress(Bar):
    """Watches a verification."""

    def begin(self, total: int) -> None:
        self.start("verifying", total)

    def advance(self, count: int) -> None:
        self.add(count)


class PullProgress(Bar):
    """Watches a download (`hub.pulling.Watcher`), whose files arrive side by side."""

    def __init__(self, *, quiet: bool) -> None:
        super().__init__(quiet=quiet)
        self._lock = threading.Lock()

    def begin(self, total: int, done: int) -> None:
        self.start("fetching", total, done)

    def label(self, text: str) -> None:
        with self._lock:
            super().label(text)

    def add(self, count: int) -> None:
        with self._lock:
            super().add(count)

    def note(self, text: str) -> None:
        stderr.print(text, soft_wrap=True)
