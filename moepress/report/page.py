"""The page: figures and pictures in the template, one file that asks for nothing from anywhere.

`contents` gathers every figure as plain data (``--json`` prints just that); `render` draws and fills the template. The
page forbids itself every request by its own content security policy.
"""

from __future__ import annotations

import shlex
from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from moepress import __version__
from moepress.convert.receipts import ErrorMap, expert_errors
from moepress.report import charts
from moepress.report.gates import Gate, Verdict, figure_text, gates, overall
from moepress.report.kv_treatment import KvTreatment, kv_treatment
from moepress.report.memory import Gpu, GpuMemory, computed_memory
from moepress.report.output import PressedOutput
from moepress.report.reproduce import commands, recipe_yaml
from moepress.report.served import SpeedPoint, measured_memory, speed_points
from moepress.report.sizes import FateRow, SizeRow, fate_rows, size_rows

GIB, MIB = 2**30, 2**20


@dataclass(frozen=True)
class LayerError:
    """Relative errors of one layer's experts. ``worst``: the expert and projection of the largest."""

    layer: int
    mean: float
    largest: float
    worst: str


@dataclass(frozen=True)
class Contents:
    """All figures of the page. Sizes in bytes; ``None`` and empty lists: not there, and the page says why."""

    title: str
    family: str
    recipe: str
    grid: str
    layout: str
    server: str
    tensor_parallel: int
    moepress: str
    digest: str
    verdict: Verdict
    gates: list[Gate]
    source: str | None
    source_problem: str
    source_bytes: int
    output_bytes: int
    parameters: int
    sizes: list[SizeRow]
    fates: list[FateRow]
    has_receipts: bool
    gpu: Gpu
    memory: list[GpuMemory]
    speed: list[SpeedPoint]
    smoke: bool
    layers: list[LayerError]
    worst: list[dict[str, Any]]
    fallbacks: dict[str, str]
    kv: KvTreatment
    results: dict[str, dict[str, Any]]
    stale: list[str]
    commands: list[tuple[str, str]]
    recipe_yaml: str
    checksums: dict[str, str]
    side_files: dict[str, str]

    def as_json(self) -> dict[str, Any]:
        """The figures as plain data."""
        return asdict(self)


def contents(output: PressedOutput, gpu: Gpu) -> Contents:
    """Every figure of one output, for one kind of GPU."""
    report, recipe = output.report, output.recipe
    judged = gates(output)
    weights = recipe.weights
    validated = output.found("validate")
    return Contents(
        title=output.folder.resolve().name,
        family=output.family.title,
        recipe=recipe.name,
        grid=f"INT{weights.num_bits}, groups of {weights.group_size}"
        if weights.group_size > 0
        else "INT4, one scale a row",
        layout=str(report["layout"]),
        server=f"{recipe.serving.server} {recipe.serving.version}",
        tensor_parallel=recipe.serving.tensor_parallel,
        moepress=__version__,
        digest=output.digest,
        verdict=overall(judged),
        gates=judged,
        source=output.source,
        source_problem=output.source_problem,
        source_bytes=int(report["source_bytes"]),
        output_bytes=int(report["output_bytes"]),
        parameters=int(report["total_parameters"]),
        sizes=size_rows(output),
        fates=fate_rows(output),
        has_receipts=bool(output.records),
        gpu=gpu,
        memory=computed_memory(output, gpu) + measured_memory(validated),
        speed=speed_points(validated),
        smoke=bool((validated or {}).get("smoke")),
        layers=_layers(_errors(output)),
        worst=[_with_tokens(entry, output.records) for entry in report["quantized"]["worst"]],
        fallbacks=dict(report["fallbacks"]),
        kv=kv_treatment(output),
        results=output.results,
        stale=list(output.stale),
        commands=commands(output),
        recipe_yaml=recipe_yaml(recipe),
        checksums=dict(report["shards"]),
        side_files=dict(report.get("side_files") or {}),
    )


def render(output: PressedOutput, figures: Contents) -> str:
    """The HTML of the page."""
    import jinja2
    from markupsafe import Markup

    fidelity, evaluated = output.found("fidelity") or {}, output.found("evaluate") or {}
    errors = _errors(output)
    drawable = [side for side in figures.memory if side.origin == "computed" or not figures.smoke]
    pictures = {
        "sizes": charts.size_chart(figures.sizes) if output.source_checkpoint is not None else "",
        "memory": charts.memory_chart(drawable, figures.gpu),
        "speed": charts.speed_chart(figures.speed) if figures.speed else "",
        "errors": charts.error_map(errors) if errors else "",
        "together": charts.together_chart(evaluated["drift"]) if evaluated.get("drift") else "",
        "drift": charts.drift_chart(fidelity["drift"]) if fidelity.get("drift") else "",
    }
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("moepress.report", "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "size": size_text,
        "figure": figure_text,
        "percent": lambda share: f"{share:.2%}",
    }
    style = (resources.files("moepress.report") / "templates" / "page.css").read_text(encoding="utf-8")
    return environment.get_template("page.html.j2").render(
        page=figures,
        style=Markup(style),
        pictures={name: Markup(svg) for name, svg in pictures.items()},
        results=output.results,
        out=shlex.quote(str(output.folder)),
        src=shlex.quote(output.source_words),
    )


def write_page(path: Path, html: str) -> None:
    """Writes it atomically, readable by all that umask lets."""
    from moepress.formats.atomic import atomic_write_text

    atomic_write_text(path, html)


def size_text(count: float) -> str:
    """Bytes in the unit of every memory figure here: ``420.71 GiB``, ``8.69 MiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024 or unit == "GiB":
            return f"{count:,.0f} B" if unit == "B" else f"{count:,.2f} {unit}"
        count /= 1024
    raise AssertionError("unreachable")


def _errors(output: PressedOutput) -> ErrorMap:
    return expert_errors(output.records, output.family, output.checkpoint.config)


def _layers(errors: ErrorMap) -> list[LayerError]:
    found = []
    for layer, by_projection in errors.items():
        every = [(e, expert, name) for name, values in by_projection.items() for expert, e in enumerate(values)]
        if every:
            largest, expert, name = max(every)
            mean = sum(error for error, _, _ in every) / len(every)
            found.append(LayerError(layer, mean, largest, f"expert {expert}, {name}"))
    return found


def _with_tokens(entry: dict[str, Any], records: dict[str, dict[str, Any]]) -> dict[str, Any]:
    tokens = records.get(entry["weight"], {}).get("tokens")
    return {**entry, "tokens": None if tokens is None else int(tokens)}
