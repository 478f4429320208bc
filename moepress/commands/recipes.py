"""``moepress recipes``: list, show and check recipes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import typer

from moepress.commands.console import next_step, stdout, table
from moepress.commands.options import AsJson, Overrides, RecipeArgument, print_json

if TYPE_CHECKING:
    from moepress.formats.family_tables import Family
    from moepress.recipe import Recipe


app = typer.Typer(no_args_is_help=True, help="List, show and check recipes.")


@app.command("list")
def list_recipes(as_json: AsJson = False) -> None:
    """The recipes that ship with moepress."""
    from moepress import api

    recipes = [api.load_recipe(name) for name in api.shipped_recipes()]
    if as_json:
        print_json([recipe.model_dump(mode="json") for recipe in recipes])
        return
    show_recipes(recipes)


@app.command("show")
def show(recipe: RecipeArgument, overrides: Overrides = None, as_json: AsJson = False) -> None:
    """A recipe with every default written out."""
    import yaml

    from moepress import api

    data = api.load_recipe(recipe, overrides or ()).model_dump(mode="json")
    if as_json:
        print_json(data)
    else:
        typer.echo(yaml.safe_dump(data, sort_keys=False, allow_unicode=True, width=110), nl=False)


@app.command("check")
def check(recipe: RecipeArgument, overrides: Overrides = None) -> None:
    """Check a recipe; every problem is listed with its field."""
    from moepress import api

    loaded = api.load_recipe(recipe, overrides or ())
    typer.echo(f"{loaded.name}: good")


@app.command("schema")
def schema() -> None:
    """The JSON schema of recipes."""
    from moepress.recipe import recipe_schema

    print_json(recipe_schema())


@app.command("families")
def families(as_json: AsJson = False) -> None:
    """The model families that moepress knows."""
    from moepress.formats.families import FAMILIES

    if as_json:
        print_json({f.key: {"title": f.title, "model_types": list(f.model_types)} for f in _families(FAMILIES)})
        return
    show_families(_families(FAMILIES))


def _families(families: Any) -> list[Any]:
    return list(families.values()) if hasattr(families, "values") else list(families)


def show_recipes(known: list[Recipe]) -> None:
    rows = table("recipe", "families", "experts", "about")
    for recipe in known:
        weights = recipe.weights
        experts = f"INT{weights.num_bits} g{weights.group_size} {weights.algorithm}"
        if recipe.keeps_experts:
            experts = "as in the source"
        rows.add_row(recipe.name, ", ".join(recipe.families), experts, recipe.description)
    stdout.print(rows)
    next_step("moepress recipes show NAME")


def show_families(known: list[Family]) -> None:
    rows = table("family", "models", "model_type")
    for family in known:
        rows.add_row(family.key, family.title, ", ".join(family.model_types))
    stdout.print(rows)
