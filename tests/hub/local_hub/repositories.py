"""Repositories in memory: commits are trees of name → content, refs point at commits, LFS objects are shared."""

from __future__ import annotations

import hashlib
import itertools
from dataclasses import dataclass, field
from pathlib import Path

LFS_FROM_BYTES = 4096
"""Binary files of this size and more are large files, as 10 MB are on the Hub."""


@dataclass(frozen=True)
class Stored:
    """A file's content, and whether it is kept as a large file."""

    data: bytes
    lfs: bool

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.data).hexdigest()

    @property
    def blob_id(self) -> str:
        """Git's id of the blob; of a large file, of its pointer."""
        data = self.pointer if self.lfs else self.data
        return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()

    @property
    def pointer(self) -> bytes:
        text = f"version https://git-lfs.github.com/spec/v1\noid sha256:{self.sha256}\nsize {len(self.data)}\n"
        return text.encode()

    @property
    def etag(self) -> str:
        return self.sha256 if self.lfs else self.blob_id


Tree = dict[str, Stored]


@dataclass
class PullRequest:
    number: int
    title: str
    status: str = "draft"
    base: str = ""
    merge_commit: str | None = None


@dataclass
class Repository:
    """One model."""

    repo: str
    private: bool = False
    gated: bool = False
    commits: dict[str, Tree] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)
    pulls: dict[int, PullRequest] = field(default_factory=dict)
    messages: list[tuple[str, str]] = field(default_factory=list)
    _count: itertools.count[int] = field(default_factory=itertools.count)

    def __post_init__(self) -> None:
        self.commit("main", {".gitattributes": Stored(b"*.safetensors filter=lfs\n", False)}, "initial commit")

    def resolve(self, revision: str) -> str | None:
        """The commit that a branch, a full ref or a commit names."""
        if revision in self.commits:
            return revision
        return self.refs.get(revision) or self.refs.get(f"refs/heads/{revision}")

    def tree(self, revision: str = "main") -> Tree:
        return self.commits[self.resolve(revision) or ""]

    def commit(self, revision: str, tree: Tree, message: str) -> str:
        """A new commit on a branch or ref."""
        seed = f"{self.repo} {next(self._count)} {message}".encode()
        commit = hashlib.sha1(seed).hexdigest()
        ref = revision if revision.startswith("refs/") else f"refs/heads/{revision}"
        self.commits[commit] = dict(tree)
        self.refs[ref] = commit
        self.messages.append((ref, message))
        return commit

    def add_folder(self, folder: Path, *, revision: str = "main") -> str:
        """Puts a folder's files on a branch, as somebody's push would."""
        tree = dict(self.tree(revision))
        for path in sorted(folder.rglob("*")):
            name = path.relative_to(folder).as_posix()
            if path.is_file() and not name.startswith(".moepress/"):
                tree[name] = stored(path.read_bytes())
        return self.commit(revision, tree, f"add {folder.name}")

    def open_pull(self, title: str) -> PullRequest:
        number = len(self.pulls) + 1
        base = self.refs["refs/heads/main"]
        self.pulls[number] = PullRequest(number, title, base=base)
        self.refs[f"refs/pr/{number}"] = base
        return self.pulls[number]

    def merge(self, number: int) -> None:
        pull = self.pulls[number]
        pull.merge_commit = self.commit("main", self.tree(f"refs/pr/{number}"), f"{pull.title} (#{number})")
        pull.status = "merged"


def stored(data: bytes) -> Stored:
    """As the Hub would keep it: text and small files in git, the rest as large files."""
    return Stored(data, is_large(data[:512], len(data)))


def is_large(sample: bytes, size: int) -> bool:
    if size < LFS_FROM_BYTES:
        return False
    try:
        sample[:500].decode("utf-8")
    except UnicodeDecodeError as error:
        return error.start < 496
    return b"\0" in sample or size > 10_000_000
