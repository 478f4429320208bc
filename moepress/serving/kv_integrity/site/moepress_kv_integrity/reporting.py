"""What has been seen: counters, their Prometheus twins, and one JSON line per violation.

A line names the request, the page and the generations. It never holds tokens, text or cache contents. It goes to the
server's log behind MARKER, and to the file that MOEPRESS_KV_INTEGRITY_LOG names (one appending write a line).
"""

from __future__ import annotations

import json
import logging
import os
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

from . import LOG_VARIABLE, SGLANG_VERSION

MARKER = "moepress KV integrity violation: "
log = logging.getLogger("sglang.moepress_kv_integrity")


@dataclass
class Counters:
    """Since the server started, on this rank.

    Attributes:
        checks: forwards checked; requests, pages: what they held.
        violations: by kind: ``page_mismatch`` for a request, the kinds of `tags.EVENTS` for the pool.
        aborted: requests ended with KVIntegrityError.
        withheld_pages: entries kept out of the free list.
        rebuilds: flushes after a violation.
        check_seconds: time the scheduler's thread spent on checking (on a GPU: launching the checks).
    """

    mode: str
    page_size: int
    checks: int = 0
    requests: int = 0
    pages: int = 0
    violations: dict[str, int] = field(default_factory=dict)
    aborted: int = 0
    withheld_pages: int = 0
    rebuilds: int = 0
    check_seconds: float = 0.0

    def status(self, suspect: bool) -> dict:
        """As /server_info shows it."""
        return {"active": True, "sglang": SGLANG_VERSION, "suspect": suspect, **asdict(self)}


def violation(watch, kind: str, **facts) -> None:
    """Count one violation and write its line. `facts`: numbers and the request's id."""
    watch.counters.violations[kind] = watch.counters.violations.get(kind, 0) + 1
    if not watch.writes:
        return
    line = json.dumps({"time": round(time.time(), 3), "mode": watch.mode, "kind": kind, **facts})
    log.error("%s%s", MARKER, line)
    if named := os.environ.get(LOG_VARIABLE):
        handle = os.open(Path(named), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            os.write(handle, line.encode() + b"\n")
        finally:
            os.close(handle)


class Metrics:
    """Prometheus twins of the counters, brought up to date at most once a second.

    Made only where SGLang's own metrics are on: its registry spans processes, and prometheus_client must be imported
    after SGLang has prepared for that.
    """

    def __init__(self, labels: dict[str, str]) -> None:
        from prometheus_client import Counter, Gauge

        self._labels = labels
        names = list(labels)
        self._totals = {
            name: Counter(f"moepress_kv_integrity_{name}", text, labelnames=names)
            for name, text in (
                ("checks", "Forwards whose KV pages were checked."),
                ("requests", "Requests in checked forwards."),
                ("pages", "KV pages checked."),
                ("aborted", "Requests ended with KVIntegrityError."),
                ("withheld_pages", "Entries kept out of the free list after a violation."),
                ("rebuilds", "Cache flushes after a violation."),
            )
        }
        self._violations = Counter("moepress_kv_integrity_violations", "Violations.", labelnames=[*names, "kind"])
        self._suspect = Gauge(
            "moepress_kv_integrity_suspect",
            "1 while the pool is suspect and the prefix cache closed.",
            labelnames=names,
            multiprocess_mode="mostrecent",
        )
        self._shown: dict[str, int] = {}
        self._next = 0.0

    def update(self, watch) -> None:
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + 1.0
        for name, total in self._totals.items():
            self._add(name, total.labels(**self._labels), getattr(watch.counters, name))
        for kind, count in watch.counters.violations.items():
            self._add(kind, self._violations.labels(**self._labels, kind=kind), count)
        self._suspect.labels(**self._labels).set(int(watch.suspect))

    def _add(self, name, total, count: int) -> None:
        total.inc(count - self._shown.get(name, 0))
        self._shown[name] = count
