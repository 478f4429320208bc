"""An SGLang server as a process: found, started, waited for, read, stopped.

    with start(launch, log=run / "server.log") as server:      # raises ServingError with the cause if it dies
        server.client.generate([1, 2, 3], max_new_tokens=16)
        server.read_log().kv_dtype                              # "float8_e4m3fn"
                                                                # nothing of it is left here

SGLang's pins conflict with moepress's, so it lives in an environment of its own and is only ever run, never imported.
The process tree is held by `keeper`: it ends when this process does, however that happens. Ready means both that the
log says so and that /health_generate has produced a token: the port answers long before the model does.

A server that somebody else started is used through `SGLangClient(url)`; it is never stopped from here.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from moepress.environments import command
from moepress.errors import ServerDied, ServingError
from moepress.serving import keeper
from moepress.serving.client import SGLangClient
from moepress.serving.launch import Launch
from moepress.serving.server_log import ServerLog, parse_log

PYTHON_VARIABLE = "MOEPRESS_SGLANG_PYTHON"
DEFAULT_PYTHON = Path(".venv-sglang/bin/python")
_GRACE_S = 15.0
_OURS = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "__PYVENV_LAUNCHER__")


@dataclass(frozen=True)
class Environment:
    """A Python that has SGLang. `version` is the installed distribution's."""

    python: Path
    version: str


def find_environment(python: str | Path | None = None) -> Environment:
    """The environment to run SGLang in.

    Args:
        python: its interpreter; None = the variable MOEPRESS_SGLANG_PYTHON, else ``.venv-sglang/bin/python`` under the
            working directory.

    Raises:
        ServingError: no interpreter there, or SGLang is not installed in it.
    """
    named = str(python or os.environ.get(PYTHON_VARIABLE) or DEFAULT_PYTHON)
    found = shutil.which(named)
    hint = (
        f"without a GPU: {command('sglang-cpu')} makes one; with a GPU: install SGLang into an environment of its own, and "
        f"name its Python with --sglang-python or {PYTHON_VARIABLE}"
    )
    if found is None:
        raise ServingError("no Python with SGLang found", where=named, hint=hint)
    asked = subprocess.run(
        [found, "-c", "from importlib.metadata import version; print(version('sglang'))"],
        capture_output=True,
        text=True,
        timeout=60,
        env=our_environment(),
        check=False,
    )
    if asked.returncode != 0:
        last = (asked.stderr.strip().splitlines() or ["no message"])[-1]
        raise ServingError(f"SGLang is not installed in this Python: {last}", where=found, hint=hint)
    return Environment(Path(found), asked.stdout.strip())


def free_port() -> int:
    """A TCP port on 127.0.0.1 that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class SGLangServer:
    """A server that `start` has started. Use as a context manager, or call `stop`.

    Attributes:
        client: speaks HTTP with it.
        url: ``http://127.0.0.1:PORT``.
        log_path: everything it wrote.
        boot_seconds: from start to the first generated token.
    """

    def __init__(self, process: subprocess.Popen[bytes], url: str, log_path: Path, command: str) -> None:
        self._process = process
        self.url = url
        self.log_path = log_path
        self.command = command
        self.client = SGLangClient(url)
        self.boot_seconds = 0.0

    def read_log(self) -> ServerLog:
        """The log so far, parsed."""
        return parse_log(self.log_text())

    def log_text(self) -> str:
        """The log so far."""
        return self.log_path.read_text(errors="replace")

    @property
    def running(self) -> bool:
        """Whether the server's process is there (it may still be loading)."""
        return self._process.poll() is None

    def pids(self) -> list[int]:
        """All its processes, the keeper's own included, while it runs."""
        return [self._process.pid, *keeper.descendants(self._process.pid)] if self.running else []

    def stop(self) -> None:
        """End the whole tree and wait until it is gone. May be called again."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(_GRACE_S + 30)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def autopsy(self, *, wait_s: float = 5.0) -> ServerDied | None:
        """Why it is gone, when it is; None when it still runs `wait_s` seconds after somebody got no answer."""
        try:
            return self._died(self._process.wait(wait_s), "while it served")
        except subprocess.TimeoutExpired:
            return None

    def __enter__(self) -> SGLangServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _wait(self, timeout_s: float) -> None:
        started = time.monotonic()
        while True:
            if not self.running:
                raise self._died(self._process.returncode, "while starting")
            if self.read_log().ready and self.client.healthy():
                self.boot_seconds = time.monotonic() - started
                return
            if time.monotonic() - started > timeout_s:
                self.stop()
                raise ServingError(
                    f"not ready after {timeout_s:.0f} s; the log's last line: {_last_line(self.log_text())}",
                    where=str(self.log_path),
                    hint="give it more time (--boot-timeout), or read the log",
                )
            time.sleep(0.5)

    def _died(self, status: int, when: str) -> ServerDied:
        death = self.read_log().death
        if death is None:
            killed = status == 128 + signal.SIGKILL
            why = "killed (signal 9), as the kernel does when memory runs out" if killed else f"exit status {status}"
            return ServerDied(
                f"the server ended {when}: {why}; the log's last line: {_last_line(self.log_text())}",
                cause=None,
                where=str(self.log_path),
                hint="more memory, or a smaller --max-total-tokens" if killed else "read the log",
            )
        return ServerDied(
            f"the server died {when}: {death.cause}: {death.line}",
            cause=death.cause,
            where=str(self.log_path),
            hint=death.hint,
        )


def start(launch: Launch, *, log: Path, timeout_s: float = 1800.0) -> SGLangServer:
    """Start a server and wait until it generates.

    Args:
        launch: what to run (`launch.sglang_launch`).
        log: file for its output; overwritten.
        timeout_s: seconds until it must be ready. 700 GB from a cold disk take many minutes.

    Raises:
        ServingError: it died (with the cause from its log) or was not ready in time. Nothing is left running then.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as out:
        variables = {**our_environment(), **launch.variables}
        process = keeper.start_kept(launch.command, variables=variables, out=out, grace=_GRACE_S)
    server = SGLangServer(process, launch.url, log, launch.shell_line())
    try:
        server._wait(timeout_s)
    except BaseException:
        server.stop()
        raise
    return server


def our_environment() -> dict[str, str]:
    """This process's environment without what would make another interpreter look into ours."""
    return {name: value for name, value in os.environ.items() if name not in _OURS}


def _last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1][-300:] if lines else "(empty)"
