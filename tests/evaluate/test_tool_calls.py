"""Tool calls: what counts as right, the shipped cases, BFCL's form, and conversations that go on from an error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from jsonschema import Draft202012Validator

from moepress.errors import EvaluateError
from moepress.evaluate.answers import Answers, Contestant
from moepress.evaluate.call_match import MadeCall, match_calls, same_value
from moepress.evaluate.endpoint import connect
from moepress.evaluate.tool_calls import error_free, play_cases, step_shares, tool_calls_json
from moepress.evaluate.tool_cases import ExpectedCall, ToolCase, Turn, read_bfcl, read_cases, shipped_cases
from tests.evaluate.served_model import ServedModel, serve

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer", "maximum": 10}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
PRICE = {"type": "function", "function": {"name": "get_price", "parameters": {"type": "object"}}}
TOOLS = (WEATHER, PRICE)
OSLO = ExpectedCall("get_weather", {"city": ["Oslo"], "days": [1, ""]})
ROME = ExpectedCall("get_weather", {"city": ["Rome", "Roma"], "days": [2]})


def made(name: str, arguments: Any) -> MadeCall:
    return MadeCall("id", name, arguments if isinstance(arguments, str) else json.dumps(arguments))


@pytest.mark.parametrize(
    ("calls", "steps"),
    [
        ([], 0),
        ([made("get_weather", "{'city': 'Oslo'}")], 1),
        ([made("get_weather", "[1]")], 1),
        ([made("get_weather", {"town": "Oslo"})], 2),
        ([made("get_weather", {"city": "Oslo", "days": "1"})], 2),
        ([made("get_weather", {"city": "Oslo", "days": 11})], 2),
        ([made("no_such_tool", {})], 2),
        ([made("get_price", {})], 3),
        ([made("get_weather", {"city": "Bergen"})], 4),
        ([made("get_weather", {"city": "Oslo", "days": 2})], 4),
        ([made("get_weather", {"city": "oslo"})], 5),
        ([made("get_weather", {"city": "Oslo", "days": 1})], 5),
        ([made("get_weather", {"city": "Oslo"}), made("get_weather", {"city": "Oslo"})], 0),
    ],
)
def test_a_call_passes_as_many_steps_as_it_gets_right(calls: list[MadeCall], steps: int) -> None:
    assert match_calls(calls, [OSLO], TOOLS).steps == steps


def test_parallel_calls_have_no_order() -> None:
    calls = [made("get_weather", {"city": "Roma", "days": 2}), made("get_weather", {"city": "Oslo"})]
    match = match_calls(calls, [OSLO, ROME], TOOLS)
    assert match.correct
    assert match.pairs == (1, 0)


def test_one_made_call_cannot_be_two_expected_ones() -> None:
    """Both calls fit the wide expectation, one fits the narrow: they are assigned so that all are used."""
    wide, narrow = ExpectedCall("get_price", {"x": [1, 2]}), ExpectedCall("get_price", {"x": [1]})
    assert match_calls([made("get_price", {"x": 1}), made("get_price", {"x": 2})], [wide, narrow], TOOLS).correct
    assert not match_calls([made("get_price", {"x": 2}), made("get_price", {"x": 2})], [wide, narrow], TOOLS).correct


def test_no_call_is_right_where_none_is_expected() -> None:
    assert match_calls([], [], TOOLS).correct
    assert match_calls([made("get_price", {})], [], TOOLS).steps == 0


@pytest.mark.parametrize(
    ("given", "right", "same"),
    [
        ("New York", "new york", True),
        ("Coffee-Filter", "coffee filter", True),
        ("10", 10, False),
        (10, 10.0, True),
        (True, 1, False),
        (1, True, False),
        (True, True, True),
        (None, None, True),
        ([1, 2], [1, 2], True),
        ([2, 1], [1, 2], False),
        ({"a": "X"}, {"a": "x"}, True),
        ({"a": 1}, {"a": [1, 2]}, True),
        ({}, {"a": [1, ""]}, True),
        ({}, {"a": 1}, False),
        ({"a": 1, "b": 2}, {"a": 1}, False),
    ],
)
def test_values_are_compared_as_meant(given: Any, right: Any, same: bool) -> None:
    assert same_value(given, right) is same


def perfect(turn: Turn) -> list[MadeCall]:
    """The first right value of every argument that has to be there."""
    return [
        made(call.name, {name: values[0] for name, values in call.arguments.items() if "" not in values})
        for call in turn.calls
    ]


def test_every_shipped_case_can_be_solved_and_says_what_it_offers() -> None:
    cases = shipped_cases()
    kinds = [case.kind for case in cases]
    assert (kinds.count("single"), kinds.count("parallel"), kinds.count("multi-turn")) == (107, 41, 30)
    assert len({case.id for case in cases}) == len(cases)
    for parameters in {
        tool["function"]["name"]: tool["function"]["parameters"] for c in cases for tool in c.tools
    }.values():
        Draft202012Validator.check_schema(parameters)
    for case in cases:
        for turn in case.turns:
            assert match_calls(perfect(turn), turn.calls, case.tools).correct, case.id
            assert not match_calls([], turn.calls, case.tools).correct
        assert len(case.tools) > len({call.name for turn in case.turns for call in turn.calls}), (
            "nothing to choose from"
        )
    assert all(turn.results for case in cases if case.kind == "multi-turn" for turn in case.turns)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("not json", "Expecting value"),
        ('{"id": "1", "ask": "x", "tools": ["no_such"], "calls": []}', "no_such"),
        ('{"id": "1", "ask": "x", "tools": [], "calls": [{"name": "f", "arguments": {"a": 1}}]}', "must be a list"),
        ('{"id": "1", "tools": [], "turns": [{"user": "x", "calls": [], "results": ["r"]}]}', "0 calls and 1 results"),
    ],
)
def test_a_line_that_is_no_case_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "cases.jsonl"
    path.write_text('{"id": "0", "ask": "x", "tools": ["get_weather"], "calls": []}\n' + line + "\n")
    with pytest.raises(EvaluateError, match=message) as failure:
        read_cases(path)
    assert f"{path}:2" in str(failure.value)


def test_bfcl_cases_are_read_in_their_own_form(tmp_path: Path) -> None:
    (tmp_path / "possible_answer").mkdir()
    function = {
        "name": "geometry.area",
        "description": "Area.",
        "parameters": {
            "type": "dict",
            "properties": {"size": {"type": "float"}, "points": {"type": "tuple", "items": {"type": "integer"}}},
            "required": ["size"],
        },
    }
    asked = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Areas?"}]
    row = {"id": "parallel_0", "question": [asked], "function": [function]}
    right = [{"geometry.area": {"size": [2.5, 2], "points": ["", [1]]}}, {"geometry.area": {"size": [3]}}]
    (tmp_path / "BFCL_v4_parallel.json").write_text(json.dumps(row) + "\n")
    (tmp_path / "possible_answer/BFCL_v4_parallel.json").write_text(
        json.dumps({"id": "parallel_0", "ground_truth": right}) + "\n"
    )
    (case,) = read_bfcl(tmp_path)
    assert (case.kind, case.before, case.turns[0].user) == ("parallel", (asked[0],), "Areas?")
    parameters = case.tools[0]["function"]["parameters"]
    assert parameters["properties"] == {
        "size": {"type": "number"},
        "points": {"type": "array", "items": {"type": "integer"}},
    }
    calls = [made("geometry_area", {"size": 3}), made("geometry_area", {"size": 2, "points": [1]})]
    assert match_calls(calls, case.turns[0].calls, case.tools).correct
    with pytest.raises(EvaluateError, match="no BFCL v4 files"):
        read_bfcl(tmp_path / "possible_answer")


class Scripted(ServedModel):
    """Answers from a list of calls per user message; a text where there are none, or after tool results."""

    def __init__(self, script: dict[str, list[tuple[str, str]]]) -> None:
        super().__init__(torch.nn.Identity(), None)
        self.script = script

    def answer(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        last = body["messages"][-1]
        calls = self.script.get(last["content"], []) if last["role"] == "user" else []
        message: dict[str, Any] = {"role": "assistant", "content": None if calls else "Done."}
        message["tool_calls"] = [
            {"id": f"c{number}", "type": "function", "function": {"name": name, "arguments": arguments}}
            for number, (name, arguments) in enumerate(calls)
        ]
        return {"choices": [{"message": message, "finish_reason": "tool_calls" if calls else "stop"}]}


CONVERSATION = ToolCase(
    "c",
    TOOLS,
    (
        Turn("Oslo?", (OSLO,), ('{"sun": 1}',)),
        Turn("Rome?", (ROME,), ('{"sun": 2}',)),
        Turn("Oslo again?", (OSLO,), ('{"sun": 3}',)),
    ),
)


def play(script: dict[str, list[tuple[str, str]]], tmp_path: Path) -> tuple[Any, list[dict[str, Any]]]:
    with serve(Scripted(script)) as server, Answers(tmp_path) as answers:
        endpoint = connect(server.url)
        who = Contestant("source", "S", "me", endpoint.kind, endpoint.software, lambda: endpoint, answers)
        (played,) = play_cases(who, [CONVERSATION], max_tokens=32)
        return played, [body for path, body in server.requests]


def test_a_conversation_goes_on_from_its_own_errors(tmp_path: Path) -> None:
    """The wrong call stays in the history, and its result is an error; the next turn is judged on that history."""
    right = ("get_weather", '{"city": "Oslo"}')
    script = {"Oslo?": [right], "Rome?": [("get_weather", '{"city": "Rome"}')], "Oslo again?": [right]}
    played, bodies = play(script, tmp_path)
    assert [match.steps for match in played.matches] == [5, 4, 5]
    assert (played.correct, played.first_error, played.calls) == (False, 2, 3)
    history = bodies[-1]["messages"]
    assert [message["role"] for message in history] == [*(["user", "assistant", "tool", "assistant"] * 2), "user"]
    assert history[2]["content"] == '{"sun": 1}'
    assert "error" in history[6]["content"]
    assert history[5]["tool_calls"][0]["function"]["arguments"] == '{"city": "Rome"}'


def test_arguments_that_are_no_json_do_not_go_back_to_the_server(tmp_path: Path) -> None:
    """Chat templates parse them, and fail; the model is told instead."""
    played, bodies = play({"Oslo?": [("get_weather", '{"city": ')]}, tmp_path)
    assert [match.steps for match in played.matches] == [1, 0, 0]
    history = bodies[1]["messages"]
    assert history[1]["tool_calls"][0]["function"]["arguments"] == "{}"
    assert "not a JSON object" in history[2]["content"]


def test_shares_and_survival_over_turns(tmp_path: Path) -> None:
    right = ("get_weather", '{"city": "Oslo"}')
    roma = ("get_weather", '{"city": "Roma", "days": 2}')
    good, _ = play({"Oslo?": [right], "Rome?": [roma], "Oslo again?": [right]}, tmp_path / "good")
    bad, _ = play({"Oslo?": [right], "Oslo again?": [right]}, tmp_path / "bad")
    assert step_shares([good, bad]) == pytest.approx(
        {"called": 5 / 6, "json": 5 / 6, "schema": 5 / 6, "names": 5 / 6, "correct": 5 / 6}
    )
    curve = error_free([good, bad], confidence=0.95)
    assert (curve.positions, curve.surviving) == ((2,), (0.5,))
    found = tool_calls_json([CONVERSATION] * 2, [good, good], [good, bad], confidence=0.95)["multi-turn"]
    assert [entry["candidate"] for entry in found["by_turn"]] == [1.0, 0.5, 1.0]
    assert found["survival"]["source"]["diverged"] == 0
    assert (found["conversations"], found["turns"]) == (2, 6)
