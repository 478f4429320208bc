"""Answers, kept per prompt: what was asked once is not asked again, so a stopped run goes on where it was.

    key = SHA-256(schema, identity of the model, path, request, take)  ──►  the server's answer, compressed

One SQLite file, a transaction an answer: after a kill every answer that had arrived is there, and none by half. The
*identity* is the checkpoint's, not the URL's: another port finds the same answers, other weights never do. `take` tells
apart answers that are asked for twice on purpose, to see how far a server agrees with itself.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
import threading
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from moepress.errors import EvaluateError
from moepress.evaluate.endpoint import Endpoint, Kind

SCHEMA = 1
FILE_NAME = "answers.sqlite"


class Watcher(Protocol):
    """Sees progress."""

    def start(self, label: str, total: int, done: int = 0) -> None: ...
    def add(self, count: int) -> None: ...


class Answers:
    """The kept answers of a folder. Use as a context manager; safe to use from threads and from two runs at once."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / FILE_NAME
        self._lock = threading.Lock()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._connection = sqlite3.connect(self.path, timeout=60, check_same_thread=False)
            self._connection.execute("PRAGMA synchronous=NORMAL")  # one flush an answer; WAL is unsafe on network disks
            with self._connection:
                self._connection.execute(
                    "CREATE TABLE IF NOT EXISTS answers (key TEXT PRIMARY KEY, identity TEXT, path TEXT, answer BLOB)"
                )
        except (OSError, sqlite3.Error) as error:
            raise self._unusable(error) from error

    def __enter__(self) -> Answers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._connection.close()

    def get(self, key: str) -> dict[str, Any] | None:
        """The answer, or None."""
        try:
            with self._lock:
                row = self._connection.execute("SELECT answer FROM answers WHERE key = ?", (key,)).fetchone()
            return None if row is None else json.loads(zlib.decompress(row[0]))
        except (sqlite3.Error, zlib.error, ValueError) as error:
            raise self._unusable(error) from error

    def put(self, key: str, identity: str, path: str, answer: dict[str, Any]) -> None:
        """Keeps an answer; it is on the disk when this returns."""
        blob = zlib.compress(json.dumps(answer, separators=(",", ":")).encode(), 3)
        try:
            with self._lock, self._connection:
                self._connection.execute(
                    "INSERT OR REPLACE INTO answers VALUES (?, ?, ?, ?)", (key, identity, path, blob)
                )
        except sqlite3.Error as error:
            raise self._unusable(error) from error

    def _unusable(self, error: Exception) -> EvaluateError:
        return EvaluateError(
            f"the kept answers cannot be used: {error}",
            where=str(self.path),
            hint=f"rm {self.path} asks everything again; --answers DIR keeps them elsewhere",
        )


@dataclass
class Contestant:
    """One of the two models, reachable when it is needed.

    Attributes:
        role: ``source`` or ``candidate``.
        name: for people: folder or id.
        identity: what its answers are kept under.
        kind: which API its server has, known before it runs, because requests depend on it.
        software: that server, for people.
        open_endpoint: gives the server; called at the first question that has no kept answer, and then never again.
        answers: where they are kept.
        concurrency: questions at once.
        watcher: sees progress.
        asked, kept: how many questions went to the server, how many did not have to.
    """

    role: str
    name: str
    identity: str
    kind: Kind
    software: str
    open_endpoint: Callable[[], Endpoint]
    answers: Answers
    concurrency: int = 8
    watcher: Watcher | None = None
    asked: int = 0
    kept: int = 0
    _endpoint: Endpoint | None = field(default=None, repr=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    @property
    def reached(self) -> Endpoint | None:
        """The server, if it was needed."""
        return self._endpoint

    def endpoint(self) -> Endpoint:
        """The server, started now if it was not yet needed."""
        with self._lock:
            if self._endpoint is None:
                self._endpoint = self.open_endpoint()
            return self._endpoint

    def ask(self, path: str, body: dict[str, Any], *, take: int = 0) -> dict[str, Any]:
        """One question: the kept answer, or the server's, which is then kept."""
        key = self._key(path, body, take)
        answer = self.answers.get(key)
        if answer is not None:
            with self._lock:
                self.kept += 1
            return answer
        answer = self.endpoint().post(path, body)
        self.answers.put(key, self.identity, path, answer)
        with self._lock:
            self.asked += 1
        return answer

    def ask_all(
        self, path: str, bodies: Sequence[dict[str, Any]], *, label: str, take: int = 0
    ) -> list[dict[str, Any]]:
        """Many questions at once, answers in their order."""
        return self.each([lambda body=body: self.ask(path, body, take=take) for body in bodies], label=label)  # type: ignore[misc]

    def each(self, jobs: Sequence[Callable[[], Any]], *, label: str) -> list[Any]:
        """Runs jobs that ask questions, `concurrency` at once; results in their order.

        Raises:
            EvaluateError: the first that failed; what was answered by then stays.
        """
        if self.watcher is not None:
            self.watcher.start(f"{self.role}: {label}", len(jobs))

        def run(job: Callable[[], Any]) -> Any:
            result = job()
            if self.watcher is not None:
                with self._lock:
                    self.watcher.add(1)
            return result

        with ThreadPoolExecutor(max(1, self.concurrency)) as pool:
            futures = [pool.submit(run, job) for job in jobs]
            try:
                finished, _ = wait(futures, return_when=FIRST_EXCEPTION)
                for future in finished:
                    future.result()
                return [future.result() for future in futures]
            except EvaluateError as error:
                error.hint = (
                    f"{error.hint or 'run it again'}; {self.asked + self.kept:,} answers of the {self.role} are kept"
                )
                raise
            except BaseException:  # Ctrl-C: answers on their way still arrive and are kept, none is asked again
                if self._endpoint is not None:
                    self._endpoint.stop.set()
                raise
            finally:
                pool.shutdown(cancel_futures=True)

    def _key(self, path: str, body: dict[str, Any], take: int) -> str:
        content = [SCHEMA, self.identity, path, body, take]
        return hashlib.sha256(json.dumps(content, sort_keys=True, ensure_ascii=False).encode()).hexdigest()
