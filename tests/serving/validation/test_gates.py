"""What is passed, failed and not judged, from measurements that are given."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import pytest
import scipy.stats

from moepress.recipe import Gates
from moepress.serving.load_proof import LoadProof, Problem
from moepress.serving.validation.figures import Figure
from moepress.serving.validation.gates import (
    Failed,
    Gate,
    NotJudged,
    Passed,
    judge_loads,
    judge_memory,
    judge_sanity,
    judge_speed,
    overall,
)
from moepress.serving.validation.headroom import Headroom, SideMemory
from moepress.serving.validation.loads import Loads
from moepress.serving.validation.loops import LongAnswers, chance_of_more
from moepress.serving.validation.reference import Agreement, Compared
from moepress.serving.validation.sanity import Sanity
from moepress.serving.validation.speed import DecodeRow, Rates, Speed, Workload

BOUNDS = Gates(max_gib_per_gpu=53, min_decode_speedup={1: 1.5}, max_kl=0.05)
PROOF = LoadProof(tensors=100, used=90, parameters=40, excused={"MTP layer; no draft model was served": 10})
LOST = Problem("tensor that went into no parameter", ("model.layers.1.mlp.experts.3.up_proj.weight_scale",))


def verdicts(gates: list[Gate]) -> dict[str, str]:
    return {gate.name: gate.outcome.verdict for gate in gates}


def test_the_whole_passes_only_when_every_gate_did() -> None:
    passed, failed, not_judged = Gate("a", Passed("x")), Gate("b", Failed("y")), Gate("c", NotJudged("z"))
    assert overall([passed, passed]) == "pass"
    assert overall([passed, not_judged]) == "not judged"
    assert overall([passed, not_judged, failed]) == "fail"
    assert overall([]) == "not judged"


@pytest.mark.parametrize(
    ("loads", "verdict"),
    [
        (Loads(100, (), PROOF), "passed"),
        (Loads(100, (LOST,), PROOF), "failed"),
        (Loads(100, (), replace(PROOF, problems=(LOST,))), "failed"),
        (Loads(100, (), PROOF, log=(LOST,)), "failed"),
        (Loads(100, (), PROOF, unchanged=(LOST,)), "failed"),
        (Loads(100, (), None, "the server was started by somebody else"), "not judged"),
        (None, "not judged"),
    ],
)
def test_loads(loads: Loads | None, verdict: str) -> None:
    (gate,) = judge_loads(BOUNDS, loads, "not asked")
    assert gate.outcome.verdict == verdict
    if verdict == "failed":
        assert "up_proj.weight_scale" in gate.outcome.reason
    assert judge_loads(Gates(loads=False), loads, "") == []


def memory(weights: float) -> Headroom:
    gib = Figure(weights, "GiB")
    side = SideMemory(gib, {}, gib, Figure(1000, "tokens"), gib, "bfloat16", {"routed experts": 1}, 0, 100, None)
    return Headroom(8, 8, side, None)


def test_memory_is_judged_on_the_gpus_the_bound_is_for() -> None:
    assert verdicts(judge_memory(BOUNDS, memory(52.4), "", smoke=False)) == {"max_gib_per_gpu": "passed"}
    assert verdicts(judge_memory(BOUNDS, memory(53.1), "", smoke=False)) == {"max_gib_per_gpu": "failed"}
    assert verdicts(judge_memory(BOUNDS, memory(0.1), "", smoke=True)) == {"max_gib_per_gpu": "not judged"}
    on_four = replace(memory(52.4), tensor_parallel=4)
    (gate,) = judge_memory(BOUNDS, on_four, "", smoke=False)
    assert gate.outcome.reason == "the bound is for 8 GPUs, this ran on 4"
    assert judge_memory(Gates(), memory(99), "", smoke=False) == []


def speed(ratio: float, *, baseline: bool = True) -> Speed:
    def rates(value: float) -> Rates:
        decode, other = Figure.of([value, value], "tok/s"), Figure(1.0, "ms")
        return Rates(decode, decode, decode, other, other, other, other)

    row = DecodeRow(1, rates(100 * ratio), rates(100.0) if baseline else None)
    return Speed(Workload(), ("candidate",), (row,), {"candidate": Figure.of([1.0], "tok/s")})


def test_speed_is_never_passed_without_a_gpu() -> None:
    assert verdicts(judge_speed(BOUNDS, speed(1.8), "", smoke=False)) == {"min_decode_speedup at 1": "passed"}
    assert verdicts(judge_speed(BOUNDS, speed(1.4), "", smoke=False)) == {"min_decode_speedup at 1": "failed"}
    (gate,) = judge_speed(BOUNDS, speed(1.8), "", smoke=True)
    assert gate.outcome.verdict == "not judged"
    assert gate.outcome.reason.startswith("smoke only")


def test_speed_needs_a_baseline_and_the_bounds_concurrency() -> None:
    (gate,) = judge_speed(BOUNDS, speed(1.8, baseline=False), "", smoke=False)
    assert gate.outcome == NotJudged("there is no baseline to be faster than")
    (gate,) = judge_speed(Gates(min_decode_speedup={64: 1.1}), speed(1.8), "", smoke=False)
    assert gate.outcome == NotJudged("64 concurrent requests were not measured")


FINE = Compared(
    Agreement(tokens=256, equal=250, near_ties=6, wrong=0, first_equal=16, prompts=16, worst=None),
    positions=900,
    top_mass=0.97,
    kl_serving=Figure(0.001, "nats/token"),
    kl_source=Figure(0.012, "nats/token"),
    kl_pressing=Figure(0.011, "nats/token"),
)
STRAIGHT = LongAnswers(answers=8, tokens=4000, looping=0, distinct=0.9)
SANE = Sanity(FINE, "", 256, 16, (), STRAIGHT, STRAIGHT, ())
GOOD = {
    "max_kl": "passed",
    "max_serving_kl": "passed",
    "min_agreement": "passed",
    "deterministic": "passed",
    "max_loops": "passed",
}


@pytest.mark.parametrize(
    ("change", "differs"),
    [
        ({}, {}),
        ({"compared": replace(FINE, kl_source=Figure(0.06, "nats/token"))}, {"max_kl": "failed"}),
        ({"compared": replace(FINE, kl_source=None)}, {"max_kl": "not judged"}),
        ({"compared": replace(FINE, kl_serving=Figure(0.03, "nats/token"))}, {"max_serving_kl": "failed"}),
        (
            {"compared": replace(FINE, agreement=replace(FINE.agreement, equal=240, wrong=10))},
            {"min_agreement": "failed"},
        ),
        ({"differing": (3,)}, {"deterministic": "failed"}),
        ({"long": replace(STRAIGHT, looping=4)}, {"max_loops": "failed"}),
        ({"long": replace(STRAIGHT, looping=3)}, {"max_loops": "not judged"}),
        ({"long": replace(STRAIGHT, answers=20, looping=1)}, {"max_loops": "failed"}),
        ({"long": replace(STRAIGHT, looping=2), "long_baseline": replace(STRAIGHT, looping=2)}, {}),
        ({"long": replace(STRAIGHT, looping=2), "long_baseline": None}, {"max_loops": "not judged"}),
        (
            {"compared": None, "no_reference": "no reference: unknown family"},
            {"max_kl": "not judged", "max_serving_kl": "not judged", "min_agreement": "not judged"},
        ),
    ],
)
def test_answers(change: dict[str, object], differs: dict[str, str]) -> None:
    found = judge_sanity(BOUNDS, replace(SANE, **change), "")  # type: ignore[arg-type]
    assert verdicts(found) == GOOD | differs


def test_more_loops_of_few_answers_are_said_with_how_often_chance_gives_them() -> None:
    few = replace(STRAIGHT, answers=4)
    gates = judge_sanity(BOUNDS, replace(SANE, long=replace(few, looping=1), long_baseline=few), "")
    (outcome,) = [gate.outcome for gate in gates if gate.name == "max_loops"]
    assert outcome.verdict == "not judged"
    assert outcome.reason.startswith("1 of 4 long answers end in a loop, 0 of the baseline's; ")
    assert {name: figure.value for name, figure in outcome.numbers.items()} == {
        "looping": 0.25,
        "baseline": 0.0,
        "chance": 0.5,
    }


@pytest.mark.parametrize("mine", [(4, 1), (8, 5), (7, 0), (19, 3)])
@pytest.mark.parametrize("theirs", [(4, 0), (8, 2), (5, 5)])
def test_the_chance_of_more_loops_is_fishers(mine: tuple[int, int], theirs: tuple[int, int]) -> None:
    """Counted: every way of dealing the answers of both sides to the two."""
    (n, k), (m, j) = mine, theirs
    deck = [1] * (k + j) + [0] * (n + m - k - j)
    deals = [sum(deck[i] for i in hand) for hand in combinations(range(n + m), n)] if n + m < 16 else None
    chance = chance_of_more(replace(STRAIGHT, answers=n, looping=k), replace(STRAIGHT, answers=m, looping=j))
    if deals is not None:
        assert chance == pytest.approx(sum(deal >= k for deal in deals) / len(deals))
    assert chance == pytest.approx(scipy.stats.hypergeom.sf(k - 1, n + m, k + j, n))


def test_nothing_measured_is_nothing_passed() -> None:
    found = [
        *judge_loads(BOUNDS, None, "nothing was booted"),
        *judge_memory(BOUNDS, None, "nothing was booted", smoke=False),
        *judge_speed(BOUNDS, None, "nothing was booted", smoke=False),
        *judge_sanity(BOUNDS, None, "nothing was booted"),
    ]
    assert set(verdicts(found).values()) == {"not judged"}
    assert {gate.outcome.reason for gate in found} == {"nothing was booted"}
