"""The world around a run: clocks that jump, locks that do not work, a source that changes, state of other versions."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moepress.convert.watcher import Silent
from moepress.errors import CheckpointError, ConvertError, MoepressError, PlanRefused
from moepress.formats.sealed_json import sealed
from moepress.verify.run import verify
from tests.faults.injected import Source, contents

SHARD = "model-00001-of-00002.safetensors"


@pytest.fixture
def source(tmp_path: Path) -> Source:
    return Source(tmp_path)


class After(Silent):
    """Does something once, after the first finished shard."""

    def __init__(self, something: Callable[[], Any]) -> None:
        self.something: Callable[[], Any] | None = something

    def unit_done(self, receipt: dict[str, Any]) -> None:
        something, self.something = self.something, None
        if something is not None:
            something()


def stop() -> None:
    raise KeyboardInterrupt


def test_clocks_that_run_backwards_change_nothing(
    source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """During the run and between two: files of the future and of 1970 are as finished as any."""
    now = iter(range(10**9, 0, -3600))
    for name in ("time", "monotonic", "perf_counter"):
        monkeypatch.setattr(time, name, lambda: float(next(now)))
    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        source.press(out, watcher=After(stop))
    for number, path in enumerate(sorted(out.rglob("*"))):
        os.utime(path, (0, 0) if number % 2 else (4e9, 4e9))
    assert source.press(out).resumed == 1
    assert contents(out) == source.whole
    assert verify(out, source.folder, threads=1).problems == ()


def test_a_file_system_without_locks_still_has_one_run_per_folder(
    source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """flock and lockf answer ENOLCK, as on some network file systems: nothing here stands on them."""

    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    for name in ("flock", "lockf"):
        monkeypatch.setattr(fcntl, name, no_locks)
    out = tmp_path / "out"

    def second() -> None:
        with pytest.raises(ConvertError, match="is writing this output folder now"):
            source.press(out)

    source.press(out, watcher=After(second))
    assert contents(out) == source.whole


@pytest.mark.parametrize(
    ("lock", "says"),
    [
        ({"host": "elsewhere", "pid": 1, "started": "1"}, "a run on host elsewhere"),
        (
            {"host": socket.gethostname(), "pid": os.getpid(), "started": "0"},
            None,
        ),  # the process number is another's now
        (b"", None),
        (b"\xff\xfe", None),
        (b"[1, 2]", None),
        (b'{"host": 3}', None),
        ("folder", "cannot be read"),
    ],
    ids=["other-host", "reused-pid", "empty", "not-text", "a-list", "half", "a-folder"],
)
def test_a_lock_that_was_left(lock: Any, says: str | None, source: Source, tmp_path: Path) -> None:
    """Of a dead process it is taken over; where that cannot be known, the error says which file to delete."""
    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        source.press(out, watcher=After(stop))
    path = out / ".moepress" / "run.lock"
    if lock == "folder":
        path.mkdir()
    else:
        path.write_bytes(lock if isinstance(lock, bytes) else json.dumps(lock).encode())
    if says is None:
        source.press(out)
        assert contents(out) == source.whole
        return
    with pytest.raises(ConvertError, match=says) as error:
        source.press(out)
    assert str(path) in str(error.value)


def other_bytes(path: Path) -> None:
    """Newer weights under the same header, as a second download would write them."""
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    os.utime(path, ns=(time.time_ns(), time.time_ns() + 10**9))


@pytest.mark.parametrize(
    "change", [other_bytes, lambda path: os.truncate(path, 100), Path.unlink], ids=["other-bytes", "cut", "gone"]
)
@pytest.mark.parametrize("shard", [SHARD, "model-00002-of-00002.safetensors"])
def test_a_source_that_changes_while_it_is_read_is_not_pressed_into_one_model(
    change: Callable[[Path], None], shard: str, source: Source, tmp_path: Path
) -> None:
    """Nothing that this run pressed is kept, so the same command does not take it for finished."""
    out = tmp_path / "out"
    before = (source.folder / shard).read_bytes()
    with pytest.raises((ConvertError, CheckpointError), match=r"changed|missing"):
        source.press(out, watcher=After(lambda: change(source.folder / shard)))
    assert not (out / "model.safetensors.index.json").exists()
    if change is other_bytes:
        assert list((out / ".moepress" / "receipts").glob("*")) == []
        source.press(out)
        assert verify(out, source.folder, threads=1).problems == (), "the newer weights, all of them"
        assert contents(out) != source.whole
        return
    (source.folder / shard).write_bytes(before)
    source.press(out)
    assert contents(out) == source.whole


def test_a_source_changed_between_two_runs_is_found_by_verify(source: Source, tmp_path: Path) -> None:
    """Its headers are the same, so the run goes on: contents are compared by verify alone."""
    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        source.press(out, watcher=After(stop))
    path = source.folder / SHARD
    raw = bytearray(path.read_bytes())
    raw[8 + int.from_bytes(raw[:8], "little")] ^= 1  # of the embedding, which is in the finished shard
    path.write_bytes(raw)
    source.press(out)
    assert verify(out, source.folder, threads=1).problems


def state_without_digest(state: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in state.items() if key != "digest"}


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (state_without_digest, "older version"),
        (lambda r: {**r, "sha256": "0" * 64}, "was changed after it was written"),
        (lambda r: sealed({**r, "plan_key": "0" * 64}), "belongs to another plan"),
        (lambda r: sealed({**r, "unit": "model-00009-of-00009.safetensors"}), "is that of"),
        (lambda r: sealed({**r, "file_bytes": 1}), "its receipt says 1 bytes"),
        (lambda r: [], "not a JSON object"),
    ],
    ids=["no-digest", "edited", "another-recipe", "another-shard", "another-size", "a-list"],
)
def test_a_receipt_of_another_version_or_recipe_is_refused(
    edit: Callable[[dict[str, Any]], Any], says: str, source: Source, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        source.press(out, watcher=After(stop))
    (path,) = (out / ".moepress" / "receipts").glob("*.json")
    path.write_text(json.dumps(edit(json.loads(path.read_text()))))
    with pytest.raises(MoepressError, match=says) as error:
        source.press(out)
    assert str(path) in str(error.value)
    path.unlink()
    source.press(out)
    assert contents(out) == source.whole


def test_a_plan_of_another_version_names_what_differs(source: Source, tmp_path: Path) -> None:
    out = tmp_path / "out"
    source.press(out)
    path = out / ".moepress" / "plan.json"
    plan = json.loads(path.read_text())
    plan["recipe"]["weights"]["group_size"] = 64
    path.write_text(json.dumps({**plan, "key": "0" * 64}))
    with pytest.raises(PlanRefused, match=r"recipe\.weights\.group_size|weights\.group_size"):
        source.press(out)
