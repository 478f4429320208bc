"""Faults put into the operating system's calls: the n-th one fails, all others do their work."""

from __future__ import annotations

import os
import pathlib
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from fuzz import small
from moepress.convert.run import Conversion, convert
from moepress.recipe import Recipe, load_recipe

WRITING = ("open", "write", "fsync", "rename", "mkdir")
"""Calls of `os` by which anything reaches a disk here."""


class Source:
    """A checkpoint of a few kilobytes, its recipe, and what a conversion without faults makes of it."""

    def __init__(self, folder: Path, kind: str = "qwen3") -> None:
        self.folder = folder / "src"
        for name, raw in small.build(kind).whole().items():
            path = self.folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(raw)
        self.recipe: Recipe = load_recipe(
            {"qwen3": "qwen3-moe", "kimi": "kimi-k2"}[kind], ["serving.tensor_parallel=1"]
        )
        self.press(folder / "whole")
        self.whole = contents(folder / "whole")

    def press(self, out: Path, **more: Any) -> Conversion:
        return convert(self.folder, out, self.recipe, threads=1, **more)


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of an output but its state, whose receipts hold times."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and ".moepress" not in path.relative_to(folder).parts
    }


class Calls:
    """Counts calls, and lets one of them fail. ``at`` -1: none."""

    def __init__(self, at: int, number: int) -> None:
        self.at, self.number, self.count = at, number, 0
        self._lock = threading.Lock()

    def wrap(self, call: Callable[..., Any], concerns: Callable[..., bool]) -> Callable[..., Any]:
        def wrapped(*given: Any, **named: Any) -> Any:
            if concerns(*given):
                with self._lock:
                    mine, self.count = self.count, self.count + 1
                if mine == self.at:
                    raise OSError(self.number, os.strerror(self.number))
            return call(*given, **named)

        return wrapped


@contextmanager
def failing_writes(out: Path, at: int, number: int) -> Iterator[Calls]:
    """The ``at``-th opening, writing, flushing, renaming or making of anything below ``out`` fails with errno ``number``."""
    calls = Calls(at, number)

    def below(target: Any, *_: Any) -> bool:
        if isinstance(target, int):
            target = Path(f"/proc/self/fd/{target}").readlink()
        return str(target).startswith(str(out))

    with pytest.MonkeyPatch.context() as patch:
        for name in WRITING:
            patch.setattr(os, name, calls.wrap(getattr(os, name), below))
        yield calls


@contextmanager
def failing_reads(source: Path, at: int, number: int) -> Iterator[Calls]:
    """The ``at``-th opening of a file below ``source``, or pread of any, fails."""
    calls = Calls(at, number)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "preadv", calls.wrap(os.preadv, lambda *_: True))
        patch.setattr(
            pathlib.Path, "open", calls.wrap(pathlib.Path.open, lambda path, *_: str(path).startswith(str(source)))
        )
        yield calls


def fresh(out: Path) -> Path:
    shutil.rmtree(out, ignore_errors=True)
    return out
