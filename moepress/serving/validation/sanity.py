"""Does the server say what the weights mean? The same tokens as the reference, twice the same, and no loops.

Requests of the comparison go one at a time: what else is in a batch changes the last bits of a sum, and this is about
the checkpoint. The prefix cache is flushed before the repetition, so that both runs compute the same things.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from moepress.errors import CheckpointError
from moepress.formats.checkpoint import Checkpoint
from moepress.serving.client import Generation, SGLangClient
from moepress.serving.validation.loops import LongAnswers, study
from moepress.serving.validation.prompts import Prompt
from moepress.serving.validation.reference import TOP, Compared, compare_with_reference

_SHOWN = 4
_TEXT = 300


@dataclass(frozen=True)
class Length:
    """Tokens to generate. `answers`: of a comparison; `long`: of a long answer, of which there are `long_prompts`."""

    answers: int = 16
    long: int = 512
    long_prompts: int = 8


SMOKE_LENGTH = Length(long=96, long_prompts=4)
"""Without a GPU."""


@dataclass(frozen=True)
class Asked:
    """What the candidate answered."""

    served: tuple[Generation, ...]
    differing: tuple[int, ...]
    long: LongAnswers


@dataclass(frozen=True)
class Sanity:
    """Everything about the output.

    Attributes:
        compared: with the reference; None where there is none, for `no_reference`'s reason.
        differing: prompts whose repetition gave other tokens, of `repeated`.
        long, long_baseline: long answers of both sides.
        samples: (prompt, answer) texts to look at.
    """

    compared: Compared | None
    no_reference: str
    tokens: int
    repeated: int
    differing: tuple[int, ...]
    long: LongAnswers
    long_baseline: LongAnswers | None
    samples: tuple[tuple[str, str], ...]

    def as_json(self) -> dict[str, Any]:
        empty = dict.fromkeys(("agreement", "first_tokens", "kl_serving", "kl_source", "kl_pressing"))
        return {
            "prompts": self.repeated,
            "tokens": self.tokens,
            **(empty if self.compared is None else self.compared.as_json()),
            "no_reference": self.no_reference or None,
            "deterministic": not self.differing,
            "differing": list(self.differing),
            "long": {
                "candidate": self.long.as_json(),
                "baseline": None if self.long_baseline is None else self.long_baseline.as_json(),
            },
            "samples": [{"prompt": prompt, "served": served} for prompt, served in self.samples],
        }


def ask(client: SGLangClient, prompts: Sequence[Prompt], length: Length) -> Asked:
    """All requests to the candidate: greedy answers with log-probabilities, the same again, long answers."""

    def greedy(prompt: Prompt) -> Generation:
        return client.generate(
            prompt.tokens,
            max_new_tokens=length.answers,
            ignore_eos=True,
            logprobs=True,
            logprobs_from=1 if len(prompt.tokens) > 1 else None,
            top_logprobs=TOP,
        )

    client.flush_cache()
    first = tuple(map(greedy, prompts))
    client.flush_cache()
    again = tuple(map(greedy, prompts))
    differing = tuple(
        index for index, (one, other) in enumerate(zip(first, again, strict=True)) if one.tokens != other.tokens
    )
    return Asked(first, differing, long_answers(client, prompts, length))


def long_answers(client: SGLangClient, prompts: Sequence[Prompt], length: Length) -> LongAnswers:
    """Long greedy answers to the last prompts (conversations, in the shipped set), at once."""
    chosen = prompts[-length.long_prompts :]
    with ThreadPoolExecutor(len(chosen)) as pool:
        answers = pool.map(lambda prompt: client.generate(prompt.tokens, max_new_tokens=length.long), chosen)
        return study([answer.tokens for answer in answers])


def judge_answers(
    asked: Asked,
    prompts: Sequence[Prompt],
    pressed: Checkpoint,
    source: Checkpoint | None,
    *,
    long_baseline: LongAnswers | None,
    layer_done: Callable[[int, int], None],
) -> Sanity:
    """Compare with the reference; a family that has no forward pass here keeps everything else."""
    compared, why = None, ""
    try:
        compared = compare_with_reference(
            [prompt.tokens for prompt in prompts], asked.served, pressed, source, layer_done=layer_done
        )
    except CheckpointError as error:
        why = f"no reference: {error.what}"
    return Sanity(
        compared=compared,
        no_reference=why,
        tokens=sum(len(answer.tokens) for answer in asked.served),
        repeated=len(prompts),
        differing=asked.differing,
        long=asked.long,
        long_baseline=long_baseline,
        samples=tuple(
            (prompt.text[-_TEXT:], answer.text[:_TEXT])
            for prompt, answer in list(zip(prompts, asked.served, strict=True))[:_SHOWN]
        ),
    )
