"""What the server should have said: transformers' own layers on the same weights, one layer in memory at a time.

The server's greedy tokens are given back as text to be scored (teacher forcing), so one forward pass judges all of them,
and a token that differs at one step does not spoil the steps after it:

    equal      the reference puts the same token first
    near tie   the reference prefers another by less than NEAR_TIE nats. Logits in bfloat16 are 2⁻⁷ of their size apart,
               0.125 between 16 and 32: two steps of the head alone turn such a pair around
    wrong      anything else

KL(p ‖ q) of reference p and served q: a server returns its K best tokens, so the sum runs over these and, as one more
outcome, over all the others together. That is a lower bound of the true value (log-sum inequality), close to it as
long as the K best hold most of the mass. Between two references, pressed and source, it is exact.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from moepress.calibration.activations import Scratch
from moepress.calibration.checkpoint_weights import CheckpointWeights
from moepress.calibration.run_settings import RunSettings
from moepress.calibration.streamed_model import StreamedModel
from moepress.errors import VerifyFailed
from moepress.formats.checkpoint import Checkpoint
from moepress.serving.client import Generation
from moepress.serving.validation.figures import Figure, json_or_none

NEAR_TIE = 0.25
TOP = 64
_LEAST = 1e-12


@dataclass(frozen=True)
class Disagreement:
    """One token that is not the reference's. `gap`: nats that the reference prefers its own by."""

    prompt: int
    position: int
    gap: float
    served: int
    reference: int


@dataclass(frozen=True)
class Agreement:
    """Greedy tokens against the reference. `first_equal`: first tokens of the answers that are equal, of `prompts`."""

    tokens: int
    equal: int
    near_ties: int
    wrong: int
    first_equal: int
    prompts: int
    worst: Disagreement | None

    def as_json(self) -> dict[str, Any]:
        worst = self.worst
        return {
            "equal": self.equal,
            "near_ties": self.near_ties,
            "wrong": self.wrong,
            "near_tie_nats": NEAR_TIE,
            "worst": None
            if worst is None
            else {
                "prompt": worst.prompt,
                "position": worst.position,
                "gap_nats": worst.gap,
                "served": worst.served,
                "reference": worst.reference,
            },
        }


@dataclass(frozen=True)
class Compared:
    """Served against the references; `kl_source` and `kl_pressing` need the source's weights."""

    agreement: Agreement
    positions: int
    top_mass: float
    kl_serving: Figure
    kl_source: Figure | None
    kl_pressing: Figure | None

    def as_json(self) -> dict[str, Any]:
        return {
            "agreement": self.agreement.as_json(),
            "first_tokens": {"equal": self.agreement.first_equal, "of": self.agreement.prompts},
            "positions": self.positions,
            "top_mass": self.top_mass,
            "kl_serving": self.kl_serving.as_json(),
            "kl_source": json_or_none(self.kl_source),
            "kl_pressing": json_or_none(self.kl_pressing),
        }


def compare_with_reference(
    prompts: Sequence[Sequence[int]],
    served: Sequence[Generation],
    pressed: Checkpoint,
    source: Checkpoint | None,
    *,
    memory: int = 4 << 30,
    layer_done: Callable[[int, int], None],
) -> Compared:
    """Score the server's answers with the reference.

    Args:
        prompts: token ids.
        served: one answer for each, with `top` and `prompt_top` from the prompt's second token on.
        pressed, source: the checkpoints; the source's is read only if given.
        memory: bytes for activations, and again for a block of experts.
        layer_done: called after every layer with the number done and the number of all.

    Raises:
        CheckpointError: the family has no forward pass here. VerifyFailed: logits that are not finite.
    """
    texts = [[*prompt, *answer.tokens] for prompt, answer in zip(prompts, served, strict=True)]
    sums = _Sums()
    for sample, (p, source_p) in enumerate(_log_probs(texts, pressed, source, memory, layer_done)):
        sums.add(sample, len(prompts[sample]), served[sample], p, source_p)
    return sums.finished(len(prompts))


def _log_probs(
    texts: Sequence[Sequence[int]],
    pressed: Checkpoint,
    source: Checkpoint | None,
    memory: int,
    layer_done: Callable[[int, int], None],
) -> Iterator[tuple[torch.Tensor, torch.Tensor | None]]:
    """For each text, log-probabilities [tokens, vocabulary] float32 of both references."""
    lengths = torch.tensor([len(text) for text in texts])
    token_ids = torch.zeros(len(texts), int(lengths.max()), dtype=torch.int64)
    for row, text in zip(token_ids, texts, strict=True):
        row[: len(text)] = torch.tensor(text)
    settings = RunSettings(expert_bytes=memory)
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="moepress-"))
        scratch = stack.enter_context(Scratch(Path(folder), memory_bytes=memory))
        weights = [stack.enter_context(CheckpointWeights(c)) for c in (pressed, source) if c is not None]
        models = [StreamedModel(pressed.config, held, scratch, settings) for held in weights]
        streams = [model.embed(token_ids, lengths) for model in models]
        for index in range(models[0].num_layers):
            for model, stream in zip(models, streams, strict=True):
                model.run_layer(index, stream)
            layer_done(index + 1, models[0].num_layers)
        for model, stream in zip(models, streams, strict=True):
            model.finish(stream)
        for rows in zip(*(model.logits(stream) for model, stream in zip(models, streams, strict=True)), strict=True):
            found = [_finite(logits[: lengths[sample]].log_softmax(-1)) for sample, logits in rows]
            yield found[0], found[1] if source is not None else None


def _finite(log_p: torch.Tensor) -> torch.Tensor:
    if not bool(torch.isfinite(log_p).all()):
        raise VerifyFailed("the reference's logits are not finite", hint="moepress verify OUT --source SRC")
    return log_p


class _Sums:
    def __init__(self) -> None:
        self.tokens = self.equal = self.near = self.first = self.positions = 0
        self.serving = self.source = self.pressing = self.mass = 0.0
        self.has_source = False
        self.worst: Disagreement | None = None

    def add(self, sample: int, prompt: int, answer: Generation, p: torch.Tensor, source: torch.Tensor | None) -> None:
        """`p`, `source` [prompt + answer tokens, vocabulary]: row r predicts token r + 1."""
        for step, token in enumerate(answer.tokens):
            row = p[prompt - 1 + step]
            best = int(row.argmax())
            gap = float(row[best] - row[token])
            self.tokens += 1
            self.equal += best == token
            self.first += best == token and step == 0
            if best != token:
                self.near += gap <= NEAR_TIE
                if self.worst is None or gap > self.worst.gap:
                    self.worst = Disagreement(sample, step, gap, token, best)
        tops = [*answer.prompt_top, *answer.top]
        first = prompt - 1 - len(answer.prompt_top)
        for row_index, top in enumerate(tops, start=first):
            if not top:
                continue
            ids = torch.tensor(list(top))
            log_q = torch.tensor(list(top.values()))
            self.positions += 1
            self.mass += float(log_q.exp().sum())
            self.serving += coarse_kl(p[row_index], ids, log_q)
            if source is not None:
                self.has_source = True
                self.source += coarse_kl(source[row_index], ids, log_q)
                self.pressing += float(
                    functional.kl_div(p[row_index], source[row_index], reduction="sum", log_target=True)
                )

    def finished(self, prompts: int) -> Compared:
        count = max(1, self.positions)
        unit = "nats/token"
        wrong = self.tokens - self.equal - self.near
        return Compared(
            agreement=Agreement(self.tokens, self.equal, self.near, wrong, self.first, prompts, self.worst),
            positions=self.positions,
            top_mass=self.mass / count,
            kl_serving=Figure(self.serving / count, unit),
            kl_source=Figure(self.source / count, unit) if self.has_source else None,
            kl_pressing=Figure(self.pressing / count, unit) if self.has_source else None,
        )


def coarse_kl(log_p: torch.Tensor, ids: torch.Tensor, log_q: torch.Tensor) -> float:
    """KL(p ‖ q) over the tokens `ids` and, as one outcome, all others.

    Args:
        log_p: [vocabulary].
        ids: [K] int64, different tokens.
        log_q: [K], the log-probabilities that q gives them.
    """
    log_pk = log_p[ids].double()
    log_q = log_q.double()
    inside = float((log_pk.exp() * (log_pk - log_q)).sum())
    rest_p = max(1 - float(log_pk.exp().sum()), _LEAST)
    rest_q = max(1 - float(log_q.exp().sum()), _LEAST)
    return inside + rest_p * float(torch.log(torch.tensor(rest_p / rest_q, dtype=torch.float64)))
