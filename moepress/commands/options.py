"""Options that several commands share, and how their words become values."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from moepress.commands.numbers import whole
from moepress.errors import MoepressError


def complete_recipe(incomplete: str) -> list[str]:
    """Shipped recipes and YAML files here, for the shell's completion; from file names alone, because a key press waits."""
    shipped = (path.stem for path in (Path(__file__).parents[1] / "recipes").glob("*.yaml"))
    here = (path.name for path in Path().glob("*.yaml"))
    return sorted(name for name in (*shipped, *here) if name.startswith(incomplete))


Source = Annotated[
    str, typer.Argument(metavar="SRC", help="Checkpoint folder, or org/name or org/name@revision on the Hub.")
]
RecipeName = Annotated[
    str,
    typer.Option(
        "--recipe",
        "-r",
        metavar="NAME|FILE",
        help="Shipped recipe (see moepress recipes list) or YAML file.",
        autocompletion=complete_recipe,
    ),
]
RecipeArgument = Annotated[
    str,
    typer.Argument(
        metavar="NAME|FILE",
        help="Shipped recipe (see moepress recipes list) or YAML file.",
        autocompletion=complete_recipe,
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="FIELD=VALUE", help="Override a field of the recipe; may be repeated."),
]
SameKvAs = Annotated[
    str | None,
    typer.Option(
        "--same-kv-as",
        metavar="OTHER",
        help="Take the KV scales from another output, the other side of a prefill/decode pair, instead of measuring them.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", metavar="", help="Print data as JSON on stdout, messages on stderr.")]
Threads = Annotated[
    int | None,
    typer.Option(
        "--threads",
        metavar="N",
        parser=whole(),
        help="Threads to work with (default: one per processor). The result does not depend on it.",
    ),
]

TrustRemoteCode = Annotated[
    bool,
    typer.Option("--trust-remote-code", metavar="", help="Let the checkpoint's own Python code for its tokenizer run."),
]

SglangPython = Annotated[
    str | None,
    typer.Option(
        "--sglang-python",
        metavar="PATH",
        help="Python with SGLang (default: $MOEPRESS_SGLANG_PYTHON or the one in .venv-sglang).",
    ),
]


def this_command() -> str:
    """The command that is running, as it can be pasted again."""
    return shlex.join(["moepress", *sys.argv[1:]])


def recipe_words(recipe: str, overrides: list[str] | None) -> str:
    return shlex.join([recipe, *(word for override in overrides or () for word in ("--set", override))])


def size_option(text: str, option: str, parse: Any) -> int:
    try:
        return int(parse(text))
    except ValueError as error:
        raise MoepressError(str(error), where=option) from error


def add_named_file(found: dict[str, Path], name: str, path: Path, option: str) -> None:
    """One file more, under a name of its own.

    Raises:
        MoepressError: the name is another file's, which would be left out without a word.
    """
    if name in found:
        raise MoepressError(f"two files are called {name!r}: {found[name]} and {path}", where=option)
    found[name] = path


def print_json(data: Any) -> None:
    typer.echo(json.dumps(data, indent=2, ensure_ascii=False))
