"""One commit of a repository: which files, how large, and what their bytes must hash to.

A branch is resolved to a commit by the first request; from then on only the commit is asked for, so that shards, index
and tokenizer are of one version whatever is pushed meanwhile. The Hub knows two kinds of checksums:

    large files (LFS, Xet)   SHA-256 of the content
    small files (git)        git's blob id: SHA-1 of ``blob SIZE\\0`` and the content

Both are computed here from bytes that have arrived; nothing that the Hub says about a transfer is believed.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import HfApi, RepoFile

from moepress.errors import HubError
from moepress.formats.shard_index import check_shard_name
from moepress.hub.address import Address
from moepress.hub.connection import explained

CHUNK_BYTES = 4 << 20
SKIPPED = frozenset((".gitattributes",))
"""The Hub makes its own."""


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file of a commit. One of ``sha256`` and ``git_sha1`` is set: the checksum of its content, in hex."""

    name: str
    size: int
    sha256: str | None
    git_sha1: str | None

    @property
    def checksum(self) -> str:
        return self.sha256 or self.git_sha1 or ""


@dataclass(frozen=True)
class Snapshot:
    """A repository at one commit. ``files`` by name, sorted."""

    address: Address
    commit: str
    files: dict[str, RemoteFile]

    @property
    def repo(self) -> str:
        return self.address.repo


def take_snapshot(api: HfApi, address: Address) -> Snapshot:
    """Resolves the address to a commit and lists it.

    Raises:
        HubError: no such repository or revision, no access, or a file name that leads out of a folder.
    """
    with explained(address.repo, address.revision):
        info = api.model_info(address.repo, revision=address.revision)
        commit = str(info.sha)
    return Snapshot(address, commit, list_commit(api, address.repo, commit))


def list_commit(api: HfApi, repo: str, revision: str) -> dict[str, RemoteFile]:
    """Files of a commit or branch, by name, sorted; without `SKIPPED`.

    Raises:
        HubError: see `take_snapshot`.
    """
    files = {}
    with explained(repo, revision):
        for entry in api.list_repo_tree(repo, recursive=True, revision=revision):
            if isinstance(entry, RepoFile) and entry.path not in SKIPPED:
                sha256 = entry.lfs.sha256 if entry.lfs else None
                size = entry.lfs.size if entry.lfs else entry.size
                files[entry.path] = RemoteFile(entry.path, size, sha256, None if sha256 else entry.blob_id)
    for name in files:
        _check_name(name, repo)
    return dict(sorted(files.items()))


def _check_name(name: str, repo: str) -> None:
    path = Path(name)
    if path.is_absolute() or ".." in path.parts or "\\" in name or not name.isprintable() or path.as_posix() != name:
        raise HubError(
            f"a file name that leads out of the folder: {name!r}", where=repo, hint="do not use this repository"
        )
    if name.endswith(".safetensors"):
        check_shard_name(name)


def checksum_of(path: Path, like: RemoteFile) -> str:
    """The checksum of a local file, of the kind that ``like`` has."""
    size = path.stat().st_size
    digest = hashlib.sha256() if like.sha256 else git_blob_sha1(size)
    buffer = bytearray(CHUNK_BYTES)
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(memoryview(buffer)[:count])
    return digest.hexdigest()


def git_blob_sha1(size: int) -> hashlib._Hash:
    """Git's hash of a blob, begun: what is left is to update it with ``size`` bytes of content."""
    return hashlib.sha1(f"blob {size}\0".encode(), usedforsecurity=False)
