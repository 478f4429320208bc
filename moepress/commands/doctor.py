"""``moepress doctor``: what this machine can do, and what to mend."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from moepress.commands.console import marked, next_step, stdout
from moepress.commands.options import AsJson, print_json

MARKS = {"good": "[green]✓[/green]", "note": "[yellow]○[/yellow]", "bad": "[red]✗[/red]"}


def doctor(
    folder: Annotated[Path, typer.Option("--folder", metavar="DIR", help="Where outputs will be written.")] = Path(),
    offline: Annotated[bool, typer.Option("--offline", metavar="", help="Do not ask the Hub.")] = False,
    as_json: AsJson = False,
) -> None:
    """Check what this machine can do (processors, memory, disk speed, GPUs, SGLang, Ray, Hub login) and say what to fix."""
    from moepress.doctor import Diagnosis, diagnose, environment_line

    checks = []
    if not as_json:
        stdout.print(environment_line(), soft_wrap=True)
    for check in diagnose(folder, online=not offline):
        checks.append(check)
        if not as_json:
            line = f"{MARKS[check.status]} [bold]{{name}}[/bold]: {{found}}"
            stdout.print(marked(line, name=check.name, found=check.found), soft_wrap=True)
            if check.mend:
                stdout.print(f"    → {check.mend}", soft_wrap=True)
    diagnosis = Diagnosis(tuple(checks))
    if as_json:
        print_json(diagnosis.as_json())
    elif diagnosis.can_convert:
        next_step("moepress inspect SRC")
    if not diagnosis.can_convert:
        raise typer.Exit(1)
