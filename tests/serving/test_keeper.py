"""The keeper with real processes: whatever ends, nothing is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from moepress.serving import keeper

# A server in miniature: a child in a session of its own, an orphan, and one that ignores SIGTERM.
TREE = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
subprocess.Popen(["sleep", "600"], start_new_session=True)
if os.fork() == 0:
    subprocess.Popen(["sleep", "600"])
    os._exit(0)
print("up", flush=True)
time.sleep(600)
"""


def keep(code: str, *, grace: float = 1.0) -> subprocess.Popen[bytes]:
    command = [sys.executable, keeper.__file__, str(grace), sys.executable, "-c", code]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)


def tree_of(process: subprocess.Popen[bytes]) -> list[int]:
    assert process.stdout is not None
    assert process.stdout.readline() == b"up\n"
    deadline = time.monotonic() + 30
    while len(found := keeper.descendants(process.pid)) < 3:
        assert time.monotonic() < deadline, found
        time.sleep(0.05)
    return found


def alive(pids: list[int]) -> list[int]:
    states = {}
    for pid in pids:
        stat = Path(f"/proc/{pid}/stat")
        if stat.exists():
            states[pid] = stat.read_text().rpartition(")")[2].split()[0]
    return [pid for pid, state in states.items() if state != "Z"]


def wait_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + 30
    while left := alive(pids):
        assert time.monotonic() < deadline, f"still there: {left}"
        time.sleep(0.05)


def test_closing_the_pipe_ends_the_whole_tree() -> None:
    process = keep(TREE)
    pids = tree_of(process)
    assert process.stdin is not None
    process.stdin.close()
    assert process.wait(30) == 0
    assert alive(pids) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_keeper_ends_the_whole_tree(number: signal.Signals) -> None:
    process = keep(TREE)
    pids = tree_of(process)
    process.send_signal(number)
    assert process.wait(30) == 0
    assert alive(pids) == []


def test_kill_minus_nine_of_the_owner_ends_the_whole_tree(tmp_path: Path) -> None:
    owner = f"""
import subprocess, sys, time
process = subprocess.Popen(
    [sys.executable, {keeper.__file__!r}, "1", sys.executable, "-c", {TREE!r}],
    stdin=subprocess.PIPE, start_new_session=True)
print(process.pid, flush=True)
time.sleep(600)
"""
    process = subprocess.Popen([sys.executable, "-c", owner], stdout=subprocess.PIPE)
    assert process.stdout is not None
    kept = int(process.stdout.readline())
    deadline = time.monotonic() + 30
    while len(pids := keeper.descendants(kept)) < 3:
        assert time.monotonic() < deadline, pids
        time.sleep(0.05)
    process.kill()
    process.wait()
    wait_gone([kept, *pids])


def test_kill_minus_nine_of_the_keeper_kills_the_server() -> None:
    process = keep("print('up', flush=True); import time; time.sleep(600)")
    assert process.stdout is not None
    process.stdout.readline()
    pids = keeper.descendants(process.pid)
    process.kill()
    process.wait()
    wait_gone(pids)


@pytest.mark.parametrize(("code", "status"), [("raise SystemExit(7)", 7), ("import os; os.kill(os.getpid(), 9)", 137)])
def test_the_status_is_the_servers(code: str, status: int) -> None:
    assert keep(code).wait(30) == status


def test_what_a_dead_server_leaves_behind_is_ended() -> None:
    process = keep(
        "import subprocess; print(subprocess.Popen(['sleep', '600'], start_new_session=True).pid, flush=True)"
    )
    assert process.stdout is not None
    left = int(process.stdout.readline())
    assert process.wait(30) == 0
    assert alive([left]) == []
    assert os.getpid() not in keeper.descendants(os.getpid())


def test_run_until_its_end_or_the_limit(tmp_path: Path) -> None:
    log, variables = tmp_path / "log", dict(os.environ)
    code = "print('said'); raise SystemExit(3)"
    assert keeper.run_kept([sys.executable, "-c", code], variables=variables, log=log) == 3
    assert log.read_text() == "said\n"
    with pytest.raises(subprocess.TimeoutExpired):
        keeper.run_kept(["sleep", "600"], variables=variables, log=log, timeout_s=1)
    assert alive(keeper.descendants(os.getpid())) == []
