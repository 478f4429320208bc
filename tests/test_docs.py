"""The README, the docs and the help texts: every command is one that the command line takes.

A command of a page stands in an indented block and begins with ``moepress``, ``make`` or ``python``. Here each is parsed;
`test_docs_run` runs them, page by page, on tiny checkpoints.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from moepress.cli import COMMANDS, app
from moepress.commands.examples import EXAMPLES
from moepress.recipe import load_recipe

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
COMMAND = re.compile(r"^ {4,8}(?:\$ )?(?:[A-Z_]+=\S+ )*((?:moepress|make|python -m) .+)$", re.MULTILINE)
CONTINUED = re.compile(r" \\\n\s+")
INLINE = re.compile(r"`(moepress [a-z]+(?: [^`]*)?)`")


def commands(page: Path) -> list[str]:
    text = CONTINUED.sub(" ", page.read_text())
    found = [line.partition(" #")[0] for line in COMMAND.findall(text)]
    return [
        line if line.startswith("moepress") else line.partition("  ")[0] for line in found
    ]  # `make X   what it is for`


FOUND = [(page.relative_to(ROOT).as_posix(), line) for page in PAGES for line in commands(page)]
EXAMPLE_LINES = [(f"moepress {name} --help", line) for name, lines in EXAMPLES.items() for line, _ in lines]
OURS = [(page, line) for page, line in [*FOUND, *EXAMPLE_LINES] if line.startswith("moepress ")]


def test_there_are_commands_to_check() -> None:
    assert len(OURS) > 60
    pages = {page for page, _ in OURS}
    assert {"README.md", "docs/getting-started.md", "docs/guides/hub.md", "docs/guides/validate.md"} <= pages


@pytest.mark.parametrize(("page", "line"), OURS)
def test_a_command_of_the_docs_is_one_that_the_command_line_takes(page: str, line: str) -> None:
    """Its options exist, its arguments fit, its recipe is one and takes the changes."""
    words = shlex.split(line)[1:]
    if any(word in ("[OPTIONS]", "…", "--version", "--install-completion", "COMMAND") for word in words):
        return  # a usage line of the reference
    command = typer.main.get_command(app)
    context = command.make_context("moepress", list(words), resilient_parsing=True)
    name, rest = words[0], words[1:]
    found = command.get_command(context, name)  # type: ignore[attr-defined]
    assert found is not None, f"{page}: no command {name}"
    if hasattr(found, "get_command"):
        found, rest = found.get_command(context, rest[0]), rest[1:]
        assert found is not None, f"{page}: no command {words[:2]}"
    if "--help" in rest:
        return
    parsed = found.make_context(name, list(rest))
    recipe = parsed.params.get("recipe")
    if recipe and not recipe.isupper() and not recipe.endswith(".yaml"):
        load_recipe(recipe, parsed.params.get("overrides") or ())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_a_command_in_a_sentence_exists(page: Path) -> None:
    command = typer.main.get_command(app)
    context = command.make_context("moepress", [], resilient_parsing=True)
    for line in INLINE.findall(page.read_text()):
        words = line.replace("…", "").split()
        found = command.get_command(context, words[1])  # type: ignore[attr-defined]
        assert found is not None, f"{page.name}: {line}"
        known = {name for option in found.params for name in (*option.opts, *option.secondary_opts)}
        if not hasattr(found, "get_command"):
            given = {word.partition("=")[0].strip("[],.") for word in words if word.startswith("--")}
            assert given <= known, f"{page.name}: {line}: {sorted(given - known)}"


@pytest.mark.parametrize(("page", "line"), [(p, w) for p, w in FOUND if w.startswith(("make ", "python -m "))])
def test_make_targets_and_modules_of_the_docs_exist(page: str, line: str) -> None:
    words = shlex.split(line)
    if words[0] == "make":
        targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
        assert {word for word in words[1:] if "=" not in word and not word.startswith("-")} <= targets, (
            f"{page}: {line}"
        )
    elif words[2].startswith(("benchmarks", "examples", "tests", "moepress")):
        path = ROOT / words[2].replace(".", "/")
        assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), f"{page}: {line}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_inside_the_repository_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?://|#)([^)#]+)", page.read_text()):
        assert (page.parent / target).exists(), f"{page.name}: {target}"


def run(*words: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "NO_COLOR": "1", "TERM": "dumb", "COLUMNS": "120", "NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, check=False, cwd=cwd, env=environment
    )


def test_reference_pages_are_those_of_the_code() -> None:
    """Commands, recipe, errors, Python: ``python docs/generate`` was run after the code changed."""
    done = run("docs/generate", "--check")
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_site_builds_without_a_dead_link(tmp_path: Path) -> None:
    """`make docs`: mkdocs, strict, anchors too; every page is in the navigation."""
    done = run("-m", "mkdocs", "build", "--quiet", "--site-dir", str(tmp_path / "site"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "site" / "reference" / "errors.html").exists()
    assert not list((tmp_path / "site").rglob("*.py"))


def test_every_command_is_in_the_reference_and_in_the_readme() -> None:
    reference, readme = (ROOT / "docs/reference/commands.md").read_text(), (ROOT / "README.md").read_text()
    for group in COMMANDS.values():
        for command in group:
            assert f"### moepress {command.__name__}\n" in reference
            assert re.search(rf"(moepress |`){command.__name__}\b", readme), command.__name__


class TestErrors:
    """Messages as the source has them, all of them: `docs/generate/error_page.py` reads them out."""

    @staticmethod
    def messages() -> list[tuple[str, str, str]]:
        sys.path.insert(0, str(ROOT / "docs" / "generate"))
        try:
            import error_page
        finally:
            sys.path.pop(0)
        return [(m.area, m.what, m.hint) for m in error_page.messages()]

    def test_they_speak_with_one_voice(self) -> None:
        """A message is a fact: no shouting, no full stop at its end, no "please", no "failed to", no "Error:"."""
        found = self.messages()
        assert len(found) > 300
        for area, what, hint in found:
            for text in (what, hint):
                assert not re.search(r"please|sorry|oops|failed to|^error|invalid", text, re.IGNORECASE), (
                    f"{area}: {text}"
                )
                assert not text.endswith((".", "!")), f"{area}: {text}"
                assert not re.match(r"[A-Z][a-z]+ [a-z]", text) or re.match(
                    r"[A-Z]\w*( |$)(is|has|was|cannot|needs|gave|refuses)|Git LFS|Ray|Hub", text
                ), f"{area}: {text}"

    def test_every_error_ends_with_what_to_do(self) -> None:
        """Without advice of its own, with its kind's; each kind has some, and each names a command or a step."""
        from moepress import errors

        kinds = [
            kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.MoepressError)
        ]
        for kind in kinds:
            assert kind.usual_hint
        assert len({kind.usual_hint for kind in kinds}) >= len(kinds) - 1  # ServerDied is a ServingError
        text = str(errors.ConvertError("no room", where="/out"))
        assert text.splitlines() == [
            "no room",
            "  where: /out",
            "  hint:  run the same command again: finished shards are kept",
        ]
