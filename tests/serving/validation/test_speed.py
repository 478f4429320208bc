"""The order of visits, what becomes of bench_serving's figures, and verdicts. The benchmark itself: test_validate.py."""

from __future__ import annotations

import pytest

from moepress.serving.validation.figures import Figure
from moepress.serving.validation.speed import DecodeRow, Rates, Speed, Workload, _rates, visits


def test_neither_side_is_always_first_and_two_visits_share_a_boot() -> None:
    assert visits(["candidate", "baseline"], 1) == ("candidate", "baseline")
    assert visits(["candidate", "baseline"], 3) == (
        *("candidate", "baseline", "baseline", "candidate", "candidate", "baseline"),
    )
    assert visits(["candidate"], 2) == ("candidate", "candidate")


def run(tpot: float) -> dict[str, float]:
    return {
        "median_tpot_ms": tpot,
        "output_throughput": 700.0,
        "median_ttft_ms": 40.0,
        "p95_ttft_ms": 90.0,
        "median_itl_ms": tpot,
        "p95_itl_ms": 2 * tpot,
    }


def test_decode_speed_is_that_of_all_requests_at_once() -> None:
    rates = _rates([run(10.0), run(12.5), run(20.0)], 8)
    assert rates.per_request == Figure(80.0, "tok/s", (100.0, 80.0, 50.0))
    assert rates.decode == Figure(640.0, "tok/s", (800.0, 640.0, 400.0))
    assert rates.inter_token_p95.value == 25.0
    assert rates.decode.as_json() == {
        "value": 640.0,
        "unit": "tok/s",
        "min": 400.0,
        "max": 800.0,
        "runs": [800, 640, 400],
    }


@pytest.mark.parametrize(
    ("mine", "theirs", "verdict"),
    [
        ([10.0, 10.0], [15.0, 14.0], "faster"),
        ([15.0, 14.0], [10.0, 10.0], "slower"),
        ([10.0, 10.0], [15.0, 9.0], "no difference"),
        ([10.0, 10.0], [10.1, 10.1], "no difference"),
    ],
)
def test_a_verdict_needs_every_round_on_one_side(mine: list[float], theirs: list[float], verdict: str) -> None:
    row = DecodeRow(64, _rates([run(t) for t in mine], 64), _rates([run(t) for t in theirs], 64))
    assert row.as_json()["verdict"] == verdict
    speed = Speed(Workload(), ("candidate", "baseline"), (row,), {"candidate": Figure.of([1.0], "tok/s")})
    assert any("slower than the baseline at 64" in line for line in speed.remarks()) == (verdict == "slower")


def test_rounds_are_compared_with_each_other() -> None:
    """The second round met a busy machine, on both sides: the ratio does not see it."""
    row = DecodeRow(1, _rates([run(10.0), run(30.0)], 1), _rates([run(20.0), run(60.0)], 1))
    assert row.ratio is not None
    assert row.ratio.runs == (2.0, 2.0)


def test_without_a_baseline_there_is_no_ratio() -> None:
    rates: Rates = _rates([run(10.0)], 1)
    assert DecodeRow(1, rates, None).as_json()["ratio"] is None


@pytest.mark.parametrize("context", [128, 1024, 5000, 200_000, None])
def test_requests_fit_the_models_context(context: int | None) -> None:
    fitted = Workload().fitted(context)
    if context is None or context >= 4104:
        assert fitted == Workload()
    else:
        assert fitted.prompt_tokens + fitted.output_tokens < context
        assert fitted.prefill_tokens < context
        assert fitted.output_tokens >= 8
