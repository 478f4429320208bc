"""What is measured, each in two halves: `ask` one server, then `compare` the two sets of answers, which needs none.

Everything that can be wrong before a server runs (files, text, an environment, the sandbox) is found when a measurement is
made: `moepress.evaluate.choose` makes them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from moepress.errors import EvaluateError
from moepress.evaluate import rows
from moepress.evaluate.answers import Contestant
from moepress.evaluate.code_tasks import Problem, ask_code, run_code
from moepress.evaluate.drift import Continuation, ask_continuations, compare_continuations
from moepress.evaluate.lm_eval_process import LmSamples, LmSettings, LmTask, run_lm_eval
from moepress.evaluate.next_tokens import Scores, ask_scores, compare_scores
from moepress.evaluate.rows import Row
from moepress.evaluate.tool_calls import Played, play_cases, tool_calls_json
from moepress.evaluate.tool_cases import ToolCase
from moepress.evaluate.tool_worlds import WorldCase
from moepress.evaluate.word_problems import NAME, WordProblem, ask_word_problems, number_of
from moepress.recipe import Evaluation


@dataclass(frozen=True)
class Findings:
    """Judged figures, and the details that the result keeps under `section`."""

    rows: list[Row]
    section: str
    details: dict[str, Any]


class Measurement(Protocol):
    """One thing that is measured on both models."""

    @property
    def name(self) -> str: ...

    def ask(self, who: Contestant) -> Any:
        """What this needs to know from one model."""

    def compare(self, source: Any, candidate: Any, bounds: Evaluation) -> Findings:
        """What both said, judged."""


@dataclass
class NextTokens:
    """KL, agreement of the top token and perplexity, per domain. windows: domain -> [windows][length] token ids."""

    windows: dict[str, list[list[int]]]
    top_k: int
    name: str = "fidelity"

    def ask(self, who: Contestant) -> dict[str, list[Scores]]:
        return {
            domain: ask_scores(who, some, top_k=self.top_k, label=f"next tokens, {domain}")
            for domain, some in self.windows.items()
        }

    def compare(
        self, source: dict[str, list[Scores]], candidate: dict[str, list[Scores]], bounds: Evaluation
    ) -> Findings:
        judged: list[Row] = []
        details = {}
        for domain in self.windows:
            found = compare_scores(source[domain], candidate[domain], top_k=self.top_k, confidence=bounds.confidence)
            judged += rows.domain_rows(domain, found, bounds)
            details[domain] = found.as_json()
        return Findings(judged, "fidelity", details)


@dataclass
class DriftOverLength:
    """Greedy continuations; the source is asked twice, to see how far it agrees with itself."""

    prompts: list[list[int]]
    tokens: int
    name: str = "drift"

    def ask(self, who: Contestant) -> tuple[list[Continuation], list[Continuation] | None]:
        first = ask_continuations(who, self.prompts, tokens=self.tokens)
        again = ask_continuations(who, self.prompts, tokens=self.tokens, take=1) if who.role == "source" else None
        return first, again

    def compare(
        self,
        source: tuple[list[Continuation], list[Continuation] | None],
        candidate: tuple[list[Continuation], list[Continuation] | None],
        bounds: Evaluation,
    ) -> Findings:
        drift = compare_continuations(
            source[0], candidate[0], source[1], tokens=self.tokens, confidence=bounds.confidence
        )
        if not drift.watched[:, 1].sum():
            raise NothingToCompare("both models ended every text before its first token")
        return Findings([rows.drift_row(drift.watched, bounds)], "drift", drift.as_json())


@dataclass
class ToolCalls:
    """Tool calls: single, parallel, over several turns. One judged figure over all cases."""

    cases: list[ToolCase | WorldCase]
    max_tokens: int
    name: str = "tool-calls"

    def ask(self, who: Contestant) -> list[Played]:
        return play_cases(who, self.cases, max_tokens=self.max_tokens)

    def compare(self, source: list[Played], candidate: list[Played], bounds: Evaluation) -> Findings:
        details = tool_calls_json(self.cases, source, candidate, confidence=bounds.confidence)
        expected = sum(bool(turn.calls) for case in self.cases for turn in case.turns)
        cut = (sum(one.truncated > 0 for one in source), sum(one.truncated > 0 for one in candidate))
        if expected and not any(cut) and not any(one.calls for one in [*source, *candidate]):
            raise NothingToCompare(
                "no answer of either model held a tool call: the model makes none, or the server needs a parser for "
                "them (SGLang: --tool-call-parser)"
            )
        row = rows.share_row(
            "tool calls",
            "all calls right",
            [one.correct for one in source],
            [one.correct for one in candidate],
            bounds,
            max_drop=bounds.max_tool_call_drop,
            truncated=cut,
            of="cases",
        )
        return Findings([row], "tool_calls", details)


@dataclass
class Code:
    """HumanEval or MBPP, executed."""

    name: str
    problems: list[Problem]
    chat: bool
    max_tokens: int

    def ask(self, who: Contestant) -> list[dict[str, Any]]:
        return ask_code(who, self.problems, chat=self.chat, max_tokens=self.max_tokens)

    def compare(self, source: list[dict[str, Any]], candidate: list[dict[str, Any]], bounds: Evaluation) -> Findings:
        ran = [run_code(self.problems, answers, chat=self.chat) for answers in (source, candidate)]
        row = rows.share_row(
            self.name, "pass@1", ran[0].passed, ran[1].passed, bounds, truncated=(ran[0].truncated, ran[1].truncated)
        )
        details = {
            "kind": "code",
            "metric": "pass@1",
            "samples": len(self.problems),
            "source": row.source,
            "candidate": row.candidate,
            "version": None,
            "settings": {"chat": self.chat, "max_tokens": self.max_tokens},
            "outcomes": {"source": ran[0].counts(), "candidate": ran[1].counts()},
        }
        return Findings([row], "tasks", {self.name: details})


@dataclass
class WordProblems:
    """GSM8K's problems, without lm-eval and the Hub."""

    problems: list[WordProblem]
    max_tokens: int
    name: str = NAME

    def ask(self, who: Contestant) -> list[dict[str, Any]]:
        return ask_word_problems(who, self.problems, max_tokens=self.max_tokens)

    def compare(self, source: list[dict[str, Any]], candidate: list[dict[str, Any]], bounds: Evaluation) -> Findings:
        right = [
            [number_of(answer["text"]) == problem.number for problem, answer in zip(self.problems, said, strict=True)]
            for said in (source, candidate)
        ]
        cut = (sum(answer["cut"] for answer in source), sum(answer["cut"] for answer in candidate))
        row = rows.share_row(self.name, "right number", right[0], right[1], bounds, truncated=cut)
        details = {
            "kind": "word problems",
            "metric": row.metric,
            "samples": len(self.problems),
            "source": row.source,
            "candidate": row.candidate,
            "version": None,
            "settings": {"fewshot": 0, "chat": True, "max_tokens": self.max_tokens},
            "outcomes": None,
        }
        return Findings([row], "tasks", {self.name: details})


@dataclass
class LmEval:
    """One task of lm-eval."""

    task: LmTask
    settings: LmSettings
    python: Path
    version: str
    tokenizer: Path
    folder: Path
    count_tokens: Callable[[str], int] = field(repr=False)

    @property
    def name(self) -> str:
        return self.task.name

    def ask(self, who: Contestant) -> LmSamples:
        return run_lm_eval(
            who,
            self.task,
            self.settings,
            python=self.python,
            version=self.version,
            tokenizer=self.tokenizer,
            folder=self.folder,
            count_tokens=self.count_tokens,
        )

    def compare(self, source: LmSamples, candidate: LmSamples, bounds: Evaluation) -> Findings:
        if source.scores.keys() != candidate.scores.keys():
            raise EvaluateError(
                f"lm-eval scored other documents of {self.name} for the source than for the candidate",
                where=str(self.folder),
                hint="remove its folder and run again",
            )
        keys = sorted(source.scores)
        row = _lm_row(
            self.name, source.metric, [source.scores[k] for k in keys], [candidate.scores[k] for k in keys], bounds,
            (source.truncated, candidate.truncated),
        )  # fmt: skip
        details = {
            "kind": "lm-eval",
            "metric": source.metric,
            "samples": len(keys),
            "source": row.source,
            "candidate": row.candidate,
            "version": f"lm_eval {source.version}",
            "settings": {
                "task": self.task.task,
                "fewshot": self.task.fewshot,
                "limit": self.settings.limit,
                "chat": self.settings.chat and self.task.generates,
                "max_tokens": self.settings.max_tokens if self.task.generates else None,
            },
            "outcomes": None,
        }
        return Findings([row], "tasks", {self.name: details})


class NothingToCompare(EvaluateError):
    """Both models answered, and the answers say nothing about this measurement."""


def _lm_row(
    name: str, metric: str, source: Sequence[Any], candidate: Sequence[Any], bounds: Evaluation, cut: tuple[int, int]
) -> Row:
    if isinstance(source[0], tuple):
        units = np.array([(s[1], s[0], c[0]) for s, c in zip(source, candidate, strict=True)])
        return rows.perplexity_row(name, metric, units, bounds)
    if set(source) | set(candidate) <= {0.0, 1.0}:
        return rows.share_row(
            name, metric, [s == 1 for s in source], [c == 1 for c in candidate], bounds, truncated=cut
        )
    return rows.mean_row(name, metric, source, candidate, bounds, truncated=cut)
