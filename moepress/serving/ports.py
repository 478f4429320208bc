"""TCP ports for servers that bind them late.

A server is told its port when it starts and binds it when the model is loaded: seconds to many minutes later. A port from
the kernel's own range (`bind` to 0) may be handed to any outgoing connection in between, so ports are chosen below that
range, where nothing is taken unless somebody asks for it. SGLang itself picks one more there, from 22,000 to 29,999.
"""

from __future__ import annotations

import errno
import random
import socket
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import urlsplit

from moepress.errors import ServerDied
from moepress.serving.death import Cause

_LOWEST, _HIGHEST = 10_000, 21_999
_TRIES = 64
_KERNELS_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


def free_port() -> int:
    """A TCP port of 127.0.0.1 that was free a moment ago, outside the range that the kernel hands out by itself."""
    return free_ports(1)[0]


def free_ports(count: int) -> list[int]:
    """As `free_port`, all different. From the kernel's range after all where it hands out every port, or few are free."""
    highest = min(_HIGHEST, _kernels_lowest() - 1)
    range_ = range(_LOWEST, max(_LOWEST, highest + 1))
    # not by `random`'s own state: a seed that somebody sets would have two processes choose alike
    chosen = random.SystemRandom().sample(range_, min(_TRIES, len(range_)))
    free = [port for port in chosen if not _is_taken("127.0.0.1", port)][:count]
    with ExitStack() as held:
        while len(free) < count:
            probe = held.enter_context(socket.socket())
            probe.bind(("127.0.0.1", 0))
            free.append(int(probe.getsockname()[1]))
    return free


def check_port(url: str) -> None:
    """Before a server is started: the port of its URL can be bound.

    Args:
        url: one without a port, or on an address that is not this machine's, is passed over.

    Raises:
        ServerDied: its port is taken.
    """
    parts = urlsplit(url)
    if parts.hostname is None or parts.port is None or not _is_taken(parts.hostname, parts.port):
        return
    raise ServerDied(
        f"port {parts.port} of {parts.hostname} is taken: another program listens on it",
        cause=Cause.PORT_TAKEN,
        where=url,
        hint="choose another port (--port), or end what listens there: ss -ltnp",
    )


def _is_taken(host: str, port: int) -> bool:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do: a closed one's port is free
            probe.bind(address)
    except OSError as error:
        return error.errno == errno.EADDRINUSE
    return False


def _kernels_lowest() -> int:
    try:
        return int(_KERNELS_RANGE.read_text().split()[0])
    except (OSError, ValueError, IndexError):  # no Linux, or no /proc: its usual range
        return 32_768
