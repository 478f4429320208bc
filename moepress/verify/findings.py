"""What a verification finds: problems as sentences, and what was checked, thread-safe."""

from __future__ import annotations

import threading


class Findings:
    """Collects problems from several threads; the order of the report is the order of names, not of threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._problems: list[tuple[str, str]] = []

    def problem(self, where: str, what: str) -> None:
        """One thing that is off. ``where`` is a file, tensor or field."""
        with self._lock:
            self._problems.append((where, what))

    def sentences(self) -> list[str]:
        """All problems as ``where: what``, sorted by place."""
        with self._lock:
            return [f"{where}: {what}" for where, what in sorted(set(self._problems))]

    def __len__(self) -> int:
        with self._lock:
            return len(self._problems)
