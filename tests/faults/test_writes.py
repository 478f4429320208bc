"""A disk that refuses, at every single point where something is written: one clear error, nothing half done, resumable."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from moepress.errors import MoepressError
from tests.faults.injected import Source, contents, failing_writes, fresh


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Source:
    return Source(tmp_path_factory.mktemp("writes"))


def points(source: Source, out: Path) -> int:
    with failing_writes(out, -1, errno.ENOSPC) as calls:
        source.press(out)
    assert calls.count > 40, "the calls are seen"
    return calls.count


def refusal(source: Source, out: Path, at: int, number: int) -> MoepressError | None:
    """How a fresh run ends in which one call fails; any other error than ours passes through."""
    try:
        with failing_writes(fresh(out), at, number):
            source.press(out)
    except MoepressError as error:
        return error
    return None


def test_a_disk_that_is_full_at_any_point_leaves_nothing_half_done_and_the_same_command_goes_on(
    source: Source, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    refused = 0
    for at in range(points(source, out)):
        error = refusal(source, out, at, errno.ENOSPC)
        if error is None:  # making a folder that is there already
            assert contents(out) == source.whole, at
        else:
            assert "disk is full" in error.what, at
            assert error.where, at
            refused += 1
        assert not [p for p in out.rglob("*") if p.name.endswith(".moepress-tmp") or p.name == "run.lock"], at
        assert contents(out).items() <= source.whole.items(), f"{at}: what is there is whole"
        source.press(out)
        assert contents(out) == source.whole, at
    assert refused > at * 0.9


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS, errno.EIO, errno.EDQUOT])
def test_every_refusal_to_write_is_one_error_that_says_where(number: int, source: Source, tmp_path: Path) -> None:
    """Permissions, a read-only file system, a broken disk, a quota. What a folder's fsync may be denied is passed over."""
    out = tmp_path / "out"
    for at in range(number % 5, points(source, out), 5):
        error = refusal(source, out, at, number)
        assert contents(out) == source.whole if error is None else error.where, at
        assert contents(out).items() <= source.whole.items(), at
