"""``moepress run``: from the Hub to the Hub in one command, up to the first gate that fails."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from moepress.commands.chain import RunJournal, Step, open_journal, run_steps
from moepress.commands.console import marked, next_step, note, quoted, stdout, table
from moepress.commands.hub_source import DeleteSource, SourceFolder, Stream
from moepress.commands.options import AsJson, Overrides, TrustRemoteCode, print_json
from moepress.errors import MoepressError, PlanRefused

SKIPPABLE = ("validate", "evaluate", "publish")


def run(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE", help="Shipped recipe or YAML file.")],
    source: Annotated[
        str, typer.Option("--source", metavar="ID|DIR", help="org/name or org/name@revision on the Hub, or a folder.")
    ],
    to: Annotated[
        str, typer.Option("--to", metavar="ID|DIR", help="org/name on the Hub, or a folder; then nothing is published.")
    ],
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="DIR", help="Folder to press into (default: --to, or the name in it)."),
    ] = None,
    overrides: Overrides = None,
    skip: Annotated[
        list[str] | None,
        typer.Option(
            "--skip", metavar="STEP", help="Skip validate, evaluate or publish; may be repeated. The card will say so."
        ),
    ] = None,
    stream: Stream = False,
    delete_source: DeleteSource = False,
    source_dir: SourceFolder = None,
    sglang_python: Annotated[
        str | None, typer.Option(metavar="PATH", help="Python with SGLang, for validate and evaluate.")
    ] = None,
    container: Annotated[str | None, typer.Option(metavar="CMD", help="Container with SGLang; see validate.")] = None,
    cpu_lab: Annotated[
        bool, typer.Option("--cpu-lab", metavar="", help="Without a GPU, for small models; see validate.")
    ] = False,
    validate_options: Annotated[str, typer.Option(metavar="'--X …'", help="More options for validate.")] = "",
    evaluate_options: Annotated[str, typer.Option(metavar="'--X …'", help="More options for evaluate.")] = "",
    publish_options: Annotated[str, typer.Option(metavar="'--X …'", help="More options for publish.")] = "",
    trust_remote_code: TrustRemoteCode = False,
    as_json: AsJson = False,
) -> None:
    """plan → pull → convert → verify → validate → evaluate → publish; stops at the first failed gate, resumes there."""
    from moepress.hub.address import hub_address
    from moepress.recipe import load_recipe

    skipped = frozenset(skip or ())
    if wrong := sorted(skipped - set(SKIPPABLE)):
        raise PlanRefused(
            f"{wrong[0]!r} cannot be skipped", where="--skip", hint=f"--skip takes {', '.join(SKIPPABLE)}"
        )
    load_recipe(recipe, overrides or ())
    target = hub_address(to)
    folder = out or (Path(target.repo.partition("/")[2]) if target else Path(to))
    address = hub_address(source)
    here = str(source_dir or folder.with_name(f"{folder.name}-source")) if address else source
    server = _words(("--sglang-python", sglang_python), ("--container", container)) + (["--cpu-lab"] if cpu_lab else [])
    asked = _words(*(("--set", text) for text in overrides or ()))
    trust = ["--trust-remote-code"] if trust_remote_code else []
    gone = delete_source and address is not None
    if gone and "evaluate" not in skipped and "--baseline-url" not in evaluate_options:
        raise PlanRefused(
            "evaluate asks the source too, and --delete-source removes it",
            where="--delete-source",
            hint="leave it out, give --evaluate-options '--baseline-url URL', or --skip evaluate",
        )
    _check_server(skipped, server, validate_options, evaluate_options)
    if target is not None and "publish" not in skipped:
        _check_token(to)
    streaming = ["--stream"] if stream else []
    streaming += (["--delete-source"] if delete_source else []) + _words(
        ("--source-dir", str(source_dir) if source_dir else None)
    )
    baseline = [] if gone else ["--baseline", here]
    steps = [
        Step("plan", ("plan", source, str(folder), "--recipe", recipe, *asked, *trust)),
        Step("pull", not_run="the source is a folder here")
        if address is None
        else Step("pull", not_run="shards are pressed as they land")
        if stream
        else Step("pull", ("pull", source, here)),
        Step(
            "convert",
            ("convert", source if stream else here, str(folder), "--recipe", recipe, *asked, *trust, *streaming),
        ),
        Step("verify", ("verify", str(folder), *([] if gone else ["--source", here]))),
        _or_skipped(
            "validate", skipped, ["validate", str(folder), *baseline, *server, *trust, *shlex.split(validate_options)]
        ),
        _or_skipped(
            "evaluate",
            skipped,
            [
                "evaluate",
                str(folder),
                *(baseline or ["--baseline", source]),
                *server,
                *trust,
                *shlex.split(evaluate_options),
            ],
        ),
        Step("publish", not_run="--to is a folder")
        if target is None
        else _or_skipped("publish", skipped, ["publish", str(folder), target.repo, *shlex.split(publish_options)]),
    ]
    journal = open_journal(folder, {"recipe": " ".join([recipe, *asked]), "source": source, "to": to})
    code = run_steps(journal, steps, as_json=as_json, say=note)
    if as_json:
        print_json({"out": str(folder), "exit_code": code, **journal.head, "steps": journal.steps})
    else:
        show(journal, steps)
        if code:
            note("what passed is kept; the same command resumes from there")
        else:
            next_step(
                f"moepress inspect {target.repo}"
                if target and "publish" not in skipped
                else f"moepress report {quoted(folder)}"
            )
    if code:
        raise typer.Exit(code)


def show(journal: RunJournal, steps: list[Step]) -> None:
    colours = {"passed": "green", "failed": "red", "stopped": "red"}
    rows = table("step", "outcome", "")
    for step in steps:
        entry = journal.steps.get(step.name) or {"outcome": "not reached", "why": ""}
        colour = colours.get(entry["outcome"], "yellow")
        rows.add_row(
            step.name, marked(f"[{colour}]{{outcome}}[/{colour}]", outcome=entry["outcome"]), str(entry["why"])
        )
    stdout.print(rows)


def _or_skipped(name: str, skipped: frozenset[str], words: list[str]) -> Step:
    return Step(name, not_run=f"--skip {name}") if name in skipped else Step(name, tuple(words))


def _words(*options: tuple[str, str | None]) -> list[str]:
    return [word for option, value in options if value is not None for word in (option, value)]


def _check_server(skipped: frozenset[str], server: list[str], *extra: str) -> None:
    """A server that will be missing after days of work is missed now.

    Raises:
        PlanRefused: validate or evaluate is to run, and there is nothing to run it with.
    """
    wanted = [
        name
        for name, options in zip(("validate", "evaluate"), extra, strict=True)
        if name not in skipped and "--url" not in options
    ]
    if not wanted or "--container" in server:
        return
    from moepress.errors import ServingError
    from moepress.serving.sglang import find_environment

    python = server[server.index("--sglang-python") + 1] if "--sglang-python" in server else None
    try:
        find_environment(python)
    except ServingError as error:
        raise PlanRefused(
            f"{' and '.join(wanted)} need a server, and there is none: {error.what}",
            where="--sglang-python",
            hint="; or ".join(f"--skip {name}" for name in wanted) + ", and the card will say that it was not run",
        ) from error


def _check_token(to: str) -> None:
    from huggingface_hub import get_token

    if get_token() is None:
        raise MoepressError(
            "you are not logged in to the Hub: publishing would be refused after all the work",
            where=f"--to {to}",
            hint="hf auth login, or --to a folder",
        )
