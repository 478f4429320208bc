"""The pictures of the page: sizes, memory of a GPU, speed, errors of every expert, drift through the layers.

A chart says one thing and says it in its labels; the table beside it holds the figures. The source is always drawn in one
colour and the pressed model in another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from moepress.convert.layout import PROJECTIONS
from moepress.report.drawing import (
    INK,
    KINDS,
    LINE,
    MUTED,
    PAPER,
    PRESSED,
    PRESSED_SOFT,
    SOURCE,
    SOURCE_SOFT,
    picture,
)
from moepress.report.memory import Gpu, GpuMemory
from moepress.report.served import SpeedPoint, Spread
from moepress.report.sizes import SizeRow

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

GIB, MIB = 2**30, 2**20
SMALL = 0.02
"""Components below this share of the larger checkpoint are drawn as one."""
_COLORS = {
    "Routed experts": KINDS[0],
    "Attention": KINDS[1],
    "Shared experts": KINDS[2],
    "Embedding": KINDS[3],
    "Output head": KINDS[4],
    "Dense MLP": KINDS[5],
}
_REST = KINDS[6]


class _Part(NamedTuple):
    component: str
    before: int
    after: int


def size_chart(rows: Sequence[SizeRow]) -> str:
    """Two bars, source and pressed, divided by component."""
    total = max(sum(row.before or 0 for row in rows), sum(row.after for row in rows), 1)
    large = [row for row in rows if row.component in _COLORS and max(row.before or 0, row.after) >= SMALL * total]
    large.sort(key=lambda row: list(_COLORS).index(row.component))
    parts = [_Part(row.component, row.before or 0, row.after) for row in large]
    rest = [row for row in rows if row not in large]
    if rest:
        parts.append(_Part("All else", sum(row.before or 0 for row in rest), sum(row.after for row in rest)))
    unit, scale = ("GiB", GIB) if total >= GIB / 2 else ("MiB", MIB)
    sums = (sum(part.before for part in parts), sum(part.after for part in parts))

    def draw(figure: Figure, narrow: bool) -> None:
        axes = figure.subplots()
        lefts = [0.0, 0.0]
        for part in parts:
            widths = [part.before / scale, part.after / scale]
            axes.barh(
                [1, 0],
                widths,
                left=lefts,
                height=0.56,
                color=_COLORS.get(part.component, _REST),
                edgecolor=PAPER,
                linewidth=1,
                label=part.component,
            )
            lefts = [left + width for left, width in zip(lefts, widths, strict=True)]
        for place, size in zip((1, 0), sums, strict=True):
            if size:
                axes.text(size / scale + total / scale * 0.012, place, f"{size / scale:,.2f} {unit}", va="center")
        axes.set_yticks([1, 0], ["source", "pressed"])
        axes.set_xlim(0, total / scale * (1.3 if narrow else 1.16))
        axes.set_xlabel(unit)
        axes.grid(axis="x")
        _quiet(axes)
        figure.legend(loc="outside lower left", ncols=2 if narrow else 4, fontsize=8.5, handlelength=1, handleheight=1)

    describes = f"Bytes by component: source {sums[0] / scale:,.2f} {unit}, pressed {sums[1] / scale:,.2f} {unit}"
    legend_rows = -(-len(parts) // 2)
    return picture("sizes", describes, draw, heights=(2.3, 2.1 + 0.2 * legend_rows))


def memory_chart(sides: Sequence[GpuMemory], gpu: Gpu) -> str:
    """One bar a side: weights, KV pool, and what the server leaves alone, against the GPU's memory."""
    top = max([gpu.bytes, *(side.weights + max(side.kv_pool, 0) for side in sides)]) / GIB
    places = list(range(len(sides) - 1, -1, -1))

    def draw(figure: Figure, narrow: bool) -> None:
        axes = figure.subplots()
        for place, side in zip(places, sides, strict=True):
            strong, soft = (SOURCE, SOURCE_SOFT) if side.side == "source" else (PRESSED, PRESSED_SOFT)
            weights, pool = side.weights / GIB, max(side.kv_pool, 0) / GIB
            axes.barh(place, weights, height=0.5, color=strong)
            axes.barh(place, pool, left=weights, height=0.5, color=soft)
            words = f"weights {weights:,.2f} GiB · KV cache {pool:,.2f} GiB"
            words += f" · {_count(side.kv_tokens)} tokens" if not narrow else ""
            axes.text(0, place + 0.34, words, fontsize=8.5, color=MUTED, va="bottom")
        axes.axvline(gpu.bytes / GIB, color=INK, linewidth=1.2)
        axes.text(gpu.bytes / GIB, places[0] + 0.78, f"GPU {gpu.bytes / GIB:,.1f} GiB", ha="right", fontsize=8.5)
        axes.set_yticks(places, [_side(side, narrow) for side in sides])
        axes.set_ylim(-0.4, places[0] + 0.95)
        axes.set_xlim(0, top * 1.02)
        axes.set_xlabel("GiB of one GPU")
        axes.grid(axis="x")
        _quiet(axes)

    words = "; ".join(
        f"{side.side}, {side.origin}: weights {side.weights / GIB:,.2f} GiB, {side.kv_tokens:,} KV tokens"
        for side in sides
    )
    height = 0.95 + 0.62 * len(sides)
    return picture("memory", f"Memory of one GPU. {words}", draw, heights=(height, height))


def speed_chart(points: Sequence[SpeedPoint]) -> str:
    """Decode rate and time between tokens over concurrency, with the range of the runs."""
    places = [point.concurrency for point in points]

    def draw(figure: Figure, narrow: bool) -> None:
        rate, gap = figure.subplots(2 if narrow else 1, 1 if narrow else 2, squeeze=False).flat
        _curves(rate, places, [point.decode for point in points])
        _curves(gap, places, [point.inter_token for point in points])
        rate.set_title("decode, tokens a second of all requests", loc="left")
        gap.set_title("between tokens, ms (median)", loc="left")
        for axes in (rate, gap):
            axes.set_xscale("log", base=2)
            axes.set_xticks(places, [str(place) for place in places])
            axes.minorticks_off()
            axes.set_xlabel("concurrent requests")
            axes.set_ylim(bottom=0)
            axes.grid(axis="y")
        rate.legend(loc="upper left")

    words = "; ".join(
        f"at {point.concurrency}: pressed {point.decode[0].value:,.1f}"
        + (f", source {point.decode[1].value:,.1f}" if point.decode[1] else "")
        for point in points
    )
    return picture("speed", f"Decoded tokens a second. {words}", draw, heights=(2.9, 5.2))


def error_map(errors: Mapping[int, Mapping[str, Sequence[float]]]) -> str:
    """Relative error of every expert: one panel a projection, layers downwards, experts to the right."""
    layers = sorted(errors)
    panels = [name for name in PROJECTIONS if any(name in errors[layer] for layer in layers)]
    every = [value for layer in layers for name in panels for value in errors[layer].get(name, ())]
    low, top = min(every, default=0.0), max(every, default=1.0)

    def draw(figure: Figure, narrow: bool) -> None:
        import numpy as np

        grid = figure.subplots(len(panels) if narrow else 1, 1 if narrow else len(panels), squeeze=False)
        image: Any = None
        for axes, name in zip(grid.flat, panels, strict=True):
            width = max(len(errors[layer].get(name, ())) for layer in layers)
            rows = np.full((len(layers), width), np.nan)
            for place, layer in enumerate(layers):
                values = errors[layer].get(name, ())
                rows[place, : len(values)] = values
            image = axes.imshow(rows, aspect="auto", cmap="viridis", vmin=low, vmax=top, interpolation="none")
            axes.set_title(name, loc="left")
            axes.set_xlabel("expert")
            step = max(1, len(layers) // 12)
            axes.set_yticks(range(0, len(layers), step), [str(layer) for layer in layers[::step]])
            for spine in axes.spines.values():
                spine.set_visible(False)
            axes.locator_params(axis="x", integer=True, nbins=6)
        grid.flat[0].set_ylabel("layer")
        bar = figure.colorbar(image, ax=list(grid.flat), label="relative error", shrink=0.9, pad=0.02)
        bar.outline.set_visible(False)  # type: ignore[operator]

    height = 1.5 + 0.05 * min(len(layers), 60)
    describes = f"Relative error of {len(every):,} expert matrices in {len(layers)} layers, from {low:.4f} to {top:.4f}"
    return picture("errors", describes, draw, heights=(height, height * len(panels) * 0.9))


def drift_chart(drift: Sequence[float]) -> str:
    """Relative error of the hidden states after each layer."""

    def draw(figure: Figure, _narrow: bool) -> None:
        axes = figure.subplots()
        axes.plot(range(len(drift)), drift, marker="o", markersize=3.5, linewidth=1.6, color=PRESSED)
        axes.set_ylim(0, max(drift, default=1) * 1.15 or 1)
        axes.set_xlabel("after layer")
        axes.set_ylabel("‖h̃ − h‖ / ‖h‖")
        axes.locator_params(axis="x", integer=True)
        axes.grid(axis="y")

    describes = f"Drift of the hidden states: {drift[0]:.4f} after the first layer, {drift[-1]:.4f} after the last"
    return picture("drift", describes, draw, heights=(2.1, 2.1))


def together_chart(drift: Mapping[str, Any]) -> str:
    """Share of greedy continuations that still equal the source's, by position, with its interval.

    Args:
        drift: of a result of evaluate: the candidate's curve, and the source's against itself where it was asked twice.
    """
    candidate, noise = drift["candidate"], drift.get("noise")

    def draw(figure: Figure, _narrow: bool) -> None:
        axes = figure.subplots()
        axes.fill_between(
            candidate["positions"], candidate["low"], candidate["high"], step="post", color=PRESSED_SOFT, linewidth=0
        )
        axes.step(candidate["positions"], candidate["surviving"], where="post", color=PRESSED, label="pressed")
        if noise:
            axes.step(
                noise["positions"], noise["surviving"], where="post", color=SOURCE, linestyle="--", label="source again"
            )
        axes.set_ylim(0, 1.02)
        axes.set_xlim(left=0)
        axes.set_xlabel("generated token")
        axes.set_ylabel("still together")
        axes.grid(axis="y")
        axes.legend(loc="lower left")

    describes = f"{candidate['diverged']} of {candidate['pairs']} continuations part from the source's"
    return picture("together", describes, draw, heights=(2.3, 2.3))


def _curves(axes: Axes, places: Sequence[int], pairs: Sequence[tuple[Spread | None, Spread | None]]) -> None:
    for side, label, color, marker in ((1, "source", SOURCE, "s"), (0, "pressed", PRESSED, "o")):
        known = [(place, pair[side]) for place, pair in zip(places, pairs, strict=True)]
        drawn = [(place, figure) for place, figure in known if figure is not None]
        if drawn:
            values = [figure.value for _, figure in drawn]
            below = [figure.value - figure.low for _, figure in drawn]
            above = [figure.high - figure.value for _, figure in drawn]
            axes.errorbar(
                [place for place, _ in drawn],
                values,
                yerr=[below, above],
                label=label,
                color=color,
                marker=marker,
                markersize=4.5,
                linewidth=1.6,
                capsize=3,
            )


def _side(side: GpuMemory, narrow: bool) -> str:
    joint = "\n" if narrow else ", "
    return f"{side.side}{joint}{side.origin}"


def _count(count: int) -> str:
    return (
        f"{count / 1e6:,.2f} M" if count >= 1_000_000 else f"{count / 1e3:,.0f} k" if count >= 10_000 else f"{count:,}"
    )


def _quiet(axes: Axes) -> None:
    axes.spines["left"].set_visible(False)
    axes.tick_params(left=False)
    axes.spines["bottom"].set_color(LINE)
