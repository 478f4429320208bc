"""The recipe reference, from the recipe's own classes: their fields, types, bounds, defaults and descriptions."""

from __future__ import annotations

import json
from typing import Any

from moepress.recipe import Recipe, load_recipe, recipe_schema, shipped_recipes

HEAD = """# Recipe

A recipe is one YAML file, checked whole before a byte is read: an unknown field, a wrong type, a value out of bounds are
errors, all listed at once. What is not written has the default of this page. Any field can be changed for one run, by its path:

    moepress convert SRC OUT --recipe kimi-k2 --set weights.group_size=64

`moepress recipes show NAME` prints a recipe with every default in it; `moepress recipes schema` the JSON schema, for an editor.
Sizes are written `5GB` (decimal) or `4GiB` (binary).

| shipped recipe | families | experts | about |
|---|---|---|---|
"""


def page() -> str:
    schema = recipe_schema()
    sections = schema["$defs"]
    text = HEAD
    for name in shipped_recipes():
        recipe = load_recipe(name)
        weights = recipe.weights
        how = f"INT{weights.num_bits} g{weights.group_size} {weights.algorithm}"
        text += f"| `{name}` | {', '.join(recipe.families)} | {how} | {_cell(recipe.description)} |\n"
    text += f"\n## Top level\n\n{_sentence(Recipe.__doc__)}\n\n{_table('', schema, sections)}"
    for name, field in schema["properties"].items():
        section = _section(field, sections)
        if section is not None:
            text += _part(name, section, sections)
    return text


def _part(path: str, section: dict[str, Any], sections: dict[str, Any]) -> str:
    text = f"\n## {path}\n\n{_sentence(section.get('description'))}\n\n{_table(path + '.', section, sections)}"
    for name, field in section["properties"].items():
        inner = _section(field, sections)
        if inner is not None:
            text += _part(f"{path}.{name}", inner, sections)
    return text


def _table(prefix: str, section: dict[str, Any], sections: dict[str, Any]) -> str:
    rows = ["| field | value | default | meaning |", "|---|---|---|---|"]
    for name, field in section["properties"].items():
        if _section(field, sections) is not None:
            rows.append(f"| [`{prefix}{name}`](#{(prefix + name).replace('.', '')}) | section | | |")
            continue
        required = name in section.get("required", ())
        default = "**required**" if required else f"`{_default(field)}`"
        rows.append(f"| `{prefix}{name}` | {_value(field)} | {default} | {_cell(field.get('description', ''))} |")
    return "\n".join(rows) + "\n"


def _section(field: dict[str, Any], sections: dict[str, Any]) -> dict[str, Any] | None:
    reference = field.get("$ref") or next((part.get("$ref") for part in field.get("allOf", ())), None)
    return sections[reference.rpartition("/")[2]] if reference else None


def _value(field: dict[str, Any]) -> str:
    if "enum" in field:
        return ", ".join(f"`{value}`" for value in field["enum"])
    if "const" in field:
        return f"`{json.dumps(field['const'])}`"
    if "anyOf" in field:
        return " or ".join(_value(part) for part in field["anyOf"])
    kind = {"integer": "whole number", "number": "number", "string": "text", "boolean": "true, false", "null": "null"}
    text = kind.get(str(field.get("type")), "")
    if field.get("type") == "array":
        text = "list of text"
    if field.get("type") == "object":
        text = "mapping"
    bounds = [
        f"{sign} {field[key]:g}"
        for key, sign in (("minimum", "≥"), ("exclusiveMinimum", ">"), ("maximum", "≤"), ("exclusiveMaximum", "<"))
        if key in field
    ]
    return f"{text} {', '.join(bounds)}".strip()


def _default(field: dict[str, Any]) -> str:
    value = field.get("default")
    return str(value) if isinstance(value, str) and value else json.dumps(value)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _sentence(text: str | None) -> str:
    return " ".join((text or "").split())
