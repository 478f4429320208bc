"""One request: read, logged, gone wrong if a `Fault` says so, answered. Which pages there are, `pages` says."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler
from typing import TYPE_CHECKING, Any, ClassVar
from urllib.parse import parse_qs, unquote, urlsplit

from tests.hub.local_hub.repositories import Repository

if TYPE_CHECKING:
    from tests.hub.local_hub.server import LocalHub


@dataclass
class Fault:
    """What goes wrong with the next ``times`` requests whose 'METHOD /path' matches.

    Either an answer of ``status`` with ``headers``, or a body ``cut`` after so many bytes, or one with its last bytes
    ``corrupt``. ``after`` matching requests are let through first.
    """

    match: str
    times: int = 1
    after: int = 0
    status: int = 0
    headers: tuple[tuple[str, str], ...] = ()
    cut: int | None = None
    corrupt: bool = False
    drop: bool = False


@dataclass(frozen=True)
class Request:
    """One line of the log."""

    method: str
    path: str
    authorized: bool
    received: int
    range: str | None
    host: str


class Refused(Exception):
    def __init__(self, status: int, code: str = "", message: str = "") -> None:
        super().__init__(message)
        self.status, self.code, self.message = status, code, message


class Plumbing(BaseHTTPRequestHandler):
    """Reads a request, logs it, lets its fault happen, finds its page, and sends what the page answers."""

    protocol_version = "HTTP/1.1"
    hub: LocalHub
    routes: ClassVar[list[tuple[str, str, Callable[..., None]]]] = []

    def log_message(self, *_: Any) -> None:
        """The log is a list."""

    def do_GET(self) -> None:
        self._answer()

    do_HEAD = do_POST = do_PUT = do_DELETE = do_GET  # noqa: N815 (http.server's names)

    def _answer(self) -> None:
        parts = urlsplit(self.path)
        self.route, self.query = unquote(parts.path), parse_qs(parts.query)
        length = int(self.headers.get("content-length") or 0)
        self.fault = self.hub.fault_for(f"{self.command} {self.route}")
        self.body = self._read_body(length)
        line = Request(
            self.command,
            self.route,
            "authorization" in self.headers,
            len(self.body),
            self.headers.get("range"),
            self.headers.get("host", ""),
        )
        self.hub.log.append(line)
        for hook in list(self.hub.hooks):
            hook(line)
        if self.fault and self.fault.drop:
            self._break()
            return
        if self.fault and self.fault.status:
            self._send(self.fault.status, b'{"error": "injected"}', dict(self.fault.headers))
            return
        try:
            for method, pattern, action in self.routes:
                match = re.fullmatch(pattern, self.route)
                if match and self.command in method.split("|"):
                    with self.hub.lock:
                        action(self, *match.groups())
                    return
            raise Refused(404, "", f"no such page: {self.command} {self.route}")
        except Refused as error:
            headers = {"X-Error-Code": error.code, "X-Error-Message": error.message}
            self._json({"error": error.message}, error.status, {k: v for k, v in headers.items() if v})

    def _read_body(self, length: int) -> bytes:
        if self.headers.get("transfer-encoding") == "chunked":
            parts = []
            while size := int(self.rfile.readline(), 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)
        return self.rfile.read(length)

    def _break(self) -> None:
        """The line goes dead: a reset, not an orderly end."""
        self.close_connection = True
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
        self.connection.shutdown(socket.SHUT_RDWR)

    def _send(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        headers = dict(headers or {})
        self.send_response(status)
        headers.setdefault("Content-Length", str(len(body)))
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        fault = self.fault
        if fault and fault.corrupt:
            body = body[:-8] + bytes(byte ^ 0xFF for byte in body[-8:])
        if fault and fault.cut is not None:
            self.wfile.write(body[: fault.cut])
            self.wfile.flush()
            self.hub.sent += min(len(body), fault.cut)
            self._break()
            return
        self.wfile.write(body)
        self.hub.sent += len(body)

    def _json(self, data: Any, status: int = 200, headers: dict[str, str] | None = None) -> None:
        self._send(status, json.dumps(data).encode(), {"Content-Type": "application/json", **(headers or {})})

    # ------------------------------------------------------------------ who may

    @property
    def _known(self) -> bool:
        return self.headers.get("authorization") == f"Bearer {self.hub.token}"

    def _repo(self, repo: str, *, writing: bool = False) -> Repository:
        found = self.hub.repositories.get(repo)
        if found is None or (found.private and not self._known):
            raise Refused(404 if self._known else 401, "RepoNotFound", "Repository not found")
        if writing and not self._known:
            raise Refused(401, "", "Invalid credentials in Authorization header")
        return found

    def _commit(self, repo: Repository, revision: str) -> str:
        commit = repo.resolve(revision)
        if commit is None:
            raise Refused(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return commit
