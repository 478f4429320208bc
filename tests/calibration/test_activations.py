"""Arrays in memory and in files behave alike."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from moepress.calibration.activations import Scratch
from moepress.errors import ConvertError


@pytest.mark.parametrize("memory_bytes", [0, 1 << 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32])
def test_rows_come_back(memory_bytes: int, dtype: torch.dtype, tmp_path: Path) -> None:
    with Scratch(tmp_path / "new", memory_bytes=memory_bytes) as scratch:
        array = scratch.allocate((5, 3, 2), dtype)
        assert (array.path is None) == (memory_bytes > 0)
        assert not array.read(0, 5).any(), "zero at first"
        rows = torch.arange(12).reshape(2, 3, 2)
        array.write(1, rows)
        assert array.read(1, 3).dtype == dtype
        assert torch.equal(array.read(1, 3), rows.to(dtype))
        assert not array.read(3, 5).any()
        with pytest.raises(IndexError, match=r"rows 4\.\.6 of 5"):
            array.write(4, rows)


def test_budget_counts_what_is_held(tmp_path: Path) -> None:
    with Scratch(tmp_path, memory_bytes=1000) as scratch:
        first = scratch.allocate((100,), torch.float32)
        second = scratch.allocate((200,), torch.float32)
        assert (first.path is None, second.path is None) == (True, False)
        assert (scratch.in_memory, scratch.in_files) == (400, 800)
        first.release()
        first.release()
        assert scratch.allocate((200,), torch.float32).path is None, "released memory is free again"
        with pytest.raises(RuntimeError, match="released"):
            first.read(0, 1)
        path = second.path
        assert path is not None
        assert path.stat().st_size == 800
    assert not path.exists()


def test_a_full_disk_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with (
        Scratch(tmp_path, memory_bytes=0) as scratch,
        pytest.raises(ConvertError, match=r"bytes of scratch, .* are free"),
    ):
        scratch.allocate((1 << 44, 1 << 10), torch.float32)
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with Scratch(tmp_path, memory_bytes=0) as scratch, pytest.raises(ConvertError, match="no scratch file"):
        scratch.allocate((1,), torch.float32)


def test_a_file_in_the_folders_place(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    with Scratch(tmp_path / "taken", memory_bytes=0) as scratch, pytest.raises(ConvertError, match="no scratch file"):
        scratch.allocate((1,), torch.float32)
