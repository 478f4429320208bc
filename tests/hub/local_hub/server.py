"""The HTTP side: one handler, a table of routes, faults on top."""

from __future__ import annotations

import base64
import json
import re
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import yaml

from tests.hub.local_hub.repositories import Repository, Stored, is_large
from tests.hub.local_hub.xet import XetStore

TREE_PAGE = 40
"""Entries a page of a tree listing; the Hub's pages have 1,000."""


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
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
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


class _Refused(Exception):
    def __init__(self, status: int, code: str = "", message: str = "") -> None:
        super().__init__(message)
        self.status, self.code, self.message = status, code, message


def _handler(hub: LocalHub) -> type[BaseHTTPRequestHandler]:
    class Handler(_Handler):
        pass

    Handler.hub = hub
    return Handler


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: LocalHub

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
            for method, pattern, action in ROUTES:
                match = re.fullmatch(pattern, self.route)
                if match and self.command in method.split("|"):
                    with self.hub.lock:
                        action(self, *match.groups())
                    return
            raise _Refused(404, "", f"no such page: {self.command} {self.route}")
        except _Refused as error:
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
            raise _Refused(404 if self._known else 401, "RepoNotFound", "Repository not found")
        if writing and not self._known:
            raise _Refused(401, "", "Invalid credentials in Authorization header")
        return found

    def _commit(self, repo: Repository, revision: str) -> str:
        commit = repo.resolve(revision)
        if commit is None:
            raise _Refused(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return commit

    # ------------------------------------------------------------------ reading

    def info(self, repo: str, revision: str | None = None) -> None:
        found = self._repo(repo)
        commit = self._commit(found, revision or "main")
        names = [{"rfilename": name} for name in found.commits[commit]]
        self._json({"id": repo, "sha": commit, "private": found.private, "gated": found.gated, "siblings": names})

    def tree(self, repo: str, revision: str) -> None:
        found = self._repo(repo)
        files = sorted(found.commits[self._commit(found, revision)].items())
        first = int(self.query.get("cursor", ["0"])[0])
        page = []
        for name, file in files[first : first + TREE_PAGE]:
            entry: dict[str, Any] = {"type": "file", "path": name, "size": len(file.data), "oid": file.blob_id}
            if file.lfs:
                entry["lfs"] = {"oid": file.sha256, "size": len(file.data), "pointerSize": len(file.pointer)}
            page.append(entry)
        headers = {}
        if first + TREE_PAGE < len(files):
            address = f"{self.hub.endpoint}/api/models/{repo}/tree/{revision}?recursive=true&cursor={first + TREE_PAGE}"
            headers["Link"] = f'<{address}>; rel="next"'
        self._json(page, headers=headers)

    def refs(self, repo: str) -> None:
        found = self._repo(repo)

        def listed(prefix: str) -> list[dict[str, str]]:
            chosen = [(ref, commit) for ref, commit in found.refs.items() if ref.startswith(prefix)]
            return [{"name": ref.removeprefix("refs/heads/"), "ref": ref, "targetCommit": c} for ref, c in chosen]

        pulls = listed("refs/pr/")
        self._json({"branches": listed("refs/heads/"), "converts": [], "tags": [], "pullRequests": pulls})

    def resolve(self, repo: str, revision: str, name: str) -> None:
        found = self._repo(repo)
        if found.gated and not self._known:
            raise _Refused(401, "GatedRepo", f"Access to model {repo} is restricted")
        commit = self._commit(found, revision)
        file = found.commits[commit].get(name)
        if file is None:
            raise _Refused(404, "EntryNotFound", "Entry not found")
        headers = {"X-Repo-Commit": commit, "ETag": f'"{file.etag}"', "Accept-Ranges": "bytes"}
        if not file.lfs:
            self._content(file.data, headers)
            return
        if file.sha256 in self.hub.xet.hashes:
            token = f"{self.hub.endpoint}/api/models/{repo}/xet-read-token/{commit}"
            headers |= {"X-Xet-Hash": self.hub.xet.hashes[file.sha256], "X-Xet-Refresh-Route": token}
        headers |= {"X-Linked-Etag": f'"{file.sha256}"', "X-Linked-Size": str(len(file.data))}
        self._send(302, b"", headers | {"Location": f"{self.hub.cdn}/cdn/{repo}/{file.sha256}?signature=secret"})

    def from_cdn(self, repo: str, sha256: str) -> None:
        if "authorization" in self.headers:
            raise _Refused(400, "", "only one way of saying who you are")
        for tree in self.hub.repositories[repo].commits.values():
            for file in tree.values():
                if file.lfs and file.sha256 == sha256:
                    self._content(file.data, {"ETag": f'"{sha256}"', "Accept-Ranges": "bytes"})
                    return
        raise _Refused(404)

    def _content(self, data: bytes, headers: dict[str, str]) -> None:
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("range", ""))
        if not wanted:
            self._send(200, data, headers | {"Content-Length": str(len(data))})
            return
        start = int(wanted[1])
        end = min(int(wanted[2]) + 1 if wanted[2] else len(data), len(data))
        if start >= len(data):
            self._send(416, b"", {"Content-Range": f"bytes */{len(data)}"})
            return
        self._send(206, data[start:end], headers | {"Content-Range": f"bytes {start}-{end - 1}/{len(data)}"})

    # ------------------------------------------------------------------ writing

    def create(self) -> None:
        data = json.loads(self.body)
        repo = f"{data['organization']}/{data['name']}"
        if not self._known:
            raise _Refused(401, "", "Invalid credentials in Authorization header")
        if repo in self.hub.repositories:
            self._json({"error": "You already created this model repo", "url": f"{self.hub.endpoint}/{repo}"}, 409)
            return
        self.hub.repository(repo, private=data.get("visibility") == "private" or bool(data.get("private")))
        self._json({"url": f"{self.hub.endpoint}/{repo}", "name": repo, "id": repo})

    def validate_yaml(self) -> None:
        text = json.loads(self.body)["content"]
        match = re.match(r"---\n(.*?)\n---\n", text, re.DOTALL)
        errors = []
        try:
            data = yaml.safe_load(match[1]) if match else {}
            if any(not isinstance(item, str) for item in data.get("datasets") or ()):
                errors.append('"datasets" must be strings')
        except yaml.YAMLError as error:
            errors.append(str(error))
        listed = [{"message": message} for message in errors]
        self._json({"errors": listed, "warnings": []}, 400 if errors else 200)

    def preupload(self, repo: str, revision: str) -> None:
        found = self._repo(repo, writing=True)
        tree = found.commits[self._commit(found, revision)]
        files = []
        for file in json.loads(self.body)["files"]:
            large = is_large(base64.b64decode(file["sample"]), file["size"])
            there = tree.get(file["path"])
            mode = "lfs" if large else "regular"
            files.append(
                {"path": file["path"], "uploadMode": mode, "shouldIgnore": False, "oid": there.etag if there else None}
            )
        self._json({"files": files})

    def lfs_batch(self, repo: str) -> None:
        self._repo(repo, writing=True)
        objects = []
        for item in json.loads(self.body)["objects"]:
            answer: dict[str, Any] = {"oid": item["oid"], "size": item["size"]}
            if item["oid"] not in self.hub.objects:
                answer["actions"] = {
                    "upload": {"href": f"{self.hub.cdn}/lfs/{item['oid']}?signature=secret", "header": {}},
                    "verify": {"href": f"{self.hub.endpoint}/{repo}.git/info/lfs/verify", "header": {}},
                }
            objects.append(answer)
        self._json({"transfer": "basic", "objects": objects})

    def lfs_put(self, oid: str) -> None:
        self.hub.objects[oid] = self.body
        self._send(200, b"")

    def lfs_verify(self, repo: str) -> None:
        data = json.loads(self.body)
        there = self.hub.objects.get(data["oid"])
        if there is None or len(there) != data["size"]:
            raise _Refused(404, "", "object missing")
        self._json({})

    def commit(self, repo: str, revision: str) -> None:
        found = self._repo(repo, writing=True)
        parent = self._commit(found, revision)
        tree = dict(found.commits[parent])
        header: dict[str, Any] = {}
        for line in self.body.splitlines():
            item = json.loads(line)
            value = item["value"]
            if item["key"] == "header":
                header = value
            elif item["key"] == "file":
                tree[value["path"]] = Stored(base64.b64decode(value["content"]), False)
            elif item["key"] == "lfsFile":
                data = self.hub.objects.get(value["oid"])
                if data is None:
                    raise _Refused(400, "", "LFS pointer pointed to a file that does not exist")
                tree[value["path"]] = Stored(data, True)
            elif item["key"] == "deletedFile":
                tree.pop(value["path"], None)
        if header.get("parentCommit") not in (None, parent):
            raise _Refused(412, "", "A commit has happened since. Please refresh and try again.")
        made = found.commit(revision, tree, header["summary"])
        self._json({"success": True, "commitOid": made, "commitUrl": f"{self.hub.endpoint}/{repo}/commit/{made}"})

    def branch(self, repo: str, name: str) -> None:
        found = self._repo(repo, writing=True)
        ref = f"refs/heads/{name}"
        if self.command == "DELETE":
            found.refs.pop(ref, None)
            self._json({})
            return
        if ref in found.refs:
            raise _Refused(409, "", "Reference already exists")
        found.refs[ref] = self._commit(found, json.loads(self.body or b"{}").get("startingPoint", "main"))
        self._json({})

    # ------------------------------------------------------------------ Xet

    def xet_token(self, repo: str, kind: str, revision: str) -> None:
        self._repo(repo, writing=kind == "write")
        data = {"casUrl": f"{self.hub.endpoint}/xet", "accessToken": "of-xet", "exp": 4102444800}
        names = ("X-Xet-Cas-Url", "X-Xet-Access-Token", "X-Xet-Token-Expiration")
        self._json(data, headers=dict(zip(names, map(str, data.values()), strict=True)))

    def xet_xorb(self, name: str) -> None:
        self._json({"was_inserted": self.hub.xet.put_xorb(name, self.body)})

    def xet_shard(self) -> None:
        self.hub.objects |= self.hub.xet.put_shard(self.body)
        self._json({"result": 1})

    def xet_reconstruction(self, name: str) -> None:
        if name not in self.hub.xet.files:
            raise _Refused(404)
        self._json(self.hub.xet.reconstruction(name, f"{self.hub.cdn}/xet-data"))

    def xet_data(self, name: str) -> None:
        self._content(self.hub.xet.xorbs[name], {"ETag": f'"{name}"'})

    # ------------------------------------------------------------------ pull requests

    def discussions(self, repo: str) -> None:
        found = self._repo(repo, writing=self.command == "POST")
        if self.command == "POST":
            self._json({"num": found.open_pull(json.loads(self.body)["title"]).number})
            return
        listed = [self._pull(found, number) for number in sorted(found.pulls, reverse=True)]
        self._json({"count": len(listed), "start": 0, "discussions": listed})

    def discussion(self, repo: str, number: str) -> None:
        self._json(self._pull(self._repo(repo), int(number)))

    def _pull(self, repo: Repository, number: int) -> dict[str, Any]:
        pull = repo.pulls[number]
        return {
            "title": pull.title,
            "num": number,
            "author": {"name": "somebody"},
            "createdAt": "2026-01-01T00:00:00.000Z",
            "status": pull.status,
            "repo": {"name": repo.repo, "type": "model"},
            "isPullRequest": True,
            "events": [],
            "filesWithConflicts": [],
            "changes": {"base": "refs/heads/main", "mergeCommitId": pull.merge_commit},
            "diff": "",
        }

    def change_pull(self, repo: str, number: str, what: str) -> None:
        found = self._repo(repo, writing=True)
        pull = found.pulls[int(number)]
        if what == "merge":
            if pull.status != "open":
                raise _Refused(400, "", "This pull request is not open")
            found.merge(int(number))
            self._json({})
            return
        pull.status = json.loads(self.body)["status"]
        event = {"id": "1", "type": "status-change", "createdAt": "2026-01-01T00:00:00.000Z"}
        self._json({"newStatus": {**event, "author": {"name": "somebody"}, "data": {"status": pull.status}}})


ID = r"([\w.-]+/[\w.-]+)"
ROUTES: list[tuple[str, str, Callable[..., None]]] = [
    ("GET", rf"/api/models/{ID}", _Handler.info),
    ("GET", rf"/api/models/{ID}/revision/(.+)", _Handler.info),
    ("GET", rf"/api/models/{ID}/tree/([^?]+)", _Handler.tree),
    ("GET", rf"/api/models/{ID}/refs", _Handler.refs),
    ("GET|HEAD", rf"/{ID}/resolve/([^/]+|refs/pr/\d+)/(.+)", _Handler.resolve),
    ("GET|HEAD", rf"/cdn/{ID}/([0-9a-f]+)", _Handler.from_cdn),
    ("POST", r"/api/repos/create", _Handler.create),
    ("POST", r"/api/validate-yaml", _Handler.validate_yaml),
    ("POST", rf"/api/models/{ID}/preupload/(.+)", _Handler.preupload),
    ("POST", rf"/{ID}\.git/info/lfs/objects/batch", _Handler.lfs_batch),
    ("POST", rf"/{ID}\.git/info/lfs/verify", _Handler.lfs_verify),
    ("PUT", r"/lfs/([0-9a-f]+)", _Handler.lfs_put),
    ("POST", rf"/api/models/{ID}/commit/(.+)", _Handler.commit),
    ("POST|DELETE", rf"/api/models/{ID}/branch/(.+)", _Handler.branch),
    ("GET", rf"/api/models/{ID}/xet-(read|write)-token/(.+)", _Handler.xet_token),
    ("POST", r"/xet/v1/xorbs/default/([0-9a-f]+)", _Handler.xet_xorb),
    ("POST", r"/xet/v1/shards", _Handler.xet_shard),
    ("GET", r"/xet/v1/reconstructions/([0-9a-f]+)", _Handler.xet_reconstruction),
    ("GET", r"/xet-data/([0-9a-f]+)", _Handler.xet_data),
    ("GET|POST", rf"/api/models/{ID}/discussions", _Handler.discussions),
    ("GET", rf"/api/models/{ID}/discussions/(\d+)", _Handler.discussion),
    ("POST", rf"/api/models/{ID}/discussions/(\d+)/(merge|status)", _Handler.change_pull),
]
