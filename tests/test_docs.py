"""Every moepress command in the README and the docs is one that the command line takes, with a recipe that exists."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import typer

from moepress.cli import app
from moepress.recipe import load_recipe

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])
COMMAND = re.compile(r"^ {4}(?:\$ )?(moepress .+)$", re.MULTILINE)
CONTINUED = re.compile(r" \\\n\s+")
FOUND = [
    (page.relative_to(ROOT).as_posix(), line)
    for page in PAGES
    for line in COMMAND.findall(CONTINUED.sub(" ", page.read_text()))
]


def test_there_are_commands_to_check() -> None:
    assert len(FOUND) >= 10


@pytest.mark.parametrize(("page", "line"), FOUND)
def test_a_command_of_the_docs_parses(page: str, line: str) -> None:
    words = shlex.split(line.partition("  #")[0])[1:]
    command = typer.main.get_command(app)
    context = command.make_context("moepress", list(words), resilient_parsing=True)
    name, rest = words[0], words[1:]
    found = command.get_command(context, name)  # type: ignore[attr-defined]
    if hasattr(found, "get_command"):
        found, rest = found.get_command(context, rest[0]), rest[1:]
    assert found is not None, f"{page}: no command {name}"
    parsed = found.make_context(name, list(rest))
    recipe = parsed.params.get("recipe")
    if recipe and not recipe.isupper() and not recipe.endswith(".yaml"):
        load_recipe(recipe, parsed.params.get("overrides") or ())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_inside_the_repository_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?://|#)([^)#]+)", page.read_text()):
        assert (page.parent / target).exists(), f"{page.name}: {target}"
