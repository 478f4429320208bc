"""From YAML to a recipe: shipped or a file, overridden field by field, every problem at once."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from moepress.errors import RecipeError
from moepress.recipe.recipe import Recipe


def shipped_recipes() -> list[str]:
    """Names of the recipes inside the package, sorted."""
    folder = resources.files("moepress") / "recipes"
    return sorted(entry.name.removesuffix(".yaml") for entry in folder.iterdir() if entry.name.endswith(".yaml"))


def recipe_text(source: str) -> tuple[str, str]:
    """The YAML text of a shipped recipe's name or of a file's path, and where it was found.

    Raises:
        RecipeError: neither a shipped name nor a readable file.
    """
    path = Path(source)
    if path.suffix in (".yaml", ".yml") or path.exists():
        try:
            return path.read_text(encoding="utf-8"), str(path)
        except (OSError, UnicodeDecodeError) as error:
            raise RecipeError([("(file)", str(error))], where=source, hint="moepress recipes list") from error
    if source in shipped_recipes():
        return (resources.files("moepress") / "recipes" / f"{source}.yaml").read_text(
            encoding="utf-8"
        ), f"shipped recipe {source}"
    known = ", ".join(shipped_recipes())
    raise RecipeError(
        [("(name)", f"no recipe is called {source!r}; shipped are: {known}")], hint="moepress recipes list"
    )


def load_recipe(source: str, overrides: Iterable[str] = ()) -> Recipe:
    """A recipe from a shipped name or a YAML file, with ``path=value`` overrides applied before the check.

    Raises:
        RecipeError: with every problem at once, each under its field's path.
    """
    text, where = recipe_text(source)
    try:
        data = yaml.load(text, Loader=_StrictLoader)
    except (
        yaml.YAMLError,
        ValueError,
        RecursionError,
    ) as error:  # also a number of ten thousand digits, or of brackets
        raise RecipeError([("(yaml)", " ".join(str(error).split()))], where=where) from error
    if not isinstance(data, dict):
        raise RecipeError([("(yaml)", f"a recipe is a mapping of fields, this is {_kind(data)}")], where=where)
    return check_recipe(data, where=where, overrides=overrides)


def check_recipe(
    data: dict[str, Any], *, where: str, problems: Iterable[tuple[str, str]] = (), overrides: Iterable[str] = ()
) -> Recipe:
    """Validates a mapping; ``problems`` already found are reported together with the new ones.

    Args:
        data: changed by `overrides`.
        overrides: ``path=value``, applied first.

    Raises:
        RecipeError: if there is any problem.
    """
    found = [*problems, *(problem for override in overrides if (problem := _apply(data, override)))]
    try:
        recipe = Recipe.model_validate(data)
    except ValidationError as error:
        found += [(_path(item["loc"]), _message(item)) for item in error.errors()]
    if found:
        raise RecipeError(found, where=where)
    return recipe


def recipe_schema() -> dict[str, Any]:
    """The JSON schema of recipes, for editors and other tools."""
    return Recipe.model_json_schema()


class _StrictLoader(yaml.SafeLoader):
    """YAML without tags that run code, without silently repeated keys, and without anchors: nine short lines of them
    stand for a billion values, which an error message would write out."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):  # type: ignore[no-untyped-call]
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
            raise yaml.composer.ComposerError(None, None, "a recipe has no anchors and aliases (&a, *a)", mark)
        node: yaml.Node | None = super().compose_node(parent, index)  # type: ignore[no-untyped-call, misc]
        return node


def _mapping_without_repeats(loader: yaml.SafeLoader, node: yaml.MappingNode) -> dict[Any, Any]:
    seen: dict[Any, Any] = {}
    for key_node, value_node in node.value:
        key = loader.construct_object(key_node, deep=True)  # type: ignore[no-untyped-call]
        if not isinstance(key, str | int | float | bool):
            raise yaml.constructor.ConstructorError(
                None, None, "a field's name must be plain text", key_node.start_mark
            )
        if key in seen:
            raise yaml.constructor.ConstructorError(None, None, f"field {key!r} is given twice", key_node.start_mark)
        seen[key] = loader.construct_object(value_node, deep=True)  # type: ignore[no-untyped-call]
    return seen


_StrictLoader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping_without_repeats)


def _apply(data: dict[str, Any], override: str) -> tuple[str, str] | None:
    """Sets one ``a.b=value`` in ``data``; returns a problem instead of raising, so that all come at once."""
    path, separator, value = override.partition("=")
    keys = path.strip().split(".")
    if not separator or not all(keys):
        return ("--set", f"{override!r} is not of the form section.field=value")
    node: Any = data
    for key in keys[:-1]:
        node = node.setdefault(key, {})
        if not isinstance(node, dict):
            return (path, f"{key!r} is not a section")
    try:
        node[keys[-1]] = yaml.load(value, Loader=_StrictLoader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        return (path, " ".join(str(error).split()))
    return None


def _path(location: tuple[int | str, ...]) -> str:
    return ".".join(str(part) for part in location) or "(recipe)"


def _message(item: Mapping[str, Any]) -> str:
    text = str(item["msg"]).removeprefix("Value error, ")
    if item["type"] == "extra_forbidden":
        near = difflib.get_close_matches(str(item["loc"][-1]), _fields_beside(item["loc"]), n=1)
        return f"no such field; did you mean {near[0]}?" if near else "no such field"
    if item["type"] == "missing":
        return "is required"
    given = repr(item["input"])
    return f"{text} (given: {given if len(given) <= 200 else given[:200] + '…'})"


def _fields_beside(location: tuple[int | str, ...]) -> list[str]:
    """Names of the fields of the section that a path leads into."""
    section: type[BaseModel] = Recipe
    for part in location[:-1]:
        inner = section.model_fields[str(part)].annotation if str(part) in section.model_fields else None
        if not (isinstance(inner, type) and issubclass(inner, BaseModel)):
            return []
        section = inner
    return list(section.model_fields)


def _kind(value: object) -> str:
    return {list: "a list", str: "a text", type(None): "empty"}.get(type(value), type(value).__name__)
