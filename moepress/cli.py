"""The command line: parse, call, print. Nothing heavy is imported before a command needs it.

Every command takes ``--json`` (data on stdout, talk on stderr) and ends with what to run next. Exit codes: 0 done and
good, 1 checked and found wanting, 2 could not be done.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Annotated

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
    sign,
    stopping,
    validate,
    verify,
)
from moepress.commands.examples import epilog, exit_codes
from moepress.commands.options import print_json
from moepress.errors import MoepressError

app = typer.Typer(
    name="moepress",
    help="Press FP8 mixture-of-experts checkpoints into INT4 experts on one machine, and prove that the result serves.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=exit_codes(),
)
COMMANDS: dict[str, tuple[Callable[..., None], ...]] = {
    "Look": (doctor.doctor, inspect.inspect, plan.plan),
    "Press": (pull.pull, convert.convert, run.run),
    "Prove": (verify.verify, fidelity.fidelity, validate.validate, evaluate.evaluate),
    "Ship": (serve.serve, report.report, card.card, sign.sign, publish.publish),
}
for panel, commands in COMMANDS.items():
    for command in commands:
        app.command(epilog=epilog(command.__name__), rich_help_panel=panel)(command)
app.add_typer(recipes.app, name="recipes", epilog=epilog("recipes"), rich_help_panel="Set up")
app.add_typer(cluster.app, name="cluster", epilog=epilog("cluster"), rich_help_panel="Set up")


@app.callback(invoke_without_command=True)
def _root(
    version: Annotated[
        bool,
        typer.Option("--version", metavar="", help="Show the version and the environment, and exit.", is_eager=True),
    ] = False,
) -> None:
    if version:
        from moepress.doctor import environment_line, package_versions

        typer.echo(environment_line())
        typer.echo(", ".join(f"{name} {found or 'missing'}" for name, found in package_versions().items()))
        raise typer.Exit


def main() -> None:
    """Entry point: errors of ours become one clear message and their exit code; never a traceback."""
    stopping.listen()
    # Before torch loads MKL: matrix products give the same bits wherever their factors lie in memory.
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
    except SystemExit as ended:
        if stopping.asked() and ended.code == 1:  # Typer's own code for it, which here means "found wanting"
            raise SystemExit(130) from None
        raise


if __name__ == "__main__":
    main()
