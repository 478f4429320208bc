"""A source that cannot be read, at every single point where it is: named, and the output is never taken for whole."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from moepress.errors import MoepressError
from moepress.verify.run import verify
from tests.faults.injected import Source, contents, failing_reads, fresh


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Source:
    return Source(tmp_path_factory.mktemp("reads"))


@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES, errno.ESTALE])
def test_a_read_that_fails_at_any_point_names_the_file(number: int, source: Source, tmp_path: Path) -> None:
    """A broken disk, permissions, and a network file system that lost the file."""
    out = tmp_path / "out"
    with failing_reads(source.folder, -1, number) as calls:
        source.press(out)
    assert calls.count > 30
    for at in range(number % 2, calls.count, 2):
        with failing_reads(source.folder, at, number), pytest.raises(MoepressError) as error:
            source.press(fresh(out))
        assert error.value.where, at
        assert str(source.folder) in str(error.value) or "safetensors" in str(error.value), at
        assert not (out / "model.safetensors.index.json").exists(), at
    source.press(out)
    assert contents(out) == source.whole


def test_a_read_that_fails_while_verifying_is_no_pass(source: Source, tmp_path: Path) -> None:
    out = tmp_path / "out"
    source.press(out)
    with failing_reads(tmp_path, -1, errno.EIO) as calls:
        assert verify(out, source.folder, threads=1).problems == ()
    assert calls.count > 5
    for at in range(calls.count):
        with failing_reads(tmp_path, at, errno.EIO):
            problems = verify(out, source.folder, threads=1).problems
        assert problems, at
