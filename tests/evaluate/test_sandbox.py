"""The sandbox: what ends a program, what it cannot do, and that nothing runs where it cannot be closed."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from moepress.errors import EvaluateError
from moepress.evaluate import sandbox
from moepress.evaluate.sandbox import Limits, execute, inside, prove

QUICK = Limits(seconds=2, memory=1 << 30, file_bytes=1 << 20)


def test_it_holds_against_a_program_that_tries_to_break_out() -> None:
    prove()


@pytest.mark.parametrize(
    ("program", "kind"),
    [
        ("x = 1", "passed"),
        ("import math, re, json, collections, typing, hashlib, datetime\nhashlib.md5(b'x')", "passed"),
        ("import threading\nt = threading.Thread(target=len, args=('x',)); t.start(); t.join()", "passed"),
        ("assert 1 == 2", "failed"),
        ("def f(:", "failed"),
        ("import sys; sys.exit(0)", "failed"),
        ("import os; os._exit(0)", "failed"),
        ("def f(n): return f(n + 1)\nf(0)", "failed"),
        ("open('f', 'w').write('x' * (1 << 21))", "failed"),
        ("while True: pass", "timeout"),
        ("import time; time.sleep(60)", "timeout"),
        ("a = [0] * 10**10", "memory"),
        ("import ctypes; ctypes.string_at(0)", "crashed"),
    ],
)
def test_how_a_program_ends(program: str, kind: str) -> None:
    started = time.monotonic()
    assert execute(program, QUICK).kind == kind
    assert time.monotonic() - started < 30


@pytest.mark.parametrize(
    "attempt",
    [
        "import socket; socket.create_connection(('127.0.0.1', 80), timeout=1)",
        "import urllib.request; urllib.request.urlopen('http://127.0.0.1', timeout=1)",
        "import subprocess; subprocess.run(['true'], check=True)",
        "import os; os.fork()",
        "import multiprocessing as m; p = m.Process(target=len, args=('x',)); p.start(); p.join(); assert p.exitcode == 0",
        "import os, signal; os.kill(1, 0)",
        "import os; os.kill(os.getppid(), 0)",
        "import os; os.listdir('/home')",
        "import os; os.listdir('/proc')",
        "open('/etc/passwd').read()",
        "import resource; resource.setrlimit(resource.RLIMIT_CPU, (99, 99))",
        "import os; os.setuid(65534) or os.chroot('.')",
        "import ctypes; l = ctypes.CDLL(None, use_errno=True); assert l.mount(b'x', b'.', b'tmpfs', 0, None) == 0",
        "import ctypes; l = ctypes.CDLL(None); assert l.syscall(425, 8, ctypes.create_string_buffer(120)) >= 0",
        "import ctypes; l = ctypes.CDLL(None); assert l.ptrace(16, 1, 0, 0) == 0",
    ],
)
def test_what_a_program_cannot_do(attempt: str) -> None:
    """A control each: the same program with the attempt left out passes, so it is the attempt that failed."""
    assert execute(attempt, QUICK).kind == "failed"
    imports = "\n".join(part for part in attempt.split("; ") if part.startswith("import "))
    assert execute(imports, QUICK).passed


def test_it_cannot_touch_a_file_of_ours(tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.write_text("mine")
    mode = mine.stat().st_mode
    for attempt in (f"open({str(mine)!r}).read()", f"open({str(mine)!r}, 'w')", f"import os; os.remove({str(mine)!r})",
                    f"import os; os.chmod({str(mine)!r}, 0)", f"import os; os.truncate({str(mine)!r}, 0)",
                    f"import os; os.rename({str(mine)!r}, 'x')", f"import os; os.link({str(mine)!r}, 'x')",
                    f"import os; os.utime({str(mine)!r}, (0, 0))"):  # fmt: skip
        assert execute(attempt, QUICK).kind == "failed", attempt
    assert (mine.read_text(), mine.stat().st_mode) == ("mine", mode)


def test_it_sees_no_secrets_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    found = execute("import os, sys; assert 'HF_TOKEN' not in os.environ; assert sys.stdin.read() == ''", QUICK)
    assert found.passed, found.detail


def test_nothing_is_left_of_a_program() -> None:
    before = set(Path("/tmp").glob("moepress-run-*"))
    execute("open('left', 'w').write('x'); import time; time.sleep(60)", QUICK)
    assert set(Path("/tmp").glob("moepress-run-*")) <= before
    assert not [pid for pid in os.listdir("/proc") if pid.isdigit() and _command(pid).startswith(f"{inside.__file__}")]  # noqa: PTH208


def _command(pid: str) -> str:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return ""
    return words[4].decode() if len(words) > 4 else ""


def test_where_it_cannot_be_closed_nothing_is_executed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel without Landlock answers ENOSYS: here, a system call that no kernel has."""
    numbers = "LANDLOCK_CREATE, LANDLOCK_ADD, LANDLOCK_RESTRICT, CAPSET, SECCOMP = 444"
    changed = Path(inside.__file__).read_text().replace(numbers, numbers + "4")
    assert "= 4444" in changed
    script = tmp_path / "inside.py"
    script.write_text(changed)
    monkeypatch.setattr(inside, "__file__", str(script))
    with pytest.raises(EvaluateError, match=r"cannot be closed here, so code is not executed: .*not implemented"):
        execute("open('/tmp/moepress-it-ran', 'w')")
    with pytest.raises(EvaluateError, match="cannot be closed"):
        prove()
    assert not Path("/tmp/moepress-it-ran").exists()


def test_a_sandbox_that_does_not_hold_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the seccomp filter sockets can be made: the proof finds it, and the files stay guarded."""
    changed = Path(inside.__file__).read_text().replace("        filter_calls()\n", "")
    script = tmp_path / "inside.py"
    script.write_text(changed)
    monkeypatch.setattr(inside, "__file__", str(script))
    with pytest.raises(EvaluateError, match="does not hold"):
        sandbox.prove()
