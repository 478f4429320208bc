"""Shared steps of the tests that convert: which recipe goes with which tiny family, and a conversion in one call."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from moepress.convert.run import Conversion, convert
from moepress.convert.watcher import Silent, Watcher
from moepress.recipe import Recipe, load_recipe

RECIPES = {
    "kimi": "kimi-k2",
    "glm4": "glm-4",
    "glm5": "glm-5",
    "kimi_k25": "kimi-k2",
    "deepseek_v32": "deepseek-v3",
    "qwen3_moe": "qwen3-moe",
}
"""Tiny checkpoint family → shipped recipe."""


def recipe_for(family: str, *overrides: str) -> Recipe:
    """The family's shipped recipe, for one GPU: tiny experts cannot be split eight ways."""
    return load_recipe(RECIPES[family], ["serving.tensor_parallel=1", *overrides])


def press(
    source: Path, out: Path, family: str, *overrides: str, threads: int | None = None, watcher: Watcher | None = None
) -> Conversion:
    """Converts with the family's recipe."""
    return convert(source, out, recipe_for(family, *overrides), threads=threads, watcher=watcher)


def shard_bytes(folder: Path) -> dict[str, bytes]:
    """Every file that makes the checkpoint, without the state folder, whose receipts hold times."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and ".moepress" not in path.parts
    }


class StopAfter(Silent):
    """A watcher that dies after so many finished units, as a killed process would: nothing is cleaned up on purpose."""

    def __init__(self, units: int) -> None:
        self.left = units

    def unit_done(self, receipt: dict[str, Any]) -> None:
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt
