"""Conversations whose tools run: a small world of our own in bfcl-eval's layout, and the package itself where it is at hand."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from moepress.errors import EvaluateError
from moepress.evaluate.answers import Answers, Contestant
from moepress.evaluate.call_match import MadeCall
from moepress.evaluate.endpoint import connect
from moepress.evaluate.tool_calls import Played, play_cases, tool_calls_json
from moepress.evaluate.tool_world_process import expected_call
from moepress.evaluate.tool_worlds import MOST_STEPS, WorldCase, open_world, read_worlds
from tests.evaluate.served_model import ServedModel, serve

VARIABLE = "MOEPRESS_BFCL"

WORLD = """
import sys

class TicketAPI:
    def _load_scenario(self, scenario, long_context=False):
        self.tickets = dict(scenario["tickets"])
        self.size = 1000 if long_context else 10

    def open(self, title, priority=1):
        self.tickets[title] = priority
        return {"id": len(self.tickets)}

    def close(self, title):
        del self.tickets[title]
        return {"closed": title}

    def count(self):
        return {"count": len(self.tickets)}

    def shout(self):
        print("x" * 200_000)
        print("y" * 200_000, file=sys.stderr)
        return {"shouted": True}

    def think(self, number):
        while True:
            number = number * number
"""
DOCS = [
    {"name": "open", "parameters": {"type": "dict", "required": ["title"], "properties": {
        "title": {"type": "string"}, "priority": {"type": "integer"}}}, "response": {"type": "dict"}},
    {"name": "close", "parameters": {"type": "dict", "required": ["title"], "properties": {"title": {"type": "string"}}}},
    {"name": "count", "parameters": {"type": "dict", "properties": {}}},
]  # fmt: skip
CASE = {
    "id": "multi_turn_base_0",
    "question": [[{"role": "user", "content": text}] for text in ("Open disk and fan.", "How many?", "Close disk.")],
    "initial_config": {"TicketAPI": {"tickets": {"old": 3}}},
    "involved_classes": ["TicketAPI"],
}
TRUTH = [["open(title='disk')", "open('fan', 2)"], ["count()"], ["close(title='disk')"]]


def package(folder: Path, *rows: tuple[str, dict[str, Any], list[list[str]]]) -> Path:
    """Cases by category in the layout of bfcl-eval; the folder ``bfcl_eval/data``."""
    programs = folder / "bfcl_eval" / "eval_checker" / "multi_turn_eval" / "func_source_code"
    data = folder / "bfcl_eval" / "data"
    for made in (programs, data / "possible_answer", data / "multi_turn_func_doc"):
        made.mkdir(parents=True)
    for made in (programs, *list(programs.parents)[:3]):
        (made / "__init__.py").touch()
    (programs / "ticket_api.py").write_text(WORLD)
    (data / "multi_turn_func_doc" / "ticket_api.json").write_text("\n".join(json.dumps(doc) for doc in DOCS))
    for category, case, truth in rows:
        name = f"BFCL_v4_multi_turn_{category}.json"
        (data / name).write_text(json.dumps(case) + "\n")
        (data / "possible_answer" / name).write_text(json.dumps({"id": case["id"], "ground_truth": truth}) + "\n")
    return data


class Script(ServedModel):
    """Makes a turn's answers one after the other (each a list of calls), then says something."""

    def __init__(self, turns: list[list[list[tuple[str, Any]]]]) -> None:
        super().__init__(torch.nn.Identity(), None)
        self.turns = turns

    def answer(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        messages = body["messages"]
        turn = sum(message["role"] == "user" for message in messages) - 1
        since = len(messages) - 1 - max(i for i, message in enumerate(messages) if message["role"] == "user")
        step = sum(message["role"] == "assistant" for message in messages[len(messages) - since :]) if since else 0
        steps = self.turns[turn]
        calls = steps[step] if step < len(steps) else []
        made = [
            {"id": f"c{n}", "function": {"name": name, "arguments": a if isinstance(a, str) else json.dumps(a)}}
            for n, (name, a) in enumerate(calls)
        ]
        message = {"role": "assistant", "content": None if made else "Done.", "tool_calls": made or None}
        return {"choices": [{"message": message, "finish_reason": "tool_calls" if made else "stop"}]}


def play(case: WorldCase, turns: list[list[list[tuple[str, Any]]]], folder: Path) -> tuple[Played, list[Any]]:
    with serve(Script(turns)) as server, Answers(folder) as answers:
        endpoint = connect(server.url)
        who = Contestant("source", "S", "me", endpoint.kind, endpoint.software, lambda: endpoint, answers)
        (played,) = play_cases(who, [case], max_tokens=32)
        return played, [body for _, body in server.requests]


OPENED = [("open", {"title": "disk"}), ("open", {"title": "fan", "priority": 2})]
COUNTED, CLOSED = [("count", {})], [("close", {"title": "disk"})]


def test_what_counts_is_the_state_and_what_was_seen_not_the_way(tmp_path: Path) -> None:
    """In one answer or in four, with a look and a repaired mistake in between: all turns are right."""
    (case,) = read_worlds(package(tmp_path / "p", ("base", CASE, TRUTH)))
    assert (case.kind, len(case.turns), case.long) == ("stateful", 3, False)
    assert case.turns[0].tools[0]["function"]["parameters"]["type"] == "object"
    straight, _ = play(case, [[OPENED], [COUNTED], [CLOSED]], tmp_path / "a")
    detour = [[OPENED[:1], [("count", {})], [("open", '{"title": ')], OPENED[1:]], [COUNTED], [CLOSED]]
    wandering, bodies = play(case, detour, tmp_path / "b")
    for played in (straight, wandering):
        assert [match.steps for match in played.matches] == [5, 5, 5]
    said = [message["content"] for message in bodies[-1]["messages"] if message["role"] == "tool"]
    assert said[:3] == ['{"id": 2}', '{"count": 2}', '{"error": "the arguments are not a JSON object"}']
    assert said[-1] == '{"closed": "disk"}'


@pytest.mark.parametrize(
    ("first", "steps"),
    [
        ([], [0, 0, 0]),  # nothing was opened: the count, and the closing, are of another world
        ([[("open", '{"title": ')]], [1, 0, 0]),
        ([[("open", {"priority": 1})]], [2, 0, 0]),
        ([[("count", {})]], [3, 0, 0]),
        ([[("open", {"title": "disk"})]], [4, 0, 0]),
    ],
)
def test_an_early_error_spoils_what_follows(first: list[Any], steps: list[int], tmp_path: Path) -> None:
    """Later turns are right by themselves, and are judged in the world as the first one left it."""
    (case,) = read_worlds(package(tmp_path / "p", ("base", CASE, TRUTH)))
    played, _ = play(case, [first, [COUNTED], [CLOSED]], tmp_path / "a")
    assert [match.correct for match in played.matches] == [step == 5 for step in steps]
    assert played.matches[0].steps == steps[0]
    assert played.first_error == 1
    found = tool_calls_json([case], [played], [played], confidence=0.95)["stateful"]
    assert (found["conversations"], [entry["source"] for entry in found["by_turn"]]) == (1, [0, 0, 0])
    assert found["survival"]["source"]["positions"] == [1]


def test_a_tool_that_comes_later_and_a_value_that_is_missing(tmp_path: Path) -> None:
    later = {**CASE, "id": "multi_turn_miss_func_0", "missed_function": {"1": ["open"]}}
    later["question"] = [CASE["question"][0], []]
    unclear = {**CASE, "id": "multi_turn_miss_param_0", "excluded_function": ["count"]}
    unclear["question"] = CASE["question"][:2]
    data = package(tmp_path / "p", ("miss_func", later, [[], TRUTH[0]]), ("miss_param", unclear, [[], TRUTH[0]]))
    one, two = read_worlds(data)
    offered = [[tool["function"]["name"] for tool in turn.tools] for turn in one.turns]
    assert offered == [["close", "count"], ["open", "close", "count"]]
    assert one.turns[1].user == "More tools are there now. Go on with them."
    assert [tool["function"]["name"] for tool in two.turns[0].tools] == ["open", "close"]
    patient, _ = play(one, [[], [OPENED]], tmp_path / "a")
    hasty, _ = play(two, [[OPENED], []], tmp_path / "b")
    assert [match.correct for match in patient.matches] == [True, True]
    assert [match.correct for match in hasty.matches] == [False, False]


def test_a_model_that_never_stops_calling_is_wrong_and_the_turn_ends(tmp_path: Path) -> None:
    (case,) = read_worlds(package(tmp_path / "p", ("base", CASE, TRUTH)))
    played, bodies = play(case, [[OPENED, *[COUNTED] * 40], [COUNTED], [CLOSED]], tmp_path / "a")
    assert played.matches[0].correct is False
    assert sum(sum(m["role"] == "user" for m in body["messages"]) == 1 for body in bodies) == MOST_STEPS


def test_a_value_that_takes_for_ever_costs_its_turn_not_the_run(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("moepress.evaluate.tool_worlds.SECONDS", 3.0)
    (case,) = read_worlds(package(tmp_path / "p", ("base", CASE, TRUTH)))
    played, bodies = play(case, [[[("think", {"number": 3})]], [COUNTED], [CLOSED]], tmp_path / "a")
    assert [match.correct for match in played.matches] == [False, False, False]
    assert "took too long" in bodies[1]["messages"][-1]["content"]


def test_what_a_tool_prints_is_no_answer_and_stops_nothing(tmp_path: Path) -> None:
    (case,) = read_worlds(package(tmp_path, ("base", CASE, TRUTH)))
    with open_world(case) as world:
        assert world.run([MadeCall("1", "shout", "{}"), MadeCall("2", "count", "{}")]) == [
            '{"shouted": true}',
            '{"count": 1}',
        ]


@pytest.mark.parametrize(
    "text", ["__import__('os').system('true')", "open(title=title)", "1", "a.b()", "open(open('x'))"]
)
def test_expected_calls_are_literals(text: str) -> None:
    with pytest.raises(ValueError, match=r"not a call|malformed"):
        expected_call(text)


def test_a_package_that_cannot_run_is_named(tmp_path: Path) -> None:
    data = package(tmp_path / "p", ("base", CASE, TRUTH))
    (data.parent / "eval_checker/multi_turn_eval/func_source_code/ticket_api.py").write_text("import no_such_module\n")
    (case,) = read_worlds(data)
    with pytest.raises(EvaluateError, match="no_such_module"):
        play(case, [[OPENED], [COUNTED], [CLOSED]], tmp_path / "a")


@pytest.mark.slow
@pytest.mark.oracle
def test_the_leaderboards_own_answers_are_right_and_none_is_wrong(tmp_path: Path) -> None:
    """Every 20th case of the package: its expected calls, one an answer, pass all turns; a model that calls nothing, none."""
    data = Path(os.environ.get(VARIABLE, "no-such-folder"))
    if not data.is_dir():
        pytest.skip(f"{VARIABLE} names no bfcl_eval/data")
    cases = read_worlds(data)
    assert len(cases) == 800
    for number, case in enumerate(cases[::20]):
        turns = [[[_as_call(call, turn.tools)] for call in turn.calls] for turn in case.turns]
        played, _ = play(case, turns, tmp_path / f"right-{number}")
        assert played.correct, case.id
        silent, _ = play(case, [[] for _ in case.turns], tmp_path / f"silent-{number}")
        assert [match.correct for match in silent.matches] == [not turn.calls for turn in case.turns], case.id


def _as_call(text: str, tools: tuple[dict[str, Any], ...]) -> tuple[str, dict[str, Any]]:
    """Positional values get the names that the tool's description has, in its order."""
    name, positional, named = expected_call(text)
    names = next(list(t["function"]["parameters"]["properties"]) for t in tools if t["function"]["name"] == name)
    return name, {**dict(zip(names, positional, strict=False)), **named}
