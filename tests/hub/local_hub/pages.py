"""The pages of the Hub that huggingface_hub asks for, and the addresses they stand under."""

from __future__ import annotations

import base64
import json
import re
from typing import Any

import yaml

from tests.hub.local_hub.plumbing import Plumbing, Refused
from tests.hub.local_hub.repositories import Repository, Stored, is_large

TREE_PAGE = 40
"""Entries a page of a tree listing; the Hub's pages have 1,000."""


class Pages(Plumbing):
    """What is answered to whom."""

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
            raise Refused(401, "GatedRepo", f"Access to model {repo} is restricted")
        commit = self._commit(found, revision)
        file = found.commits[commit].get(name)
        if file is None:
            raise Refused(404, "EntryNotFound", "Entry not found")
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
            raise Refused(400, "", "only one way of saying who you are")
        for tree in self.hub.repositories[repo].commits.values():
            for file in tree.values():
                if file.lfs and file.sha256 == sha256:
                    self._content(file.data, {"ETag": f'"{sha256}"', "Accept-Ranges": "bytes"})
                    return
        raise Refused(404)

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
            raise Refused(401, "", "Invalid credentials in Authorization header")
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
            raise Refused(404, "", "object missing")
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
                    raise Refused(400, "", "LFS pointer pointed to a file that does not exist")
                tree[value["path"]] = Stored(data, True)
            elif item["key"] == "deletedFile":
                tree.pop(value["path"], None)
        if header.get("parentCommit") not in (None, parent):
            raise Refused(412, "", "A commit has happened since. Please refresh and try again.")
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
            raise Refused(409, "", "Reference already exists")
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
            raise Refused(404)
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
                raise Refused(400, "", "This pull request is not open")
            found.merge(int(number))
            self._json({})
            return
        pull.status = json.loads(self.body)["status"]
        event = {"id": "1", "type": "status-change", "createdAt": "2026-01-01T00:00:00.000Z"}
        self._json({"newStatus": {**event, "author": {"name": "somebody"}, "data": {"status": pull.status}}})


ID = r"([\w.-]+/[\w.-]+)"
Pages.routes = [
    ("GET", rf"/api/models/{ID}", Pages.info),
    ("GET", rf"/api/models/{ID}/revision/(.+)", Pages.info),
    ("GET", rf"/api/models/{ID}/tree/([^?]+)", Pages.tree),
    ("GET", rf"/api/models/{ID}/refs", Pages.refs),
    ("GET|HEAD", rf"/{ID}/resolve/([^/]+|refs/pr/\d+)/(.+)", Pages.resolve),
    ("GET|HEAD", rf"/cdn/{ID}/([0-9a-f]+)", Pages.from_cdn),
    ("POST", r"/api/repos/create", Pages.create),
    ("POST", r"/api/validate-yaml", Pages.validate_yaml),
    ("POST", rf"/api/models/{ID}/preupload/(.+)", Pages.preupload),
    ("POST", rf"/{ID}\.git/info/lfs/objects/batch", Pages.lfs_batch),
    ("POST", rf"/{ID}\.git/info/lfs/verify", Pages.lfs_verify),
    ("PUT", r"/lfs/([0-9a-f]+)", Pages.lfs_put),
    ("POST", rf"/api/models/{ID}/commit/(.+)", Pages.commit),
    ("POST|DELETE", rf"/api/models/{ID}/branch/(.+)", Pages.branch),
    ("GET", rf"/api/models/{ID}/xet-(read|write)-token/(.+)", Pages.xet_token),
    ("POST", r"/xet/v1/xorbs/default/([0-9a-f]+)", Pages.xet_xorb),
    ("POST", r"/xet/v1/shards", Pages.xet_shard),
    ("GET", r"/xet/v1/reconstructions/([0-9a-f]+)", Pages.xet_reconstruction),
    ("GET", r"/xet-data/([0-9a-f]+)", Pages.xet_data),
    ("GET|POST", rf"/api/models/{ID}/discussions", Pages.discussions),
    ("GET", rf"/api/models/{ID}/discussions/(\d+)", Pages.discussion),
    ("POST", rf"/api/models/{ID}/discussions/(\d+)/(merge|status)", Pages.change_pull),
]
