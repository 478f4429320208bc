"""What is kept beside an output, where there is one: what commands found, for ``moepress report``, and its recipe."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from moepress.commands.console import note
from moepress.errors import MoepressError
from moepress.results import REPORT_NAME, write_result

if TYPE_CHECKING:
    from moepress.recipe import Recipe


def keep(out: Path, name: str, verdict: str, found: dict[str, Any]) -> None:
    """Writes the result; a folder that takes none costs a warning, never the finding itself.

    Args:
        verdict: ``pass``, ``fail`` or ``not judged``.
    """
    if not (out / REPORT_NAME).exists():  # not finished by convert: a result would be bound to nothing
        note(f"this finding is not kept: {out} holds no {REPORT_NAME} that it would belong to")
        return
    try:
        write_result(out, name, verdict, found)
    except MoepressError as error:
        note(f"not kept for the report: {error}")


def kept_recipe(out: Path, bounds: Literal["gates", "evaluation"], overrides: Sequence[str]) -> Recipe | None:
    """The recipe that an output was made by; None where there is no report of convert.

    Args:
        bounds: the section that the report keeps beside the recipe, because it changes no byte of the output.
        overrides: ``field=value``, on top.

    Raises:
        MoepressError: a report that is none, or a recipe with problems.
    """
    from moepress.recipe import check_recipe

    path = out / REPORT_NAME
    if not path.is_file():
        return None
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
        data: dict[str, Any] = {**report["recipe"], bounds: report.get(bounds, {})}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise MoepressError(f"not a report of moepress convert: {error!r}", where=str(path)) from error
    return check_recipe(data, where=str(path), overrides=overrides)
