"""Does a long answer end in a loop? The failure that a mean KL does not show: one bad layer, and text repeats for ever.

A sequence loops when its end has a period p: x[i] = x[i − p] for the last max(3·p, 32) tokens, for some p ≤ 64. Small and
base models loop in greedy decoding when nothing is wrong with them, so the count means something next to the baseline's.

Of few answers, one or two more loops mean nothing either. How often chance alone gives as many or more, when the n answers
of both sides loop alike, is Fisher's exact test: with K loops in n + m answers, of which k are in our n,

    p = Σ_{i ≥ k} C(K, i) · C(n + m − K, n − i) / C(n + m, n)                   0 : 1 of 4 → 0.50,   0 : 4 of 8 → 0.04
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import comb
from typing import Any

from moepress.serving.validation.figures import Figure

LONGEST_PERIOD = 64
REPEATS = 3
LEAST = 32
_NGRAM = 4


@dataclass(frozen=True)
class LongAnswers:
    """Long greedy answers of one side.

    Attributes:
        answers: how many. tokens: in all of them.
        looping: how many end in a loop.
        distinct: share of their runs of four tokens that are different from each other, 0 to 1.
    """

    answers: int
    tokens: int
    looping: int
    distinct: float

    @property
    def share(self) -> float:
        """Of the answers that end in a loop."""
        return self.looping / max(1, self.answers)

    def as_json(self) -> dict[str, Any]:
        return {
            "answers": self.answers,
            "tokens": self.tokens,
            "looping": self.looping,
            "distinct": Figure(self.distinct, "1").as_json(),
        }


def loops(tokens: Sequence[int]) -> bool:
    """Whether the end repeats itself."""
    for period in range(1, LONGEST_PERIOD + 1):
        wanted = max(REPEATS * period, LEAST)
        if len(tokens) < wanted + period:
            continue
        if all(tokens[-i] == tokens[-i - period] for i in range(1, wanted + 1)):
            return True
    return False


def chance_of_more(mine: LongAnswers, theirs: LongAnswers) -> float:
    """Probability that so many of the loops, or more, fall to ``mine`` when both sides loop alike (one-sided, exact)."""
    looping, total = mine.looping + theirs.looping, mine.answers + theirs.answers
    ways = [
        comb(looping, i) * comb(total - looping, mine.answers - i)
        for i in range(mine.looping, min(looping, mine.answers) + 1)
    ]
    return sum(ways) / comb(total, mine.answers)


def distinct_share(tokens: Sequence[int]) -> float:
    """Different runs of four tokens over all of them; 1 for a sequence too short to have any."""
    runs = [tuple(tokens[i : i + _NGRAM]) for i in range(len(tokens) - _NGRAM + 1)]
    return len(set(runs)) / len(runs) if runs else 1.0


def study(answers: Sequence[Sequence[int]]) -> LongAnswers:
    """All answers of a side."""
    shares = [distinct_share(answer) for answer in answers]
    return LongAnswers(
        len(answers), sum(map(len, answers)), sum(map(loops, answers)), sum(shares) / len(shares) if shares else 1.0
    )
