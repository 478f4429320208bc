"""SRC of ``convert`` when it is on the Hub: fetched first, or pressed shard by shard as it lands."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moepress.commands.console import note
from moepress.commands.progress import PullProgress
from moepress.errors import HubError

if TYPE_CHECKING:
    from moepress.convert.arrivals import Arrivals

Stream = Annotated[
    bool,
    typer.Option(
        "--stream",
        metavar="",
        help="For a SRC on the Hub: press shards as they arrive, instead of fetching all of them first.",
    ),
]
DeleteSource = Annotated[
    bool,
    typer.Option(
        "--delete-source",
        metavar="",
        help="With --stream: delete each source shard once everything made from it is written.",
    ),
]
SourceFolder = Annotated[
    Path | None,
    typer.Option("--source-dir", metavar="DIR", help="Where to download SRC to (default: OUT-source)."),
]


@contextmanager
def here_or_arriving(
    source: str, out: Path, *, stream: bool, delete: bool, folder: Path | None, quiet: bool
) -> Iterator[tuple[str, Arrivals | None]]:
    """The source's folder on this machine, and what arrives in it, if anything still does.

    Raises:
        HubError: options that do not fit; whatever stops a download.
    """
    from moepress.hub.address import hub_address

    address = hub_address(source)
    if address is None:
        if stream or delete:
            raise HubError(
                f"{source} is a folder here: there is nothing to stream, and it is not ours to delete", where="--stream"
            )
        yield source, None
        return
    if delete and not stream:
        raise HubError(
            "--delete-source removes shards while others are pressed", where="--delete-source", hint="add --stream"
        )
    from moepress.convert.streaming import AHEAD, StreamedSource
    from moepress.hub.arriving import Arriving
    from moepress.hub.pulling import pull
    from moepress.hub.reading import open_hub_checkpoint

    place = folder or out.with_name(f"{out.name}-source")
    checkpoint, snapshot = open_hub_checkpoint(address, tell=note)
    with PullProgress(quiet=quiet) as progress:
        if not stream:
            pull(checkpoint, snapshot, place, watcher=progress)
            yield str(place), None
            return
        progress = PullProgress(quiet=True)  # one bar: what is pressed
        with Arriving(checkpoint, snapshot, place, progress, ahead=AHEAD if delete else None) as arriving:
            arriving.fetch_small_files()
            yield str(place), StreamedSource(arriving, out, delete=delete)
