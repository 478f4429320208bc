"""verify as an adversary's judge: hundreds of single corruptions of good outputs, every one found and its place named."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from pathlib import Path

import pytest

from fuzz import small
from moepress.convert.run import convert
from moepress.recipe import load_recipe
from moepress.verify.run import verify
from tests.verify.corruptions import corruptions

RECIPES = {"kimi": "kimi-k2", "packed": "kimi-k2", "qwen3": "qwen3-moe", "glm4": "glm-4"}


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    """(source, output) by family."""
    made = {}
    for family, recipe in RECIPES.items():
        folder = tmp_path_factory.mktemp(family)
        for name, raw in small.build(family).whole().items():
            path = folder / "src" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(raw)
        loaded = load_recipe(recipe, ["serving.tensor_parallel=1", "weights.scale=max"])
        convert(folder / "src", folder / "out", loaded, threads=1)
        made[family] = folder / "src", folder / "out"
    return made


def copy(out: Path, to: Path) -> Path:
    """The same files under other names; whoever changes one writes it anew."""
    shutil.copytree(out, to, copy_function=os.link)
    return to


@pytest.mark.slow
def test_every_single_corruption_is_found_and_its_place_named(
    good: dict[str, tuple[Path, Path]], tmp_path: Path
) -> None:
    table = corruptions({family: out for family, (_, out) in good.items()})
    assert len(table) >= 800
    if not os.environ.get("MOEPRESS_ALL_CORRUPTIONS"):  # every third, of every family and part, in half a minute
        table = dict(list(table.items())[::3])
    missed = []
    found: Counter[str] = Counter()
    for number, (name, (family, corrupt)) in enumerate(table.items()):
        source, whole = good[family]
        out = copy(whole, tmp_path / str(number))
        corrupt(out)
        problems = verify(out, source, threads=1).problems
        if not problems:
            missed.append(name)
        assert all(": " in problem for problem in problems), f"{name}: each problem names a place"
        found["with its source"] += bool(problems)
        shutil.rmtree(out)
    assert not missed, f"{len(missed)} of {len(table)} corruptions were passed: {missed}"


def test_the_good_outputs_have_no_problems(good: dict[str, tuple[Path, Path]]) -> None:
    for source, out in good.values():
        assert verify(out, source, threads=1).problems == ()
        assert verify(out, threads=1).problems == ()
