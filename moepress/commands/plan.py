"""``moepress plan``: what a conversion would need and give."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moepress.commands.console import duration, next_step, quoted, stdout, table, warnings
from moepress.commands.numbers import number
from moepress.commands.options import (
    AsJson,
    Overrides,
    RecipeName,
    SameKvAs,
    Threads,
    TrustRemoteCode,
    print_json,
    recipe_words,
    size_option,
)

if TYPE_CHECKING:
    from moepress.convert.forecast.machines import PaperTime
    from moepress.convert.forecast.outlook import Outlook


def plan(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SRC", help="Checkpoint folder, org/name or org/name@revision on the Hub, or a config.json alone."
        ),
    ],
    recipe: RecipeName,
    out: Annotated[
        Path | None, typer.Argument(metavar="OUT", help="Output folder to check; nothing is written.")
    ] = None,
    overrides: Overrides = None,
    same_kv_as: SameKvAs = None,
    gpu_memory: Annotated[str, typer.Option(metavar="SIZE", help="Memory of one GPU.")] = "141GB",
    memory_fraction: Annotated[
        float,
        typer.Option(
            metavar="SHARE",
            parser=number(0.05, 1),
            help="Share of that memory for weights and KV cache (SGLang: --mem-fraction-static).",
        ),
    ] = 0.88,
    kv_dtype: Annotated[str, typer.Option(metavar="bf16|fp8", help="KV cache type.")] = "fp8",
    machines: Annotated[
        list[str] | None,
        typer.Option(
            "--on",
            metavar="MACHINE",
            help="Also estimate the time on another machine, on paper: cpu64, h200, h200x8 or 4xh200x8; may be repeated.",
        ),
    ] = None,
    threads: Threads = None,
    trust_remote_code: TrustRemoteCode = False,
    as_json: AsJson = False,
) -> None:
    """Say what a conversion would need and produce, and refuse what cannot work, before any work is done."""
    from moepress import api
    from moepress.recipe import parse_size

    result = api.plan(
        source,
        api.load_recipe(recipe, overrides or ()),
        out,
        gpu_memory=size_option(gpu_memory, "--gpu-memory", parse_size),
        memory_fraction=memory_fraction,
        kv_dtype=kv_dtype,
        threads=threads,
        trust_remote_code=trust_remote_code,
        machines=machines or (),
        same_kv_as=same_kv_as,
    )
    if as_json:
        print_json(result.as_json())
        return
    show(result)
    if result.plan is not None:
        words = recipe_words(recipe, overrides) + (f" --same-kv-as {quoted(same_kv_as)}" if same_kv_as else "")
        next_step(f"moepress convert {quoted(source, out or 'OUT')} --recipe {words}")


def show(result: Outlook) -> None:
    warnings(result.warnings)
    rows = table(f"{result.title} → {result.recipe_name}", right=("source", "pressed", ""))
    for label, before, after, in_bytes in result.rows():
        figures = (f"{before:,}", f"{after:,}")
        if in_bytes:
            unit, scale = ("GiB", 2**30) if max(before, after) >= 2**29 else ("MiB", 2**20)
            figures = (f"{before / scale:,.2f} {unit}", f"{after / scale:,.2f} {unit}")
        rows.add_row(label, *figures, f"× {after / before:.2f}" if before else "")
    stdout.print(rows)
    for line in result.lines():
        stdout.print(line, soft_wrap=True)
    if result.paper:
        show_paper(result.paper)


def show_paper(times: tuple[PaperTime, ...]) -> None:
    """Times on machines that are not here: arithmetic, and said to be."""
    from moepress.convert.forecast.machines import MACHINES

    names = list(dict.fromkeys(name for each in times for name in each.stages))
    rows = table("on paper", right=(*names, "in turn", "floor"))
    for each in times:
        figures = [duration(each.stages[name]) if name in each.stages else "" for name in names]
        rows.add_row(
            MACHINES[each.machine].title, *figures, duration(each.in_turn), f"{duration(each.floor)}, {each.bound_by}"
        )
    stdout.print()
    stdout.print(rows)
    stdout.print(
        "in turn: one stage after the other, as convert works now; floor: its busiest resource alone. Not measured."
    )
