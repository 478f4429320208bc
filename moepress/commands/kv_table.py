"""KV scales for people: per layer what was measured, what was chosen, and why."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from moepress.commands.console import marked, stderr, stdout, table

MOST_LAYERS = 16
"""So many layers are shown whole; of more, those whose scale is not 1.0, and the rest is counted."""


def show_kv(kv: Mapping[str, Any]) -> None:
    """Prints the ``kv_cache`` part of a report."""
    if kv["emission"] == "none":
        stdout.print(f"\nKV scales: none ({kv['reason']})", soft_wrap=True)
        return
    layers: Mapping[str, Mapping[str, Any]] = kv["layers"]
    changed = {index: layer for index, layer in layers.items() if layer["emission"] != "none"}
    shown = dict(layers) if len(layers) <= MOST_LAYERS else dict(list(changed.items())[:MOST_LAYERS])
    stdout.print(
        f"\nKV scales: {kv['emission']} in {len(changed)} of {len(layers)} layers ({kv['reason']})", soft_wrap=True
    )
    rows = table("layer", "cached", "emission", right=("amax", "clipped", "tiny", "scale", "error at 1.0", "error now"))
    for index, layer in shown.items():
        # taken over from another output they come in the alphabet's order
        ordered = sorted(layer["scale"].items(), key=lambda item: item[0] in ("k_pe", "v"))
        for place, (cached, scale) in enumerate(ordered):
            first = place == 0
            rows.add_row(
                index if first else "",
                cached,
                layer["emission"] if first else "",
                f"{layer['amax'][cached]:.3g}",
                f"{layer['clipped_at_one'][cached]:.2%}",
                f"{layer['below_normal_at_one'][cached]:.2%}",
                _scale(scale),
                f"{layer['attention_error_at_one']:.4f}" if first else "",
                f"{layer['attention_error']:.4f}" if first else "",
            )
    if shown:
        stdout.print(rows)
        stdout.print(
            "  clipped, tiny: shares beyond 448 and below e4m3's normal range at 1.0; error: of attention's output"
        )
    if len(shown) < len(layers):
        stdout.print(f"  … and {len(layers) - len(shown)} more layers in moepress_report.json")
    for cached, why in kv["left"].items():
        stdout.print(f"  {cached} could not be folded: {why}", soft_wrap=True)
    for sentence in kv["suspicious"]:
        stderr.print(
            marked("[yellow]warning:[/yellow] KV scales look wrong: {sentence}", sentence=sentence), soft_wrap=True
        )


def _scale(scale: float) -> str:
    """A power of two as one, anything else in figures."""
    mantissa, exponent = math.frexp(scale)
    return f"2^{exponent - 1}" if mantissa == 0.5 and scale != 1 else f"{scale:.4g}"
