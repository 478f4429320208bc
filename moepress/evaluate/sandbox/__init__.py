"""Programs that a model wrote, executed where they can do no harm: a process with limits, no network, one folder.

    time       wall clock, and CPU time by RLIMIT_CPU            memory    RLIMIT_AS
    files      Landlock: reads Python's own folders, writes one temporary folder that is removed; RLIMIT_FSIZE, RLIMIT_NOFILE
    network    seccomp: no socket can be made (nor by io_uring)
    processes  seccomp: no fork, no exec, no signal to anybody; all capabilities dropped, none can be gained
    secrets    empty environment, no standard input, nothing of the home folder readable

`execute` runs one program, `prove` runs one that tries to break out and refuses when it could. There is no lesser mode:
where the kernel lacks Landlock (before Linux 5.13) or seccomp, or the machine is not x86-64, code is not executed at all.
A kernel before 6.2 does not guard one oddity, opening a file for reading and truncating it in the same call.

What runs inside is `inside`, a script of the standard library alone. A program passes when it reached its end; one that
exits early with status 0 does not.
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from moepress.errors import EvaluateError
from moepress.evaluate.sandbox import inside

OutcomeKind = Literal["passed", "failed", "timeout", "memory", "crashed"]

_SHOWN = 300  # characters of a program's last line

_HOSTILE = """
import os, signal, socket, sys
done = []
def attempt(name, act):
    try:
        act()
    except (OSError, ValueError):
        return
    done.append(name)
attempt("opened a socket", lambda: socket.socket())
attempt("opened a local socket", lambda: socket.socket(socket.AF_UNIX))
attempt("started a process", lambda: os.fork() or os._exit(0))
attempt("ran another program", lambda: os.execv("/bin/true", ["/bin/true"]))
attempt("signalled its parent", lambda: os.kill(os.getppid(), 0))
attempt("wrote beside its folder", lambda: open({beside!r}, "w"))
attempt("read beside its folder", lambda: open({secret!r}).read())
attempt("removed a file", lambda: os.remove({secret!r}))
attempt("changed a file's mode", lambda: os.chmod({secret!r}, 0o777))
attempt("raised its limits", lambda: __import__("resource").setrlimit(__import__("resource").RLIMIT_AS, (-1, -1)))
with open("mine", "w") as file:
    file.write("this must work")
assert not done, ", ".join(done)
assert set(os.environ) <= {{"LC_CTYPE"}}, "it has an environment"  # Python sets that one itself
"""


@dataclass(frozen=True)
class Limits:
    """Of one program: wall-clock seconds, bytes of address space, bytes of a file, open files."""

    seconds: float = 10.0
    memory: int = 2 << 30
    file_bytes: int = 16 << 20
    open_files: int = 64


@dataclass(frozen=True)
class Outcome:
    """How a program ended, and its last words."""

    kind: OutcomeKind
    detail: str = ""

    @property
    def passed(self) -> bool:
        return self.kind == "passed"


def execute(program: str, limits: Limits | None = None) -> Outcome:
    """Runs Python source in the sandbox.

    Raises:
        EvaluateError: the sandbox could not be closed; the program was not run.
    """
    limits = limits or Limits()
    token = secrets.token_hex(16)
    with tempfile.TemporaryDirectory(prefix="moepress-run-", ignore_cleanup_errors=True) as folder:
        work, said = Path(folder) / "work", Path(folder) / "said"
        work.mkdir()
        reader, writer = os.pipe()
        with os.fdopen(reader, "rb") as report, said.open("wb") as out:
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-B", inside.__file__, str(writer), token, *_arguments(limits)],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=out,
                cwd=work,
                env={},
                pass_fds=(writer,),
                start_new_session=True,
            )
            os.close(writer)
            timed_out = _feed_and_wait(process, program, limits.seconds)
            heard = report.read(4096).decode(errors="replace")
        words = said.read_bytes()[-4096:].decode(errors="replace").strip()
    if heard.startswith("open: "):
        raise EvaluateError(
            f"the sandbox cannot be closed here, so code is not executed: {heard[6:]}",
            hint="x86-64 Linux with Landlock (5.13 or newer) and seccomp is needed; leave out the code tasks elsewhere",
        )
    return _outcome(process.returncode, timed_out, heard, token, words)


def prove() -> None:
    """Runs a program that tries to break out.

    Raises:
        EvaluateError: the sandbox cannot be closed, or does not hold.
    """
    with tempfile.TemporaryDirectory(prefix="moepress-beside-") as folder:
        secret, beside = Path(folder) / "secret", Path(folder) / "beside"
        secret.write_text("secret")
        found = execute(_HOSTILE.format(beside=str(beside), secret=str(secret)), Limits(seconds=30))
    if not found.passed:
        raise EvaluateError(
            f"the sandbox does not hold, so code is not executed: {found.kind}: {found.detail}",
            hint="leave out the code tasks on this machine",
        )


def _arguments(limits: Limits) -> list[str]:
    cpu = max(1, int(limits.seconds) + 1)
    return [str(cpu), str(limits.memory), str(limits.file_bytes), str(limits.open_files)]


def _feed_and_wait(process: subprocess.Popen[bytes], program: str, seconds: float) -> bool:
    """True when it had to be killed. Nothing that it started is left: it cannot start anything."""
    deadline = time.monotonic() + seconds
    try:
        process.communicate(program.encode(), timeout=max(0.1, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGKILL)
        process.communicate()
        return True
    except BaseException:
        process.kill()
        process.wait()
        raise
    return False


def _outcome(status: int, timed_out: bool, heard: str, token: str, words: str) -> Outcome:
    last = words.splitlines()[-1][-_SHOWN:] if words else ""
    if timed_out or status == -signal.SIGXCPU:
        return Outcome("timeout", last)
    if status == 0 and heard == f"end: {token}":
        return Outcome("passed")
    if heard == "memory" or "MemoryError" in last:
        return Outcome("memory", last)
    if status < 0:
        return Outcome("crashed", f"signal {-status}")
    return Outcome("failed", last or "it exited before its end")
