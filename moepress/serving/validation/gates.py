"""Measurements and the recipe's bounds in, verdicts out. Nothing is measured here.

    passed      it was measured, and the bound holds
    failed      it was measured, and the bound does not hold: the reason names what, the numbers say by how much
    not judged  it was not measured, or not where it would mean something (speed without a GPU); never taken for passed

Only what the recipe bounds is a gate: a figure without a bound is in the result, and decides nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from moepress.recipe import Gates
from moepress.serving.validation.figures import Figure
from moepress.serving.validation.headroom import Headroom
from moepress.serving.validation.loads import Loads
from moepress.serving.validation.loops import chance_of_more
from moepress.serving.validation.sanity import Sanity
from moepress.serving.validation.speed import Speed

ENOUGH_ANSWERS = 20
"""Long answers from which the recipe's bound on loops holds as it stands."""

CHANCE = 0.05
"""Below that many answers, more loops than the baseline's fail only where chance gives as many less often than this."""


@dataclass(frozen=True)
class Passed:
    """Measured, and as it should be."""

    reason: str
    numbers: dict[str, Figure] = field(default_factory=dict)
    verdict = "passed"


@dataclass(frozen=True)
class Failed:
    """Measured, and not as it should be."""

    reason: str
    numbers: dict[str, Figure] = field(default_factory=dict)
    verdict = "failed"


@dataclass(frozen=True)
class NotJudged:
    """Not measured, or measured where it says nothing."""

    reason: str
    numbers: dict[str, Figure] = field(default_factory=dict)
    verdict = "not judged"


Outcome = Passed | Failed | NotJudged


@dataclass(frozen=True)
class Gate:
    """One bound of the recipe and what became of it. `name` as in the recipe's `gates` section, or one part of it."""

    name: str
    outcome: Outcome

    def as_json(self) -> dict[str, Any]:
        numbers = {name: figure.as_json() for name, figure in self.outcome.numbers.items()}
        return {
            "gate": self.name,
            "verdict": self.outcome.verdict,
            "reason": self.outcome.reason,
            "numbers": numbers,
        }


def overall(gates: Sequence[Gate]) -> str:
    """``fail`` when a gate failed, ``pass`` when every gate passed, else ``not judged``."""
    verdicts = {gate.outcome.verdict for gate in gates}
    if "failed" in verdicts:
        return "fail"
    return "pass" if verdicts == {"passed"} else "not judged"


def judge_loads(bounds: Gates, loads: Loads | None, absent: str) -> list[Gate]:
    """`absent`: why there is no measurement, where there is none. Likewise below."""
    if not bounds.loads:
        return []
    if loads is None:
        return [Gate("loads", NotJudged(absent))]
    numbers = {"tensors": Figure(loads.tensors, "tensors")}
    problems = loads.problems
    if problems:
        more = f" (and {len(problems) - 1} more kinds of problem)" if len(problems) > 1 else ""
        return [Gate("loads", Failed(f"{problems[0]}{more}", numbers))]
    if loads.after is None:
        return [Gate("loads", NotJudged(f"the headers are right; {loads.not_proven}", numbers))]
    numbers["in the server"] = Figure(loads.after.parameters, "parameters")
    kept_out = sum(loads.after.excused.values())
    excused = f", {kept_out:,} rightly left out" if kept_out else ""
    return [Gate("loads", Passed(f"{loads.after.used:,} of {loads.tensors:,} tensors loaded{excused}", numbers))]


def judge_memory(bounds: Gates, memory: Headroom | None, absent: str, *, smoke: bool) -> list[Gate]:
    """`smoke`: there is no GPU whose memory could be full."""
    if bounds.max_gib_per_gpu is None:
        return []
    limit = Figure(bounds.max_gib_per_gpu, "GiB")
    if memory is not None and smoke:
        return [Gate("max_gib_per_gpu", NotJudged("no GPU here", {"bound": limit}))]
    if memory is None or memory.candidate.weights is None:
        return [Gate("max_gib_per_gpu", NotJudged(absent or "the server does not say what its weights take"))]
    held = memory.candidate.weights
    numbers = {"weights per GPU": held, "bound": limit}
    if memory.tensor_parallel != memory.planned_parallel:
        planned = f"the bound is for {memory.planned_parallel} GPUs, this ran on {memory.tensor_parallel}"
        return [Gate("max_gib_per_gpu", NotJudged(planned, numbers))]
    text = f"{held.value:.2f} GiB of weights on a GPU, at most {limit.value:g} wanted"
    return [Gate("max_gib_per_gpu", Passed(text, numbers) if held.value <= limit.value else Failed(text, numbers))]


def judge_speed(bounds: Gates, speed: Speed | None, absent: str, *, smoke: bool) -> list[Gate]:
    """One gate for each concurrency that the recipe bounds."""
    gates = []
    for concurrency, wanted in sorted(bounds.min_decode_speedup.items()):
        name = f"min_decode_speedup at {concurrency}"
        row = next((row for row in speed.decode if row.concurrency == concurrency), None) if speed else None
        if row is None:
            why = absent if speed is None else f"{concurrency} concurrent requests were not measured"
            gates.append(Gate(name, NotJudged(why)))
            continue
        if row.ratio is None:
            gates.append(Gate(name, NotJudged("there is no baseline to be faster than")))
            continue
        numbers = {"ratio": row.ratio, "bound": Figure(wanted, "×"), "decode": row.candidate.decode}
        text = f"{row.ratio.value:.2f} × the baseline's decode speed at {concurrency}, at least {wanted:g} wanted"
        if smoke:
            outcome: Outcome = NotJudged("smoke only: no GPU, the kernels are stand-ins", numbers)
        else:
            outcome = Passed(text, numbers) if row.ratio.value >= wanted else Failed(text, numbers)
        gates.append(Gate(name, outcome))
    return gates


def judge_sanity(bounds: Gates, sanity: Sanity | None, absent: str) -> list[Gate]:
    """KL bounds, agreement with the reference, the same answer twice, loops."""
    gates = []
    for name, bound in (("max_kl", bounds.max_kl), ("max_serving_kl", bounds.max_serving_kl)):
        if bound is not None:
            gates.append(Gate(name, _divergence(name, bound, sanity, absent)))
    gates.append(Gate("min_agreement", _agreement(bounds.min_agreement, sanity, absent)))
    if bounds.deterministic:
        gates.append(Gate("deterministic", _repeats(sanity, absent)))
    gates.append(Gate("max_loops", _loops(bounds.max_loops, sanity, absent)))
    return gates


def _divergence(name: str, bound: float, sanity: Sanity | None, absent: str) -> Outcome:
    if sanity is None:
        return NotJudged(absent)
    compared = sanity.compared
    if compared is None:
        return NotJudged(sanity.no_reference)
    kl = compared.kl_source if name == "max_kl" else compared.kl_serving
    if kl is None:
        return NotJudged("there is no --baseline to be far from")
    text = f"{kl.value:.5f} nats a token, at most {bound:g} wanted"
    numbers = {"KL": kl, "bound": Figure(bound, "nats/token")}
    return Passed(text, numbers) if kl.value <= bound else Failed(text, numbers)


def _agreement(bound: float, sanity: Sanity | None, absent: str) -> Outcome:
    if sanity is None:
        return NotJudged(absent)
    if sanity.compared is None:
        return NotJudged(sanity.no_reference)
    agreement = sanity.compared.agreement
    share = Figure(1 - agreement.wrong / max(1, agreement.tokens), "1")
    text = (
        f"of {agreement.tokens} greedy tokens {agreement.equal} are the reference's, {agreement.near_ties} near-ties, "
        f"{agreement.wrong} others"
    )
    numbers = {"share": share, "bound": Figure(bound, "1")}
    return Passed(text, numbers) if share.value >= bound else Failed(text, numbers)


def _repeats(sanity: Sanity | None, absent: str) -> Outcome:
    if sanity is None:
        return NotJudged(absent)
    if sanity.differing:
        return Failed(f"{len(sanity.differing)} of {sanity.repeated} prompts gave other tokens the second time")
    return Passed(f"{sanity.repeated} prompts gave the same tokens twice")


def _loops(bound: float, sanity: Sanity | None, absent: str) -> Outcome:
    if sanity is None:
        return NotJudged(absent)
    mine, theirs = sanity.long, sanity.long_baseline
    numbers = {"looping": Figure(mine.share, "1")}
    if theirs is None:
        if mine.looping:
            return NotJudged(
                f"{mine.looping} of {mine.answers} long answers end in a loop; whether the source does too needs a baseline",
                numbers,
            )
        return Passed(f"none of {mine.answers} long answers ends in a loop", numbers)
    numbers["baseline"] = Figure(theirs.share, "1")
    text = f"{mine.looping} of {mine.answers} long answers end in a loop, {theirs.looping} of the baseline's"
    if mine.share - theirs.share <= bound:
        return Passed(text, numbers)
    chance = chance_of_more(mine, theirs)
    if mine.answers < ENOUGH_ANSWERS and chance > CHANCE:
        numbers["chance"] = Figure(chance, "1")
        return NotJudged(f"{text}; of so few, chance alone gives as many more {chance:.0%} of the time", numbers)
    return Failed(text, numbers)
