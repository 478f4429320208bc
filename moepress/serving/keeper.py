"""Run one server and end all of it when our end of a pipe closes. Runs as a process of its own; standard library only.

    moepress ──pipe──▶ keeper ──▶ sglang.launch_server ──▶ scheduler, detokenizer, compile workers, ...

A server is a tree of processes, and some of them start sessions of their own or lose their parent. Asking the parent
program to clean up is not enough: it may be killed. So nobody asks: the pipe's other end is held by moepress and by
nobody else, and the kernel closes it whichever way moepress ends (return, exception, Ctrl-C, kill -9). The keeper is a
"child subreaper": processes whose parent died become its children, so its descendants in /proc are the whole tree.

    pipe closed, or SIGTERM/SIGINT   SIGTERM to the tree, wait `grace` seconds, SIGKILL until nothing is left
    server ended by itself           SIGKILL to what it left behind
    keeper killed                    the kernel kills the server (parent-death signal); SGLang's workers do the same

The server's own standard input is a pipe that the keeper holds: a container client (docker run -i) passes its end on, and
a second keeper inside the container ends what no signal from outside would reach.

Exit status: 0 when asked to stop; otherwise the server's own, 0-255, or 128 + the signal that ended it.

Trade-off: Linux only (subreaper, /proc, pidfd), as SGLang's GPU servers are.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def descendants(root: int) -> list[int]:
    """Process ids below `root`, parents first, from one reading of /proc. Zombies are left out."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
        except OSError:  # ended between listing and reading
            continue
        if state != "Z":
            children.setdefault(int(parent), []).append(int(entry.name))
    found: list[int] = []
    todo = [root]
    while todo:
        below = children.get(todo.pop(), [])
        found += below
        todo += below
    return found


def end_all(root: int, *, grace: float) -> None:
    """End every process below `root`: SIGTERM, then after `grace` seconds SIGKILL, again until none is left."""
    deadline = time.monotonic() + grace
    for pid in descendants(root):
        _signal(pid, signal.SIGTERM)
    while living := descendants(root):
        if time.monotonic() >= deadline:
            for pid in living:
                _signal(pid, signal.SIGKILL)
        _reap()
        time.sleep(0.05)
    _reap()


def start_kept(
    command: Sequence[str], *, variables: Mapping[str, str], out: IO[bytes], grace: float = 15.0
) -> subprocess.Popen[bytes]:
    """Start `command` under a keeper of its own. Closing the returned process's `stdin` ends the whole tree.

    Args:
        command: argument vector.
        variables: the whole environment of the new process.
        out: file for everything it writes.
        grace: seconds between SIGTERM and SIGKILL.
    """
    return subprocess.Popen(
        [sys.executable, __file__, str(grace), *command],
        stdin=subprocess.PIPE,
        stdout=out,
        stderr=subprocess.STDOUT,
        env=variables,
        start_new_session=True,
    )


def run_kept(command: Sequence[str], *, variables: Mapping[str, str], log: Path, timeout_s: float | None = None) -> int:
    """Run `command` under a keeper of its own until it ends; its exit status. Nothing of it is left, however this ends.

    Args:
        command: argument vector.
        variables: the whole environment of the new process.
        log: file for everything it writes; overwritten.
        timeout_s: seconds that it may take; None = any.

    Raises:
        subprocess.TimeoutExpired: it took longer; it has ended by now.
    """
    with log.open("wb") as out:
        process = start_kept(command, variables=variables, out=out)
    try:
        return process.wait(timeout_s)
    finally:
        if process.stdin is not None:
            process.stdin.close()
        process.wait()


def keep(command: list[str], *, grace: float) -> int:
    """Run `command` until it ends or standard input closes. Returns its exit status."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    signal.set_wakeup_fd(wake_write)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: None)

    server = subprocess.Popen(
        command, stdin=subprocess.PIPE, preexec_fn=lambda: libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    )
    ended = os.pidfd_open(server.pid)
    ready, _, _ = select.select([0, wake_read, ended], [], [])
    if ended in ready:
        status = server.wait()
        end_all(os.getpid(), grace=0)
    else:
        if server.stdin is not None:
            server.stdin.close()
        end_all(os.getpid(), grace=grace)
        status = 0
    return status if status >= 0 else 128 - status


def _signal(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:  # ended meanwhile
        return


def _reap() -> None:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:  # none left
        return


if __name__ == "__main__":
    sys.exit(keep(sys.argv[2:], grace=float(sys.argv[1])))
