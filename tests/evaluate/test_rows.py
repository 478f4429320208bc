"""Rows: a verdict needs samples, something to lose, and answers that were not cut off."""

from __future__ import annotations

import numpy as np
import pytest

from moepress.evaluate import rows
from moepress.evaluate.run import Evaluated
from moepress.recipe import Evaluation

BOUNDS = Evaluation()  # type: ignore[call-arg]


def answers(right: int, of: int) -> list[bool]:
    return [number < right for number in range(of)]


@pytest.mark.parametrize(
    ("source", "candidate", "verdict"),
    [
        (answers(900, 1000), answers(900, 1000), "ACCEPT"),
        (answers(900, 1000), answers(905, 1000), "ACCEPT"),
        (answers(900, 1000), answers(880, 1000), "NOT ENOUGH DATA"),
        (answers(900, 1000), answers(830, 1000), "REGRESSION"),
        (answers(50, 60), answers(10, 60), "NOT ENOUGH DATA"),
        (answers(0, 1000), answers(0, 1000), "NOT ENOUGH DATA"),
    ],
)
def test_shares(source: list[bool], candidate: list[bool], verdict: str) -> None:
    row = rows.share_row("gsm8k", "exact_match", source, candidate, BOUNDS)
    assert row.verdict == verdict, row.why
    facts = row.as_json()
    assert facts["difference"] == pytest.approx(facts["candidate"] - facts["source"])
    assert facts["interval"][0] <= facts["difference"] <= facts["interval"][1]
    if any(source):
        assert facts["recovery"] == pytest.approx(sum(candidate) / sum(source))


@pytest.mark.parametrize(
    ("cut", "verdict", "why"),
    [
        ((0, 0), "ACCEPT", "is within"),
        ((50, 50), "ACCEPT", "is within"),
        ((51, 51), "NOT ENOUGH DATA", "--max-tokens is too low"),
        ((51, 0), "NOT ENOUGH DATA", "--max-tokens is too low"),
        ((3, 80), "REGRESSION", "it runs on"),
    ],
)
def test_answers_that_were_cut_off(cut: tuple[int, int], verdict: str, why: str) -> None:
    """Even equal scores are not accepted when they rest on answers that never ended."""
    row = rows.share_row("gsm8k", "exact_match", answers(900, 1000), answers(900, 1000), BOUNDS, truncated=cut)
    assert row.verdict == verdict
    assert why in row.why


def test_answers_that_were_all_cut_off_say_so_and_not_that_the_source_can_do_nothing() -> None:
    row = rows.share_row("calls", "right", answers(0, 1000), answers(0, 1000), BOUNDS, truncated=(1000, 1000))
    assert (row.verdict, "--max-tokens is too low" in row.why) == ("NOT ENOUGH DATA", True)


def greedy(rate: float, prompts: int, *, tokens: int = 256, noise: float = 0.0, seed: int = 4) -> np.ndarray:
    """What `Drift.watched` holds of texts that part at a constant rate."""
    rng = np.random.default_rng(seed)
    columns: list[np.ndarray] = []
    for value in (rate, noise):
        at = rng.geometric(value, prompts) if value else np.full(prompts, tokens + 1)
        columns += [(at <= tokens).astype(float), np.minimum(at, tokens).astype(float)]
    return np.stack(columns, axis=1)


@pytest.mark.parametrize(
    ("watched", "verdict"),
    [
        (greedy(0.005, 64), "ACCEPT"),
        (greedy(0.0, 64), "ACCEPT"),
        (greedy(0.1, 64), "REGRESSION"),
        (greedy(0.1, 400, noise=0.1), "ACCEPT"),  # parts from itself as fast
        (greedy(0.12, 64, noise=0.1), "NOT ENOUGH DATA"),
        (greedy(0.02, 64), "NOT ENOUGH DATA"),
        (greedy(0.1, 15), "NOT ENOUGH DATA"),
        (greedy(0.0, 64, tokens=1), "NOT ENOUGH DATA"),  # nothing parted, and hardly anything was watched
    ],
)
def test_drift_is_judged_beyond_the_sources_own(watched: np.ndarray, verdict: str) -> None:
    row = rows.drift_row(watched, BOUNDS)
    assert row.verdict == verdict, row.why
    assert row.interval.low <= row.interval.value <= row.interval.high
    assert row.as_json()["recovery"] is None


@pytest.mark.parametrize("tokens", [64, 256, 1024])
def test_the_divergence_rate_does_not_depend_on_the_length(tokens: int) -> None:
    row = rows.drift_row(greedy(0.01, 2000, tokens=tokens), BOUNDS)
    assert row.candidate == pytest.approx(0.01, rel=0.08)
    assert row.interval.low < 0.01 < row.interval.high


def test_scores_between_right_and_wrong() -> None:
    rng = np.random.default_rng(3)
    source = rng.random(400)
    same = rows.mean_row("rouge", "f1", source, source + rng.normal(0, 0.01, 400), BOUNDS)
    worse = rows.mean_row("rouge", "f1", source, source - 0.1 + rng.normal(0, 0.01, 400), BOUNDS)
    assert (same.verdict, worse.verdict) == ("ACCEPT", "REGRESSION")
    assert worse.as_json()["mcnemar"] is None


def test_perplexity_of_documents() -> None:
    rng = np.random.default_rng(3)
    weight = rng.integers(50, 400, 30).astype(float)
    log = -2.3 * weight
    for rise, verdict in ((0.005, "ACCEPT"), (0.10, "REGRESSION")):
        units = np.stack([weight, log, log - weight * np.log1p(rise) * rng.uniform(0.9, 1.1, 30)], 1)
        row = rows.perplexity_row("wikitext", "word_perplexity", units, BOUNDS)
        assert row.verdict == verdict
        assert row.source == pytest.approx(np.exp(2.3))
        assert row.interval.value == pytest.approx(rise, rel=0.1)
        assert row.as_json()["recovery"] is None


def test_gates_are_the_rows_by_task() -> None:
    good = rows.share_row("mmlu", "acc", answers(900, 1000), answers(900, 1000), BOUNDS)
    bad = rows.share_row("gsm8k", "exact_match", answers(900, 1000), answers(700, 1000), BOUNDS)
    result = Evaluated([good, bad], {}, {}, {}, BOUNDS, {})
    assert result.verdict == "REGRESSION"
    gates = {gate["gate"]: gate for gate in result.gates()}
    assert (gates["mmlu"]["verdict"], gates["gsm8k"]["verdict"]) == ("passed", "failed")
    assert gates["gsm8k"]["numbers"] == {"exact_match": {"value": 0.7, "unit": "share"}}
    assert "beyond -0.02" in gates["gsm8k"]["reason"]
