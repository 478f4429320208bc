"""From words to measurements: what is asked for is loaded, what is not there is named, answers leave room for their questions."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moepress.errors import EvaluateError
from moepress.evaluate.choose import Settings, choose
from moepress.evaluate.measurements import ToolCalls, WordProblems
from tests.evaluate.test_tool_worlds import CASE, TRUTH, package
from tests.evaluate.tiny_cases import write_cases
from tests.tiny_checkpoints import build


@pytest.mark.parametrize(
    ("context", "asked", "tokens"), [(1024, 1024, 512), (1024, 100, 100), (131_072, 1024, 1024), (None, 1024, 1024)]
)
def test_an_answer_takes_at_most_half_of_the_context(
    context: int | None, asked: int, tokens: int, tmp_path: Path
) -> None:
    folder = build("kimi", tmp_path / "model").folder
    config = json.loads((folder / "config.json").read_text())
    config.pop("max_position_embeddings", None)
    (folder / "config.json").write_text(json.dumps(config | ({"max_position_embeddings": context} if context else {})))
    problems = tmp_path / "problems.jsonl"
    problems.write_text('{"question": "Two and two?", "answer": "#### 4"}\n' * 3)
    settings = Settings(("gsm8k-100",), data={"gsm8k-100": problems}, max_tokens=asked, limit=2)
    (made,) = choose(folder, settings, folder=tmp_path / "lm")
    assert isinstance(made, WordProblems)
    assert (made.max_tokens, len(made.problems)) == (tokens, 2)


def test_a_limit_is_one_of_each_file_and_category(tmp_path: Path) -> None:
    """Own cases and the leaderboard's categories are tasks of their own: two of each, not two of all."""
    one, two = ({**CASE, "id": f"multi_turn_{category}_0"} for category in ("base", "miss_param"))
    data = package(tmp_path / "p", ("base", one, TRUTH), ("miss_param", two, TRUTH))
    for category in ("simple_python", "multiple"):
        rows = [
            {"id": f"{category}_{n}", "question": [[{"role": "user", "content": "?"}]], "function": []}
            for n in range(3)
        ]
        for folder, lines in (
            (data, rows),
            (data / "possible_answer", [{"id": r["id"], "ground_truth": []} for r in rows]),
        ):
            (folder / f"BFCL_v4_{category}.json").write_text("\n".join(map(json.dumps, lines)))
    own = write_cases(tmp_path / "own.jsonl", singles=5, conversations=0, turns=0)
    settings = Settings(("tool-calls",), tool_cases=own, bfcl=data, limit=2)
    (made,) = choose(tmp_path / "nothing", settings, folder=tmp_path / "lm")
    assert isinstance(made, ToolCalls)
    assert [case.id for case in made.cases] == [
        *("single-0", "single-1", "simple_python_0", "simple_python_1", "multiple_0", "multiple_1"),
        *("multi_turn_base_0", "multi_turn_miss_param_0"),
    ]


def test_words_that_are_no_task_are_named_with_those_that_are(tmp_path: Path) -> None:
    with pytest.raises(EvaluateError, match="no such task: gsm9k") as failure:
        choose(tmp_path, Settings(("fidelity", "gsm9k")), folder=tmp_path)
    assert "gsm8k-100" in str(failure.value)
