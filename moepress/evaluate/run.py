"""The order of events: all of the source's answers, then all of the candidate's, then what they say.

One model after the other, because a machine that serves a 700 GB checkpoint seldom serves two. A server is started at the
first question without a kept answer: a run that was stopped during the candidate's answers does not start the source
again, and one that has all answers starts nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from moepress.evaluate.answers import Contestant
from moepress.evaluate.endpoint import RequestRefused
from moepress.evaluate.measurements import Findings, Measurement, NothingToCompare
from moepress.evaluate.rows import Row
from moepress.evaluate.significance import Verdict, worst
from moepress.recipe import Evaluation

SCHEMA = 1
_GATE: dict[Verdict, str] = {"ACCEPT": "passed", "REGRESSION": "failed", "NOT ENOUGH DATA": "not judged"}


@dataclass(frozen=True)
class Evaluated:
    """What was found.

    Attributes:
        rows: judged figures.
        sections: ``fidelity``, ``drift``, ``tool_calls``, ``tasks``: details, where measured.
        skipped: measurement -> why.
        sides: facts about source and candidate.
    """

    rows: list[Row]
    sections: dict[str, dict[str, Any]]
    skipped: dict[str, str]
    sides: dict[str, dict[str, Any]]
    bounds: Evaluation
    requests: dict[str, int]

    @property
    def verdict(self) -> Verdict:
        return worst([row.verdict for row in self.rows])

    @property
    def counts(self) -> dict[str, int]:
        """Rows by verdict."""
        return dict(Counter(row.verdict for row in self.rows))

    def gates(self) -> list[dict[str, Any]]:
        """The rows by task, in the form in which the report shows the gates of every command."""
        found = []
        for task in dict.fromkeys(row.task for row in self.rows):
            rows = [row for row in self.rows if row.task == task]
            verdict = worst([row.verdict for row in rows])
            decisive = [row for row in rows if row.verdict == verdict]
            reason = "; ".join(f"{row.metric}: {row.why}" for row in decisive[:2])
            more = f"; and {len(decisive) - 2} more" if len(decisive) > 2 else ""
            numbers = {row.metric: {"value": row.candidate, "unit": _unit(row)} for row in rows}
            found.append({"gate": task, "verdict": _GATE[verdict], "reason": reason + more, "numbers": numbers})
        return found

    def as_json(self) -> dict[str, Any]:
        """The shape in the package's docstring, but for ``next``."""
        return {
            "schema": SCHEMA,
            "verdict": self.verdict,
            **self.sides,
            "bounds": self.bounds.model_dump(mode="json"),
            "rows": [row.as_json() for row in self.rows],
            "gates": self.gates(),
            **{name: self.sections.get(name) for name in ("fidelity", "drift", "tool_calls", "tasks")},
            "skipped": [{"task": task, "why": why} for task, why in self.skipped.items()],
            "requests": self.requests,
        }


def evaluate(
    source: Contestant,
    candidate: Contestant,
    measurements: Sequence[Measurement],
    bounds: Evaluation,
    *,
    skip_refused: bool,
    finished: Callable[[Contestant], None],
) -> Evaluated:
    """Asks both, compares, judges.

    Args:
        skip_refused: a server whose API lacks what a measurement needs costs that measurement (for those that nobody
            asked for by name), not the run.
        finished: called when a model will not be asked any more: its server may stop.

    Raises:
        EvaluateError: a server that does not answer, a sandbox that does not hold; what was answered is kept.
    """
    skipped: dict[str, str] = {}
    heard: dict[str, dict[str, Any]] = {}
    for who in (source, candidate):
        heard[who.role] = {}
        for measurement in measurements:
            if measurement.name in skipped:
                continue
            try:
                heard[who.role][measurement.name] = measurement.ask(who)
            except RequestRefused as error:
                if not skip_refused:
                    raise
                skipped[measurement.name] = f"the {who.role}'s server refused: {error.what}"
        finished(who)

    found: list[Findings] = []
    for measurement in measurements:
        if measurement.name not in skipped:
            said = heard["source"][measurement.name], heard["candidate"][measurement.name]
            try:
                found.append(measurement.compare(*said, bounds))
            except NothingToCompare as error:
                if not skip_refused:
                    raise
                skipped[measurement.name] = error.what
    sections: dict[str, dict[str, Any]] = {}
    for findings in found:
        sections.setdefault(findings.section, {}).update(findings.details)
    return Evaluated(
        [row for findings in found for row in findings.rows],
        sections,
        skipped,
        {who.role: _side(who) for who in (source, candidate)},
        bounds,
        {"asked": source.asked + candidate.asked, "from_cache": source.kept + candidate.kept},
    )


def _unit(row: Row) -> str:
    if row.metric.startswith("KL"):
        return "nats/token"
    return "share" if row.better == "higher" else ""


def _side(who: Contestant) -> dict[str, Any]:
    reached = who.reached
    return {
        "name": who.name,
        "server": who.software,
        "url": None if reached is None else reached.url,
        "model": None if reached is None else reached.model,
        "identity": who.identity,
    }
