"""Judged figures: one row each, with its interval, its bound and its verdict.

    share          of right answers       difference ≥ −max_drop             Tango's interval, McNemar beside it
    mean           of scores              difference ≥ −max_drop             paired bootstrap over prompts
    perplexity     of a text              rise ≤ max_perplexity_rise         paired bootstrap over windows or documents
    KL, top-1      of next tokens         ≤ max_kl, ≥ min_top1_agreement     bootstrap over windows
    drift          of greedy texts        excess rate ≤ max_drift_rate       paired bootstrap over prompts

Two things stand above the interval: answers that were cut off, and (KL) probability that the server did not tell.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from moepress.evaluate.next_tokens import DomainDivergence
from moepress.evaluate.significance import (
    Interval,
    McNemar,
    Verdict,
    bootstrap_interval,
    judge,
    mcnemar,
    no_event_limit,
    tango_interval,
)
from moepress.recipe import Evaluation

MOST_UNSEEN = 0.05
"""A lower bound of KL is not accepted when the source puts more than this share of probability where it is blind."""


@dataclass(frozen=True)
class Row:
    """One judged figure. See the package's docstring for the fields' meaning."""

    task: str
    metric: str
    of: str
    samples: int
    source: float | None
    candidate: float
    interval: Interval
    bound: float
    better: Literal["higher", "lower"]
    verdict: Verdict
    why: str
    domain: str | None = None
    test: McNemar | None = None
    truncated: tuple[int, int] = (0, 0)

    def as_json(self) -> dict[str, Any]:
        return {
            "task": self.task,
            "metric": self.metric,
            "domain": self.domain,
            "of": self.of,
            "samples": self.samples,
            "source": self.source,
            "candidate": self.candidate,
            "recovery": self.candidate / self.source if self.better == "higher" and self.source else None,
            "difference": self.interval.value,
            "interval": [self.interval.low, self.interval.high],
            "method": self.interval.method,
            "bound": self.bound,
            "better": self.better,
            "mcnemar": None
            if self.test is None
            else {
                "only_source": self.test.only_source,
                "only_candidate": self.test.only_candidate,
                "p": self.test.p,
            },
            "truncated": {"source": self.truncated[0], "candidate": self.truncated[1]},
            "verdict": self.verdict,
            "why": self.why,
        }


def share_row(
    task: str,
    metric: str,
    source: Sequence[bool],
    candidate: Sequence[bool],
    bounds: Evaluation,
    *,
    max_drop: float | None = None,
    truncated: tuple[int, int] = (0, 0),
    of: str = "prompts",
) -> Row:
    """Right or wrong on the same prompts. truncated: answers cut off, of source and candidate."""
    n, test = len(source), mcnemar(source, candidate)
    interval = tango_interval(test.only_source, test.only_candidate, n, confidence=bounds.confidence)
    row = _dropping(
        task, metric, of, n, sum(source) / n, sum(candidate) / n, interval, bounds, max_drop, truncated, test
    )
    if not any(source) and truncated[0] <= bounds.max_truncated_share * n:  # equal zeros would pass any bound
        return replace(row, verdict="NOT ENOUGH DATA", why=f"the source has none of {n} right: nothing could be lost")
    return row


def mean_row(
    task: str,
    metric: str,
    source: Sequence[float],
    candidate: Sequence[float],
    bounds: Evaluation,
    *,
    truncated: tuple[int, int] = (0, 0),
) -> Row:
    """Scores that are not just right or wrong."""
    units = np.array([(1.0, s, c) for s, c in zip(source, candidate, strict=True)])
    interval = bootstrap_interval(
        units, lambda sums: (sums[..., 2] - sums[..., 1]) / sums[..., 0], confidence=bounds.confidence, of="prompts"
    )
    means = units.mean(0)
    return _dropping(
        task, metric, "prompts", len(units), float(means[1]), float(means[2]), interval, bounds, None, truncated, None
    )


def perplexity_row(task: str, metric: str, units: NDArray[np.float64], bounds: Evaluation) -> Row:
    """Perplexity. units [documents, 3] float64: weight (words, tokens), log-likelihood of source and of candidate."""
    interval = bootstrap_interval(
        units,
        lambda sums: np.expm1((sums[..., 1] - sums[..., 2]) / sums[..., 0]),
        confidence=bounds.confidence,
        of="documents",
    )
    sums = units.sum(0)
    verdict, why = judge(
        interval,
        bounds.max_perplexity_rise,
        better="lower",
        samples=len(units),
        needed=bounds.min_windows,
        of="documents",
    )
    source, candidate = (float(np.exp(-sums[i] / sums[0])) for i in (1, 2))
    return Row(
        task,
        metric,
        "documents",
        len(units),
        source,
        candidate,
        interval,
        bounds.max_perplexity_rise,
        "lower",
        verdict,
        why,
    )


def domain_rows(domain: str, found: DomainDivergence, bounds: Evaluation) -> list[Row]:
    """KL, perplexity and top-1 agreement of one domain."""
    facts = found.as_json()
    made = []
    for metric, interval, bound, better in (
        ("KL", found.kl, bounds.max_kl, "lower"),
        ("perplexity", found.rise, bounds.max_perplexity_rise, "lower"),
        ("same top token", found.top1, bounds.min_top1_agreement, "higher"),
    ):
        side: Literal["higher", "lower"] = "lower" if better == "lower" else "higher"
        verdict, why = judge(
            interval, bound, better=side, samples=len(found.units), needed=bounds.min_windows, of="windows"
        )
        if metric == "KL" and verdict == "ACCEPT" and found.unseen_mass > MOST_UNSEEN:
            verdict = "NOT ENOUGH DATA"
            why = f"a lower bound, blind to {found.unseen_mass:.1%} of the source's probability: --top-k above {found.top_k}"
        values = (facts["source_perplexity"], facts["candidate_perplexity"]) if metric == "perplexity" else None
        made.append(
            Row(
                "fidelity",
                f"{metric}, {domain}",
                "windows",
                len(found.units),
                values[0] if values else None,
                values[1] if values else interval.value,
                interval,
                bound,
                side,
                verdict,
                why,
                domain,
            )
        )
    return made


def drift_row(watched: NDArray[np.float64], bounds: Evaluation) -> Row:
    """First divergences a token, beyond the source's own. watched: [prompts, 4], as `drift.Drift` has it; some tokens, > 0."""
    sums, n = watched.sum(0), len(watched)
    rates = sums[0] / sums[1], sums[2] / sums[3]
    if sums[0] or sums[2]:
        interval = bootstrap_interval(
            watched, lambda s: s[..., 0] / s[..., 1] - s[..., 2] / s[..., 3], confidence=bounds.confidence, of="prompts"
        )
    else:  # resampling nothing gives nothing, and would be sure of it
        candidate, noise = (
            no_event_limit(float(tokens), confidence=bounds.confidence) for tokens in (sums[1], sums[3])
        )
        interval = Interval(0.0, -noise, candidate, "exact Poisson limit of no event")
    verdict, why = judge(interval, bounds.max_drift_rate, better="lower", samples=n, needed=bounds.min_windows)
    return Row(
        "drift",
        "divergence rate",
        "prompts",
        n,
        float(rates[1]),
        float(rates[0]),
        interval,
        bounds.max_drift_rate,
        "lower",
        verdict,
        why,
    )


def _dropping(
    task: str,
    metric: str,
    of: str,
    n: int,
    source: float,
    candidate: float,
    interval: Interval,
    bounds: Evaluation,
    max_drop: float | None,
    truncated: tuple[int, int],
    test: McNemar | None,
) -> Row:
    bound = -(bounds.max_drop if max_drop is None else max_drop)
    verdict, why = judge(interval, bound, better="higher", samples=n, needed=bounds.min_samples, of=of)
    row = Row(task, metric, of, n, source, candidate, interval, bound, "higher", verdict, why, None, test, truncated)
    return _cut_off(row, bounds.max_truncated_share)


def _cut_off(row: Row, most: float) -> Row:
    """Many answers cut off: of the candidate alone, it runs on where the source stopped; of both, the limit is too low."""
    ours, theirs = (count / row.samples for count in row.truncated)
    if ours > most:
        why = f"{ours:.1%} of the source's answers were cut off ({most:.1%} may be): --max-tokens is too low to judge"
        return replace(row, verdict="NOT ENOUGH DATA", why=why)
    if theirs > most:
        why = f"{theirs:.1%} of the answers were cut off, {ours:.1%} of the source's: it runs on ({most:.1%} may be)"
        return replace(row, verdict="REGRESSION", why=why)
    return row
