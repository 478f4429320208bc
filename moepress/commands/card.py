"""``moepress card``: the model card, before anybody else sees it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from moepress.commands.console import next_step, note, quoted, stdout
from moepress.commands.options import AsJson, print_json

BaseModel = Annotated[
    str | None,
    typer.Option("--base-model", metavar="ORG/NAME", help="The source's name on the Hub, if it is not recorded."),
]


def card(
    out: Annotated[Path, typer.Argument(metavar="OUT", help="A converted checkpoint.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE.md", help="Write to this file (default: print).")
    ] = None,
    title: Annotated[str | None, typer.Option(metavar="NAME", help="The model's name (default: the folder's).")] = None,
    base_model: BaseModel = None,
    as_json: AsJson = False,
) -> None:
    """Show the model card that publish would write for OUT: what changed, what it cost, what nobody has checked."""
    from moepress.formats.atomic import atomic_write_text
    from moepress.publish.card import make_card
    from moepress.report.output import read_pressed_output

    made = make_card(read_pressed_output(out), title=title, base_model=base_model)
    for text in made.notes:
        note(f"card: {text}")
    if output is not None:
        atomic_write_text(output, made.text)
    if as_json:
        print_json({"metadata": made.metadata, "notes": list(made.notes), "card": made.text})
    elif output is None:
        typer.echo(made.text, nl=False)
    else:
        stdout.print(f"written: {output}", soft_wrap=True)
        next_step(f"moepress publish {quoted(out)} ORG/NAME --dry-run")
