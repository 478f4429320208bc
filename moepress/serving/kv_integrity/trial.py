"""The same checkpoint served with the plug-in and without it, in turn: is it active, is it silent, what does it cost?

    guarded, plain, plain, guarded, …     one boot serves two visits; every visit is the whole workload

Active means that every rank says so itself (/server_info), in the mode that was asked for, with forwards checked. A
violation under a benchmark's load is a failure too: either the plug-in is wrong or the server is. Cost is a ratio per
concurrency, round by round, of output tokens a second and of the 95th percentiles of latency.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from moepress.errors import ServingError
from moepress.serving.kv_integrity import LOG_VARIABLE, MODE_VARIABLE, SITE, STATUS_KEY
from moepress.serving.validation.figures import Figure, ratio
from moepress.serving.validation.gates import Failed, Gate, Outcome, Passed
from moepress.serving.validation.sides import Host, Side, Stage
from moepress.serving.validation.speed import Speed, SpeedRun, visits

GATE = "kv_integrity"


@dataclass(frozen=True)
class Overhead:
    """At one concurrency, guarded over plain.

    Attributes:
        throughput: ratio of output tokens a second; below 1 is a cost.
        inter_token_p95, ttft_p95: ratios of the 95th percentiles; above 1 is a cost.
    """

    concurrency: int
    throughput: Figure
    inter_token_p95: Figure
    ttft_p95: Figure

    def as_json(self) -> dict[str, Any]:
        return {name: value if name == "concurrency" else value.as_json() for name, value in self.__dict__.items()}


@dataclass(frozen=True)
class Trial:
    """What was found.

    Attributes:
        mode: that was asked for.
        ranks: the status of every rank after the last visit, as the plug-in reports it.
        speed: guarded (its `candidate`) and plain (its `baseline`).
    """

    mode: str
    ranks: tuple[dict[str, Any], ...]
    speed: Speed

    @property
    def checks(self) -> int:
        """Forwards checked, on the rank that checked least."""
        return min((int(rank["checks"]) for rank in self.ranks), default=0)

    @property
    def overheads(self) -> tuple[Overhead, ...]:
        """One for each concurrency."""
        found = []
        for row in self.speed.decode:
            if row.baseline is not None:
                mine, theirs = row.candidate, row.baseline
                found.append(
                    Overhead(
                        row.concurrency,
                        ratio(mine.output, theirs.output),
                        ratio(mine.inter_token_p95, theirs.inter_token_p95),
                        ratio(mine.ttft_p95, theirs.ttft_p95),
                    )
                )
        return tuple(found)

    @property
    def problems(self) -> tuple[str, ...]:
        """Why the gate fails; empty when it passes."""
        found = []
        for number, rank in enumerate(self.ranks):
            if not rank.get("active") or rank.get("mode") != self.mode:
                found.append(f"rank {number} is not active in mode {self.mode}: {rank}")
            elif not rank.get("checks"):
                found.append(f"rank {number} has checked nothing")
            elif rank.get("violations"):
                kinds = ", ".join(f"{count} × {kind}" for kind, count in sorted(rank["violations"].items()))
                found.append(f"rank {number} found violations under load: {kinds}")
        return tuple(found)

    def as_json(self) -> dict[str, Any]:
        return {
            "mode": self.mode,
            "ranks": list(self.ranks),
            "overhead": [row.as_json() for row in self.overheads],
            "order": ["guarded" if name == "candidate" else "plain" for name in self.speed.order],
            "problems": list(self.problems),
        }


def run_trial(
    side: Side,
    host: Host,
    *,
    mode: str,
    speed: SpeedRun,
    rounds: int,
    work: Path,
    together: bool,
    timeout_s: float,
    tell: Callable[[str], None],
) -> Trial:
    """Boot both, measure in turn, and ask the guarded one after each visit.

    Args:
        side: how the checkpoint is launched; its own boots are left alone.
        host: where.
        mode: observe, enforce or strict.
        speed: measures; nothing else may have visited it.
        rounds: visits of each.
        work: folder for logs and the plug-in's lines.
        together: both up at once.
        timeout_s: for one boot.
        tell: called with a line about what happens now.

    Raises:
        ServingError: one does not come up, does not answer, or has no plug-in in it.
    """
    plain = replace(side, name="baseline", boots=[], info={})
    guarded = replace(
        side,
        name="candidate",
        boots=[],
        info={},
        plugins=(*side.plugins, SITE),
        variables={**side.variables, MODE_VARIABLE: mode, LOG_VARIABLE: str(work / "kv-violations.jsonl")},
    )
    ranks: tuple[dict[str, Any], ...] = ()
    with Stage([guarded, plain], host, work=work, together=together, timeout_s=timeout_s, tell=tell) as stage:
        for name in visits(("candidate", "baseline"), rounds):
            stage.client(name)
            tell(f"measuring {'with' if name == 'candidate' else 'without'} KV integrity")
            speed.visit(stage, name)
            if name == "candidate":
                ranks = read_status(stage.client(name).server_info())
    return Trial(mode, ranks, speed.result())


def read_status(server_info: dict[str, Any]) -> tuple[dict[str, Any], ...]:
    """The plug-in's status of every rank, from /server_info.

    Raises:
        ServingError: the server does not mention it: it runs without the plug-in.
    """
    found = []
    for state in server_info.get("internal_states") or ():
        if STATUS_KEY not in state:
            raise ServingError(
                "the server says nothing about KV integrity: the plug-in is not in it",
                hint=f"its folder must be on PYTHONPATH and {MODE_VARIABLE} set where the server starts",
            )
        found += state[STATUS_KEY]["ranks"]
    return tuple(found)


def judge(trial: Trial, *, smoke: bool) -> Gate:
    """Passed when active and silent on every rank. What it costs is a figure without a bound, and none where `smoke`."""
    costs = {f"throughput at {row.concurrency}": row.throughput for row in trial.overheads}
    costs |= {f"p95 between tokens at {row.concurrency}": row.inter_token_p95 for row in trial.overheads}
    if trial.problems:
        outcome: Outcome = Failed("; ".join(trial.problems), costs)
    else:
        worst = min((row.throughput.value for row in trial.overheads), default=1.0)
        late = max((row.inter_token_p95.value for row in trial.overheads), default=1.0)
        cost = "" if smoke else f"; throughput × {worst:.3f}, p95 between tokens × {late:.3f} at worst"
        outcome = Passed(
            f"{trial.mode} on {len(trial.ranks)} rank{'s' if len(trial.ranks) != 1 else ''}, {trial.checks:,} forwards "
            f"checked, no violation{cost}",
            costs,
        )
    return Gate(GATE, outcome)
