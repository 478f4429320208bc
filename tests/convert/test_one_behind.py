"""One piece behind: in order, one at a time, errors at the next call, nothing begun after them; and shards written that way."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from moepress.convert.calibrated import layer_shards
from moepress.convert.calibrated.one_behind import OneBehind
from moepress.errors import ConvertError
from moepress.formats.writer import ShardWriter
from tests.pressing import press, shard_bytes
from tests.tiny_checkpoints import build

SMALL = ("weights.algorithm=gptq", "calibration.samples=4", "calibration.length=48", "output.shard_size=1MB")


def test_pieces_run_in_order_one_at_a_time_and_beside_the_caller() -> None:
    behind: OneBehind[int] = OneBehind()
    running, most, order = 0, 0, []

    def work(number: int) -> int:
        nonlocal running, most
        running += 1
        most = max(most, running)
        time.sleep(0.01)
        order.append((number, threading.current_thread().name.startswith("one-behind")))
        running -= 1
        return number

    gave = [behind.hand_over(lambda n=n: work(n)) for n in range(5)]  # type: ignore[misc]
    assert gave == [None, 0, 1, 2, 3]
    assert behind.done() == 4
    assert behind.done() is None
    behind.abandon()
    assert order == [(number, True) for number in range(5)]
    assert most == 1


def test_an_error_comes_with_the_next_call_and_nothing_is_begun_after_it() -> None:
    behind: OneBehind[None] = OneBehind()
    begun: list[str] = []

    def fails() -> None:
        raise ConvertError("the disk is full")

    behind.hand_over(fails)
    with pytest.raises(ConvertError, match="the disk is full"):
        behind.hand_over(lambda: begun.append("second"))
    behind.abandon()
    assert begun == []


@pytest.mark.slow
def test_a_disk_that_fails_behind_ends_the_conversion_with_its_error_and_the_next_run_gives_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = build("kimi", tmp_path / "src", mtp=0, layers=4)
    press(source.folder, tmp_path / "one", "kimi", *SMALL)
    writes = 0
    real = ShardWriter.write

    def failing(self: ShardWriter, name: str, data: object) -> None:
        nonlocal writes
        writes += threading.current_thread().name.startswith("one-behind")
        if writes == 100:
            raise ConvertError("no space left on device", where=str(self.path))
        real(self, name, data)

    monkeypatch.setattr(layer_shards.ShardWriter, "write", failing)
    with pytest.raises(ConvertError, match="no space left"):
        press(source.folder, tmp_path / "two", "kimi", *SMALL)
    assert not list((tmp_path / "two").rglob("*.moepress-tmp"))
    assert not [thread for thread in threading.enumerate() if thread.name.startswith(("one-behind", "read-ahead"))]
    monkeypatch.undo()
    again = press(source.folder, tmp_path / "two", "kimi", *SMALL)
    assert again.resumed > 0
    assert shard_bytes(tmp_path / "two") == shard_bytes(tmp_path / "one")
