"""What a person reads of an evaluation: figures by kind, then the verdict and its reasons."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from moepress.commands.console import marked, stdout, table

if TYPE_CHECKING:
    from moepress.evaluate.choose import Settings
    from moepress.evaluate.rows import Row
    from moepress.evaluate.run import Evaluated

_MARKS = {"ACCEPT": "[green]✓[/green]", "REGRESSION": "[red]✗[/red]", "NOT ENOUGH DATA": "[yellow]?[/yellow]"}
_WORDS = {
    "ACCEPT": "[green]ACCEPT[/green]",
    "REGRESSION": "[red]REGRESSION[/red]",
    "NOT ENOUGH DATA": "[yellow]NOT ENOUGH DATA[/yellow]",
}
_SIDES = {"source": "source", "candidate": "pressed"}


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
        stdout.print(marked("[yellow]skipped[/yellow] [bold]{task}[/bold]: {why}", task=task, why=why), soft_wrap=True)
    reasons: dict[tuple[str, str, str], list[str]] = {}
    for row in result.rows:
        if row.verdict != "ACCEPT":
            reasons.setdefault((row.verdict, row.task, row.why), []).append(row.metric)
    for (verdict, task, why), metrics in reasons.items():
        about = f" ({'; '.join(metrics[:3])}{f'; {len(metrics) - 3} more' if len(metrics) > 3 else ''})"
        line = f"{_WORDS[verdict]} [bold]{{task}}[/bold]{{about}}: {{why}}"
        stdout.print(marked(line, task=task, about=about, why=why), soft_wrap=True)
    counts = ", ".join(f"{count} {verdict}" for verdict, count in result.counts.items()) or "nothing was judged"
    asked, kept = result.requests["asked"], result.requests["from_cache"]
    summary = (
        f"{counts}, at {result.bounds.confidence:.0%} confidence; "
        f"{asked:,} questions asked, {kept:,} answers kept from before"
    )
    stdout.print(marked(f"[bold]{_WORDS[result.verdict]}[/bold]: {{summary}}", summary=summary), soft_wrap=True)


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
            marked(_MARKS[worst]),
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
    stdout.print(marked(f"\n[bold]drift[/bold]: {drift['prompts']} greedy texts of up to {drift['tokens']} tokens"))
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
            line = (
                f"divergence rate {row.candidate:.4f} a token, {row.interval.value:+.4f} "
                f"[{row.interval.low:.4f}, {row.interval.high:.4f}] against its own, {row.bound:g} allowed"
            )
            stdout.print(marked(f"{{line}} {_MARKS[row.verdict]}", line=line), soft_wrap=True)


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
            f"{row.interval.value:+.1%} {span}",
            "" if row.test is None else f"{row.test.p:.3f}",
            *((f"{row.truncated[0]}, {row.truncated[1]}",) if cut else ()),
            marked(_MARKS[row.verdict]),
        )
    stdout.print(rows)
    if any(row.test is not None for row in scores):
        stdout.print("p: McNemar's exact test on the same prompts", highlight=False)


def _figure(value: float | None, percent: bool) -> str:
    if value is None:
        return ""
    return f"{value:.1%}" if percent else f"{value:.3f}"
