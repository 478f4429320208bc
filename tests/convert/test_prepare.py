"""What `plan` and `convert` settle before work begins: the same refusals, and the cheap ones before a text is read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from moepress.calibration.text import read_documents
from moepress.convert.forecast.outlook import outlook
from moepress.convert.plan import make_plan
from moepress.convert.prepare import prepare
from moepress.convert.run import convert
from moepress.errors import MoepressError, PlanRefused
from moepress.formats.checkpoint import open_checkpoint
from moepress.recipe import Recipe
from tests.pressing import press, recipe_for
from tests.tiny_checkpoints import TinyCheckpoint

GPTQ = ("weights.algorithm=gptq", "calibration.samples=4", "calibration.length=32")
NO_TEXT = "calibration.text=no/such/text.txt"
"""Whoever asks for it is told so: a refusal that says something else came before the text was looked for."""


class Disk(NamedTuple):
    total: int = 10
    used: int = 9
    free: int = 1


def plan_it(source: Path, out: Path, recipe: Recipe) -> None:
    outlook(str(source), recipe, out, gpu_bytes=141 * 10**9, memory_fraction=0.88, kv_dtype="fp8")


def convert_it(source: Path, out: Path, recipe: Recipe) -> None:
    convert(source, out, recipe)


both = pytest.mark.parametrize("ask", [plan_it, convert_it], ids=["plan", "convert"])


@pytest.fixture
def source(tiny: Callable[[str], TinyCheckpoint]) -> Path:
    return tiny("kimi").folder


@both
def test_the_text_is_looked_for_when_nothing_else_is_wrong(
    ask: Callable[[Path, Path, Recipe], None], source: Path, tmp_path: Path
) -> None:
    with pytest.raises(PlanRefused, match="calibration text: No such file"):
        ask(source, tmp_path / "out", recipe_for("kimi", *GPTQ, NO_TEXT))


@both
@pytest.mark.parametrize(
    ("case", "says"),
    [
        ("inside the source", "one lies inside the other"),
        ("a file", "the output is a file"),
        ("not empty", "the output folder is not empty"),
        ("begun with another recipe", r"weights\.group_size 32 → 64"),
        ("a full disk", "bytes and 1 are free"),
        ("another family's recipe", "is for glm_moe_dsa"),
        ("another engine's limit", "does not run MTP layers"),
    ],
)
def test_what_is_cheap_to_refuse_is_refused_before_a_text_is_read(
    case: str,
    says: str,
    ask: Callable[[Path, Path, Recipe], None],
    source: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out, recipe = tmp_path / "out", recipe_for("kimi", *GPTQ, NO_TEXT)
    if case == "inside the source":
        out = source / "out"
    elif case == "a file":
        out.write_text("")
    elif case == "not empty":
        out.mkdir()
        (out / "notes.txt").write_text("")
    elif case == "begun with another recipe":
        press(source, out, "kimi", *GPTQ, "weights.group_size=32")
        recipe = recipe_for("kimi", *GPTQ, NO_TEXT, "weights.group_size=64")
    elif case == "a full disk":
        monkeypatch.setattr("moepress.convert.forecast.estimate.shutil.disk_usage", lambda _: Disk())
    elif case == "another family's recipe":
        recipe = recipe_for("glm5", *GPTQ, NO_TEXT)
    else:
        recipe = recipe_for("kimi", *GPTQ, NO_TEXT, "engine=llmcompressor", "mtp.experts=quantize")
    with pytest.raises(MoepressError, match=says):
        ask(source, out, recipe)


def test_the_resume_key_is_that_of_a_plan_made_with_the_digest_at_once(source: Path, tmp_path: Path) -> None:
    recipe, checkpoint = recipe_for("kimi", *GPTQ), open_checkpoint(source)
    prepared = prepare(checkpoint, tmp_path / "out", recipe)
    assert prepared.samples is not None
    at_once = make_plan(checkpoint, recipe, calibration=prepared.samples.token_sha256)
    assert (prepared.plan.key, prepared.plan.as_json()) == (at_once.key, at_once.as_json())
    assert not (tmp_path / "out").exists()


def test_a_finished_folder_is_known_again_and_another_text_is_refused_by_name(source: Path, tmp_path: Path) -> None:
    out, text = tmp_path / "out", tmp_path / "text.txt"
    words = (*GPTQ, f"calibration.text={text}")
    content = "\n".join(document.text or "" for document in read_documents(Path(__file__)))
    text.write_text(content)
    first = press(source, out, "kimi", *words)
    prepared = prepare(open_checkpoint(source), out, recipe_for("kimi", *words))
    assert (prepared.plan.key, len(prepared.done)) == (first.plan.key, len(first.plan.shards))
    text.write_text(content[200:])
    with pytest.raises(PlanRefused, match=r"calibration [0-9a-f]{12}… → [0-9a-f]{12}…"):
        prepare(open_checkpoint(source), out, recipe_for("kimi", *words))
