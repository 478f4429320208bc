"""Whole small checkpoints with random damage: plan, convert, verify, and a judge who computes the result himself.

    7 of 10   a damaged source                       refused, or converted to exactly what `expectation` says
    3 of 10   a good source, a damaged output folder  resume: the same bytes as ever, or refused
                                                      verify: the damage is found, or nothing that it reads has changed

Beside every case lies a file that nobody may touch: nothing is written outside the output folder. The process stays
within the bounds of `bounded`.
"""

from __future__ import annotations

import json
import random
import shutil
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from fuzz import damage, small
from fuzz.bounded import Wrong
from fuzz.expectation import expected, read
from fuzz.scratch_folder import scratch_folder
from fuzz.wild import edit_bytes, edit_tree, to_text
from moepress.convert.finish import broken_limits
from moepress.convert.run import convert
from moepress.errors import MoepressError
from moepress.recipe import Recipe, load_recipe
from moepress.verify.run import verify

RECIPES = {"kimi": "kimi-k2", "packed": "kimi-k2", "qwen3": "qwen3-moe", "glm4": "glm-4"}
KINDS = ("kimi", "qwen3", "qwen3", "glm4", "packed", "packed")
"""Twice those that take half the time."""

NOTHING_LEFT = (ValueError, KeyError, TypeError, IndexError, RecursionError)
"""What damage ends in where the damage before it left nothing to damage: no shards, a header that is no JSON any more."""

Case = tuple[int, int]


@cache
def recipe(kind: str) -> Recipe:
    return load_recipe(RECIPES[kind], ["serving.tensor_parallel=1", "weights.scale=max"])


@cache
def place() -> Path:
    """Where everything happens. `outside` is what nobody may touch."""
    root = scratch_folder() / "checkpoints"
    (root / "outside").mkdir(parents=True)
    (root / "outside" / "secret.txt").write_text("nobody may touch this")
    return root


@cache
def good(kind: str) -> tuple[Path, Path]:
    """An undamaged source and its output, made once."""
    source, out = place() / f"good-{kind}", place() / f"good-{kind}-out"
    write(small.build(kind).whole(), source)
    convert(source, out, recipe(kind), threads=1)
    return source, out


def warm_up() -> None:
    """Compiled kernels and libraries, before memory is limited; and the undamaged cases must be right."""
    for kind in small.KINDS:
        source, out = good(kind)
        judge_conversion(source, out)


def case(seed: int, number: int) -> Case:
    return seed, number


def judge(case: Case) -> str:
    """One case.

    Raises:
        MoepressError: refused, as it may be.
        Wrong: a wrong result, or something written where nothing may be written.
    """
    rng = random.Random(f"checkpoints/{case[0]}/{case[1]}")
    folder = place() / "case"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    try:
        return damaged_source(rng, folder) if rng.random() < 0.7 else damaged_output(rng, folder)
    finally:
        beside = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
        outside = sorted(path.name for path in (place() / "outside").iterdir())
        if not set(beside) <= {"src", "out"} or outside != ["secret.txt"]:
            raise Wrong(f"written outside the output folder: {beside} {outside}")


def damaged_source(rng: random.Random, folder: Path) -> str:
    kind = rng.choice(KINDS)
    files = small.build(kind)
    edits = rng.choice((1, 1, 1, 2, 3))
    level = rng.random()
    for _ in range(edits if level < 0.65 else 0):
        with suppress(*NOTHING_LEFT):
            rng.choice(damage.TENSORS)(rng, files)
    content = files.whole()
    for _ in range(edits if 0.65 <= level < 0.95 else 0):
        with suppress(*NOTHING_LEFT):
            rng.choice(damage.FILES)(rng, content)
    write(content, folder / "src")
    if level >= 0.95:
        rng.choice(damage.FOLDER)(rng, folder / "src")
    result = convert(folder / "src", folder / "out", recipe(kind), threads=1)
    if broken := broken_limits(result.plan, result.report):
        if not verify(folder / "out", folder / "src", threads=1).problems:
            raise Wrong(f"verify passes what broke a limit: {broken}")
        return "converted, a limit broken and said so"
    judge_conversion(folder / "src", folder / "out")
    return "converted, as expected"


def judge_conversion(source: Path, out: Path) -> None:
    """The output's tensors, config and side files are what they must be, and verify agrees."""
    report = json.loads((out / "moepress_report.json").read_text())
    before, after = (json.loads((folder / "config.json").read_text("utf-8-sig")) for folder in (source, out))
    theirs, ours = expected(read(source), report["layout"], before), read(out)
    wrong = sorted(name for name in {*theirs, *ours} if theirs.get(name) != ours.get(name))
    if wrong:
        raise Wrong(f"{len(wrong)} tensors are not as expected: {wrong[:3]}")
    described = before.get("quantization_config")
    for config in (before, after):
        config.pop("quantization_config", None)
        config.pop("compression_config", None)
    if json.dumps(before, sort_keys=True) != json.dumps(after, sort_keys=True):
        raise Wrong("config.json changed beside its quantization")
    problems = verify(out, source, threads=1).problems
    if (
        report["layout"] == "source"
        and described == json.loads((out / "config.json").read_text())["quantization_config"]
    ):
        return  # carried with the publisher's own description, which compressed-tensors may refuse
    if problems:
        raise Wrong(f"verify refuses a right output: {problems[0]}")


def damaged_output(rng: random.Random, folder: Path) -> str:
    kind = rng.choice(KINDS)
    source, whole = good(kind)
    out = folder / "out"
    shutil.copytree(whole, out)
    names = sorted(path for path in out.rglob("*") if path.is_file())
    path = rng.choice(names)
    before = path.read_bytes()
    path.write_bytes(_edited(rng, before, path.suffix == ".json"))
    if rng.random() < 0.3:
        return _resumed(source, out, whole, kind)
    problems = verify(out, source, threads=1).problems
    if not problems and not _harmless(path, before):
        raise Wrong(f"verify passes a damaged {path.relative_to(out)}")
    return "verified: damage found" if problems else "verified: nothing that counts had changed"


def _edited(rng: random.Random, raw: bytes, is_json: bool) -> bytes:
    if is_json and rng.random() < 0.7:
        tree: Any = json.loads(raw)
        edit_tree(rng, tree)
        return to_text(rng, tree)
    return edit_bytes(rng, raw)


def _harmless(path: Path, before: bytes) -> bool:
    """Whether a file still says the same: white space of JSON is not what it says."""
    after = path.read_bytes()
    if path.suffix != ".json":
        return after == before
    try:
        trees = [json.loads(raw) for raw in (before, after)]
    except (ValueError, RecursionError):
        return False
    return json.dumps(trees[0], sort_keys=True) == json.dumps(trees[1], sort_keys=True)


def _resumed(source: Path, out: Path, whole: Path, kind: str) -> str:
    """The same command again: refused, or the bytes that a run without damage gives."""
    try:
        convert(source, out, recipe(kind), threads=1)
    except MoepressError as error:
        return f"resume refused: {type(error).__name__}"
    for path in sorted(whole.rglob("*")):
        name = path.relative_to(whole)
        if path.is_file() and ".moepress" not in name.parts and (out / name).read_bytes() != path.read_bytes():
            if verify(out, source, threads=1).problems:
                return "resumed over changed bytes, and verify says so"
            raise Wrong(f"resumed, and {name} has other bytes that verify passes")
    return "resumed: the same bytes"


def write(content: dict[str, bytes], folder: Path) -> None:
    folder.mkdir(parents=True)
    for name, raw in content.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(raw)
