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

from moepress.serving.ports import check_port
from moepress.serving.serve import Deployment, Role
from moepress.serving.sglang import SGLangServer, launch_process, not_ready

_POLL_S = 0.5


@dataclass(frozen=True)
class RunningRole:
    """One started process. ``server.stop()`` ends its whole tree."""

    role: Role
    server: SGLangServer

    def ready(self) -> bool:
        """Whether it answers: a server by having generated a token, a router by knowing healthy servers of both kinds.

        A router's ``/health`` says that it runs; for a second or two it still has nobody to send requests to.

        Raises:
            ServerDied: it has ended, or its port is another's.
        """
        if self.role.name == "router":
            self.server.check("while starting")
            return _answers(f"{self.role.launch.url}/readiness")
        return self.server.ready()


@contextmanager
def running(deployment: Deployment, *, logs: Path, timeout_s: float) -> Iterator[list[RunningRole]]:
    """Starts all roles, waits until they are ready, and ends them with the block.

    Args:
        logs: folder for one log a role; overwritten.
        timeout_s: seconds until all servers must be ready.

    Raises:
        ServerDied: one died, or a port is taken.
        ServingError: they were not ready in time.
    """
    for role in deployment.roles:
        for url in role.also_binds:
            check_port(url)
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
        ServerDied: when it does.
    """
    while True:
        for role in started:
            role.server.check()
        time.sleep(_POLL_S)


def _start(role: Role, logs: Path, stack: ExitStack) -> RunningRole:
    name = role.name if role.name in ("router", "server") else f"{role.name} server"
    server = launch_process(role.launch, log=logs / f"{role.name}.log", name=name)
    stack.callback(server.stop)
    return RunningRole(role, server)


def _wait(started: Sequence[RunningRole], timeout_s: float, *, others: Sequence[RunningRole] = ()) -> None:
    deadline = time.monotonic() + timeout_s
    waiting = list(started)
    while waiting:
        for role in (*started, *others):
            role.server.check("while starting")
        waiting = [role for role in waiting if not role.ready()]
        if waiting and time.monotonic() > deadline:
            raise not_ready(waiting[0].server, timeout_s)
        if waiting:
            time.sleep(_POLL_S)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            return bool(answer.status == 200)
    except (OSError, urllib.error.URLError):
        return False
