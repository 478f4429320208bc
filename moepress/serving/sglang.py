"""An SGLang server as a process: found, started, waited for, read, stopped.

    with start(launch, log=run / "server.log") as server:      # raises ServerDied with the cause if it dies
        server.client.generate([1, 2, 3], max_new_tokens=16)
        server.read_log().kv_dtype                              # "float8_e4m3fn"
                                                                # nothing of it is left here

SGLang's pins conflict with moepress's, so it lives in an environment of its own and is only ever run, never imported.
The process tree is held by `keeper`: it ends when this process does, however that happens. Ready means both that the
log says so and that /health_generate has produced a token: the port answers long before the model does.

A server binds its port long after the port was chosen, and SGLang 0.5.23 does not end when that fails: it waits two to
twelve minutes for itself on a port that is another's. So the log's complaint ends the boot, and `start_anywhere` tries
again on another port.

A server that somebody else started is used through `SGLangClient(url)`; it is never stopped from here.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from moepress.environments import command
from moepress.errors import ServerDied, ServingError
from moepress.serving import keeper
from moepress.serving.client import SGLangClient
from moepress.serving.death import Cause, last_lines
from moepress.serving.launch import Launch
from moepress.serving.ports import check_port, free_port
from moepress.serving.server_log import ServerLog, parse_log

PYTHON_VARIABLE = "MOEPRESS_SGLANG_PYTHON"
DEFAULT_PYTHON = Path(".venv-sglang/bin/python")
_GRACE_S = 15.0
_POLL_S = 0.5
_ASK_S = 120.0
_ENDING_S = 120.0
"""Seconds in which a tree ends whose log says why: SGLang 0.5.23 waits 65 s for crash dumps first."""
_PORTS_TRIED = 3
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
    try:
        version = ask_python(found, "from importlib.metadata import version; print(version('sglang'))")
    except ServingError as error:
        raise ServingError(f"SGLang is not installed in this Python: {error.what}", where=found, hint=hint) from error
    return Environment(Path(found), version)


def ask_python(python: str | Path, code: str) -> str:
    """What a few lines print in another environment's interpreter.

    Raises:
        ServingError: it does not run them, or not within two minutes.
    """
    try:
        asked = subprocess.run(
            [python, "-c", code], capture_output=True, text=True, timeout=_ASK_S, env=our_environment(), check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ServingError(f"this Python does not run: {error}", where=str(python)) from error
    if asked.returncode:
        last = (asked.stderr.strip().splitlines() or [f"exit status {asked.returncode}"])[-1]
        raise ServingError(last[-300:], where=str(python))
    return asked.stdout.strip()


class SGLangServer:
    """A server that was started here. Use as a context manager, or call `stop`.

    Attributes:
        client: speaks HTTP with it.
        url: ``http://127.0.0.1:PORT``.
        log_path: everything it wrote.
        command: as it can be pasted into a shell.
        name: what messages call it.
        boot_seconds: from start to the first generated token; 0 until then.
    """

    def __init__(self, process: subprocess.Popen[bytes], launch: Launch, log_path: Path, name: str = "server") -> None:
        self._process = process
        self.url = launch.url
        self.log_path = log_path
        self.command = launch.shell_line()
        self.name = name
        self.client = SGLangClient(launch.url)
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

    def ready(self) -> bool:
        """Whether it said so and has just generated a token.

        Raises:
            ServerDied: it has ended, or its port is another's, which it would go on about for minutes.
        """
        self.check("while starting")
        log = self.read_log()
        if log.death is not None and log.death.cause is Cause.PORT_TAKEN:
            self.stop()
            raise self._died(0, "while starting")
        return log.ready and self.client.healthy()

    def check(self, when: str = "while it served") -> None:
        """
        Raises:
            ServerDied: it has ended.
        """
        if not self.running:
            raise self._died(self._process.returncode, when)

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
        """Why it is gone, when it is; None when it still runs `wait_s` seconds after somebody got no answer.

        A server whose log names a cause already is given the time that SGLang takes to end.
        """
        try:
            status = self._process.wait(wait_s)
        except subprocess.TimeoutExpired:
            if self.read_log().death is None:
                return None
            try:
                status = self._process.wait(_ENDING_S)
            except subprocess.TimeoutExpired:
                return None
        return self._died(status, "while it served")

    def __enter__(self) -> SGLangServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _died(self, status: int, when: str) -> ServerDied:
        text = self.log_text()
        death = parse_log(text).death
        if death is not None:
            what = f"the {self.name} died {when}: {death.cause}: {death.line}"
            return ServerDied(what, cause=death.cause, where=str(self.log_path), hint=death.hint)
        killed = status == 128 + signal.SIGKILL
        why = "killed (signal 9), as the kernel does when memory runs out" if killed else f"exit status {status}"
        return ServerDied(
            f"the {self.name} ended {when}: {why}; the log ends with\n{last_lines(text)}",
            cause=None,
            where=str(self.log_path),
            hint="more memory, or a smaller --max-total-tokens" if killed else "read the log",
        )


def start(launch: Launch, *, log: Path, timeout_s: float = 1800.0) -> SGLangServer:
    """Start a server and wait until it generates.

    Args:
        launch: what to run (`launch.sglang_launch`).
        log: file for its output; overwritten.
        timeout_s: seconds until it must be ready. 700 GB from a cold disk take many minutes.

    Raises:
        ServerDied: it died (with the cause from its log), or its port is taken.
        ServingError: it was not ready in time. Nothing is left running in either case.
    """
    server = launch_process(launch, log=log)
    try:
        wait_until_ready(server, timeout_s)
    except BaseException:
        server.stop()
        raise
    return server


def start_anywhere(launch_on: Callable[[int], Launch], *, log: Path, timeout_s: float = 1800.0) -> SGLangServer:
    """`start` on a port that is free; on another one when somebody takes it before the server does.

    Args:
        launch_on: the launch for a port.
        log, timeout_s: as for `start`; of one try.

    Raises:
        ServingError: as `start`.
    """
    for _ in range(_PORTS_TRIED - 1):
        try:
            return start(launch_on(free_port()), log=log, timeout_s=timeout_s)
        except ServerDied as death:
            if death.cause != Cause.PORT_TAKEN:
                raise
    return start(launch_on(free_port()), log=log, timeout_s=timeout_s)


def launch_process(launch: Launch, *, log: Path, name: str = "server") -> SGLangServer:
    """Start a server, or another program that is looked after as one, under a keeper. Waits for nothing.

    Args:
        launch: what to run.
        log: file for its output; overwritten.
        name: what messages call it.

    Raises:
        ServerDied: somebody listens on its port.
    """
    check_port(launch.url)
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as out:
        variables = {**our_environment(), **launch.variables}
        process = keeper.start_kept(launch.command, variables=variables, out=out, grace=_GRACE_S)
    return SGLangServer(process, launch, log, name)


def wait_until_ready(server: SGLangServer, timeout_s: float) -> None:
    """Waits until it generates, and notes in `boot_seconds` how long that took.

    Raises:
        ServerDied: it has ended.
        ServingError: it was not ready after `timeout_s` seconds; it still runs.
    """
    started = time.monotonic()
    while not server.ready():
        if time.monotonic() - started > timeout_s:
            raise not_ready(server, timeout_s)
        time.sleep(_POLL_S)
    server.boot_seconds = time.monotonic() - started


def not_ready(server: SGLangServer, timeout_s: float) -> ServingError:
    """The error for a server that was not ready after `timeout_s` seconds."""
    return ServingError(
        f"the {server.name} was not ready after {timeout_s:.0f} s; its log ends with\n{last_lines(server.log_text())}",
        where=str(server.log_path),
        hint="give it more time (--boot-timeout), or read the log",
    )


def our_environment() -> dict[str, str]:
    """This process's environment without what would make another interpreter look into ours."""
    return {name: value for name, value in os.environ.items() if name not in _OURS}
