"""matplotlib draws, the page colours: SVG inside HTML that follows the page's theme and fits its width.

matplotlib knows no CSS variable, so a chart is drawn in stand-in colours, each used for nothing else, which are then
replaced in the SVG's text:

    INK "#0b0b01"  →  var(--ink)          text keeps its words (svg.fonttype none) and takes the page's font

Each picture is drawn twice, for a wide and for a narrow page; CSS shows one. Element ids are prefixed, since all pictures
share one document. The same figures give the same bytes.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

INK, MUTED, LINE, PAPER = "#0b0b01", "#0b0b02", "#0b0b03", "#0b0b04"
SOURCE, PRESSED, PRESSED_SOFT, SOURCE_SOFT = "#0b0b05", "#0b0b06", "#0b0b07", "#0b0b08"
KINDS = ("#0b0b11", "#0b0b12", "#0b0b13", "#0b0b14", "#0b0b15", "#0b0b16", "#0b0b17")

_VARIABLES = {
    INK: "--ink",
    MUTED: "--muted",
    LINE: "--line",
    PAPER: "--paper",
    SOURCE: "--source",
    PRESSED: "--pressed",
    PRESSED_SOFT: "--pressed-soft",
    SOURCE_SOFT: "--source-soft",
    **{color: f"--kind-{number}" for number, color in enumerate(KINDS, 1)},
}
_STYLE: dict[str, Any] = {
    "svg.fonttype": "none",
    "font.family": "DejaVu Sans",  # ships with matplotlib: the layout is the same on every machine
    "font.size": 9.5,
    "text.color": INK,
    "axes.edgecolor": LINE,
    "axes.labelcolor": MUTED,
    "axes.titlesize": 10,
    "axes.titlecolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.color": LINE,
    "grid.linewidth": 0.7,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": MUTED,
    "ytick.labelcolor": MUTED,
    "legend.frameon": False,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
}
WIDE, NARROW = 8.6, 3.9
"""Widths in inches of 72 CSS pixels; a picture is scaled down, never up."""


def picture(name: str, describes: str, draw: Callable[[Figure, bool], None], *, heights: tuple[float, float]) -> str:
    """Two inline SVGs, of which CSS shows one.

    Args:
        name: prefix of its ids; unique on the page.
        describes: the text alternative.
        draw: draws into a figure; told whether it is the narrow one.
        heights: in inches, wide and narrow.
    """
    wide = _svg(f"{name}-w", "wide", describes, draw, (WIDE, heights[0]), narrow=False)
    return wide + _svg(f"{name}-n", "narrow", describes, draw, (NARROW, heights[1]), narrow=True)


def _svg(
    prefix: str,
    kind: str,
    describes: str,
    draw: Callable[[Figure, bool], None],
    size: tuple[float, float],
    *,
    narrow: bool,
) -> str:
    import matplotlib as mpl
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    out = io.StringIO()
    with mpl.rc_context({**_STYLE, "svg.hashsalt": prefix}):
        figure = Figure(figsize=size, layout="constrained")
        draw(figure, narrow)
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        FigureCanvasSVG(figure).print_svg(out, metadata=nothing)
    return _for_page(out.getvalue(), prefix, kind, describes)


def _for_page(text: str, prefix: str, kind: str, describes: str) -> str:
    text = text[text.index("<svg") :]
    head, _, body = text.partition(">")
    box = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', head)
    width, height = (float(box[1]), float(box[2])) if box else (0.0, 0.0)
    body = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", body, flags=re.DOTALL)
    body = re.sub(r'\bid="([^"]+)"', rf'id="{prefix}-\1"', body)
    body = re.sub(r"url\(#([^)]+)\)", rf"url(#{prefix}-\1)", body)
    body = re.sub(r'xlink:href="#([^"]+)"', rf'href="#{prefix}-\1"', body)
    body = body.replace("xlink:href=", "href=")
    for color, variable in _VARIABLES.items():
        body = body.replace(color, f"var({variable})")
    body = "\n".join(line.strip() for line in body.splitlines() if line.strip())
    label = describes.replace("&", "&amp;").replace('"', "&quot;").replace("<", "&lt;")
    return (
        f'<svg class="chart {kind}" role="img" aria-label="{label}" viewBox="0 0 {width:g} {height:g}"'
        f' style="max-width:{width * 96 / 72:.0f}px">{body}'
    )
