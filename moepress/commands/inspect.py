"""``moepress inspect``: what a checkpoint holds."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from moepress.commands.console import marked, next_step, note, params, quoted, size, stdout, table, warnings
from moepress.commands.options import AsJson, Source, print_json
from moepress.results import REPORT_NAME

if TYPE_CHECKING:
    from moepress.formats.inspection import Inspection


def inspect(source: Source, as_json: AsJson = False) -> None:
    """Show what a checkpoint holds: components, formats, parameters, bytes. Reads headers only."""
    from moepress import api

    inspection = api.inspect(source, tell=note)
    if as_json:
        print_json(inspection.as_json())
        return
    show(inspection)
    if (Path(source) / REPORT_NAME).is_file():  # what convert made is looked at, not converted
        next_step(f"moepress verify {quoted(source)} --source SRC")
        return
    recipe = suggest_recipe(inspection.family.key, inspection.model_type)
    next_step(f"moepress plan {quoted(source)} --recipe {recipe}")


def suggest_recipe(family: str, model_type: str) -> str:
    """A shipped recipe for the family, best the one named like the model; a placeholder where there is none."""
    from moepress import api

    fitting = [name for name in api.shipped_recipes() if family in api.load_recipe(name).families]
    return next((name for name in fitting if name == model_type.replace("_", "-")), next(iter(fitting), "RECIPE"))


def show(result: Inspection) -> None:
    warnings(result.warnings)
    stdout.print(marked("[bold]{location}[/bold]", location=result.location), soft_wrap=True)
    stdout.print(f"{result.family.title} · {result.architecture} · model_type {result.model_type}")
    rows = table("component", "stored as", right=("weights", "parameters", "bytes", "share"))
    for column in rows.columns[:2]:
        column.no_wrap = True
    for row in result.rows:
        share = f"{row.bytes / max(1, result.bytes):.1%}"
        rows.add_row(row.component, row.stored_as, f"{row.weights:,}", params(row.parameters), size(row.bytes), share)
    rows.add_section()
    rows.add_row(
        "all",
        "",
        f"{sum(r.weights for r in result.rows):,}",
        params(result.parameters),
        size(result.bytes),
        "",
        style="bold",
    )
    stdout.print(rows)
    stdout.print(f"{result.shards} shards, {len(result.side_files)} side files")
