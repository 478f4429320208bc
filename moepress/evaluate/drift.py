"""Drift over length: both models continue the same prompts greedily; where do the texts part, and how many have not?

    first divergence    the position (from 1) of the first token that differs; Kaplan–Meier over all prompts
    noise               the source against itself, asked a second time: batches of another shape round differently, so a server
                        on a GPU parts from itself too. Only what goes beyond this is the candidate's.
    token agreement     share of all positions with the same token, those after the parting included
    divergence rate     first divergences / tokens generated up to them: the hazard of parting, a token. What is judged is the
                        candidate's minus the noise's; it does not depend on how long the texts are, as "parted within 256" does

Two good models part as well: one near-tie is enough, and everything after it is another text. That they part is no fault; the bound
is about how soon: at a rate of 0.02 half of them have parted by token 35, at 0.005 by token 139 (ln 2 / rate).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moepress.evaluate.answers import Contestant
from moepress.evaluate.survival import Curve, kaplan_meier

SHOWN = 3
"""How many partings are shown as text."""


@dataclass(frozen=True)
class Continuation:
    """A greedy answer: tokens (ids, or their texts where the API gives no ids; none at all: characters), and its text."""

    tokens: list[Any]
    text: str


@dataclass(frozen=True)
class Drift:
    """Candidate against source, and source against itself.

    watched: [prompts, 4] float64, per prompt: parted (1 or 0) and tokens up to there, of the candidate, then of the noise.
    """

    candidate: Curve
    candidate_agreement: float
    noise: Curve | None
    noise_agreement: float | None
    prompts: int
    tokens: int
    shown: list[dict[str, Any]]
    watched: NDArray[np.float64]

    def as_json(self) -> dict[str, Any]:
        return {
            "prompts": self.prompts,
            "tokens": self.tokens,
            "candidate": {**self.candidate.as_json(), "token_agreement": self.candidate_agreement},
            "noise": None if self.noise is None else {**self.noise.as_json(), "token_agreement": self.noise_agreement},
            "prompts_sample": self.shown,
        }


def ask_continuations(
    who: Contestant, prompts: Sequence[Sequence[int]], *, tokens: int, take: int = 0
) -> list[Continuation]:
    """Greedy continuations of token ids, `tokens` long unless the model ends before.

    Args:
        take: 0, or 1 to ask a second time.
    """
    label = f"greedy, {tokens} tokens" + (", again" if take else "")
    if who.kind == "sglang":
        settings = {"temperature": 0, "max_new_tokens": tokens}
        bodies: list[dict[str, Any]] = [{"input_ids": list(prompt), "sampling_params": settings} for prompt in prompts]
        answers = who.ask_all("/generate", bodies, label=label, take=take)
        return [
            Continuation(
                list(answer.get("output_ids") or []),
                str(answer.get("text") or ""),
            )
            for answer in answers
        ]
    bodies = [{"prompt": list(p), "temperature": 0, "max_tokens": tokens, "logprobs": 1} for p in prompts]
    found = []
    for answer in who.ask_all("/v1/completions", bodies, label=label, take=take):
        choice = (answer.get("choices") or [{}])[0]
        text = str(choice.get("text") or "")
        pieces = (choice.get("logprobs") or {}).get("tokens")
        found.append(Continuation(list(pieces or text), text))
    return found


def compare_continuations(
    source: Sequence[Continuation],
    candidate: Sequence[Continuation],
    again: Sequence[Continuation] | None,
    *,
    tokens: int,
    confidence: float,
) -> Drift:
    """Curves of candidate and noise over the same prompts."""
    curve, agreement = _curve(source, candidate, confidence)
    noise = _curve(source, again, confidence) if again is not None else None
    watched = np.hstack([_watched(source, candidate), _watched(source, again if again is not None else source)])
    shown: list[dict[str, Any]] = []
    for index, (one, other) in enumerate(zip(source, candidate, strict=True)):
        position, parted = first_divergence(one, other)
        if parted and len(shown) < SHOWN:
            shown.append({"prompt": index, "position": position, "source": one.text, "candidate": other.text})
    return Drift(
        curve,
        agreement,
        noise[0] if noise else None,
        noise[1] if noise else None,
        len(source),
        tokens,
        shown,
        watched,
    )


def first_divergence(one: Continuation, other: Continuation) -> tuple[int, bool]:
    """The position (from 1) of the first difference, and True; or the last common position, and False.

    A text that ends where the other goes on differs at the position after its last token. Where both were only cut off
    by the token limit, nothing is known beyond it.
    """
    shorter = min(len(one.tokens), len(other.tokens))
    for index in range(shorter):
        if one.tokens[index] != other.tokens[index]:
            return index + 1, True
    if len(one.tokens) != len(other.tokens):
        return shorter + 1, True
    return shorter, False


def _watched(one: Sequence[Continuation], other: Sequence[Continuation]) -> NDArray[np.float64]:
    found = [first_divergence(a, b) for a, b in zip(one, other, strict=True)]
    return np.array([(float(parted), float(step)) for step, parted in found])


def _curve(one: Sequence[Continuation], other: Sequence[Continuation], confidence: float) -> tuple[Curve, float]:
    found = [first_divergence(a, b) for a, b in zip(one, other, strict=True)]
    same = sum(sum(x == y for x, y in zip(a.tokens, b.tokens, strict=False)) for a, b in zip(one, other, strict=True))
    length = sum(max(len(a.tokens), len(b.tokens)) for a, b in zip(one, other, strict=True))
    curve = kaplan_meier([step for step, _ in found], [parted for _, parted in found], confidence=confidence)
    return curve, same / length if length else 1.0
