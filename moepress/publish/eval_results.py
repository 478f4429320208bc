"""Scores as the Hub's leaderboards read them: ``.eval_results/*.yaml``, one file a benchmark, beside the card's ``model-index``.

    - dataset: {id: openai/gsm8k, task_id: gsm8k}
      value: 93.56                                 per cent, as the benchmark's leaderboard has it
      date: '2026-01-31T12:00:00Z'
      source: {url: https://huggingface.co/ORG/NAME, name: Model card}
      notes: INT4 experts; 5 examples, greedy, lm_eval 0.4.13; the source, asked alike, 94.39

A leaderboard ranks models, so it gets what is comparable and nothing else: a data set that is a benchmark there, under the task
that its own ``eval.yaml`` names, and its whole test set. A score of the first 200 problems, or of a task of one's own, stands on
the card alone. Regressions are sent like all others. No ``verifyToken``: that is the Hub's own proof, and nobody else can give it.

The source's ``.eval_results`` are scores of other weights, and are never sent (`contents`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import yaml
from huggingface_hub import EvalResultEntry, eval_result_entries_to_yaml

from moepress.publish.contents import SCORES
from moepress.publish.facts import CardFacts


@dataclass(frozen=True)
class Benchmark:
    """A data set with a leaderboard on the Hub, its task there, and how many prompts the whole test set has."""

    dataset: str
    task: str
    prompts: int


BENCHMARKS = {
    "gsm8k": Benchmark("openai/gsm8k", "gsm8k", 1_319),
    "mmlu_pro": Benchmark("TIGER-Lab/MMLU-Pro", "mmlu_pro", 12_032),
}
"""Task of `evaluate` -> benchmark. MMLU, ARC-Challenge, HumanEval and MBPP have no leaderboard of this kind that is known here."""


def eval_results(facts: CardFacts, repo: str) -> dict[str, bytes]:
    """The files, by name in the repository; none where no whole benchmark was scored.

    Args:
        repo: ``org/name`` that they are sent to; its card is what they name as their source.
    """
    found: dict[str, bytes] = {}
    tasks = (facts.evaluate or {}).get("tasks") or {}
    for row in facts.scored:
        benchmark, details = BENCHMARKS.get(row["task"]), tasks.get(row["task"])
        if benchmark is None or details is None or row["samples"] != benchmark.prompts:
            continue
        entry = EvalResultEntry(
            dataset_id=benchmark.dataset,
            task_id=benchmark.task,
            value=round(100 * float(row["candidate"]), 2),
            date=facts.evaluated,
            source_url=f"https://huggingface.co/{repo}",
            source_name="Model card",
            notes=_notes(facts, row, details),
        )
        text = yaml.safe_dump(eval_result_entries_to_yaml([entry]), sort_keys=False, allow_unicode=True, width=1000)
        found[f"{SCORES}/{row['task']}.yaml"] = text.encode()
    return found


def _notes(facts: CardFacts, row: Mapping[str, Any], details: Mapping[str, Any]) -> str:
    fewshot = (details.get("settings") or {}).get("fewshot")
    how = [
        *([f"{fewshot} examples"] if fewshot is not None else []),
        "greedy",
        str(details.get("version") or "moepress"),
    ]
    return (
        f"{facts.grid.partition(',')[0]} experts; {', '.join(how)}; the source, asked alike, {100 * row['source']:.2f}"
    )
