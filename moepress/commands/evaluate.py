"""``moepress evaluate``: what pressing cost in answers, source and pressed model asked alike."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from moepress.commands.console import next_step, note, stdout, table
from moepress.commands.contestants import Model, Serving, contestants
from moepress.commands.kept import keep
from moepress.commands.options import AsJson, Overrides, TrustRemoteCode, print_json
from moepress.commands.progress import Bar
from moepress.errors import MoepressError, PlanRefused
from moepress.results import REPORT_NAME

if TYPE_CHECKING:
    from moepress.evaluate.choose import Settings
    from moepress.evaluate.rows import Row
    from moepress.evaluate.run import Evaluated
    from moepress.recipe import Recipe

_MARKS = {"ACCEPT": "[green]✓[/green]", "REGRESSION": "[red]✗[/red]", "NOT ENOUGH DATA": "[yellow]?[/yellow]"}
_WORDS = {
    "ACCEPT": "[green]ACCEPT[/green]",
    "REGRESSION": "[red]REGRESSION[/red]",
    "NOT ENOUGH DATA": "[yellow]NOT ENOUGH DATA[/yellow]",
}
_SIDES = {"source": "source", "candidate": "pressed"}
_RESULT = {"ACCEPT": "pass", "REGRESSION": "fail", "NOT ENOUGH DATA": "not judged"}


def evaluate(
    out: Annotated[Path, typer.Argument(metavar="OUT", help="A converted checkpoint.")],
    baseline: Annotated[
        str, typer.Option("--baseline", metavar="SRC", help="The checkpoint it was made from; with a URL, any name.")
    ],
    tasks: Annotated[
        str | None,
        typer.Option(
            metavar="WHAT,…",
            help="Of fidelity, drift, tool-calls, humaneval, mbpp, gsm8k-100, gsm8k, mmlu, arc_challenge, wikitext, lm:NAME "
            "(default: the first three).",
        ),
    ] = None,
    url: Annotated[str | None, typer.Option(metavar="URL", help="An OpenAI-compatible server that serves OUT.")] = None,
    baseline_url: Annotated[str | None, typer.Option(metavar="URL", help="One that serves SRC.")] = None,
    model: Annotated[str | None, typer.Option(metavar="NAME", help="Name that --url serves it under.")] = None,
    baseline_model: Annotated[str | None, typer.Option(metavar="NAME", help="The same for --baseline-url.")] = None,
    api_key_env: Annotated[
        str | None, typer.Option(metavar="NAME", help="Environment variable with the servers' key.")
    ] = None,
    sglang_python: Annotated[
        str | None,
        typer.Option(
            metavar="PATH", help="Python with SGLang (default: $MOEPRESS_SGLANG_PYTHON, else .venv-sglang/bin/python)."
        ),
    ] = None,
    container: Annotated[
        str | None, typer.Option(metavar="CMD", help="Words that start a container with SGLang; see validate.")
    ] = None,
    cpu_lab: Annotated[
        bool, typer.Option("--cpu-lab", help="No GPU: kernels in plain torch, for small models.")
    ] = False,
    tp: Annotated[int | None, typer.Option(min=1, help="GPUs that share the model (default: the recipe's).")] = None,
    kv_dtype: Annotated[str, typer.Option(metavar="auto|bf16|fp8", help="KV cache type of booted servers.")] = "auto",
    flags: Annotated[str, typer.Option(metavar="'--FLAG …'", help="More flags for booted servers.")] = "",
    boot_timeout: Annotated[float, typer.Option(min=10, metavar="SECONDS", help="For one boot.")] = 3600,
    concurrency: Annotated[int, typer.Option(min=1, help="Questions at once.")] = 8,
    request_timeout: Annotated[float, typer.Option(min=1, metavar="SECONDS", help="For one answer.")] = 900,
    windows: Annotated[int, typer.Option(min=2, help="Windows of text per domain.")] = 24,
    length: Annotated[int, typer.Option(min=16, help="Tokens of a window.")] = 256,
    top_k: Annotated[int, typer.Option(min=1, help="Tokens named at each position; OpenAI's API allows 5 to 20.")] = 64,
    text: Annotated[
        list[str] | None, typer.Option(metavar="NAME=FILE", help="A domain of your own; may be repeated.")
    ] = None,
    drift_prompts: Annotated[int, typer.Option(min=2, help="Prompts that are continued.")] = 32,
    drift_tokens: Annotated[int, typer.Option(min=2, help="Tokens of a continuation.")] = 256,
    tool_cases: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, metavar="FILE.jsonl", help="Tool-call cases of your own."),
    ] = None,
    bfcl: Annotated[
        Path | None,
        typer.Option(
            exists=True, file_okay=False, metavar="DIR", help="bfcl_eval/data: its cases too, multi-turn ones included."
        ),
    ] = None,
    data: Annotated[
        list[str] | None, typer.Option(metavar="TASK=FILE", help="Problems of humaneval, mbpp or gsm8k-100.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="First prompts of each task only.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Of an answer to a task.")] = 1024,
    base_model: Annotated[bool, typer.Option("--base-model", help="Prompts are completed, not chatted with.")] = False,
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
        str | None, typer.Option("--recipe", "-r", metavar="NAME|FILE", help="Whose bounds (default: OUT's own).")
    ] = None,
    overrides: Overrides = None,
    answers: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Keeps answers and logs (default: OUT/.moepress/evaluate).")
    ] = None,
    trust_remote_code: TrustRemoteCode = False,
    as_json: AsJson = False,
) -> None:
    """Ask OUT and SRC the same: KL, drift, tool calls, tasks; ACCEPT, REGRESSION or NOT ENOUGH DATA. Exit 0: all accepted."""
    from moepress.evaluate.answers import Answers
    from moepress.evaluate.choose import DEFAULT_TASKS, Settings, choose
    from moepress.evaluate.run import evaluate as run_evaluation

    if kv_dtype not in ("auto", "bf16", "fp8"):
        raise PlanRefused(f"{kv_dtype!r} is none of auto, bf16, fp8", where="--kv-dtype")
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
            note(f"stopped; the answers so far are kept in {folder}: the same command goes on from there")
            raise typer.Exit(130) from None
    after = _next(result, out, baseline)
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
    from moepress.recipe import check_recipe, load_recipe

    if recipe is not None:
        return load_recipe(recipe, overrides or ())
    path = out / REPORT_NAME
    if not path.is_file():
        if overrides:
            raise PlanRefused(
                f"there is no {REPORT_NAME} that names a recipe to change",
                where=str(out),
                hint="name one whose bounds count: --recipe NAME",
            )
        return None
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
        data: dict[str, Any] = {**report["recipe"], "evaluation": report.get("evaluation", {})}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise MoepressError(f"not a report of moepress convert: {error!r}", where=str(path)) from error
    return check_recipe(data, where=str(path), overrides=overrides or ())


def show(result: Evaluated, settings: Settings) -> None:
    """What a person reads: figures by kind, then the verdict and its reasons."""
    if result.sections.get("fidelity"):
        _show_fidelity(result)
    if result.sections.get("drift"):
        _show_drift(result, settings)
    if result.sections.get("tool_calls"):
        _show_tool_calls(result.sections["tool_calls"])
    scores = [row for row in result.rows if row.domain is None and row.task != "drift"]
    if scores:
        _show_scores(scores)
    stdout.print()
    for task, why in result.skipped.items():
        stdout.print(f"[yellow]skipped[/yellow] [bold]{task}[/bold]: {why}", soft_wrap=True)
    reasons: dict[tuple[str, str, str], list[str]] = {}
    for row in result.rows:
        if row.verdict != "ACCEPT":
            reasons.setdefault((row.verdict, row.task, row.why), []).append(row.metric)
    for (verdict, task, why), metrics in reasons.items():
        about = f" ({'; '.join(metrics[:3])}{f'; {len(metrics) - 3} more' if len(metrics) > 3 else ''})"
        stdout.print(f"{_WORDS[verdict]} [bold]{task}[/bold]{about}: {why}", soft_wrap=True)
    counts = ", ".join(f"{count} {verdict}" for verdict, count in result.counts.items()) or "nothing was judged"
    asked, kept = result.requests["asked"], result.requests["from_cache"]
    stdout.print(
        f"[bold]{_WORDS[result.verdict]}[/bold]: {counts}, at {result.bounds.confidence:.0%} confidence; "
        f"{asked:,} questions asked, {kept:,} answers kept from before",
        soft_wrap=True,
    )


def _show_fidelity(result: Evaluated) -> None:
    domains = result.sections["fidelity"]
    exact = all(domain["kl_is"] == "exact" for domain in domains.values())
    right = (
        "tokens",
        "KL" if exact else "KL ≥",
        *(() if exact else ("unseen",)),
        "same top token",
        "perplexity",
        "pressed",
    )
    rows = table("text", right=right)
    rows.add_column("")
    for name, domain in domains.items():
        worst = _worst([row.verdict for row in result.rows if row.domain == name])
        rows.add_row(
            name,
            f"{domain['tokens']:,}",
            f"{domain['kl']:.4f} ±{_half(domain['kl_interval']):.4f}",
            *(() if exact else (f"{domain['unseen_mass']:.1%}",)),
            f"{domain['top1_agreement']:.1%} ±{_half(domain['top1_interval']):.1%}",
            f"{domain['source_perplexity']:.2f}",
            f"{domain['candidate_perplexity']:.2f}",
            _MARKS[worst],
        )
    stdout.print(rows)
    stdout.print("KL in nats a token, ± half an interval", highlight=False)
    if not exact:
        stdout.print(
            "KL ≥: a lower bound. unseen: the source's probability on tokens that not both servers named",
            soft_wrap=True,
        )


def _half(interval: list[float]) -> float:
    return (interval[1] - interval[0]) / 2


def _worst(verdicts: list[Any]) -> str:
    from moepress.evaluate.significance import worst

    return worst(verdicts)


def _show_drift(result: Evaluated, settings: Settings) -> None:
    drift = result.sections["drift"]
    stdout.print(f"\n[bold]drift[/bold]: {drift['prompts']} greedy texts of up to {drift['tokens']} tokens")
    steps = [step for step in (16, 64, 256, 1024) if step <= settings.drift_tokens]
    rows = table("source against", right=("parted", "half by", "same tokens", *(f"whole at {step}" for step in steps)))
    for name, curve in (("itself, again", drift["noise"]), ("pressed", drift["candidate"])):
        if curve is not None:
            rows.add_row(
                name,
                f"{curve['diverged']} of {curve['pairs']}",
                "–" if curve["median"] is None else f"token {curve['median']}",
                f"{curve['token_agreement']:.1%}",
                *(f"{_at(curve, step):.0%}" for step in steps),
            )
    stdout.print(rows)
    for row in result.rows:
        if row.task == "drift":
            span = escape(f"[{row.interval.low:.4f}, {row.interval.high:.4f}]")
            stdout.print(
                f"divergence rate {row.candidate:.4f} a token, {row.interval.value:+.4f} {span} against its own, "
                f"{row.bound:g} allowed {_MARKS[row.verdict]}",
                highlight=False,
                soft_wrap=True,
            )


def _at(curve: dict[str, Any], position: int) -> float:
    share = 1.0
    for step, value in zip(curve["positions"], curve["surviving"], strict=True):
        share = value if step <= position else share
    return float(share)


def _show_tool_calls(found: dict[str, Any]) -> None:
    stdout.print()
    steps = ("called", "json", "schema", "names", "correct")
    rows = table("tool calls", "", right=("cases", *steps))
    for kind, calls in found.items():
        for side in ("source", "candidate"):
            shares = [f"{calls[side][step]:.1%}" for step in steps]
            rows.add_row(kind if side == "source" else "", _SIDES[side], str(calls["cases"]), *shares)
    stdout.print(rows)
    for kind, title in (("multi-turn", "turn"), ("stateful", "turn, tools that run")):
        if kind not in found:
            continue
        turns = found[kind]
        rows = table(title, right=tuple(str(entry["turn"]) for entry in turns["by_turn"]))
        for side in ("source", "candidate"):
            rows.add_row(f"right, {_SIDES[side]}", *(f"{entry[side]:.0%}" for entry in turns["by_turn"]))
        for side in ("source", "candidate"):
            curve = turns["survival"][side]
            shares = [f"{_at(curve, entry['turn']):.0%}" for entry in turns["by_turn"]]
            rows.add_row(f"no error so far, {_SIDES[side]}", *shares)
        stdout.print(rows)


def _show_scores(scores: list[Row]) -> None:
    stdout.print()
    cut = any(any(row.truncated) for row in scores)
    rows = table("task", right=("n", "source", "pressed", "difference", "p", *(("cut off",) if cut else ())))
    rows.add_column("")
    for row in scores:
        percent = row.better == "higher"
        span = f"[{100 * row.interval.low:+.1f}, {100 * row.interval.high:+.1f}]"
        rows.add_row(
            row.task,
            f"{row.samples:,}",
            _figure(row.source, percent),
            _figure(row.candidate, percent),
            f"{row.interval.value:+.1%} {escape(span)}",
            "" if row.test is None else f"{row.test.p:.3f}",
            *((f"{row.truncated[0]}, {row.truncated[1]}",) if cut else ()),
            _MARKS[row.verdict],
        )
    stdout.print(rows)
    if any(row.test is not None for row in scores):
        stdout.print("p: McNemar's exact test on the same prompts", highlight=False)


def _figure(value: float | None, percent: bool) -> str:
    if value is None:
        return ""
    return f"{value:.1%}" if percent else f"{value:.3f}"


def _next(result: Evaluated, out: Path, baseline: str) -> str:
    """What to do with the verdict."""
    if result.verdict == "ACCEPT":
        return f"moepress report {out}"
    if result.verdict == "REGRESSION":
        return f"moepress fidelity {out} --source {baseline}"
    short = {row.task for row in result.rows if row.verdict == "NOT ENOUGH DATA"}
    again = f"moepress evaluate {out} --baseline {baseline}"
    if "fidelity" in short:
        return f"{again} --text prose=FILE --windows 64"
    if "drift" in short:
        return f"{again} --drift-prompts 128"
    return f"{again} --bfcl bfcl_eval/data" if "tool calls" in short else f"{again} --tasks {','.join(sorted(short))}"


def _named_files(words: list[str] | None, option: str) -> dict[str, Path]:
    found = {}
    for word in words or ():
        name, separator, path = word.partition("=")
        if not separator or not name or not Path(path).is_file():
            raise MoepressError(f"{word!r} is not NAME=FILE with a file that is there", where=option)
        found[name] = Path(path)
    return found


def _evaluation(recipe: Recipe | None) -> Any:
    from moepress.recipe import Evaluation

    return recipe.evaluation if recipe is not None else Evaluation()  # type: ignore[call-arg]
