"""Calibration: the source and the quantized model run side by side, and what each layer takes from both."""

from __future__ import annotations

from pictures.drawing import BLUE, ORANGE, PLAIN, PRESSED, SOURCE, arrow, box, picture, words

UPPER, LOWER = 10, 160
"""Tops of the two runs."""


def _layer(x: float, name: str) -> list[str]:
    """Attention and router, then experts, of both runs; statistics between them."""
    parts = []
    for top, fill, how in ((UPPER, SOURCE, "as published"), (LOWER, PRESSED, "INT4, just made")):
        parts += [
            box(x, top, 120, 56, ["attention", "router"], fill=fill),
            box(x + 150, top, 120, 56, ["experts", how], fill=fill),
            arrow(x + 120, top + 28, x + 150, top + 28),
        ]
    parts += [
        box(x + 50, 92, 130, 42, ["H = (2/n) Σ x̃ x̃ᵀ", "C = Σ (x − x̃) x̃ᵀ"], fill=PLAIN, size=11),
        arrow(x + 135, UPPER + 30, x + 120, 90, dashed=True),
        arrow(x + 135, LOWER + 26, x + 120, 136, dashed=True),
        arrow(x + 180, 118, x + 205, LOWER - 2),
        words(x + 135, 240, name, at="middle"),
    ]
    return parts


def svg() -> str:
    parts = [words(10, 42, "source run x", ink=BLUE), words(10, 192, "quantized run x̃", ink=ORANGE)]
    parts += [arrow(95, UPPER + 28, 128, UPPER + 28), arrow(105, LOWER + 28, 128, LOWER + 28)]
    parts += _layer(130, "layer l") + _layer(475, "layer l + 1")
    parts += [arrow(400, top + 28, 473, top + 28) for top in (UPPER, LOWER)]
    held = "one layer’s dense part, one block of experts with its Hessians, the activations of the calibration text."
    parts.append(words(10, 268, f"In memory: {held}"))
    title = "Calibration runs the source and the quantized model side by side, layer by layer"
    return picture(title, 760, 280, parts)
