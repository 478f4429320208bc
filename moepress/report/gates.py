"""Every gate that an output has to pass, in one list: what was found, what was asked, and the verdict.

    convert     the recipe's limits, judged on moepress_report.json
    verify      every tensor re-read
    validate    the gates of the server: loads, memory, speed, sanity
    evaluate    the gates of the tasks

A command that was not run leaves one line "not run" with the command. What could not be measured is never passed.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from moepress.report.output import PressedOutput

Verdict = Literal["passed", "failed", "not judged", "not run"]


@dataclass(frozen=True)
class Gate:
    """One gate. `reason`: the finding in words, or the command that would judge it."""

    command: str
    name: str
    verdict: Verdict
    reason: str
    numbers: tuple[tuple[str, str], ...] = ()


def gates(output: PressedOutput) -> list[Gate]:
    """All gates, in the order of the commands."""
    out, source = shlex.quote(str(output.folder)), shlex.quote(output.source_words)
    found = [*_limits(output), _verify(output)]
    found += _of_command(output, "validate", "loads, fits, is faster", f"moepress validate {out} --baseline {source}")
    found += _of_command(output, "evaluate", "tasks", f"moepress evaluate {out} --baseline {source}")
    return found


def overall(found: list[Gate]) -> Verdict:
    """The worst of all gates: failed, then not run, then not judged, then passed."""
    verdicts = {gate.verdict for gate in found}
    order: tuple[Verdict, ...] = ("failed", "not run", "not judged")
    return next((verdict for verdict in order if verdict in verdicts), "passed")


def figure_text(figure: Any) -> str:
    """A figure of a result (``{"value", "unit", "min", "max"}``) in words; anything else as it is."""
    if figure is None:
        return "–"
    if not isinstance(figure, Mapping) or "value" not in figure:
        return f"{figure:,.4g}" if isinstance(figure, float) else str(figure)
    unit = "" if figure.get("unit") in (None, "1") else figure["unit"]
    text = _number(figure["value"])
    if figure.get("min") is not None and figure.get("max") is not None and figure["min"] != figure["max"]:
        text += f" ({_number(figure['min'])} to {_number(figure['max'])})"
    return f"{text} {unit}".strip()


def _number(value: float) -> str:
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"


def _limits(output: PressedOutput) -> list[Gate]:
    limits, quantized = output.recipe.limits, output.report["quantized"]
    if not quantized["weights"]:
        return [Gate("convert", "limits", "not judged", "nothing was quantized: experts are carried as they were")]
    worst, bound = quantized["relative_error_max"], limits.max_relative_error
    name = quantized["worst"][0]["weight"] if quantized["worst"] else "?"
    share = len(output.report["fallbacks"]) / quantized["weights"]
    return [
        Gate(
            "convert",
            "largest relative error",
            "passed" if worst <= bound else "failed",
            name,
            (("found", f"{worst:.4f}"), ("at most", f"{bound:g}")),
        ),
        Gate(
            "convert",
            "share of fallbacks",
            "passed" if share <= limits.max_fallback_share else "failed",
            f"{len(output.report['fallbacks']):,} of {quantized['weights']:,} quantized weights",
            (("found", f"{share:.2%}"), ("at most", f"{limits.max_fallback_share:.2%}")),
        ),
    ]


def _verify(output: PressedOutput) -> Gate:
    name = "every tensor re-read"
    found = output.found("verify")
    if found is None:
        run = shlex.join(["moepress", "verify", str(output.folder), "--source", output.source_words])
        return Gate("verify", name, "not run", run)
    if found["problems"]:
        count = len(found["problems"])
        what = f"{count:,} problem{'s' if count != 1 else ''}, first: {found['problems'][0]}"
        return Gate("verify", name, "failed", what)
    if found.get("source") is None:
        return Gate("verify", name, "not judged", "consistent in itself; not compared with its source")
    return Gate("verify", name, "passed", f"{found['tensors']:,} tensors agree with {found['source']}")


def _of_command(output: PressedOutput, command: str, name: str, run: str) -> list[Gate]:
    found = output.found(command)
    if found is None:
        return [Gate(command, name, "not run", run)]
    judged = [
        Gate(
            command,
            str(gate["gate"]),
            gate["verdict"],
            str(gate.get("reason") or ""),
            tuple(
                (label, figure_text(value))
                for label, value in (gate.get("numbers") or {}).items()
                # what was not judged without a GPU is a stand-in's speed or memory: no figure for a page or a card
                if label == "bound" or not (found.get("smoke") and gate["verdict"] == "not judged")
            ),
        )
        for gate in found.get("gates") or ()
    ]
    if judged:
        return judged
    verdicts: dict[str, Verdict] = {"pass": "passed", "fail": "failed"}
    return [Gate(command, name, verdicts.get(output.results[command]["verdict"], "not judged"), "")]
