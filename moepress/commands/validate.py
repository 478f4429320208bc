"""``moepress validate``: boot the server the checkpoint was made for, measure, and judge."""

from __future__ import annotations

import shlex
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moepress.commands.console import duration, marked, next_step, note, stdout, table
from moepress.commands.kept import keep, kept_recipe
from moepress.commands.numbers import number, whole
from moepress.commands.options import AsJson, Overrides, SglangPython, print_json
from moepress.commands.progress import Bar
from moepress.errors import PlanRefused
from moepress.results import REPORT_NAME

if TYPE_CHECKING:
    from moepress.recipe import Recipe
    from moepress.serving.validation.figures import Figure
    from moepress.serving.validation.result import Validation
    from moepress.serving.validation.sides import Host
    from moepress.serving.validation.speed import Rates

_MARKS = {"passed": "[green]✓[/green]", "failed": "[red]✗[/red]", "not judged": "[yellow]–[/yellow]"}


def validate(
    out: Annotated[Path, typer.Argument(metavar="OUT", help="A converted checkpoint.")],
    baseline: Annotated[
        Path | None, typer.Option("--baseline", metavar="SRC", help="The checkpoint it was made from, to compare with.")
    ] = None,
    sglang_python: SglangPython = None,
    container: Annotated[
        str | None,
        typer.Option(
            metavar="CMD", help="Command that starts a container with SGLang; {mounts} is replaced by -v options."
        ),
    ] = None,
    url: Annotated[str | None, typer.Option(metavar="URL", help="A running server that serves OUT.")] = None,
    baseline_url: Annotated[str | None, typer.Option(metavar="URL", help="A running server that serves SRC.")] = None,
    cpu_lab: Annotated[
        bool,
        typer.Option(
            "--cpu-lab",
            metavar="",
            help="Without a GPU: kernels in plain torch. Judges loading and answers, never speed.",
        ),
    ] = False,
    tp: Annotated[
        int | None, typer.Option(metavar="N", parser=whole(), help="GPUs that share the model (default: the recipe's).")
    ] = None,
    kv_dtype: Annotated[str, typer.Option(metavar="auto|bf16|fp8", help="KV cache type of both servers.")] = "auto",
    concurrency: Annotated[
        str, typer.Option(metavar="N,N,…", help="Numbers of concurrent requests to measure at.")
    ] = "1,8,32,64",
    rounds: Annotated[
        int, typer.Option(metavar="N", parser=whole(), help="How often speed is measured on each side.")
    ] = 2,
    prompts: Annotated[
        Path | None,
        typer.Option(
            exists=True, dir_okay=False, metavar="FILE", help="Prompts as .jsonl or text (default: 16 that ship)."
        ),
    ] = None,
    tokens: Annotated[
        int, typer.Option(metavar="N", parser=whole(), help="Greedy tokens per prompt to compare with the reference.")
    ] = 16,
    only: Annotated[
        str | None, typer.Option(metavar="WHAT,…", help="Which of loads, memory, speed, sanity (default: all).")
    ] = None,
    kv_integrity: Annotated[
        str | None,
        typer.Option(
            metavar="MODE",
            help="observe or enforce: also try the KV-page integrity plug-in: is it active, silent, and what does it cost?",
        ),
    ] = None,
    recipe: Annotated[
        str | None,
        typer.Option("--recipe", "-r", metavar="NAME|FILE", help="Recipe whose gates apply (default: OUT's own)."),
    ] = None,
    overrides: Overrides = None,
    together: Annotated[
        bool | None,
        typer.Option(
            "--together/--in-turn", metavar="", help="Run both servers at once (default: only with --cpu-lab)."
        ),
    ] = None,
    flags: Annotated[
        str, typer.Option(metavar="'--FLAG …'", help="More flags for both servers, passed on unchanged.")
    ] = "",
    work: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder for logs (default: .moepress/validate in OUT).")
    ] = None,
    boot_timeout: Annotated[
        float, typer.Option(parser=number(10), metavar="SECONDS", help="Limit for booting one server.")
    ] = 3600,
    strict: Annotated[
        bool, typer.Option("--strict", metavar="", help="Count a gate that could not be judged as failed.")
    ] = False,
    trust_remote_code: Annotated[
        bool,
        typer.Option(
            "--trust-remote-code", metavar="", help="Let the checkpoint's own Python code run, here and in the servers."
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Boot SGLang on OUT: does it load completely, fit, answer as its weights say, and decode faster than SRC? Exit 1 if not."""
    from moepress.serving.launch import ServeOptions
    from moepress.serving.validation.request import QUESTIONS, Request
    from moepress.serving.validation.run import validate as run_validation

    if kv_dtype not in ("auto", "bf16", "fp8"):
        raise PlanRefused(f"{kv_dtype!r} is not one of auto, bf16, fp8", where="--kv-dtype")
    if kv_integrity not in (None, "observe", "enforce", "strict"):
        raise PlanRefused(f"{kv_integrity!r} is not one of observe, enforce, strict", where="--kv-integrity")
    bounds, name, ours = _bounds(out, recipe, overrides)
    host = _host(sglang_python, container, cpu_lab=cpu_lab, needed=url is None)
    ranks = 1 if cpu_lab else tp or bounds.serving.tensor_parallel
    asked = _words(only, QUESTIONS, "--only") if only else QUESTIONS
    request = Request(
        out=out,
        baseline=baseline,
        gates=bounds.gates,
        recipe=name,
        planned_parallel=bounds.serving.tensor_parallel,
        host=host,
        version=_version(host, bounds),
        work=_work(out, work, ours),
        options=ServeOptions(
            tensor_parallel=ranks,
            kv_cache_dtype={"auto": "auto", "bf16": "bfloat16", "fp8": "fp8_e4m3"}[kv_dtype],
            trust_remote_code=trust_remote_code,
            extra=tuple(shlex.split(flags)),
        ),
        fp8_kv=kv_dtype == "fp8",
        url=url,
        baseline_url=baseline_url,
        together=cpu_lab if together is None else together,
        asked=asked,
        concurrencies=_concurrencies(concurrency),
        rounds=rounds,
        tokens=tokens,
        prompts=prompts,
        timeout_s=boot_timeout,
        kv_integrity=kv_integrity,
    )
    try:
        with _Progress(quiet=as_json) as progress:
            result = run_validation(request, progress)
    except KeyboardInterrupt:
        note("stopped; no server is left running, and nothing was kept")
        raise typer.Exit(130) from None
    keep(out, "validate", result.verdict, result.as_json())
    if as_json:
        print_json(result.as_json())
    else:
        show(result)
        next_step(result.next)
    if result.verdict == "fail" or (strict and result.verdict != "pass"):
        raise typer.Exit(1)


class _Progress(Bar):
    """Watches a validation (`serving.validation.request.Watcher`)."""

    def __init__(self, *, quiet: bool) -> None:
        super().__init__(quiet=quiet, in_bytes=False)
        self._reference_done = 0

    def tell(self, line: str) -> None:
        note(line)

    def layer(self, done: int, total: int) -> None:
        if done == 1:
            self.start("reference, layer by layer", total)
        self.add(done - self._reference_done)
        self._reference_done = done


def show(result: Validation) -> None:
    """What a person reads: figures first, verdicts last."""
    if result.memory is not None:
        _show_memory(result)
    if result.speed is not None:
        _show_speed(result)
    if result.sanity is not None:
        _show_sanity(result)
    if result.kv_integrity is not None:
        _show_kv_integrity(result)
    for remark in result.remarks:
        stdout.print(marked("[yellow]note:[/yellow] {remark}", remark=remark), soft_wrap=True)
    stdout.print()
    for gate in result.gates:
        outcome = gate.outcome
        judged = "not judged: " if outcome.verdict == "not judged" else ""
        line = f"{_MARKS[outcome.verdict]} [bold]{{name}}[/bold]: {{found}}"
        stdout.print(marked(line, name=gate.name, found=f"{judged}{outcome.reason}"), soft_wrap=True)
    counts = [sum(gate.outcome.verdict == verdict for gate in result.gates) for verdict in _MARKS]
    colour = {"pass": "green", "fail": "red"}.get(result.verdict, "yellow")
    parts = [f"{count} {verdict}" for count, verdict in zip(counts, _MARKS, strict=True) if count]
    stdout.print(marked(f"[bold {colour}]{', '.join(parts)}[/bold {colour}] in {duration(result.seconds)}"))


def _show_memory(result: Validation) -> None:
    memory = result.memory
    if memory is None:
        return
    mine, theirs = memory.candidate, memory.baseline
    unit, scale = ("GiB", 2**30) if mine.predicted_weights >= 2**29 else ("MiB", 2**20)

    def shown(count: float | None) -> str:
        return "" if count is None else f"{count / scale:,.2f}"

    def figure(value: Figure | None) -> str:
        return shown(None if value is None else value.value * 2**30)

    rows = table(f"memory per GPU (TP{memory.tensor_parallel}), {unit}", right=("source", "pressed", "planned"))
    other = theirs.weights if theirs is not None else None
    counted = "weights" if result.smoke else "weights, as the server counts"
    rows.add_row(counted, figure(other), figure(mine.weights), shown(mine.predicted_weights))
    for component, held, their_bytes, planned in memory.rows():
        rows.add_row(f"  {component.replace('_', ' ')}", shown(their_bytes), shown(held), shown(planned))
    rows.add_row("KV pool", figure(theirs.kv_pool if theirs else None), figure(mine.kv_pool), "")
    tokens = [f"{side.kv_tokens.value:,.0f}" if side and side.kv_tokens else "" for side in (theirs, mine)]
    planned_tokens = "" if mine.predicted_tokens is None else f"{mine.predicted_tokens:,}"
    rows.add_row(f"tokens that fit ({mine.kv_dtype or 'KV type unknown'})", *tokens, planned_tokens)
    stdout.print(rows)
    for line in memory.explained():
        stdout.print(f"  {line}", soft_wrap=True)


def _show_speed(result: Validation) -> None:
    speed = result.speed
    if speed is None:
        return
    smoke = " — smoke only, says nothing about a GPU" if result.smoke else ""
    load = speed.workload
    asked = f"{load.prompt_tokens} tokens in, {load.output_tokens} out, median of {load.rounds} rounds{smoke}"
    stdout.print(marked("\n[bold]speed[/bold]: {asked}", asked=asked), soft_wrap=True)
    rows = table("at once", right=("source tok/s", "pressed tok/s", "ratio", "least–most", "", "TTFT p95", "next p95"))
    for row in speed.decode:
        data, mine = row.as_json(), row.candidate
        waits = (f"{mine.ttft_p95.value:,.0f} ms", f"{mine.inter_token_p95.value:,.1f} ms")
        verdict = "" if result.smoke else data["verdict"] or ""
        rows.add_row(str(row.concurrency), *_rates(row.baseline, mine, row.ratio), verdict, *waits)
    prefill = speed.prefill
    rows.add_row("prefill", *_three(prefill.get("baseline"), prefill["candidate"], speed.prefill_ratio))
    stdout.print(rows)


def _show_sanity(result: Validation) -> None:
    sanity = result.sanity
    if sanity is None:
        return
    stdout.print(marked("\n[bold]answers[/bold]"))
    if (compared := sanity.compared) is not None:
        agreement = compared.agreement
        stdout.print(
            f"  first tokens equal to the reference's: {agreement.first_equal} of {agreement.prompts}; of all "
            f"{agreement.tokens}: {agreement.equal} equal, {agreement.near_ties} near-ties, {agreement.wrong} others",
            soft_wrap=True,
        )
        parts = [("serving", compared.kl_serving), ("pressing", compared.kl_pressing), ("both", compared.kl_source)]
        shown = ", ".join(f"{name} {kl.value:.5f}" for name, kl in parts if kl is not None)
        stdout.print(f"  KL, nats a token over {compared.positions:,} positions: {shown}", soft_wrap=True)
    else:
        stdout.print(f"  {sanity.no_reference}", soft_wrap=True)
    for prompt, served in sanity.samples[:2]:
        stdout.print(f"  …{prompt[-60:]!r} → {served!r}", soft_wrap=True)


def _show_kv_integrity(result: Validation) -> None:
    trial = result.kv_integrity
    if trial is None:
        return
    smoke = " — smoke only, says nothing about a GPU" if result.smoke else ""
    compared = f"{trial.mode}: with the plug-in over without{smoke}; median and spread"
    stdout.print(marked("\n[bold]KV integrity[/bold], {compared}", compared=compared), soft_wrap=True)
    rows = table("at once", right=("tokens/s", "p95 between tokens", "p95 to first token"))
    for row in trial.overheads:
        ratios = (row.throughput, row.inter_token_p95, row.ttft_p95)
        rows.add_row(str(row.concurrency), *(_ratio(ratio) for ratio in ratios))
    stdout.print(rows)


def _ratio(ratio: Figure) -> str:
    spread = f" [{min(ratio.runs):.3f}–{max(ratio.runs):.3f}]" if len(ratio.runs) > 1 else ""
    return f"× {ratio.value:.3f}{spread}"


def _bounds(out: Path, recipe: str | None, overrides: list[str] | None) -> tuple[Recipe, str, bool]:
    """The recipe whose gates count, its name, and whether OUT is an output of ours."""
    from moepress.recipe import load_recipe

    loaded = load_recipe(recipe, overrides or ()) if recipe is not None else kept_recipe(out, "gates", overrides or ())
    if loaded is None:
        raise PlanRefused(
            f"there is no {REPORT_NAME} that names a recipe",
            where=str(out),
            hint="name one whose gates count: --recipe NAME",
        )
    return loaded, loaded.name, (out / REPORT_NAME).is_file()


def _host(python: str | None, container: str | None, *, cpu_lab: bool, needed: bool) -> Host | None:
    from moepress.environments import command
    from moepress.errors import ServingError
    from moepress.serving.container import container_words
    from moepress.serving.launch import CPU_LAB_VERSION
    from moepress.serving.sglang import find_environment
    from moepress.serving.validation.machine import this_machine
    from moepress.serving.validation.sides import Host

    if container is not None:
        if python is not None:
            raise PlanRefused("a container and a Python: only one of them can run the server", where="--container")
        return Host(None, container_words(container), cpu_lab)
    try:
        environment = find_environment(python)
    except ServingError:
        if needed:
            raise
        return None
    if cpu_lab and environment.version != CPU_LAB_VERSION:
        raise PlanRefused(
            f"the CPU lab is made for SGLang {CPU_LAB_VERSION}, this is {environment.version}",
            where=str(environment.python),
            hint=f"{command('sglang-cpu')} makes the environment that it is made for",
        )
    if needed and not cpu_lab and not this_machine().gpus:
        raise PlanRefused(
            "no GPU here (nvidia-smi finds none)", hint="on a machine without one: --cpu-lab, which judges no speed"
        )
    return Host(environment, (), cpu_lab)


def _version(host: Host | None, recipe: Recipe) -> str:
    return host.environment.version if host is not None and host.environment is not None else recipe.serving.version


def _work(out: Path, work: Path | None, ours: bool) -> Path:
    import shutil

    if work is not None:
        work.mkdir(parents=True, exist_ok=True)
        return work.resolve()
    if not ours:
        return Path(tempfile.mkdtemp(prefix="moepress-validate-"))
    folder = out / ".moepress" / "validate"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder.resolve()


def _concurrencies(text: str) -> tuple[int, ...]:
    try:
        numbers = tuple(int(part) for part in text.split(","))
    except ValueError:
        numbers = ()
    if not numbers or min(numbers) < 1:
        raise PlanRefused(f"{text!r} is not a list of numbers such as 1,8,32,64", where="--concurrency")
    return numbers


def _words(text: str, known: tuple[str, ...], where: str) -> tuple[str, ...]:
    words = [word.strip() for word in text.split(",")]
    if unknown := [word for word in words if word not in known]:
        raise PlanRefused(f"{', '.join(map(repr, unknown))}: not one of {', '.join(known)}", where=where)
    return tuple(word for word in known if word in words)


def _rates(theirs: Rates | None, mine: Rates, ratio: Figure | None) -> tuple[str, str, str, str]:
    return _three(None if theirs is None else theirs.decode, mine.decode, ratio)


def _three(theirs: Figure | None, mine: Figure, ratio: Figure | None) -> tuple[str, str, str, str]:
    if ratio is None:
        return ("" if theirs is None else f"{theirs.value:,.1f}", f"{mine.value:,.1f}", "", "")
    spread = f"{min(ratio.runs):.2f}–{max(ratio.runs):.2f}"
    return ("" if theirs is None else f"{theirs.value:,.1f}", f"{mine.value:,.1f}", f"× {ratio.value:.2f}", spread)
