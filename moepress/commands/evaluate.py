"""``moepress evaluate``: what pressing cost in answers, source and pressed model asked alike."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moepress.commands.console import next_step, note, quoted
from moepress.commands.contestants import Model, Serving, contestants
from moepress.commands.kept import keep, kept_recipe
from moepress.commands.numbers import number, whole
from moepress.commands.options import AsJson, Overrides, SglangPython, TrustRemoteCode, add_named_file, print_json
from moepress.commands.progress import Bar
from moepress.commands.verdicts import show
from moepress.errors import MoepressError, PlanRefused
from moepress.results import REPORT_NAME

if TYPE_CHECKING:
    from moepress.evaluate.run import Evaluated
    from moepress.recipe import Recipe

_RESULT = {"ACCEPT": "pass", "REGRESSION": "fail", "NOT ENOUGH DATA": "not judged"}


def evaluate(
    out: Annotated[Path, typer.Argument(metavar="OUT", help="A converted checkpoint.")],
    baseline: Annotated[
        str,
        typer.Option(
            "--baseline", metavar="SRC", help="The checkpoint it was made from (with --baseline-url, any name)."
        ),
    ],
    tasks: Annotated[
        str | None,
        typer.Option(
            metavar="WHAT,…",
            help="Which of fidelity, drift, tool-calls, humaneval, mbpp, gsm8k-100, gsm8k, mmlu, arc_challenge, wikitext, lm:NAME "
            "(default: the first three).",
        ),
    ] = None,
    url: Annotated[str | None, typer.Option(metavar="URL", help="An OpenAI-compatible server that serves OUT.")] = None,
    baseline_url: Annotated[
        str | None, typer.Option(metavar="URL", help="An OpenAI-compatible server that serves SRC.")
    ] = None,
    model: Annotated[str | None, typer.Option(metavar="NAME", help="The model's name on --url.")] = None,
    baseline_model: Annotated[
        str | None, typer.Option(metavar="NAME", help="The model's name on --baseline-url.")
    ] = None,
    api_key_env: Annotated[
        str | None, typer.Option(metavar="NAME", help="Environment variable that holds the servers' API key.")
    ] = None,
    sglang_python: SglangPython = None,
    container: Annotated[
        str | None, typer.Option(metavar="CMD", help="Command that starts a container with SGLang; see validate.")
    ] = None,
    cpu_lab: Annotated[
        bool, typer.Option("--cpu-lab", metavar="", help="Without a GPU: kernels in plain torch, for small models.")
    ] = False,
    tp: Annotated[
        int | None, typer.Option(metavar="N", parser=whole(), help="GPUs that share the model (default: the recipe's).")
    ] = None,
    kv_dtype: Annotated[str, typer.Option(metavar="auto|bf16|fp8", help="KV cache type of booted servers.")] = "auto",
    flags: Annotated[str, typer.Option(metavar="'--FLAG …'", help="More flags for booted servers.")] = "",
    boot_timeout: Annotated[
        float, typer.Option(parser=number(10), metavar="SECONDS", help="Limit for booting one server.")
    ] = 3600,
    concurrency: Annotated[int, typer.Option(metavar="N", parser=whole(), help="Concurrent requests.")] = 8,
    request_timeout: Annotated[
        float, typer.Option(parser=number(1), metavar="SECONDS", help="Limit for one answer.")
    ] = 900,
    windows: Annotated[int, typer.Option(metavar="N", parser=whole(2), help="Windows of text per domain.")] = 24,
    length: Annotated[int, typer.Option(metavar="N", parser=whole(16), help="Tokens per window.")] = 256,
    top_k: Annotated[
        int,
        typer.Option(
            metavar="N",
            parser=whole(),
            help="Log-probabilities asked for at each position; OpenAI's API allows 5 to 20.",
        ),
    ] = 64,
    text: Annotated[
        list[str] | None, typer.Option(metavar="NAME=FILE", help="A domain of your own; may be repeated.")
    ] = None,
    drift_prompts: Annotated[int, typer.Option(metavar="N", parser=whole(2), help="Prompts to continue.")] = 32,
    drift_tokens: Annotated[int, typer.Option(metavar="N", parser=whole(2), help="Tokens per continuation.")] = 256,
    tool_cases: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, metavar="FILE.jsonl", help="Tool-call cases of your own."),
    ] = None,
    bfcl: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            file_okay=False,
            metavar="DIR",
            help="Also the cases in bfcl_eval/data, multi-turn ones included.",
        ),
    ] = None,
    data: Annotated[
        list[str] | None,
        typer.Option(metavar="TASK=FILE", help="File with the problems of humaneval, mbpp or gsm8k-100."),
    ] = None,
    limit: Annotated[
        int | None, typer.Option(metavar="N", parser=whole(), help="Only the first so many prompts of each task.")
    ] = None,
    max_tokens: Annotated[
        int, typer.Option(metavar="N", parser=whole(), help="Longest answer to a task, in tokens.")
    ] = 1024,
    base_model: Annotated[
        bool, typer.Option("--base-model", metavar="", help="Complete prompts instead of chatting.")
    ] = False,
    lm_eval_python: Annotated[
        str | None,
        typer.Option(
            metavar="PATH", help="Python with lm-eval (default: $MOEPRESS_LM_EVAL_PYTHON, .venv-lm-eval, or this one)."
        ),
    ] = None,
    lm_tasks: Annotated[
        Path | None,
        typer.Option(exists=True, file_okay=False, metavar="DIR", help="More task definitions for lm-eval."),
    ] = None,
    recipe: Annotated[
        str | None,
        typer.Option("--recipe", "-r", metavar="NAME|FILE", help="Recipe whose bounds apply (default: OUT's own)."),
    ] = None,
    overrides: Overrides = None,
    answers: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Folder for answers and logs (default: .moepress/evaluate in OUT)."),
    ] = None,
    trust_remote_code: TrustRemoteCode = False,
    as_json: AsJson = False,
) -> None:
    """Ask OUT and SRC the same: KL, drift, tool calls, tasks. ACCEPT, REGRESSION or NOT ENOUGH DATA; exit 0 if all accepted."""
    from moepress.evaluate.answers import Answers
    from moepress.evaluate.choose import DEFAULT_TASKS, Settings, choose
    from moepress.evaluate.run import evaluate as run_evaluation

    if kv_dtype not in ("auto", "bf16", "fp8"):
        raise PlanRefused(f"{kv_dtype!r} is not one of auto, bf16, fp8", where="--kv-dtype")
    bounds = recipe_of(out, recipe, overrides)
    folder = answers or out / ".moepress" / "evaluate"
    settings = Settings(
        tasks=tuple(word.strip() for word in tasks.split(",") if word.strip()) if tasks is not None else DEFAULT_TASKS,
        windows=windows,
        length=length,
        top_k=top_k,
        texts=_named_files(text, "--text"),
        drift_prompts=drift_prompts,
        drift_tokens=drift_tokens,
        tool_cases=tool_cases,
        bfcl=bfcl,
        data=_named_files(data, "--data"),
        chat=not base_model,
        max_tokens=max_tokens,
        limit=limit,
        lm_eval_python=lm_eval_python,
        lm_tasks=lm_tasks,
        trust_remote_code=trust_remote_code,
    )
    serving = Serving(
        sglang_python=sglang_python,
        container=container,
        cpu_lab=cpu_lab,
        tensor_parallel=tp or (bounds.serving.tensor_parallel if bounds else 1),
        kv_dtype=kv_dtype,
        flags=flags,
        boot_timeout=boot_timeout,
        api_key_variable=api_key_env,
        concurrency=concurrency,
        request_timeout=request_timeout,
        trust_remote_code=trust_remote_code,
    )
    _same_model(out, baseline)
    measurements = choose(out, settings, folder=folder / "lm-eval")
    source = Model("source", baseline, baseline_url, baseline_model)
    candidate = Model("candidate", str(out), url, model)
    with Answers(folder) as kept, _Progress(quiet=as_json, in_bytes=False) as progress:
        try:
            with contestants(source, candidate, serving, kept, work=folder / "servers", watcher=progress) as (
                a,
                b,
                stage,
            ):
                result = run_evaluation(
                    a,
                    b,
                    measurements,
                    _evaluation(bounds),
                    skip_refused=tasks is None,
                    finished=lambda _: stage.stop() if stage is not None else None,
                )
        except KeyboardInterrupt:
            note(f"stopped; the answers so far are kept in {folder}, and the same command resumes from there")
            raise typer.Exit(130) from None
    after = _next(result, out, baseline, _urls(url, baseline_url))
    found = {**result.as_json(), "next": after}
    keep(out, "evaluate", _RESULT[result.verdict], found)
    if as_json:
        print_json(found)
    else:
        show(result, settings)
        next_step(after)
    if result.verdict != "ACCEPT":
        raise typer.Exit(1)


class _Progress(Bar):
    """One bar after the other: a measurement of one model each."""

    def start(self, label: str, total: int, done: int = 0) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None
        super().start(label, total, done)


def recipe_of(out: Path, recipe: str | None, overrides: list[str] | None) -> Recipe | None:
    """The recipe whose bounds count: named, or the one OUT was made with; None: nobody says, the defaults count.

    Raises:
        MoepressError: a report that is none, a recipe with problems, or fields to change of no recipe.
    """
    from moepress.recipe import load_recipe

    if recipe is not None:
        return load_recipe(recipe, overrides or ())
    found = kept_recipe(out, "evaluation", overrides or ())
    if found is None and overrides:
        raise PlanRefused(
            f"there is no {REPORT_NAME} that names a recipe to change",
            where=str(out),
            hint="name one whose bounds count: --recipe NAME",
        )
    return found


def _same_model(out: Path, baseline: str) -> None:
    """Refuses another model's folder before a server is asked or booted; a name behind a URL cannot be looked into."""
    from moepress.convert.made_from import refuse_two_models
    from moepress.formats.checkpoint import open_checkpoint

    if all((folder / "config.json").is_file() for folder in (out, Path(baseline))):
        refuse_two_models(open_checkpoint(out), open_checkpoint(baseline), option="--baseline")


def _urls(url: str | None, baseline_url: str | None) -> list[str]:
    """The servers as they were named, for the next command."""
    named = (("--url", url), ("--baseline-url", baseline_url))
    return [word for option, value in named if value is not None for word in (option, value)]


def _next(result: Evaluated, out: Path, baseline: str, urls: list[str]) -> str:
    """What to do with the verdict."""
    if result.verdict == "ACCEPT":
        return f"moepress report {quoted(out)}"
    if result.verdict == "REGRESSION":
        return quoted("moepress", "fidelity", out, "--source", baseline)
    short = {row.task for row in result.rows if row.verdict == "NOT ENOUGH DATA"}
    again = quoted("moepress", "evaluate", out, "--baseline", baseline, *urls)
    if "fidelity" in short:
        return f"{again} --text prose=FILE --windows 64"
    if "drift" in short:
        return f"{again} --drift-prompts 128"
    return f"{again} --bfcl bfcl_eval/data" if "tool calls" in short else f"{again} --tasks {','.join(sorted(short))}"


def _named_files(words: list[str] | None, option: str) -> dict[str, Path]:
    found: dict[str, Path] = {}
    for word in words or ():
        name, separator, path = word.partition("=")
        if not separator or not name or not Path(path).is_file():
            raise MoepressError(f"{word!r} is not NAME=FILE with a file that is there", where=option)
        add_named_file(found, name, Path(path), option)
    return found


def _evaluation(recipe: Recipe | None) -> Any:
    from moepress.recipe import Evaluation

    return recipe.evaluation if recipe is not None else Evaluation()  # type: ignore[call-arg]
