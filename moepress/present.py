"""What people see: tables, progress, and the next command. Data never passes through here; ``--json`` goes around it.

On a terminal a conversion shows one live line; anywhere else (a log, a batch job) a plain line every few seconds.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

if TYPE_CHECKING:
    from moepress.convert.outlook import Outlook
    from moepress.convert.plan import ConversionPlan
    from moepress.convert.run import Conversion
    from moepress.evaluate.fidelity import Fidelity
    from moepress.formats.family_tables import Family
    from moepress.formats.inspection import Inspection
    from moepress.recipe import Recipe
    from moepress.verify.run import Verification

out = Console(highlight=False)
talk = Console(stderr=True, highlight=False)

LOG_EVERY = 10.0
"""Seconds between progress lines where there is no terminal."""


def size(count: float) -> str:
    """Bytes for people, binary: ``703.72 GiB``; the unit that every memory figure here uses."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(count) < 1024 or unit == "TiB":
            return f"{count:,.0f} B" if unit == "B" else f"{count:,.2f} {unit}"
        count /= 1024
    raise AssertionError("unreachable")


def params(count: int) -> str:
    """Parameters for people: ``753.33 B``, ``7.86 M``."""
    for unit, scale in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= scale:
            return f"{count / scale:,.2f} {unit}"
    return str(count)


def duration(seconds: float) -> str:
    """``42 s``, ``3 min 20 s``, ``2 h 05 min``."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def next_step(command: str) -> None:
    """The command to run next, alone on its line so that it can be copied."""
    out.print(f"\nnext: [bold]{command}[/bold]", soft_wrap=True)


def note(text: str) -> None:
    """Talk, on stderr."""
    talk.print(text, soft_wrap=True)


def warnings(texts: tuple[str, ...]) -> None:
    for text in texts:
        talk.print(f"[yellow]warning:[/yellow] {text}", soft_wrap=True)


def suggest_recipe(family: str, model_type: str) -> str:
    """A shipped recipe for the family, best the one named like the model; a placeholder where there is none."""
    from moepress.recipe import load_recipe, shipped_recipes

    fitting = [name for name in shipped_recipes() if family in load_recipe(name).families]
    return next((name for name in fitting if name == model_type.replace("_", "-")), next(iter(fitting), "RECIPE"))


def inspection(result: Inspection) -> None:
    warnings(result.warnings)
    out.print(f"[bold]{result.location}[/bold]")
    out.print(f"{result.family.title} · {result.architecture} · model_type {result.model_type}")
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("component", no_wrap=True)
    table.add_column("stored as", no_wrap=True)
    for heading in ("weights", "parameters", "bytes", "share"):
        table.add_column(heading, justify="right")
    for row in result.rows:
        share = f"{row.bytes / max(1, result.bytes):.1%}"
        table.add_row(row.component, row.stored_as, f"{row.weights:,}", params(row.parameters), size(row.bytes), share)
    table.add_section()
    table.add_row(
        "all",
        "",
        f"{sum(r.weights for r in result.rows):,}",
        params(result.parameters),
        size(result.bytes),
        "",
        style="bold",
    )
    out.print(table)
    out.print(f"{result.shards} shards, {len(result.side_files)} side files")


def outlook(result: Outlook) -> None:
    warnings(result.warnings)
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column(f"{result.title} → {result.recipe_name}")
    for heading in ("source", "pressed", ""):
        table.add_column(heading, justify="right")
    for label, before, after, in_bytes in result.rows():
        figures = (f"{before:,}", f"{after:,}")
        if in_bytes:
            unit, scale = ("GiB", 2**30) if max(before, after) >= 2**29 else ("MiB", 2**20)
            figures = (f"{before / scale:,.2f} {unit}", f"{after / scale:,.2f} {unit}")
        table.add_row(label, *figures, f"× {after / before:.2f}" if before else "")
    out.print(table)
    for line in result.lines():
        out.print(line, soft_wrap=True)


def conversion(result: Conversion, broken: list[str]) -> None:
    report, plan = result.report, result.plan
    resumed = f", {result.resumed} of {len(plan.shards)} shards from an earlier run" if result.resumed else ""
    ratio = report["output_bytes"] / max(1, report["source_bytes"])
    out.print(
        f"[bold]{size(report['source_bytes'])} → {size(report['output_bytes'])}[/bold] ({ratio:.1%}) in {duration(result.seconds)}"
        f", {len(plan.shards)} shards{resumed}, layout {report['layout']}"
    )
    quantized = report["quantized"]
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("weights", justify="right")
    table.add_column("what became of them")
    weights = plan.recipe.weights
    if quantized["weights"]:
        how = f"INT{weights.num_bits}, group {weights.group_size}, {weights.algorithm} with {weights.scale} scales"
        error = (
            f"relative error mean {quantized['relative_error_mean']:.4f}, worst {quantized['relative_error_max']:.4f}"
        )
        table.add_row(f"{quantized['weights']:,}", f"{how}: {error}")
    for reason, count in sorted(report["kept"].items(), key=lambda item: -item[1]):
        table.add_row(f"{count:,}", reason)
    out.print(table)
    if quantized["worst"]:
        out.print("\nleast exact:")
        for entry in quantized["worst"][:3]:
            db = "" if entry["sqnr_db"] is None else f", {entry['sqnr_db']:.1f} dB"
            out.print(f"  {entry['weight']}  relative error {entry['relative_error']:.4f}{db}", soft_wrap=True)
    for name, reason in list(report["fallbacks"].items())[:20]:
        out.print(f"[yellow]fallback:[/yellow] {name}: {reason}", soft_wrap=True)
    for problem in broken:
        talk.print(f"[red]limit broken:[/red] {problem}", soft_wrap=True)


def verification(result: Verification) -> None:
    for problem in result.problems[:50]:
        out.print(f"[red]✗[/red] {problem}", soft_wrap=True)
    if len(result.problems) > 50:
        out.print(f"  … and {len(result.problems) - 50:,} more (all with --json)")
    for line in result.checked:
        out.print(f"[green]✓[/green] {line}", soft_wrap=True)
    verdict = f"[red]{len(result.problems):,} problems[/red]" if result.problems else "[green]verified[/green]"
    out.print(f"[bold]{verdict}[/bold]: {result.tensors:,} tensors, {size(result.bytes)} in {duration(result.seconds)}")


def fidelity(result: Fidelity, picture: Path | None) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("text")
    for heading in ("tokens", "KL, nats a token", "same top token", "perplexity", "pressed"):
        table.add_column(heading, justify="right")
    for name, d in result.texts.items():
        kl = f"{d.kl:.5f} ± {d.kl_standard_error:.5f}"
        table.add_row(
            name,
            f"{d.tokens:,}",
            kl,
            f"{d.top1_agreement:.2%}",
            f"{d.source_perplexity:.3f}",
            f"{d.candidate_perplexity:.3f}",
        )
    out.print(table)
    out.print(
        "drift of hidden states after each layer: " + " ".join(f"{value:.4f}" for value in result.drift), soft_wrap=True
    )
    if picture is not None:
        out.print(f"map of errors: {picture}")


def recipes(known: list[Recipe]) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("recipe", "families", "experts", "about"):
        table.add_column(heading)
    for recipe in known:
        weights = recipe.weights
        experts = f"INT{weights.num_bits} g{weights.group_size} {weights.algorithm}"
        table.add_row(recipe.name, ", ".join(recipe.families), experts, recipe.description)
    out.print(table)
    next_step("moepress recipes show NAME")


def families(known: list[Family]) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("family", "models", "model_type"):
        table.add_column(heading)
    for family in known:
        table.add_row(family.key, family.title, ", ".join(family.model_types))
    out.print(table)


class Bar:
    """One task: a live bar on a terminal, a plain line every few seconds elsewhere, nothing when quiet.

    ``in_bytes``: what is counted are bytes, and a rate is worth showing.
    """

    def __init__(self, *, quiet: bool, in_bytes: bool = True) -> None:
        self._quiet, self._in_bytes = quiet, in_bytes
        self._live: Progress | None = None
        self._task: TaskID | None = None
        self._total = self._done = self._before = 0
        self._label = ""
        self._started = self._logged = time.monotonic()

    def __enter__(self) -> Any:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def start(self, label: str, total: int, done: int = 0) -> None:
        """Begins; ``done`` bytes were finished by an earlier run and do not count for the rate."""
        self._label, self._total, self._done, self._before = label, total, done, done
        self._started = self._logged = time.monotonic()
        if not self._quiet and sys.stderr.isatty():
            columns = (
                TextColumn("{task.description}"),
                BarColumn(bar_width=30),
                TextColumn("{task.percentage:>3.0f}%"),
                TextColumn("{task.fields[rate]}"),
                TimeElapsedColumn(),
                TextColumn("left"),
                TimeRemainingColumn(),
            )
            self._live = Progress(*columns, console=talk, transient=True)
            self._task = self._live.add_task(label, total=total, completed=done, rate="")
            self._live.start()

    def label(self, text: str) -> None:
        self._label = text
        if self._live is not None and self._task is not None:
            self._live.update(self._task, description=text)

    def add(self, count: int) -> None:
        self._done += count
        now = time.monotonic()
        rate = (self._done - self._before) / max(1e-3, now - self._started)
        if self._live is not None and self._task is not None:
            self._live.update(self._task, completed=self._done, rate=self._rate(rate))
        elif not self._quiet and now - self._logged > LOG_EVERY:
            self._logged = now
            left = duration((self._total - self._done) / max(1e-9, rate))
            parts = [f"{self._done / max(1, self._total):.0%}", self._rate(rate), f"{left} left"]
            talk.print(f"{self._label}: {', '.join(part for part in parts if part)}")

    def _rate(self, rate: float) -> str:
        if not self._in_bytes:
            return ""
        return f"{rate / 1e9:.2f} GB/s" if rate >= 1e7 else f"{rate / 1e6:.2f} MB/s"


class ConvertProgress(Bar):
    """Watches a conversion (`convert.run.Watcher`)."""

    def begin(self, plan: ConversionPlan, bytes_done: int) -> None:
        if not self._quiet:
            warnings(plan.warnings)
        self.start("pressing", plan.source_bytes, bytes_done)

    def unit(self, label: str) -> None:
        self.label(label)

    def advance(self, source_bytes: int) -> None:
        self.add(source_bytes)

    def unit_done(self, receipt: dict[str, Any]) -> None:
        pass


class VerifyProgress(Bar):
    """Watches a verification."""

    def begin(self, total: int) -> None:
        self.start("verifying", total)

    def advance(self, count: int) -> None:
        self.add(count)
