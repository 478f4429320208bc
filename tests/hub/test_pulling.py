"""A checkpoint from the Hub into a folder: every file is the commit's, or has no name."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections import namedtuple
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from moepress.errors import HubError
from moepress.hub.address import Address
from moepress.hub.ledger import LEDGER, read_origin
from moepress.hub.listing import Snapshot
from moepress.hub.pulling import Pulled, Silent, pull
from moepress.hub.reading import open_hub_checkpoint
from tests.hub.local_hub import Fault, LocalHub
from tests.hub.local_hub.repositories import Stored
from tests.tiny_checkpoints import TinyCheckpoint

REPO = "press/tiny-kimi"
SHARD = "model-00001-of-000002.safetensors"


class Heard(Silent):
    """A watcher that remembers."""

    def __init__(self) -> None:
        self.total = self.done = 0
        self.notes: list[str] = []

    def begin(self, total: int, done: int) -> None:
        self.total, self.done = total, done

    def add(self, count: int) -> None:
        self.done += count

    def note(self, text: str) -> None:
        self.notes.append(text)


@pytest.fixture
def source(hub: LocalHub, tiny: Callable[[str], TinyCheckpoint]) -> Path:
    """The folder that the repository was filled from."""
    folder = tiny("kimi").folder
    hub.repository(REPO).add_folder(folder)
    return folder


def fetch(folder: Path, address: str = REPO, watcher: Heard | None = None, workers: int = 4) -> Pulled:
    repo, _, revision = address.partition("@")
    checkpoint, snapshot = open_hub_checkpoint(Address(repo, revision or None))
    return pull(checkpoint, snapshot, folder, workers=workers, watcher=watcher)


def contents(folder: Path) -> dict[str, str]:
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and ".moepress" not in path.parts
    }


def content_requests(hub: LocalHub) -> list[str]:
    """Whole files that were sent: GETs without a range, or the CDN's."""
    return [line.path for line in hub.requests("GET /(press|cdn)/") if not line.range]


def shard_names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*.safetensors"))


def test_every_file_arrives_as_it_is_there(hub: LocalHub, source: Path, tmp_path: Path) -> None:
    """SC-01: tokenizer code and what it imports, tiktoken.model, templates and the licence come along."""
    heard = Heard()
    pulled = fetch(tmp_path / "here", watcher=heard)
    assert contents(tmp_path / "here") == contents(source)
    assert set(pulled.fetched) == contents(source).keys()
    assert heard.done == heard.total > 0
    assert read_origin(tmp_path / "here") is not None
    ledger = json.loads((tmp_path / "here" / LEDGER).read_text())
    assert ledger["commit"] == hub.repositories[REPO].refs["refs/heads/main"]
    assert ledger["files"].keys() == contents(source).keys()
    assert not list((tmp_path / "here").rglob("*incoming*"))
    assert hub.token not in "".join(p.read_text() for p in (tmp_path / "here" / ".moepress").rglob("*") if p.is_file())


def test_a_second_pull_sends_nothing(hub: LocalHub, source: Path, tmp_path: Path) -> None:
    fetch(tmp_path / "here")
    before = len(content_requests(hub))
    again = fetch(tmp_path / "here")
    assert again.fetched == ()
    assert len(content_requests(hub)) - before <= 3  # config, generation config and index are read to look at it


def test_a_stopped_pull_resumes_with_what_is_missing(hub: LocalHub, source: Path, tmp_path: Path) -> None:
    hub.faults.append(Fault("GET /cdn/", times=99, after=3, status=404))  # after both headers and one shard
    with pytest.raises(HubError):
        fetch(tmp_path / "here", workers=1)
    hub.faults.clear()
    there = contents(tmp_path / "here")
    assert there
    assert there.items() <= contents(source).items()
    pulled = fetch(tmp_path / "here")
    assert set(pulled.fetched) == contents(source).keys() - there.keys()
    assert contents(tmp_path / "here") == contents(source)


def test_a_broken_line_goes_on_inside_the_file(
    hub: LocalHub, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 4096)  # 10 MB, more than a tiny shard
    monkeypatch.setattr("huggingface_hub.file_download.time.sleep", lambda _: None)
    hub.faults.append(Fault("GET /cdn/", times=3, after=2, cut=100_000))
    fetch(tmp_path / "here", workers=1)
    assert contents(tmp_path / "here") == contents(source)
    assert [line.range for line in hub.requests("GET /cdn/") if line.range and line.range.endswith("-")]


def test_wrong_bytes_are_fetched_again_and_twice_wrong_is_an_error(hub: LocalHub, source: Path, tmp_path: Path) -> None:
    """HB-02: the size is right and the content is not; SHA-256 is what is compared."""
    hub.faults.append(Fault("GET /cdn/", after=2, corrupt=True))
    heard = Heard()
    fetch(tmp_path / "once", watcher=heard, workers=1)
    assert contents(tmp_path / "once") == contents(source)
    assert any("wrong bytes" in note for note in heard.notes)
    hub.faults.append(Fault("GET /cdn/", after=2, times=99, corrupt=True))
    with pytest.raises(HubError, match="arrived twice with wrong bytes"):
        fetch(tmp_path / "twice", workers=1)
    assert shard_names(tmp_path / "twice") == []


def test_the_cached_verdict_ends_when_the_file_is_touched(hub: LocalHub, source: Path, tmp_path: Path) -> None:
    """HB-02: checked once and remembered; changed bytes of the same size are found and fetched again."""
    fetch(tmp_path / "here")
    shard = tmp_path / "here" / shard_names(source)[0]
    data = bytearray(shard.read_bytes())
    data[-100:] = bytes(100)
    shard.write_bytes(data)
    heard = Heard()
    pulled = fetch(tmp_path / "here", watcher=heard)
    assert pulled.fetched == (shard.name,)
    assert "other bytes" in heard.notes[0]
    assert contents(tmp_path / "here") == contents(source)


@pytest.mark.parametrize("damage", ["pointer", "cut", "dangling link", "right"])
def test_what_is_there_already_is_looked_at(hub: LocalHub, source: Path, tmp_path: Path, damage: str) -> None:
    """HB-01: a clone without LFS, a cut file, a link into a cache that was emptied; and one that is simply right."""
    here = tmp_path / "here"
    shutil.copytree(source, here)
    name = shard_names(source)[0]
    shard = here / name
    data = shard.read_bytes()
    shard.unlink()
    if damage == "pointer":
        shard.write_bytes(Stored(data, True).pointer)
    elif damage == "cut":
        shard.write_bytes(data[:1000])
    elif damage == "right":
        shard.write_bytes(data)
    else:
        shard.symlink_to(tmp_path / "blobs" / "gone")
    heard = Heard()
    pulled = fetch(here, watcher=heard)
    assert pulled.fetched == (() if damage == "right" else (name,))
    words = {"pointer": "LFS pointer", "cut": "1,000 of", "dangling link": "file that is gone", "right": ""}
    assert words[damage] in " ".join(heard.notes)
    assert contents(here) == contents(source)


def test_two_processes_fill_one_folder(hub: LocalHub, source: Path, tmp_path: Path) -> None:
    """HB-04: no lock is relied on; each has its own place for what arrives, and names appear by rename."""
    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(fetch, tmp_path / "here") for _ in range(2)]:
            done.result()
    assert contents(tmp_path / "here") == contents(source)


def test_a_full_disk_is_seen_before_the_first_byte(
    hub: LocalHub, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """HB-11: with both numbers."""
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr("moepress.hub.pulling.shutil.disk_usage", lambda _: usage(10, 9, 1000))
    with pytest.raises(HubError, match=r"[\d,]+ bytes are still to come and 1,000 are free"):
        fetch(tmp_path / "here")
    assert not (tmp_path / "here").exists()
    assert not hub.requests("HEAD ")


def test_a_folder_belongs_to_one_commit(hub: LocalHub, source: Path, tmp_path: Path) -> None:
    fetch(tmp_path / "here")
    repository = hub.repositories[REPO]
    old = repository.refs["refs/heads/main"]
    repository.commit("main", {**repository.tree(), "NEW": Stored(b"new", False)}, "a new file")
    with pytest.raises(HubError, match=f"holds commit {old[:12]}"):
        fetch(tmp_path / "here")
    assert fetch(tmp_path / "here", f"{REPO}@{old}").fetched == ()


def test_weights_of_another_model_are_not_mixed_in(hub: LocalHub, source: Path, tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "model-00001-of-00009.safetensors").write_bytes(b"x")
    with pytest.raises(HubError, match=f"not of {REPO}: model-00001-of-00009"):
        fetch(tmp_path / "here")


def test_other_formats_stay_on_the_hub(hub: LocalHub, source: Path, tmp_path: Path) -> None:
    repository = hub.repositories[REPO]
    repository.commit("main", {**repository.tree(), "model.gguf": Stored(b"GGUF" * 4000, True)}, "gguf")
    pulled = fetch(tmp_path / "here")
    assert pulled.left == ("model.gguf",)
    assert not (tmp_path / "here" / "model.gguf").exists()


def test_a_file_name_that_leads_out_of_the_folder(hub: LocalHub, source: Path, tmp_path: Path) -> None:
    repository = hub.repositories[REPO]
    repository.commit("main", {**repository.tree(), "../evil.py": Stored(b"x", False)}, "evil")
    with pytest.raises(HubError, match="leads out of the folder"):
        fetch(tmp_path / "here")


def test_the_snapshot_is_of_one_commit(hub: LocalHub, source: Path) -> None:
    _, snapshot = open_hub_checkpoint(Address(REPO))
    assert isinstance(snapshot, Snapshot)
    assert len(snapshot.files) == len(contents(source))
    assert all(bool(file.sha256) != bool(file.git_sha1) for file in snapshot.files.values())
