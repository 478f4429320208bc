"""Verdicts of a trial, and its ratios, from figures; the servers behind them are in test_server and the validate command."""

from __future__ import annotations

from typing import Any

import pytest

from moepress.errors import ServingError
from moepress.serving.kv_integrity import STATUS_KEY
from moepress.serving.kv_integrity.trial import Trial, judge, read_status
from moepress.serving.validation.figures import Figure
from moepress.serving.validation.gates import Failed, Passed
from moepress.serving.validation.speed import DecodeRow, Rates, Speed, Workload


def rates(output: list[float], late: list[float]) -> Rates:
    same, ms = Figure.of([1.0, 1.0], "tok/s"), Figure.of(late, "ms")
    return Rates(same, same, Figure.of(output, "tok/s"), ms, ms, ms, ms)


SPEED = Speed(
    Workload(concurrencies=(8,), rounds=2),
    ("candidate", "baseline", "baseline", "candidate"),
    (DecodeRow(8, rates([99.0, 198.0], [10.1, 20.4]), rates([100.0, 200.0], [10.0, 20.0])),),
    {},
)


def rank(**changed: Any) -> dict[str, Any]:
    return {"active": True, "mode": "enforce", "checks": 50, "violations": {}, **changed}


def test_ratios_are_taken_round_by_round() -> None:
    (row,) = Trial("enforce", (rank(),), SPEED).overheads
    assert row.throughput.runs == (0.99, 0.99)
    assert row.inter_token_p95.runs == pytest.approx((1.01, 1.02))


def test_active_and_silent_on_every_rank_passes_and_names_the_cost() -> None:
    outcome = judge(Trial("enforce", (rank(), rank(checks=48)), SPEED), smoke=False).outcome
    assert isinstance(outcome, Passed)
    assert outcome.reason.startswith("enforce on 2 ranks, 48 forwards checked, no violation; throughput × 0.990")
    assert outcome.numbers["throughput at 8"].value == 0.99


def test_without_a_gpu_the_reason_names_no_cost() -> None:
    outcome = judge(Trial("enforce", (rank(),), SPEED), smoke=True).outcome
    assert outcome.reason == "enforce on 1 rank, 50 forwards checked, no violation"


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"active": False}, "rank 1 is not active"),
        ({"mode": "observe"}, "rank 1 is not active in mode enforce"),
        ({"checks": 0}, "rank 1 has checked nothing"),
        ({"violations": {"page_mismatch": 2, "double_free": 1}}, "1 × double_free, 2 × page_mismatch"),
    ],
)
def test_one_rank_that_is_not_as_it_should_be_fails(changed: dict[str, Any], said: str) -> None:
    outcome = judge(Trial("enforce", (rank(), rank(**changed)), SPEED), smoke=False).outcome
    assert isinstance(outcome, Failed)
    assert said in outcome.reason


def test_the_status_of_all_ranks_of_all_replicas_is_read() -> None:
    info = {"internal_states": [{STATUS_KEY: {"ranks": [rank(), rank()]}}, {STATUS_KEY: {"ranks": [rank(checks=1)]}}]}
    assert [status["checks"] for status in read_status(info)] == [50, 50, 1]


def test_a_server_without_the_plugin_is_an_error() -> None:
    with pytest.raises(ServingError, match="the plug-in is not in it"):
        read_status({"internal_states": [{"tp_size": 1}]})
