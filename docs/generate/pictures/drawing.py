"""Boxes, words, lines and arrows as SVG text. Lengths are in the picture's own units, one to a pixel at its natural size."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

INK, QUIET, EDGE = "#263238", "#546e7a", "#37474f"
SOURCE, PRESSED, PLAIN, GOOD, FAINT = "#e3f2fd", "#ffe0b2", "#eceff1", "#e8f5e9", "#cfd8dc"
BLUE, ORANGE = "#1565c0", "#ef6c00"
_ARROW = (
    '<defs><marker id="a" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" orient="auto">'
    f'<path d="M0 0 10 5 0 10z" fill="{QUIET}"/></marker></defs>'
)


def picture(title: str, width: int, height: int, parts: Iterable[str]) -> str:
    """A whole file, with its title for those who do not see it."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="Helvetica, Arial, sans-serif" role="img">'
    )
    return "\n".join([head, f"<title>{escape(title)}</title>", _ARROW, *parts, "</svg>", ""])


def words(
    x: float, y: float, text: str, *, size: float = 12, at: str = "start", ink: str = QUIET, bold: bool = False
) -> str:
    """One line of text; ``at``: start, middle or end lies at x."""
    weight = ' font-weight="bold"' if bold else ""
    return (
        f'<text x="{_number(x)}" y="{_number(y)}" font-size="{_number(size)}" text-anchor="{at}" fill="{ink}"{weight}>'
        f"{escape(text)}</text>"
    )


def box(
    x: float,
    y: float,
    width: float,
    height: float,
    lines: Iterable[str],
    *,
    fill: str,
    size: float = 12,
    bold: bool = False,
) -> str:
    """A box with lines of text in its middle; ``bold``: the first of them."""
    lines = list(lines)
    shape = (
        f'<rect x="{_number(x)}" y="{_number(y)}" width="{_number(width)}" height="{_number(height)}" rx="6" '
        f'fill="{fill}" stroke="{EDGE}"/>'
    )
    first = y + height / 2 - 0.65 * size * (len(lines) - 1) + 0.35 * size
    text = (
        words(x + width / 2, first + 1.3 * size * i, line, size=size, at="middle", ink=INK, bold=bold and i == 0)
        for i, line in enumerate(lines)
    )
    return shape + "".join(text)


def frame(x: float, y: float, width: float, height: float) -> str:
    """A dashed border around what belongs together."""
    return (
        f'<rect x="{_number(x)}" y="{_number(y)}" width="{_number(width)}" height="{_number(height)}" rx="8" '
        'fill="none" stroke="#b0bec5" stroke-dasharray="6 4"/>'
    )


def line(x1: float, y1: float, x2: float, y2: float, *, ink: str = FAINT, width: float = 1) -> str:
    return (
        f'<line x1="{_number(x1)}" y1="{_number(y1)}" x2="{_number(x2)}" y2="{_number(y2)}" '
        f'stroke="{ink}" stroke-width="{_number(width)}"/>'
    )


def arrow(x1: float, y1: float, x2: float, y2: float, *, dashed: bool = False) -> str:
    """From the first point to the second."""
    dash = ' stroke-dasharray="5 4"' if dashed else ""
    return (
        f'<line x1="{_number(x1)}" y1="{_number(y1)}" x2="{_number(x2)}" y2="{_number(y2)}" '
        f'stroke="{QUIET}" stroke-width="1.6"{dash} marker-end="url(#a)"/>'
    )


def dot(x: float, y: float, radius: float) -> str:
    """A value of the source."""
    return f'<circle cx="{_number(x)}" cy="{_number(y)}" r="{_number(radius)}" fill="{BLUE}"/>'


def tile(x: float, y: float, side: float) -> str:
    """A value on the grid, around its middle."""
    return (
        f'<rect x="{_number(x - side / 2)}" y="{_number(y - side / 2)}" width="{_number(side)}" height="{_number(side)}" '
        f'fill="{ORANGE}" fill-opacity=".75"/>'
    )


def _number(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")
