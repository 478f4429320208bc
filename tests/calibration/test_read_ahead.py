"""One block ahead: the same bytes, in order, bounded, with the errors of reading there, and over when it is closed."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from moepress.calibration.checkpoint_weights import CheckpointWeights
from moepress.calibration.read_ahead import Part, ReadAhead
from moepress.errors import CheckpointError
from moepress.formats.checkpoint import Checkpoint, TensorRef, open_checkpoint
from moepress.formats.reader import TensorReader
from tests.tiny_checkpoints import FAMILIES, build


class Watched(TensorReader):
    """Notes which thread reads what, and waits at a gate before each read of the thread that reads ahead."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__(checkpoint)
        self.ahead: list[str] = []
        self.here: list[str] = []
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()

    def rows(self, ref: TensorRef, r0: int, r1: int, *, pinned: bool = False) -> torch.Tensor:
        is_ahead = threading.current_thread().name.startswith("read-ahead")
        if is_ahead:
            self.entered.set()
            assert self.gate.wait(10)
        (self.ahead if is_ahead else self.here).append(ref.name)
        return super().rows(ref, r0, r1, pinned=pinned)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return open_checkpoint(build("kimi", tmp_path_factory.mktemp("ahead") / "src", mtp=0, layers=2).folder)


@pytest.fixture
def reader(checkpoint: Checkpoint) -> Iterator[Watched]:
    with Watched(checkpoint) as made:
        yield made
        made.gate.set()


def matrices(checkpoint: Checkpoint, count: int) -> list[Part]:
    """Whole matrices, as `expect` takes them."""
    found = [ref for ref in checkpoint.tensors.values() if len(ref.shape) == 2 and ref.name.endswith(".weight")]
    return [Part(ref, 0, ref.shape[0], travels=True) for ref in found[:count]]


def test_what_was_expected_is_read_by_the_thread_in_its_order_and_is_the_same(
    checkpoint: Checkpoint, reader: Watched
) -> None:
    parts = matrices(checkpoint, 6)
    ahead = ReadAhead(reader, limit_bytes=1 << 30)
    ahead.expect(parts)
    taken = {}
    for part in (parts[5], *parts[:5]):  # the last one first: the order of taking is free
        while not ahead._waiting[part.ref.shard, part.ref.name, part.first, part.last].done():
            pass
        taken[part.ref.name] = ahead.rows(part.ref, part.first, part.last)
    assert reader.ahead == [part.ref.name for part in parts]
    assert reader.here == []
    ahead.close()
    for part in parts:
        fresh = reader.tensor(part.ref)
        assert torch.equal(taken[part.ref.name].view(torch.uint8), fresh.view(torch.uint8))


def test_no_more_is_held_than_the_limit(checkpoint: Checkpoint, reader: Watched) -> None:
    parts = matrices(checkpoint, 6)
    ahead = ReadAhead(reader, limit_bytes=sum(part.nbytes for part in parts[:3]))
    ahead.expect(parts)
    for part in parts:
        ahead.rows(part.ref, part.first, part.last)
    ahead.close()
    assert set(reader.ahead) <= {part.ref.name for part in parts[:3]}
    assert {part.ref.name for part in parts[3:]} <= set(reader.here)


def test_what_the_thread_has_not_begun_is_read_by_whoever_wants_it(checkpoint: Checkpoint, reader: Watched) -> None:
    first, second = matrices(checkpoint, 2)
    reader.gate.clear()
    ahead = ReadAhead(reader, limit_bytes=1 << 30)
    ahead.expect([first, second])
    assert reader.entered.wait(10)  # it is in the first
    ahead.rows(second.ref, second.first, second.last)
    assert reader.here == [second.ref.name]
    reader.gate.set()
    ahead.rows(first.ref, first.first, first.last)
    ahead.close()
    assert reader.ahead == [first.ref.name]


def test_an_error_of_the_thread_is_the_one_of_reading_there(tmp_path: Path) -> None:
    source = open_checkpoint(build("kimi", tmp_path / "src", mtp=0, layers=2).folder)
    (part,) = matrices(source, 1)
    with Watched(source) as reader:
        reader.tensor(part.ref)  # the file is open, and then shrinks
        os.truncate(source.path(part.ref.shard), part.ref.start + 1)
        ahead = ReadAhead(reader, limit_bytes=1 << 30)
        ahead.expect([part])
        with pytest.raises(CheckpointError, match="changed since its header was read") as ahead_of_time:
            ahead.rows(part.ref, part.first, part.last)
        with pytest.raises(CheckpointError) as there:
            reader.rows(part.ref, part.first, part.last)
        assert str(ahead_of_time.value) == str(there.value)
        ahead.expect([part])  # nobody takes it: nobody hears of it
        ahead.close()


def test_closing_forgets_what_nobody_took(checkpoint: Checkpoint, reader: Watched) -> None:
    parts = matrices(checkpoint, 6)
    reader.gate.clear()
    ahead = ReadAhead(reader, limit_bytes=1 << 30)
    ahead.expect(parts)
    assert reader.entered.wait(10)
    threading.Timer(0.1, reader.gate.set).start()
    ahead.close()
    assert len(reader.ahead) == 1  # the read that it was in, and no other
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("read-ahead")]


def test_a_file_that_is_still_arriving_is_not_waited_for(
    checkpoint: Checkpoint, reader: Watched, monkeypatch: Any
) -> None:
    parts = matrices(checkpoint, 3)
    monkeypatch.setattr(Checkpoint, "is_here", lambda _self, _name: False)
    ahead = ReadAhead(reader, limit_bytes=1 << 30)
    ahead.expect(parts)
    for part in parts:
        ahead.rows(part.ref, part.first, part.last)
    ahead.close()
    assert reader.ahead == []


@pytest.mark.parametrize("family", [*sorted(FAMILIES), "glm4 with fused experts"])
def test_weights_of_every_format_are_the_same_when_they_were_expected(family: str, tmp_path: Path) -> None:
    if family in FAMILIES:
        made = build(family, tmp_path / "model")
    else:
        made = build("glm4", tmp_path / "model", published="bf16", fused_experts=True)
    source = open_checkpoint(made.folder)
    with CheckpointWeights(source) as plain, CheckpointWeights(source, ahead_bytes=1 << 30) as ahead:
        names = sorted(plain.names())
        ahead.expect(names)
        waiting = len(ahead._ahead._waiting)
        for name in names:
            assert torch.equal(ahead.load(name), plain.load(name)), name
        assert waiting > len(names) / 2
        assert ahead._ahead._waiting == {}  # everything that was read was asked for in the form in which it was read


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_a_gpu_what_was_expected_is_there_already(checkpoint: Checkpoint, reader: Watched) -> None:
    parts = matrices(checkpoint, 6)
    ahead = ReadAhead(reader, limit_bytes=1 << 30, device="cuda")
    ahead.expect(parts)
    for part in parts:
        taken = ahead.rows(part.ref, part.first, part.last, pinned=True)
        assert taken.is_cuda
        assert torch.equal(taken.cpu().view(torch.uint8), reader.tensor(part.ref).view(torch.uint8))
    ahead.close()
