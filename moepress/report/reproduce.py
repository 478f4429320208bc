"""The commands that make and judge this output again, as they can be pasted.

The recipe is recorded whole. Where it is a shipped one with fields changed, the command says so in its own words:
``--recipe NAME --set FIELD=VALUE …``, with exactly the differences. Otherwise the recorded recipe goes into a file first.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from typing import Any

import yaml

from moepress.recipe import Recipe, load_recipe, shipped_recipes
from moepress.report.output import PressedOutput


def commands(output: PressedOutput) -> list[tuple[str, str]]:
    """What each does, and the command."""
    source, out = shlex.quote(output.source_words), shlex.quote(str(output.folder))
    recipe = recipe_words(output.recipe, output.report["recipe"])
    return [
        ("Plan", f"moepress plan {source} {out} --recipe {recipe}"),
        ("Press", f"moepress convert {source} {out} --recipe {recipe}"),
        ("Re-read every tensor", f"moepress verify {out} --source {source}"),
        ("Compare on held-out text", f"moepress fidelity {out} --source {source}"),
        ("Boot the server", f"moepress validate {out} --baseline {source}"),
        ("Score tasks", f"moepress evaluate {out} --baseline {source}"),
        ("Serve", f"moepress serve {out} --print"),
        ("This page", f"moepress report {out}"),
    ]


def recipe_words(recipe: Recipe, recorded: Mapping[str, Any] | None = None) -> str:
    """``NAME --set FIELD=VALUE …`` where a shipped recipe of that name is near, else the file to write it to.

    Args:
        recorded: what the report holds of it: gates and the like are not recorded, for they change no byte.
    """
    if recipe.name not in shipped_recipes():
        return f"{recipe.name}.yaml"
    before = _flat(load_recipe(recipe.name).model_dump(mode="json"))
    after = _flat(recipe.model_dump(mode="json"))
    known = after if recorded is None else _flat(recorded)
    changed = {field: value for field, value in after.items() if field in known and before.get(field) != value}
    words = [recipe.name, *(f"--set {shlex.quote(f'{field}={_value(value)}')}" for field, value in changed.items())]
    return " ".join(words)


def recipe_yaml(recipe: Recipe) -> str:
    """The recipe, whole."""
    text: str = yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False, allow_unicode=True, width=100)
    return text


def _value(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            found |= _flat(value, f"{prefix}{key}.")
        else:
            found[prefix + key] = value
    return found
