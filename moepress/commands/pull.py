"""``moepress pull``: a checkpoint from the Hub, every byte checked."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moepress.commands.console import duration, marked, next_step, note, quoted, size, stdout, warnings
from moepress.commands.numbers import whole
from moepress.commands.options import AsJson, print_json, this_command
from moepress.commands.progress import PullProgress

if TYPE_CHECKING:
    from moepress.hub.pulling import Pulled


def pull(
    source: Annotated[str, typer.Argument(metavar="ID", help="org/name on the Hub, or org/name@revision.")],
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="New folder, or one to complete.")],
    workers: Annotated[
        int, typer.Option(metavar="N", parser=whole(1, 32), help="Files to fetch at the same time.")
    ] = 4,
    as_json: AsJson = False,
) -> None:
    """Download a checkpoint from the Hub: one commit, every file checked. The same command resumes."""
    from moepress import api

    try:
        with PullProgress(quiet=as_json) as progress:
            result = api.pull(source, folder, workers=workers, watcher=progress, tell=progress.note)
    except KeyboardInterrupt:
        note(f"stopped; finished files are kept. To resume:\n  {this_command()}")
        raise typer.Exit(130) from None
    if as_json:
        print_json(result.as_json())
        return
    warnings(result.warnings)
    show(result)
    next_step(f"moepress inspect {quoted(folder)}")


def show(result: Pulled) -> None:
    snapshot = result.snapshot
    count, total = (
        len(result.fetched) + len(result.kept),
        sum(snapshot.files[name].size for name in (*result.fetched, *result.kept)),
    )
    stdout.print(marked("[bold]{repo}[/bold] at commit {commit}", repo=snapshot.repo, commit=snapshot.commit))
    stdout.print(
        f"{count} files, {size(total)}, every checksum is the Hub's; {len(result.fetched)} fetched now "
        f"({size(result.fetched_bytes)} in {duration(result.seconds)}), {len(result.kept)} were here",
        soft_wrap=True,
    )
    if result.left:
        more = " …" if len(result.left) > 3 else ""
        stdout.print(
            f"left on the Hub, not part of the checkpoint: {', '.join(result.left[:3])}{more} ({len(result.left)} files)",
            soft_wrap=True,
        )
