"""What a verification finds: problems as sentences, and what was checked, thread-safe."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from moepress.errors import MoepressError


class Findings:
    """Collects problems from several threads; the order of the report is the order of names, not of threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._problems: list[tuple[str, str]] = []

    def problem(self, where: str, what: str) -> None:
        """One thing that is off. ``where`` is a file, tensor or field."""
        with self._lock:
            self._problems.append((where, what))

    @contextmanager
    def examining(self, where: str) -> Iterator[None]:
        """What stops a check is a finding too: an output so damaged that it cannot be looked at is not verified.

        Args:
            where: the file, tensor or part that is looked at in the block.
        """
        try:
            yield
        except MoepressError as error:
            self.problem(where, error.what)
        except Exception as error:  # noqa: BLE001 (a judge of damaged files cannot know all that they make libraries raise)
            self.problem(where, f"cannot be checked: {type(error).__name__}: {' '.join(str(error).split())[:300]}")

    def sentences(self) -> list[str]:
        """All problems as ``where: what``, sorted by place."""
        with self._lock:
            return [f"{where}: {what}" for where, what in sorted(set(self._problems))]

    def __len__(self) -> int:
        with self._lock:
            return len(self._problems)
