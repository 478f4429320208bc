"""A deployment as processes: started together, ready together, ended together.

All servers load at the same time, each under a keeper of its own, each with its log. The router is started when every
server has generated a token. Whatever ends the block, an exception in it, a server that dies, Ctrl-C or kill -9, none of
the processes outlives it: the keepers hold pipes to this process.
"""

from __future__ import annotations

import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from moepress.errors import ServingError
from moepress.serving import keeper
from moepress.serving.serve import Deployment, Role
from moepress.serving.sglang import SGLangServer, our_environment

_GRACE_S = 15.0
_POLL_S = 0.5


@dataclass(frozen=True)
class RunningRole:
    """One started process. ``server.stop()`` ends its whole tree."""

    role: Role
    server: SGLangServer

    def check_alive(self) -> None:
        """
        Raises:
            ServingError: it has ended, with the cause that its log gives.
        """
        if self.server.running:
            return
        death = self.server.read_log().death
        lines = [line for line in self.server.log_text().splitlines() if line.strip()]
        why = f"{death.cause}: {death.line}" if death else f"its last line: {lines[-1][-300:] if lines else '(empty)'}"
        raise ServingError(
            f"the {self.role.name} server has ended: {why}",
            where=str(self.server.log_path),
            hint=death.hint if death else "read the log",
        )

    def ready(self) -> bool:
        """Whether it answers: a server by having generated a token, a router by knowing healthy servers of both kinds.

        A router's ``/health`` says that it runs; for a second or two it still has nobody to send requests to.
        """
        if self.role.name == "router":
            return _answers(f"{self.role.launch.url}/readiness")
        return self.server.read_log().ready and self.server.client.healthy()


@contextmanager
def running(deployment: Deployment, *, logs: Path, timeout_s: float) -> Iterator[list[RunningRole]]:
    """Starts all roles, waits until they are ready, and ends them with the block.

    Args:
        logs: folder for one log a role; overwritten.
        timeout_s: seconds until all servers must be ready.

    Raises:
        ServingError: one died, or they were not ready in time.
    """
    with ExitStack() as stack:
        servers = [role for role in deployment.roles if role.name != "router"]
        started = [_start(role, logs, stack) for role in servers]
        _wait(started, timeout_s)
        for role in deployment.roles:
            if role.name == "router":
                router = _start(role, logs, stack)
                _wait([router], timeout_s, others=started)
                started.append(router)
        yield started


def watch(started: Sequence[RunningRole]) -> None:
    """Returns never: waits until one of the processes ends.

    Raises:
        ServingError: when it does.
    """
    while True:
        for role in started:
            role.check_alive()
        time.sleep(_POLL_S)


def _start(role: Role, logs: Path, stack: ExitStack) -> RunningRole:
    logs.mkdir(parents=True, exist_ok=True)
    path = logs / f"{role.name}.log"
    with path.open("wb") as out:
        variables = {**our_environment(), **role.launch.variables}
        process = keeper.start_kept(role.launch.command, variables=variables, out=out, grace=_GRACE_S)
    server = SGLangServer(process, role.launch.url, path, role.launch.shell_line())
    stack.callback(server.stop)
    return RunningRole(role, server)


def _wait(started: Sequence[RunningRole], timeout_s: float, *, others: Sequence[RunningRole] = ()) -> None:
    deadline = time.monotonic() + timeout_s
    waiting = list(started)
    while waiting:
        for role in (*started, *others):
            role.check_alive()
        waiting = [role for role in waiting if not role.ready()]
        if waiting and time.monotonic() > deadline:
            raise ServingError(
                f"the {waiting[0].role.name} server was not ready after {timeout_s:.0f} s",
                where=str(waiting[0].server.log_path),
                hint="give it more time (--boot-timeout), or read the log",
            )
        if waiting:
            time.sleep(_POLL_S)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            return bool(answer.status == 200)
    except (OSError, urllib.error.URLError):
        return False
