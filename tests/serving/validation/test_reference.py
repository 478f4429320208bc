"""The coarse KL and the sorting of tokens into equal, near tie and wrong, on distributions whose answer is known."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from moepress.serving.client import Generation
from moepress.serving.validation.reference import NEAR_TIE, _Sums, coarse_kl


def test_kl_over_all_tokens_is_the_true_one_and_over_some_a_lower_bound() -> None:
    generator = torch.Generator().manual_seed(0)
    p = torch.randn(500, generator=generator).mul(3).log_softmax(-1)
    q = (p + 0.1 * torch.randn(500, generator=generator)).log_softmax(-1)
    true = float(functional.kl_div(q, p, reduction="sum", log_target=True))
    everything = torch.arange(500)
    assert coarse_kl(p, everything, q) == pytest.approx(true, rel=1e-4)
    before = 0.0
    for count in (5, 50, 250):
        best = q.topk(count).indices
        some = coarse_kl(p, best, q[best])
        assert before < some < true
        before = some


def test_kl_of_a_distribution_to_itself_is_zero() -> None:
    p = torch.randn(300, generator=torch.Generator().manual_seed(1)).log_softmax(-1)
    best = p.topk(20).indices
    assert coarse_kl(p, best, p[best]) == pytest.approx(0, abs=1e-6)


def scores(*best: tuple[int, float]) -> torch.Tensor:
    """Log-probabilities over ten tokens with these logits, the others far below."""
    row = torch.full((10,), -20.0)
    for token, logit in best:
        row[token] = logit
    return row.log_softmax(-1)


def test_equal_near_and_wrong_tokens() -> None:
    rows = torch.stack(
        [
            scores((1, 3.0), (2, 0.0)),  # predicts the prompt's second token
            scores((3, 2.0), (4, 1.0)),  # 3 is served: equal
            scores((5, 2.0), (6, 2.0 - NEAR_TIE / 2)),  # 6 is served: nearly tied
            scores((7, 2.0), (8, 0.5)),  # 8 is served: wrong
            scores((0, 1.0), (9, 0.0)),
        ]
    )
    top = tuple({int(i): float(rows[row][i]) for i in rows[row].topk(3).indices} for row in range(4))
    answer = Generation((3, 6, 8), (), (), "", "length", top=top[1:], prompt_top=top[:1])
    sums = _Sums()
    sums.add(5, 2, answer, rows, None)
    found = sums.finished(1)
    agreement = found.agreement
    assert (agreement.tokens, agreement.equal, agreement.near_ties, agreement.wrong) == (3, 1, 1, 1)
    assert (agreement.first_equal, agreement.prompts) == (1, 1)
    worst = agreement.worst
    assert worst is not None
    assert (worst.prompt, worst.position, worst.served, worst.reference) == (5, 2, 8, 7)
    assert worst.gap == pytest.approx(1.5)
    assert found.positions == 4
    assert found.kl_serving.value == pytest.approx(0, abs=1e-6)
    assert (found.kl_source, found.kl_pressing) == (None, None)


def test_serving_pressing_and_both_are_told_apart() -> None:
    generator = torch.Generator().manual_seed(2)
    source = torch.randn(2, 50, generator=generator).log_softmax(-1)
    pressed = (source + 0.3 * torch.randn(2, 50, generator=generator)).log_softmax(-1)
    served = {i: float(pressed[0][i]) for i in range(50)}  # the server adds nothing
    sums = _Sums()
    sums.add(0, 1, Generation((7,), (), (), "", "length", top=(served,)), pressed, source)
    found = sums.finished(1)
    assert found.kl_serving.value == pytest.approx(0, abs=1e-6)
    assert found.kl_source is not None
    assert found.kl_pressing is not None
    assert found.kl_source.value == pytest.approx(found.kl_pressing.value, rel=1e-3)
    assert found.kl_source.value > 0.01
