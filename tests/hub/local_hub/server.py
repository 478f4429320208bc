"""The server, and all that it knows."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import ThreadingHTTPServer
from typing import Any

from tests.hub.local_hub.pages import Pages
from tests.hub.local_hub.plumbing import Fault, Request
from tests.hub.local_hub.repositories import Repository
from tests.hub.local_hub.xet import XetStore


class LocalHub:
    """The server and what it knows. Use `running`."""

    def __init__(self, *, token: str = "hf_testtoken0123456789") -> None:
        self.token = token
        self.repositories: dict[str, Repository] = {}
        self.objects: dict[str, bytes] = {}
        self.xet = XetStore()
        self.faults: list[Fault] = []
        self.log: list[Request] = []
        self.sent = 0
        self.lock = threading.RLock()
        self.hooks: list[Callable[[Request], None]] = []
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (Pages,), {"hub": self}))
        self._server.daemon_threads = True
        self.port = int(self._server.server_address[1])

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def cdn(self) -> str:
        """The same server under another name, so that a client takes it for another host."""
        return f"http://localhost:{self.port}"

    @contextmanager
    def running(self) -> Iterator[LocalHub]:
        thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self._server.shutdown()
            self._server.server_close()

    def repository(self, repo: str, **options: Any) -> Repository:
        if repo not in self.repositories:
            self.repositories[repo] = Repository(repo, **options)
        return self.repositories[repo]

    def requests(self, pattern: str) -> list[Request]:
        """The log's lines whose 'METHOD /path' matches."""
        return [line for line in self.log if re.search(pattern, f"{line.method} {line.path}")]

    def fault_for(self, line: str) -> Fault | None:
        with self.lock:
            for fault in self.faults:
                if fault.times and re.search(fault.match, line):
                    if fault.after:
                        fault.after -= 1
                        continue
                    fault.times -= 1
                    return fault
        return None
