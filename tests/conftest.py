"""Tiny checkpoints that tests share: made once, to be read and not to be changed."""

from __future__ import annotations

import os

# Before torch loads MKL, as the command line does: matrix products give the same bits with any number of threads.
os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

from collections.abc import Callable

import pytest

from tests.tiny_checkpoints import TinyCheckpoint, build


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], TinyCheckpoint]:
    """``tiny("kimi")``: the family's checkpoint with default options. For other options, or to damage it: `build`."""
    made: dict[str, TinyCheckpoint] = {}

    def get(family: str) -> TinyCheckpoint:
        if family not in made:
            made[family] = build(family, tmp_path_factory.mktemp(family) / "model")
        return made[family]

    return get
