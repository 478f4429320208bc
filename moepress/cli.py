"""The command line: parse, call, print. Nothing heavy is imported before a command needs it.

Every command takes ``--json`` (data on stdout, talk on stderr) and ends with what to run next. Exit codes: 0 done and
good, 1 checked and found wanting, 2 could not be done.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Annotated, NoReturn

import typer

from moepress.commands import (
    card,
    cluster,
    convert,
    doctor,
    evaluate,
    fidelity,
    inspect,
    plan,
    publish,
    pull,
    recipes,
    report,
    run,
    serve,
    validate,
    verify,
)
from moepress.commands.options import print_json
from moepress.errors import MoepressError

app = typer.Typer(
    name="moepress",
    help="Press FP8 mixture-of-experts checkpoints into INT4 experts on one machine, and prove that the result serves.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (
    doctor.doctor,
    inspect.inspect,
    plan.plan,
    pull.pull,
    convert.convert,
    verify.verify,
    fidelity.fidelity,
    validate.validate,
    evaluate.evaluate,
    serve.serve,
    report.report,
    card.card,
    publish.publish,
    run.run,
):
    app.command()(command)
app.add_typer(recipes.app, name="recipes")
app.add_typer(cluster.app, name="cluster")


@app.callback(invoke_without_command=True)
def _root(
    version: Annotated[bool, typer.Option("--version", help="Show the version and exit.", is_eager=True)] = False,
) -> None:
    if version:
        from moepress.doctor import environment_line

        typer.echo(environment_line())
        raise typer.Exit


def _terminate(*_: object) -> NoReturn:
    """SIGTERM ends a run as Ctrl-C does: temporary files removed, lock released."""
    raise KeyboardInterrupt


def main() -> None:
    """Entry point: errors of ours become one clear message and their exit code; never a traceback."""
    signal.signal(signal.SIGTERM, _terminate)
    # Before torch loads MKL: matrix products give the same bits with any number of threads, so a calibrated conversion does too.
    os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")
    # Threads that wait for others sleep: spinning made a busy machine eight times slower, and an idle one no faster.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    try:
        app(standalone_mode=True)
    except MoepressError as error:
        if "--json" in sys.argv:
            print_json(error.as_json())
        typer.secho(f"error: {error}", fg=typer.colors.RED, err=True)
        raise SystemExit(error.exit_code) from None
    except BrokenPipeError:
        raise SystemExit(141) from None


if __name__ == "__main__":
    main()
