"""The command line: parse, call, print. Nothing heavy is imported before a command needs it.

Every command takes ``--json`` (data on stdout, talk on stderr) and ends with what to run next. Exit codes: 0 done and
good, 1 checked and found wanting, 2 could not be done.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from moepress import __version__
from moepress.errors import MoepressError

if TYPE_CHECKING:
    from moepress.recipe import Recipe

app = typer.Typer(
    name="moepress",
    help="Press FP8 mixture-of-experts checkpoints into INT4 experts on one machine, and prove that the result serves.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
recipes_app = typer.Typer(no_args_is_help=True, help="List, show and check recipes.")
app.add_typer(recipes_app, name="recipes")

Source = Annotated[str, typer.Argument(metavar="SRC", help="Checkpoint folder.")]
RecipeName = Annotated[str, typer.Option("--recipe", "-r", metavar="NAME|FILE", help="Shipped recipe or YAML file.")]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="FIELD=VALUE", help="Change a field of the recipe; may be repeated."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Data on stdout as JSON, talk on stderr.")]
Threads = Annotated[
    int | None, typer.Option("--threads", min=1, help="Pressing threads [default: all processors]. Changes no byte.")
]

TrustRemoteCode = Annotated[
    bool,
    typer.Option(
        "--trust-remote-code", help="Run the checkpoint's own Python code for its tokenizer (calibration only)."
    ),
]


@app.callback(invoke_without_command=True)
def _root(
    version: Annotated[bool, typer.Option("--version", help="Show the version and exit.", is_eager=True)] = False,
) -> None:
    if version:
        typer.echo(f"moepress {__version__}")
        raise typer.Exit


@app.command()
def inspect(source: Source, as_json: AsJson = False) -> None:
    """Show what a checkpoint holds: components, formats, parameters, bytes. Reads headers only."""
    from moepress import present
    from moepress.formats.checkpoint import open_checkpoint
    from moepress.formats.inspection import inspect_checkpoint

    inspection = inspect_checkpoint(open_checkpoint(source))
    if as_json:
        _print_json(inspection.as_json())
        return
    present.inspection(inspection)
    present.next_step(
        f"moepress plan {source} --recipe {present.suggest_recipe(inspection.family.key, inspection.model_type)}"
    )


@app.command()
def plan(
    source: Annotated[str, typer.Argument(metavar="SRC", help="Checkpoint folder, or a config.json alone.")],
    recipe: RecipeName,
    out: Annotated[
        Path | None, typer.Argument(metavar="[OUT]", help="Output folder to check; nothing is created.")
    ] = None,
    overrides: Overrides = None,
    gpu_memory: Annotated[str, typer.Option(metavar="SIZE", help="Memory of one GPU.")] = "141GB",
    memory_fraction: Annotated[
        float, typer.Option(min=0.05, max=1, help="Share of it the server may use (SGLang: --mem-fraction-static).")
    ] = 0.88,
    kv_dtype: Annotated[str, typer.Option(metavar="bf16|fp8", help="KV cache type.")] = "fp8",
    threads: Threads = None,
    trust_remote_code: TrustRemoteCode = False,
    as_json: AsJson = False,
) -> None:
    """Say what a conversion would need and give, and refuse what cannot work, before any work."""
    from moepress import present
    from moepress.convert.outlook import outlook
    from moepress.recipe import load_recipe, parse_size

    loaded = load_recipe(recipe, overrides or ())
    result = outlook(
        source,
        loaded,
        out,
        gpu_bytes=_size(gpu_memory, "--gpu-memory", parse_size),
        memory_fraction=memory_fraction,
        kv_dtype=kv_dtype,
        threads=threads,
        trust_remote_code=trust_remote_code,
    )
    if as_json:
        _print_json(result.as_json())
        return
    present.outlook(result)
    if result.plan is not None:
        present.next_step(f"moepress convert {source} {out or 'OUT'} --recipe {_recipe_words(recipe, overrides)}")


@app.command()
def convert(
    source: Source,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="New or empty folder, or one to resume.")],
    recipe: RecipeName,
    overrides: Overrides = None,
    threads: Threads = None,
    trust_remote_code: TrustRemoteCode = False,
    as_json: AsJson = False,
) -> None:
    """Press SRC into OUT. Stopped at any moment, the same command resumes."""
    from moepress import present
    from moepress.convert.finish import broken_limits
    from moepress.convert.run import convert as run_convert
    from moepress.recipe import load_recipe

    loaded: Recipe = load_recipe(recipe, overrides or ())
    command = f"moepress convert {source} {out} --recipe {_recipe_words(recipe, overrides)}"
    try:
        with present.ConvertProgress(quiet=as_json) as progress:
            result = run_convert(
                source, out, loaded, threads=threads, trust_remote_code=trust_remote_code, watcher=progress
            )
    except KeyboardInterrupt:
        present.note(f"stopped; finished shards are kept. To resume:\n  {command}")
        raise typer.Exit(130) from None
    broken = broken_limits(result.plan, result.report)
    if as_json:
        _print_json(
            {
                **result.report,
                "seconds": round(result.seconds, 3),
                "resumed_shards": result.resumed,
                "broken_limits": broken,
            }
        )
    else:
        present.conversion(result, broken)
        present.next_step(f"moepress verify {out} --source {source}")
    if broken:
        raise typer.Exit(1)


@app.command()
def verify(
    out: Annotated[Path, typer.Argument(metavar="OUT", help="A converted checkpoint.")],
    source: Annotated[
        str | None, typer.Option("--source", metavar="SRC", help="The checkpoint it was made from.")
    ] = None,
    threads: Threads = None,
    as_json: AsJson = False,
) -> None:
    """Re-read OUT with safetensors and compressed-tensors, compare every tensor with SRC; exit 1 if anything is off."""
    from moepress import present
    from moepress.verify.run import verify as run_verify

    with present.VerifyProgress(quiet=as_json) as progress:
        result = run_verify(out, source, threads=threads, watcher=progress)
    if as_json:
        _print_json(result.as_json())
    else:
        present.verification(result)
    if result.problems:
        raise typer.Exit(1)


@app.command()
def fidelity(
    out: Annotated[Path, typer.Argument(metavar="OUT", help="A converted checkpoint.")],
    source: Annotated[Path, typer.Option("--source", metavar="SRC", help="The checkpoint it was made from.")],
    text: Annotated[
        list[Path] | None,
        typer.Option(
            "--text", metavar="FILE", help="Held-out .txt or .jsonl; may be repeated [default: the shipped text]."
        ),
    ] = None,
    samples: Annotated[int, typer.Option(min=1, help="Samples of each text.")] = 32,
    length: Annotated[int, typer.Option(min=16, help="Tokens a sample.")] = 512,
    memory: Annotated[
        str, typer.Option(metavar="SIZE", help="For activations, and again for experts in work.")
    ] = "4GiB",
    picture: Annotated[Path | None, typer.Option(metavar="FILE.svg", help="Draw the map of errors.")] = None,
    trust_remote_code: TrustRemoteCode = False,
    as_json: AsJson = False,
) -> None:
    """Compare OUT with SRC on held-out text, layer by layer: KL, agreement, perplexity, and where the error enters."""
    from moepress import present
    from moepress.evaluate.fidelity import draw, measure_fidelity
    from moepress.recipe import parse_size

    texts: dict[str, Path | None] = {path.stem: path for path in text or ()} or {"shipped text": None}
    with present.Bar(quiet=as_json, in_bytes=False) as bar:
        result = measure_fidelity(
            out,
            source,
            texts,
            samples=samples,
            length=length,
            memory=_size(memory, "--memory", parse_size),
            trust_remote_code=trust_remote_code,
            watcher=bar,
        )
    if picture is not None:
        draw(result, picture)
    if as_json:
        _print_json(result.as_json())
    else:
        present.fidelity(result, picture)


@recipes_app.command("list")
def recipes_list(as_json: AsJson = False) -> None:
    """The recipes that ship with moepress."""
    from moepress import present
    from moepress.recipe import load_recipe, shipped_recipes

    recipes = [load_recipe(name) for name in shipped_recipes()]
    if as_json:
        _print_json([recipe.model_dump(mode="json") for recipe in recipes])
        return
    present.recipes(recipes)


@recipes_app.command("show")
def recipes_show(
    recipe: Annotated[str, typer.Argument(metavar="NAME|FILE")], overrides: Overrides = None, as_json: AsJson = False
) -> None:
    """A recipe with every default written out."""
    import yaml

    from moepress.recipe import load_recipe

    data = load_recipe(recipe, overrides or ()).model_dump(mode="json")
    if as_json:
        _print_json(data)
    else:
        typer.echo(yaml.safe_dump(data, sort_keys=False, allow_unicode=True, width=110), nl=False)


@recipes_app.command("check")
def recipes_check(recipe: Annotated[str, typer.Argument(metavar="NAME|FILE")], overrides: Overrides = None) -> None:
    """Check a recipe; every problem is listed with its field."""
    from moepress.recipe import load_recipe

    loaded = load_recipe(recipe, overrides or ())
    typer.echo(f"{loaded.name}: good")


@recipes_app.command("schema")
def recipes_schema() -> None:
    """The JSON schema of recipes."""
    from moepress.recipe import recipe_schema

    _print_json(recipe_schema())


@recipes_app.command("families")
def recipes_families(as_json: AsJson = False) -> None:
    """The model families that moepress knows."""
    from moepress import present
    from moepress.formats.families import FAMILIES

    if as_json:
        _print_json({f.key: {"title": f.title, "model_types": list(f.model_types)} for f in _families(FAMILIES)})
        return
    present.families(_families(FAMILIES))


def _families(families: Any) -> list[Any]:
    return list(families.values()) if hasattr(families, "values") else list(families)


def _recipe_words(recipe: str, overrides: list[str] | None) -> str:
    return " ".join([recipe, *(f"--set {override}" for override in overrides or ())])


def _size(text: str, option: str, parse: Any) -> int:
    try:
        return int(parse(text))
    except ValueError as error:
        raise MoepressError(str(error), where=option) from error


def _print_json(data: Any) -> None:
    typer.echo(json.dumps(data, indent=2, ensure_ascii=False))


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
            _print_json(error.as_json())
        typer.secho(f"error: {error}", fg=typer.colors.RED, err=True)
        raise SystemExit(error.exit_code) from None
    except BrokenPipeError:
        raise SystemExit(141) from None


if __name__ == "__main__":
    main()
