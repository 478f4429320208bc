"""``moepress verify``: re-read and compare."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moepress.commands.console import duration, marked, next_step, note, quoted, size, stdout
from moepress.commands.kept import keep
from moepress.commands.options import AsJson, Threads, print_json
from moepress.commands.progress import VerifyProgress
from moepress.results import REPORT_NAME

if TYPE_CHECKING:
    from moepress.verify.run import Verification


def verify(
    out: Annotated[Path, typer.Argument(metavar="OUT", help="A converted checkpoint.")],
    source: Annotated[
        str | None, typer.Option("--source", metavar="SRC", help="The checkpoint it was made from.")
    ] = None,
    same_kv_as: Annotated[
        str | None,
        typer.Option(
            "--same-kv-as",
            metavar="OTHER",
            help="The other side of a prefill/decode pair: both must have the same KV scales.",
        ),
    ] = None,
    signed_by: Annotated[
        Path | None,
        typer.Option("--signed-by", metavar="KEY.pub", help="Public key: OUT must carry a valid signature by it."),
    ] = None,
    threads: Threads = None,
    as_json: AsJson = False,
) -> None:
    """Re-read OUT with safetensors and compressed-tensors and compare every tensor with SRC. Exit 1 if anything is off."""
    from moepress import api

    signature = None
    if signed_by is not None:
        from moepress.publish.signing import check_signature

        signature = check_signature(out, signed_by)
    with VerifyProgress(quiet=as_json) as progress:
        result = api.verify(out, source, same_kv_as=same_kv_as, threads=threads, watcher=progress)
    if signature is not None:
        says = f"{len(signature.signed)} files are signed by {signed_by}" if not signature.problems else ""
        extra = f"; not covered: {', '.join(signature.unsigned)}" if signature.unsigned and says else ""
        result = replace(
            result,
            problems=(*signature.problems, *result.problems),
            checked=(*result.checked, *([says + extra] if says else [])),
        )
    keep(
        out,
        "verify",
        "fail" if result.problems else "pass",
        {"source": source, "same_kv_as": same_kv_as, **result.as_json()},
    )
    if as_json:
        print_json(result.as_json())
    else:
        show(result)
        if not result.problems:
            next_step(f"moepress report {quoted(out)}")
        elif not (out / REPORT_NAME).exists():
            note(f"{out} holds no {REPORT_NAME}: convert did not finish it, or it is not what convert wrote")
    if result.problems:
        raise typer.Exit(1)


def show(result: Verification) -> None:
    for problem in result.problems[:50]:
        stdout.print(marked("[red]✗[/red] {problem}", problem=problem), soft_wrap=True)
    if len(result.problems) > 50:
        stdout.print(f"  … and {len(result.problems) - 50:,} more (all with --json)")
    for line in result.checked:
        stdout.print(marked("[green]✓[/green] {line}", line=line), soft_wrap=True)
    count = len(result.problems)
    verdict = f"[red]{count:,} problem{'s' if count != 1 else ''}[/red]" if count else "[green]verified[/green]"
    figures = f"{result.tensors:,} tensors, {size(result.bytes)} in {duration(result.seconds)}"
    stdout.print(marked(f"[bold]{verdict}[/bold]: {{figures}}", figures=figures))
