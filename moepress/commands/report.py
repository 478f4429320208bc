"""``moepress report``: one page that says what was pressed, what it cost, and what was proven."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from moepress.commands.console import marked, next_step, note, quoted, size, stdout
from moepress.commands.numbers import number
from moepress.commands.options import AsJson, print_json, size_option


def report(
    out: Annotated[Path, typer.Argument(metavar="OUT", help="A converted checkpoint.")],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE.html", help="Where to write (default: OUT.report.html)."),
    ] = None,
    source: Annotated[
        str | None, typer.Option("--source", metavar="SRC", help="The checkpoint it was made from, if it has moved.")
    ] = None,
    gpu_memory: Annotated[str, typer.Option(metavar="SIZE", help="Memory of one GPU.")] = "141GB",
    memory_fraction: Annotated[
        float,
        typer.Option(metavar="SHARE", parser=number(0.05, 1), help="Share of that memory for weights and KV cache."),
    ] = 0.88,
    kv_dtype: Annotated[str, typer.Option(metavar="bf16|fp8", help="KV cache type.")] = "fp8",
    as_json: AsJson = False,
) -> None:
    """Write one self-contained HTML page about OUT: sizes, memory, errors, speed, gates, checksums, how to reproduce it."""
    from moepress.errors import MoepressError
    from moepress.recipe import parse_size
    from moepress.report.memory import gpu_of
    from moepress.report.output import read_pressed_output
    from moepress.report.page import contents, render, write_page

    try:
        gpu = gpu_of(size_option(gpu_memory, "--gpu-memory", parse_size), memory_fraction, kv_dtype)
    except ValueError as error:
        raise MoepressError(str(error), where="--kv-dtype") from error
    read = read_pressed_output(out, source=source)
    figures = contents(read, gpu)
    page = output or out.resolve().with_name(f"{out.resolve().name}.report.html")
    write_page(page, render(read, figures))
    if as_json:
        print_json(figures.as_json())
        note(f"written: {page}")
        return
    for gate in figures.gates:
        mark = {"passed": "[green]✓[/green]", "failed": "[red]✗[/red]"}.get(gate.verdict, "[yellow]○[/yellow]")
        line = f"{gate.name}: {gate.verdict}{f' ({gate.reason})' if gate.reason else ''}"
        stdout.print(marked(f"{mark} {{line}}", line=line), soft_wrap=True)
    for name in figures.stale:
        note(f"stale, not shown: {name} (of an earlier conversion)")
    written = size(page.stat().st_size)
    stdout.print(
        marked("[bold]{page}[/bold]: {written}, open it in any browser", page=page, written=written), soft_wrap=True
    )
    to_run = [gate.reason for gate in figures.gates if gate.verdict == "not run"]
    next_step(to_run[0] if to_run else f"moepress serve {quoted(out)} --print")
