"""A conversion by two workers, watched on a terminal and stopped there: what somebody at it sees, and what stays behind."""

from __future__ import annotations

import os
import pty
import re
import secrets
import select
import sys
import time
from pathlib import Path

import pytest

from tests.tiny_checkpoints import build

pytestmark = pytest.mark.slow

MARK = "MOEPRESS_WATCHED"

FRAME = (
    r"pressing layer \d of \d, \d+ of 8 experts, \d+ of \d+ shards done",
    r"\d+%  +[\d.]+ [MG]B/s  +[\d.]+ s gone, ([\d.]+ s|\d+ min \d+ s) left",
    r"worst error so far 0\.\d{4}: layer \d, expert \d+, \w+_proj",
)


def test_two_workers_are_one_view_and_ctrl_c_says_how_to_go_on(tmp_path: Path) -> None:
    source, out = build("kimi", tmp_path / "src", mtp=0, layers=8), tmp_path / "out"
    options = ["weights.algorithm=gptq", "serving.tensor_parallel=1", "output.shard_size=1MB"]
    options += ["calibration.samples=16", "calibration.length=64", "calibration.batch_size=2"]
    command = [sys.executable, "-m", "moepress.cli", "convert", str(source.folder), str(out), "--recipe", "kimi-k2"]
    command += [word for option in options for word in ("--set", option)] + ["--workers", "2"]
    mark = secrets.token_hex(8)
    pid, terminal = pty.fork()
    if pid == 0:
        environment = {"COLUMNS": "200", "TERM": "xterm", "OMP_NUM_THREADS": "1", MARK: mark}
        os.execve(command[0], command, {**os.environ, **environment})
    seen, stopped = "", False
    workers: list[str] = []
    until = time.monotonic() + 500
    while time.monotonic() < until:
        if select.select([terminal], [], [], 1.0)[0]:
            try:
                more = os.read(terminal, 1 << 16)
            except OSError:  # the other side has ended
                break
            seen += re.sub(rb"\x1b\[[0-9;?]*[A-Za-z]", b"", more).decode(errors="replace")
        if not stopped and all(re.search(line, seen) for line in FRAME) and "pressing layer 3" in seen:
            workers = [name for name in begun_by(mark) if "ray::_RayWorker" in name]
            os.write(terminal, b"\x03")
            stopped = True
    _, status = os.waitpid(pid, 0)
    os.close(terminal)
    assert stopped, seen[-3000:]
    assert len(workers) == 2
    assert os.waitstatus_to_exitcode(status) == 130
    end = seen[seen.index("stopped: ") :]
    assert re.match(r"stopped: \d+ of \d+ shards are kept\. To go on from there:\s+moepress convert ", end)
    assert end.rstrip().endswith("--workers 2")
    for line in ("core_worker", "task_manager", "(raylet)", "Traceback"):  # Ray's words, which mean nothing to anybody
        assert line not in seen
    logs = sorted((out / ".moepress" / "logs").iterdir())
    assert [log.name for log in logs] == ["worker-0.log", "worker-1.log"]
    assert all(re.search(r" done layer \d experts \d+\.\.\d+: ", log.read_text()) for log in logs)
    assert not list(out.rglob("*.moepress-tmp"))
    waited = time.monotonic() + 30
    while (left := begun_by(mark)) and time.monotonic() < waited:
        time.sleep(0.5)
    assert left == []


def begun_by(mark: str) -> list[str]:
    """Processes that inherited a mark in their environment: the command, Ray's and its workers."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and f"{MARK}={mark}".encode() in (entry / "environ").read_bytes():
                found.append((entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace"))
        except OSError:
            continue
    return found
