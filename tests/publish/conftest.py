"""A pressed and verified output, copied for every test that changes it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from moepress.results import write_result
from moepress.verify.run import verify
from tests.hub.conftest import hub
from tests.pressing import press
from tests.tiny_checkpoints import build

__all__ = ["hub"]


@pytest.fixture(scope="session")
def pressed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(source, output) of a tiny Kimi, verified."""
    folder = tmp_path_factory.mktemp("pressed")
    source, out = build("kimi", folder / "src").folder, folder / "out"
    press(source, out, "kimi", "output.shard_size=1MB", threads=1)
    result = verify(out, source, threads=1)
    write_result(out, "verify", "pass", {"source": str(source), **result.as_json()})
    return source, out


@pytest.fixture
def out(pressed: tuple[Path, Path], tmp_path: Path) -> Path:
    """A copy of the output that a test may damage. Times are kept: they say that nothing was written since."""
    return Path(shutil.copytree(pressed[1], tmp_path / "out", symlinks=True))
