from __future__ import annotations

import random

import pytest

from moepress.serving.validation.loops import distinct_share, loops, study

TEXT = random.Random(0).sample(range(5000), 200)


@pytest.mark.parametrize("period", [1, 2, 7, 40, 64])
def test_an_end_that_repeats_itself_is_a_loop(period: int) -> None:
    repeats = max(3, -(-32 // period)) + 1
    assert loops([*TEXT, *(TEXT[:period] * repeats)])


@pytest.mark.parametrize(
    "tokens",
    [TEXT, TEXT + TEXT[:20] * 2, [1] * 20, [], [*TEXT[:5] * 20, *TEXT], list(range(100)) * 3],
    ids=["text", "said twice", "short", "nothing", "a loop that ended", "a period beyond 64"],
)
def test_what_is_no_loop(tokens: list[int]) -> None:
    assert not loops(tokens)


def test_answers_of_a_side() -> None:
    found = study([TEXT, [3] * 100])
    assert (found.answers, found.tokens, found.looping, found.share) == (2, 300, 1, 0.5)
    assert found.distinct == pytest.approx((1 + 1 / 97) / 2)
    assert distinct_share([1, 2]) == 1
