"""``moepress publish``: to the Hub, with a card that says what it cost."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moepress.commands.card import BaseModel
from moepress.commands.console import duration, marked, next_step, note, quoted, size, stderr, stdout, table
from moepress.commands.options import AsJson, print_json
from moepress.errors import HubError

if TYPE_CHECKING:
    from moepress.publish.card import Card
    from moepress.publish.contents import Contents
    from moepress.publish.push import Destination, Published


def publish(
    out: Annotated[Path, typer.Argument(metavar="OUT", help="A converted checkpoint.")],
    target: Annotated[str, typer.Argument(metavar="ID", help="org/name on the Hub; created if it does not exist.")],
    source: Annotated[
        str | None,
        typer.Option(
            "--source", metavar="SRC", help="The checkpoint it was made from, in case it has to be verified again."
        ),
    ] = None,
    base_model: BaseModel = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", metavar="", help="Show what would be sent, and send nothing.")
    ] = False,
    public: Annotated[
        bool, typer.Option("--public", metavar="", help="Make a new repository public (default: private).")
    ] = False,
    replace: Annotated[
        bool,
        typer.Option(
            "--replace", metavar="", help="Remove files on main that do not belong to this output, in the same merge."
        ),
    ] = False,
    merge: Annotated[
        bool,
        typer.Option(
            "--merge/--no-merge", metavar="", help="Merge the pull request, or leave it for somebody to review."
        ),
    ] = True,
    as_json: AsJson = False,
) -> None:
    """Upload OUT to the Hub as a pull request, check every file there, and only then merge. The same command resumes."""
    from moepress.hub.address import parse_address
    from moepress.hub.connection import connect
    from moepress.publish.card import make_card
    from moepress.publish.contents import stage
    from moepress.publish.eval_results import eval_results
    from moepress.publish.gate import check_publishable
    from moepress.publish.push import look, push
    from moepress.report.output import read_pressed_output

    address = parse_address(target)
    if address is None or address.revision is not None:
        raise HubError(f"{target!r} is not the name of a repository", hint="write org/name; it is published to main")
    publishable = check_publishable(out, source=source, tell=note)
    card = make_card(read_pressed_output(out), title=address.repo.partition("/")[2], base_model=base_model)
    contents = stage(publishable, card.text, eval_results(card.facts, address.repo))
    api = connect(note)
    if dry_run:
        try:
            place: Destination | None = look(api, address.repo, contents)
        except HubError as error:
            note(f"not compared with the Hub: {error}")
            place = None
        if as_json:
            print_json(planned(address.repo, contents, card, place, private=not public))
        else:
            show_plan(address.repo, contents, card, place, private=not public, replace=replace)
            next_step(f"moepress publish {quoted(out, target)}")
        return
    for text in card.notes:
        note(f"card: {text}")
    try:
        result = push(
            api,
            out,
            contents,
            publishable.digest,
            address.repo,
            private=not public,
            replace=replace,
            merge=merge,
            quiet=as_json or not stderr.is_terminal,
            tell=note,
        )
    except KeyboardInterrupt:
        note(f"stopped; main has not changed. To continue:\n  moepress publish {quoted(out, target)}")
        raise typer.Exit(130) from None
    if as_json:
        print_json(result.as_json())
        return
    show(result)
    next_step(f"moepress inspect {address.repo}" if result.merged else f"# look at {result.pull_request}, and merge it")


def planned(repo: str, contents: Contents, card: Card, place: Destination | None, *, private: bool) -> dict[str, Any]:
    """The dry run as data."""
    return {
        "repo": repo,
        "exists": None if place is None else place.exists,
        "would_be_private": private if place is not None and not place.exists else None,
        "files": [{"name": file.name, "bytes": file.size, "sha256": file.sha256} for file in contents.files.values()],
        "bytes": contents.bytes,
        "to_send": None if place is None else list(place.difference.to_send),
        "would_be_removed": None if place is None else list(place.difference.strangers),
        "metadata": card.metadata,
        "notes": list(card.notes),
    }


def show_plan(
    repo: str, contents: Contents, card: Card, place: Destination | None, *, private: bool, replace: bool
) -> None:
    rows = table("file", right=("bytes", "SHA-256", "on main"))
    for name, file in contents.files.items():
        state = "?"
        if place is not None:
            there = "new" if name in place.difference.missing else "same"
            state = "changed" if name in place.difference.other else there
        rows.add_row(name, f"{file.size:,}", file.sha256[:12], state)
    for name in place.difference.strangers if place is not None else ():
        rows.add_row(name, "", "", marked("[yellow]removed[/yellow]" if replace else "[red]in the way[/red]"))
    stdout.print(rows)
    where = (
        "not asked" if place is None else "exists" if place.exists else f"made, {'private' if private else 'public'}"
    )
    figures = f"{len(contents.files)} files, {size(contents.bytes)}; nothing was sent"
    stdout.print(marked("[bold]{repo}[/bold] ({where}): {figures}", repo=repo, where=where, figures=figures))
    for text in card.notes:
        stdout.print(marked("[yellow]card:[/yellow] {text}", text=text), soft_wrap=True)
    if place is not None and place.difference.strangers and not replace:
        stdout.print(
            marked("[red]publish would stop here:[/red] main holds files that are not of this output; see --replace"),
            soft_wrap=True,
        )


def show(result: Published) -> None:
    if not result.sent and not result.removed and result.pull_request is None:
        stdout.print(
            f"{result.repo} already holds exactly this, at commit {result.commit}; nothing was sent",
            soft_wrap=True,
        )
        return
    stdout.print(
        f"{len(result.sent)} files sent, {len(result.removed)} removed, every checksum compared, in {duration(result.seconds)}",
        soft_wrap=True,
    )
    if result.merged:
        stdout.print(
            f"{result.repo}: main is at commit {result.commit}, merged from {result.pull_request}",
            soft_wrap=True,
        )
    else:
        stdout.print(f"{result.repo}: not merged, {result.pull_request}", soft_wrap=True)
