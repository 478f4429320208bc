"""From YAML to a recipe: shipped or a file, overridden field by field, every problem at once."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
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
    path, list_recipes = Path(source), "moepress recipes list shows what ships"
    shipped = source in shipped_recipes()
    # outputs are often called as the recipe that they were made with: a folder is no recipe
    if path.suffix in (".yaml", ".yml") or (path.exists() and not (shipped and path.is_dir())):
        try:
            return path.read_text(encoding="utf-8"), str(path)
        except (OSError, UnicodeDecodeError) as error:
            why = (error.strerror if isinstance(error, OSError) else None) or str(error)
            raise RecipeError([("(file)", f"cannot be read: {why}")], where=source, hint=list_recipes) from error
    if shipped:
        return (resources.files("moepress") / "recipes" / f"{source}.yaml").read_text(
            encoding="utf-8"
        ), f"shipped recipe {source}"
    known = ", ".join(shipped_recipes())
    raise RecipeError([("(name)", f"no recipe is called {source!r}; moepress ships {known}")], hint=list_recipes)


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
    overrides = list(overrides)
    found = [*problems, *(problem for override in overrides if (problem := _apply(data, override)))]
    try:
        recipe = Recipe.model_validate(data)
    except ValidationError as error:
        found += [(_path(item["loc"]), _message(item)) for item in error.errors()]
    if found:
        raise RecipeError(found, where=f"{where}, changed by --set" if overrides else where)
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
    text = str(item["msg"]).removeprefix("Value error, ").replace("Input should be ", "must be ")
    if item["type"] == "extra_forbidden":
        return f"no such field; {_advice(item['loc'])}"
    if item["type"] == "missing":
        return "is required"
    given = repr(item["input"])
    return f"{text} (given: {given if len(given) <= 200 else given[:200] + '…'})"


def _advice(location: tuple[int | str, ...]) -> str:
    """What to write instead of an unknown field: one of that name in another section, the most like beside it, or the choice."""
    known = dict(_fields(Recipe))
    section = ".".join(str(part) for part in location[:-1])
    beside = {name: path for path, name in known.items() if path.rpartition(".")[0] == section}
    meant = [path for path, name in known.items() if name == location[-1]]
    meant = meant or [beside[name] for name in difflib.get_close_matches(str(location[-1]), beside, n=1)]
    if meant:
        return f"did you mean {' or '.join(meant)}?"
    return f"{section or 'a recipe'} has {', '.join(beside)}"


def _fields(section: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, str]]:
    """(whole path, name) of every field of a section and of the sections in it."""
    for name, field in section.model_fields.items():
        yield f"{prefix}{name}", name
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            yield from _fields(inner, f"{prefix}{name}.")


def _kind(value: object) -> str:
    return {list: "a list", str: "a text", type(None): "empty"}.get(type(value), type(value).__name__)
