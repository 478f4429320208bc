"""Everything a validation found, as one value; its JSON is described in this package's docstring."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import Any

from moepress.serving.kv_integrity.trial import Trial
from moepress.serving.validation.figures import json_or_none
from moepress.serving.validation.gates import Gate, overall
from moepress.serving.validation.headroom import Headroom
from moepress.serving.validation.loads import Loads
from moepress.serving.validation.machine import Machine
from moepress.serving.validation.sanity import Sanity
from moepress.serving.validation.sides import Side
from moepress.serving.validation.speed import Speed

SCHEMA = 1


@dataclass(frozen=True)
class Validation:
    """What was asked, what was measured, what was decided.

    Attributes:
        smoke: no GPU: speed and memory figures show that measuring works, no more.
        remarks: what a reader should know beside the gates: a baseline that was lost, notes of the log.
    """

    output: str
    baseline: str | None
    recipe: str | None
    asked: tuple[str, ...]
    started: str
    seconds: float
    smoke: bool
    machine: Machine
    environment: dict[str, Any]
    candidate: Side
    baseline_side: Side | None
    loads: Loads | None
    memory: Headroom | None
    speed: Speed | None
    sanity: Sanity | None
    kv_integrity: Trial | None
    gates: tuple[Gate, ...]
    remarks: tuple[str, ...]

    @property
    def verdict(self) -> str:
        """``pass``, ``fail`` or ``not judged``."""
        return overall(self.gates)

    @property
    def next(self) -> str:
        """The command to run now."""
        failed = {gate.name for gate in self.gates if gate.outcome.verdict == "failed"}
        out, source = shlex.quote(str(self.output)), shlex.quote(str(self.baseline or "SRC"))
        if failed & {"loads"}:
            return f"moepress verify {out} --source {source}"
        if failed & {"max_kl", "min_agreement", "max_loops"}:
            return f"moepress fidelity {out} --source {source}"
        if any(name.startswith("max_gib") for name in failed):
            return f"moepress inspect {out}"
        if failed:
            return f"moepress validate {out} --baseline {source} --only speed,sanity --rounds 4"
        return f"moepress evaluate {out} --baseline {source}"

    def as_json(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "verdict": self.verdict,
            "output": self.output,
            "baseline": self.baseline,
            "recipe": self.recipe,
            "asked": list(self.asked),
            "started": self.started,
            "seconds": round(self.seconds, 1),
            "smoke": self.smoke,
            "machine": self.machine.as_json(),
            "environment": self.environment,
            "servers": {"candidate": self.candidate.as_json(), "baseline": json_or_none(self.baseline_side)},
            "loads": json_or_none(self.loads),
            "memory": json_or_none(self.memory),
            "speed": json_or_none(self.speed),
            "sanity": json_or_none(self.sanity),
            "kv_integrity": json_or_none(self.kv_integrity),
            "gates": [gate.as_json() for gate in self.gates],
            "remarks": list(self.remarks),
            "next": self.next,
        }
