"""How far the next-token distributions are apart, from what a server tells: the k most likely tokens at each position.

    p, q: source and candidate; A: tokens that both named; r = 1 − Σ_A p, s = 1 − Σ_A q: what is left

    KL ≥ Σ_A p·log(p/q) + r·log(r/s)          all other tokens taken as one: merging can only lose divergence
    top-1 = share of positions where both put the same token first
    perplexity ratio = exp(mean log p(text) − mean log q(text))               exact whatever k is

The first line is the exact KL when k covers the vocabulary, else a lower bound; r, the *unseen mass*, says how much of the
distribution it is blind to. SGLang's /generate gives any k; OpenAI's completions with ``echo`` gives 5 to 20, by token text
(texts that are no valid UTF-8 look alike there and are left out: they join the rest).

Tokens of a window are not independent, windows nearly are: intervals come from resampling windows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moepress.errors import EvaluateError
from moepress.evaluate.answers import Contestant
from moepress.evaluate.endpoint import Kind
from moepress.evaluate.significance import Interval, bootstrap_interval

EXACT_BELOW = 1e-5
"""Unseen mass up to this is rounding: the server named every token that matters to float32."""

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


@dataclass(frozen=True)
class Scores:
    """What one server said about one window of n tokens; position i is token i + 1, given those before.

    Attributes:
        top: per position, token (id or text) -> log-probability, the most likely first.
        text_logprobs: [n − 1] float64, of the window's own tokens.
    """

    top: list[dict[Any, float]]
    text_logprobs: NDArray[np.float64]


@dataclass(frozen=True)
class DomainDivergence:
    """One domain of text.

    Attributes:
        units: [windows, 6] float64: tokens, Σ KL, Σ agreed, Σ unseen mass, Σ log p and Σ log q of the text.
        kl, top1, rise: means with intervals; rise is the perplexity ratio − 1.
    """

    units: NDArray[np.float64]
    top_k: int
    kl: Interval
    top1: Interval
    rise: Interval

    @property
    def unseen_mass(self) -> float:
        """Mean source probability outside the tokens that both named."""
        return float(self.units[:, 3].sum() / self.units[:, 0].sum())

    @property
    def exact(self) -> bool:
        """KL is the KL, not a lower bound."""
        return self.unseen_mass <= EXACT_BELOW

    def as_json(self) -> dict[str, Any]:
        sums = self.units.sum(0)
        return {
            "tokens": int(sums[0]),
            "windows": len(self.units),
            "kl": self.kl.value,
            "kl_interval": [self.kl.low, self.kl.high],
            "kl_is": "exact" if self.exact else "lower bound",
            "top_k": self.top_k,
            "unseen_mass": self.unseen_mass,
            "top1_agreement": self.top1.value,
            "top1_interval": [self.top1.low, self.top1.high],
            "source_perplexity": float(np.exp(-sums[4] / sums[0])),
            "candidate_perplexity": float(np.exp(-sums[5] / sums[0])),
            "perplexity_rise": self.rise.value,
            "perplexity_rise_interval": [self.rise.low, self.rise.high],
        }


def ask_scores(who: Contestant, windows: Sequence[Sequence[int]], *, top_k: int, label: str) -> list[Scores]:
    """Has a server score windows of token ids.

    Raises:
        EvaluateError: it does not answer, or gives no log-probabilities of prompts.
    """
    path, bodies = _requests(who.kind, windows, top_k)
    read = _read_sglang if who.kind == "sglang" else _read_openai
    answers = who.ask_all(path, bodies, label=label)
    return [read(answer, len(window)) for answer, window in zip(answers, windows, strict=True)]


def _requests(kind: Kind, windows: Sequence[Sequence[int]], top_k: int) -> tuple[str, list[dict[str, Any]]]:
    if kind == "sglang":
        settings = {
            "sampling_params": {"temperature": 0, "max_new_tokens": 1},
            "return_logprob": True,
            "logprob_start_len": 0,
            "top_logprobs_num": top_k,
        }
        return "/generate", [{"input_ids": list(window), **settings} for window in windows]
    settings = {"max_tokens": 1, "temperature": 0, "echo": True, "logprobs": top_k}
    return "/v1/completions", [{"prompt": list(window), **settings} for window in windows]


def compare_scores(
    source: Sequence[Scores], candidate: Sequence[Scores], *, top_k: int, confidence: float
) -> DomainDivergence:
    """Both servers' scores of the same windows, compared position by position."""
    units = np.array([_window(p, q) for p, q in zip(source, candidate, strict=True)], dtype=np.float64)

    def mean_of(column: int) -> Interval:
        return bootstrap_interval(
            units, lambda sums: sums[..., column] / sums[..., 0], confidence=confidence, of="windows"
        )

    rise = bootstrap_interval(
        units, lambda sums: np.expm1((sums[..., 4] - sums[..., 5]) / sums[..., 0]), confidence=confidence, of="windows"
    )
    return DomainDivergence(units, top_k, mean_of(1), mean_of(2), rise)


def _window(p: Scores, q: Scores) -> tuple[float, ...]:
    kl = agreed = unseen = 0.0
    for ours, theirs in zip(p.top, q.top, strict=True):
        divergence, rest = position_divergence(ours, theirs)
        kl += divergence
        unseen += rest
        agreed += next(iter(ours), None) == next(iter(theirs), None)
    return len(p.top), kl, agreed, unseen, float(p.text_logprobs.sum()), float(q.text_logprobs.sum())


def position_divergence(p: dict[Any, float], q: dict[Any, float]) -> tuple[float, float]:
    """KL with all tokens that not both named taken as one, and the source's probability of those.

    Args:
        p, q: token -> log-probability, natural.
    """
    common = [token for token in p if token in q]
    log_p = np.array([p[token] for token in common])
    log_q = np.array([q[token] for token in common])
    seen_p, seen_q = np.exp(log_p), np.exp(log_q)
    rest_p, rest_q = max(0.0, 1.0 - float(seen_p.sum())), max(0.0, 1.0 - float(seen_q.sum()))
    divergence = float((seen_p * (log_p - log_q)).sum())
    if rest_p > EXACT_BELOW:  # below, the servers' float32 rounds it
        divergence += rest_p * float(np.log(rest_p / max(rest_q, EXACT_BELOW)))
    return divergence, rest_p


def _read_sglang(answer: dict[str, Any], length: int) -> Scores:
    facts = answer.get("meta_info") or {}
    own, top = facts.get("input_token_logprobs"), facts.get("input_top_logprobs")
    if not own or not top or len(own) != length or len(top) != length:
        raise EvaluateError("/generate gave no log-probabilities of the prompt", hint="is this SGLang 0.5 or newer?")
    return Scores(
        [{int(entry[1]): float(entry[0]) for entry in entries} for entries in top[1:]],
        np.array([float(entry[0]) for entry in own[1:]]),
    )


def _read_openai(answer: dict[str, Any], length: int) -> Scores:
    found = (answer.get("choices") or [{}])[0].get("logprobs") or {}
    own, top = found.get("token_logprobs"), found.get("top_logprobs")
    if not own or not top or len(own) < length or len(top) < length or any(v is None for v in own[1:length]):
        raise EvaluateError(
            "/v1/completions with echo gave no log-probabilities of the prompt: KL cannot be measured over this server",
            hint="SGLang's and vLLM's servers give them; or: moepress fidelity OUT --source SRC, from the files",
        )
    return Scores(
        [
            dict(
                sorted(((t, float(v)) for t, v in entries.items() if _REPLACEMENT not in t), key=lambda item: -item[1])
            )
            for entries in top[1:length]
        ],
        np.array([float(value) for value in own[1:length]]),
    )
