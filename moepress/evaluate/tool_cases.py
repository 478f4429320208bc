"""Cases of tool calling: the ones that ship, a user's own, and those of the Berkeley Function Calling Leaderboard.

    one line, one case      {"id", "ask": "…", "tools": [...], "calls": [CALL, …]}                one question
                            {"id", "tools": [...], "turns": [{"user", "calls", "results"}, …]}    a conversation
    CALL                    {"name": "get_weather", "arguments": {"city": ["São Paulo", "Sao Paulo"], "days": [1, ""]}}

Each argument has a list of values that are right; ``""`` among them: it may be left out. This is the leaderboard's own form.
A tool is the name of a shipped one (``data/tools.json``) or an object as OpenAI's API takes it. No expected calls: any is wrong.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from moepress.errors import EvaluateError

CaseKind = Literal["single", "parallel", "multi-turn", "stateful"]
BFCL_CATEGORIES = (
    *("simple_python", "multiple", "parallel", "parallel_multiple"),
    *("live_simple", "live_multiple", "live_parallel", "live_parallel_multiple"),
)
"""BFCL's categories with one question, Python's types and a list of right answers. Its multi-turn ones: `tool_worlds`."""

_BFCL_TYPES = {"dict": "object", "float": "number", "tuple": "array", "any": None}


@dataclass(frozen=True)
class ExpectedCall:
    """A call that is right. arguments: name -> values that are right; ``""`` among them = optional."""

    name: str
    arguments: dict[str, list[Any]]


@dataclass(frozen=True)
class Turn:
    """One question of the user, the calls that answer it, and what those return (JSON text, in the calls' order)."""

    user: str
    calls: tuple[ExpectedCall, ...]
    results: tuple[str, ...] = ()


@dataclass(frozen=True)
class ToolCase:
    """A conversation of one or more turns, with the tools it offers (OpenAI's objects)."""

    id: str
    tools: tuple[dict[str, Any], ...]
    turns: tuple[Turn, ...]
    before: tuple[dict[str, Any], ...] = ()

    @property
    def kind(self) -> CaseKind:
        if len(self.turns) > 1:
            return "multi-turn"
        return "parallel" if len(self.turns[0].calls) > 1 else "single"


def shipped_cases() -> list[ToolCase]:
    """The cases in the package."""
    data = resources.files("moepress.evaluate") / "data"
    return [
        case
        for file in ("calls.jsonl", "turns.jsonl")
        for case in _read_lines((data / file).read_text(encoding="utf-8"), file)
    ]


def read_cases(path: Path) -> list[ToolCase]:
    """A user's file of cases.

    Raises:
        EvaluateError: with the line that is not a case.
    """
    try:
        cases = _read_lines(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise EvaluateError(f"tool-call cases cannot be read: {error}", where=str(path)) from error
    if not cases:
        raise EvaluateError("no tool-call cases in the file", where=str(path))
    return cases


def read_bfcl(folder: Path, categories: Iterable[str] = BFCL_CATEGORIES, *, limit: int | None = None) -> list[ToolCase]:
    """Cases of the Berkeley Function Calling Leaderboard.

    Args:
        folder: ``bfcl_eval/data`` of an installed or unpacked ``bfcl-eval`` (Apache-2.0).
        limit: first cases of each category only.

    Raises:
        EvaluateError: no such files, or another form than version 4's.
    """
    found = []
    for category in categories:
        question, answer = folder / f"BFCL_v4_{category}.json", folder / "possible_answer" / f"BFCL_v4_{category}.json"
        if question.is_file() and answer.is_file():
            try:
                right = {row["id"]: row["ground_truth"] for row in json_lines(answer)}
                found += [_bfcl_case(row, right[row["id"]]) for row in json_lines(question)[:limit]]
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise EvaluateError(f"not a BFCL v4 file: {error!r}", where=str(question)) from error
    if not found:
        raise EvaluateError(
            "no BFCL v4 files (BFCL_v4_simple_python.json and its kin)",
            where=str(folder),
            hint="pip download --no-deps bfcl-eval, unzip it, and name its folder bfcl_eval/data",
        )
    return found


def _bfcl_case(row: dict[str, Any], right: list[dict[str, dict[str, list[Any]]]]) -> ToolCase:
    calls = tuple(ExpectedCall(_api_name(name), dict(given)) for call in right for name, given in call.items())
    tools = tuple(bfcl_tool(function) for function in row["function"])
    *before, last = row["question"][0]
    return ToolCase(row["id"], tools, (Turn(last["content"], calls),), tuple(before))


def bfcl_tool(function: dict[str, Any]) -> dict[str, Any]:
    """BFCL's description of a function as OpenAI's API takes it."""
    return {"type": "function", "function": {**_json_schema(function), "name": _api_name(function["name"])}}


def _api_name(name: str) -> str:
    """OpenAI's API takes no dots in a function's name."""
    return name.replace(".", "_")


def _json_schema(node: Any) -> Any:
    """BFCL writes Python's type names where JSON schema has its own."""
    if isinstance(node, list):
        return [_json_schema(item) for item in node]
    if not isinstance(node, dict):
        return node
    found = {}
    for key, value in node.items():
        if key == "type" and isinstance(value, str):
            if (known := _BFCL_TYPES.get(value, value)) is not None:
                found[key] = known
        elif key not in ("optional", "default", "response"):
            found[key] = _json_schema(value)
    return found


def _read_lines(text: str, where: str) -> list[ToolCase]:
    tools = json.loads((resources.files("moepress.evaluate") / "data" / "tools.json").read_text(encoding="utf-8"))
    cases = []
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            try:
                cases.append(_case(json.loads(line), tools))
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise EvaluateError(
                    f"not a tool-call case: {error!r}",
                    where=f"{where}:{number}",
                    hint='{"id": "1", "ask": "…", "tools": ["get_weather"], "calls": [{"name": …, "arguments": {…: [values]}}]}',
                ) from error
    return cases


def _case(row: dict[str, Any], known: dict[str, Any]) -> ToolCase:
    tools = tuple(
        tool if isinstance(tool, dict) else {"type": "function", "function": {"name": tool, **known[tool]}}
        for tool in row["tools"]
    )
    turns = row.get("turns") or [{"user": row["ask"], "calls": row["calls"]}]
    return ToolCase(str(row["id"]), tools, tuple(_turn(turn) for turn in turns))


def _turn(turn: dict[str, Any]) -> Turn:
    calls = tuple(ExpectedCall(call["name"], _values(call["arguments"])) for call in turn["calls"])
    results = tuple(str(result) for result in turn.get("results", ()))
    if results and len(results) != len(calls):
        raise ValueError(f"{len(calls)} calls and {len(results)} results")
    return Turn(turn["user"], calls, results)


def _values(arguments: dict[str, Any]) -> dict[str, list[Any]]:
    for name, values in arguments.items():
        if not isinstance(values, list):
            raise TypeError(f"the right values of {name!r} must be a list")
    return arguments


def json_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a file of JSON lines."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line.strip()]
