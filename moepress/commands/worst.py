"""The end of ``moepress convert``: the experts that lost most, and every tensor that fell back to a plainer method.

tokens   calibration tokens that the router sent to the expert
blend λ  share of the layer's Hessian in the expert's own (1: the expert saw nothing of its own)
damping  fraction of the Hessian's mean diagonal that was added so that it could be factored
loss     what the rounding adds to the matrix's output, twice the mean square over the calibration tokens; gate and up, which
         are one matrix to GPTQ, share theirs
"""

from __future__ import annotations

import re
from typing import Any

from rich.table import Table

from moepress.commands.console import table

SHOWN = 10
_EXPERT = re.compile(r"layers\.(\d+)\..*experts\.(\d+)\.(\w+)\.weight$")


def worst_experts(report: dict[str, Any]) -> Table | None:
    """The least exact of the quantized weights; None where nothing was quantized."""
    entries = report["quantized"]["worst"][:SHOWN]
    if not entries:
        return None
    calibrated = any("tokens" in entry for entry in entries)
    notes = ("tokens", "blend λ", "damping", "loss") if calibrated else ()
    rows = table("least exact", right=("error", "SQNR", *notes))
    for entry in entries:
        db = "" if entry["sqnr_db"] is None else f"{entry['sqnr_db']:.1f} dB"
        cells = [f"{entry['relative_error']:.4f}", db]
        if calibrated:
            cells += [
                _figure(entry.get("tokens"), ",.0f"),
                _figure(entry.get("shrinkage"), ".2f"),
                _figure(entry.get("dampening_frac"), "g"),
                _figure(entry.get("loss"), "#.3g"),
            ]
        rows.add_row(short_name(entry["weight"]), *cells)
    return rows


def fallbacks(report: dict[str, Any]) -> Table | None:
    """Every fallback with its reason; None when there was none."""
    if not report["fallbacks"]:
        return None
    rows = table("fallback", "why")
    for name, reason in report["fallbacks"].items():
        rows.add_row(short_name(name), reason)
    return rows


def short_name(name: str) -> str:
    """``layer 3, expert 17, down_proj`` for a routed expert's weight; any other name as it is."""
    found = _EXPERT.search(name)
    return f"layer {found[1]}, expert {found[2]}, {found[3]}" if found else name


def _figure(value: Any, form: str) -> str:
    return "" if value is None else format(float(value), form)
