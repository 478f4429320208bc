"""KL from the top k: a lower bound that becomes exact, against torch on whole distributions."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moepress.errors import EvaluateError
from moepress.evaluate import rows
from moepress.evaluate.next_tokens import Scores, _read_openai, _read_sglang, compare_scores, position_divergence
from moepress.recipe import Evaluation

BOUNDS = Evaluation()  # type: ignore[call-arg]


def top(log_probs: torch.Tensor, k: int) -> dict[int, float]:
    best = log_probs.topk(k)
    return dict(zip(best.indices.tolist(), best.values.tolist(), strict=True))


@given(seed=st.integers(0, 10_000), k=st.integers(1, 40), noise=st.floats(0.01, 3))
@settings(max_examples=150, deadline=None)
def test_never_above_the_kl_and_exact_with_all_tokens(seed: int, k: int, noise: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(40, generator=generator, dtype=torch.float64)
    p = logits.log_softmax(-1)
    q = (logits + noise * torch.randn(40, generator=generator, dtype=torch.float64)).log_softmax(-1)
    kl = float((p.exp() * (p - q)).sum())
    bound, unseen = position_divergence(top(p, k), top(q, k))
    assert -1e-4 <= bound <= kl + 1e-3 * (1 + kl)
    assert 0 <= unseen <= 1
    whole, rest = position_divergence(top(p, 40), top(q, 40))
    assert whole == pytest.approx(kl, abs=1e-6)
    assert rest == pytest.approx(0, abs=1e-6)


def scores(distributions: torch.Tensor, k: int) -> Scores:
    """distributions [n, vocabulary] log-probabilities; the text is token 0 all along."""
    return Scores([top(row, k) for row in distributions], distributions[:, 0].double().numpy())


def windows(noise: float, k: int, count: int = 20) -> tuple[list[Scores], list[Scores], float]:
    generator = torch.Generator().manual_seed(1)
    logits = 2 * torch.randn(count, 30, 50, generator=generator, dtype=torch.float64)
    p = logits.log_softmax(-1)
    q = (logits + noise * torch.randn(logits.shape, generator=generator, dtype=torch.float64)).log_softmax(-1)
    kl = float((p.exp() * (p - q)).sum(-1).mean())
    return [scores(w, k) for w in p], [scores(w, k) for w in q], kl


def test_a_domain_is_summed_over_its_tokens() -> None:
    p, q, kl = windows(0.1, k=50)
    found = compare_scores(p, q, top_k=50, confidence=0.95)
    facts = found.as_json()
    assert facts["kl"] == pytest.approx(kl, rel=1e-6)
    assert facts["kl_is"] == "exact"
    assert found.kl.low < kl < found.kl.high
    expected = np.exp(-np.concatenate([w.text_logprobs for w in q]).mean())
    assert facts["candidate_perplexity"] == pytest.approx(expected)
    assert facts["tokens"] == 600


def test_a_lower_bound_that_is_blind_to_much_is_never_accepted() -> None:
    p, q, kl = windows(0.05, k=3)
    found = compare_scores(p, q, top_k=3, confidence=0.95)
    assert found.kl.value < kl
    assert found.unseen_mass > rows.MOST_UNSEEN
    row = next(row for row in rows.domain_rows("prose", found, BOUNDS) if row.metric == "KL, prose")
    assert row.verdict == "NOT ENOUGH DATA"
    assert "--top-k above 3" in row.why


def test_noise_of_many_nats_is_a_regression_even_as_a_lower_bound() -> None:
    p, q, _ = windows(1.5, k=10)
    row = rows.domain_rows("prose", compare_scores(p, q, top_k=10, confidence=0.95), BOUNDS)[0]
    assert (row.metric, row.verdict) == ("KL, prose", "REGRESSION")


def test_openai_answers_are_read_up_to_the_prompts_end() -> None:
    """The generated token at the end is not of the prompt; a text that is no UTF-8 tells nobody which token it is."""
    answer = {
        "choices": [
            {
                "logprobs": {
                    "token_logprobs": [None, -1.0, -2.0],
                    "top_logprobs": [None, {"b": -2.0, "a": -1.0, "\N{REPLACEMENT CHARACTER}": -3.0}, {"z": 0.0}],
                }
            }
        ]
    }
    found = _read_openai(answer, 2)
    assert found.text_logprobs.tolist() == [-1.0]
    assert found.top == [{"a": -1.0, "b": -2.0}]
    assert next(iter(found.top[0])) == "a"


@pytest.mark.parametrize("answer", [{}, {"choices": [{"logprobs": None}]}, {"choices": [{"logprobs": {}}]}])
def test_a_server_that_tells_no_probabilities(answer: dict) -> None:
    with pytest.raises(EvaluateError, match="no log-probabilities"):
        _read_openai(answer, 2)
    with pytest.raises(EvaluateError, match="no log-probabilities"):
        _read_sglang(answer, 2)
