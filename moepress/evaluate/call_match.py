"""Is this answer the right tool call? Five steps, each needs the one before:

    called      as many calls as expected (none, where none is)
    json        the arguments of every call are a JSON object
    schema      every call names an offered tool, and its arguments satisfy that tool's JSON schema
    names       the right tools, each as often as expected
    correct     every expected call is made by one of them, with right values and nothing beside them

Order does not matter: parallel calls have none. Text is compared without case, spaces and punctuation, as the Berkeley
Function Calling Leaderboard does; numbers by value; true is not 1.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError

from moepress.errors import EvaluateError
from moepress.evaluate.tool_cases import ExpectedCall

STEPS = ("called", "json", "schema", "names", "correct")
_IGNORED = str.maketrans("", "", " \t\n,./-_*^'\"’")


@dataclass(frozen=True)
class MadeCall:
    """A call as the server gave it. arguments: text, hopefully JSON."""

    id: str
    name: str
    arguments: str

    def parsed(self) -> dict[str, Any] | None:
        """The arguments, or None when they are no JSON object."""
        try:
            value = json.loads(self.arguments)
        except ValueError:
            return None
        return value if isinstance(value, dict) else None


@dataclass(frozen=True)
class Match:
    """How far an answer came (number of steps passed, 5 = correct), and which expected call each made one is."""

    steps: int
    pairs: tuple[int | None, ...]

    @property
    def correct(self) -> bool:
        return self.steps == len(STEPS)


def match_calls(made: Sequence[MadeCall], expected: Sequence[ExpectedCall], tools: Sequence[dict[str, Any]]) -> Match:
    """Judges the calls of one answer.

    Args:
        made: what the model called.
        expected: what it should have called.
        tools: OpenAI's tool objects that it was offered.

    Raises:
        EvaluateError: a tool whose parameters are no JSON schema.
    """
    pairs = _assign(made, expected)
    checks = (
        len(made) == len(expected),
        all(call.parsed() is not None for call in made),
        all(fits_schema(call, tools) for call in made),
        Counter(call.name for call in made) == Counter(call.name for call in expected),
        all(pair is not None for pair in pairs),
    )
    return Match(next((step for step, passed in enumerate(checks) if not passed), len(STEPS)), pairs)


def same_value(given: Any, right: Any) -> bool:
    """A value that a model gave against one that is right."""
    if isinstance(given, bool) or isinstance(right, bool):
        return given is right
    if isinstance(given, int | float) and isinstance(right, int | float):
        return math.isclose(given, right, rel_tol=1e-9, abs_tol=1e-12)
    if isinstance(given, str) and isinstance(right, str):
        return given.casefold().translate(_IGNORED) == right.casefold().translate(_IGNORED)
    if isinstance(given, list) and isinstance(right, list):
        return len(given) == len(right) and all(same_value(g, r) for g, r in zip(given, right, strict=True))
    if isinstance(given, dict) and isinstance(right, dict):
        return _same_object(given, right)
    return given is None and right is None


def _same_object(given: dict[str, Any], right: dict[str, Any]) -> bool:
    """Values inside objects may be lists of right ones too (BFCL), with ``""`` for optional."""
    if not given.keys() <= right.keys():
        return False
    for key, value in right.items():
        choices = value if isinstance(value, list) else [value]
        if key not in given:
            if "" not in choices:
                return False
        elif not same_value(given[key], value) and not any(same_value(given[key], choice) for choice in choices):
            return False
    return True


def _fits(call: MadeCall, expected: ExpectedCall) -> bool:
    given = call.parsed()
    if given is None or call.name != expected.name or not given.keys() <= expected.arguments.keys():
        return False
    return all(
        any(same_value(given[name], value) for value in values) if name in given else "" in values
        for name, values in expected.arguments.items()
    )


def _assign(made: Sequence[MadeCall], expected: Sequence[ExpectedCall]) -> tuple[int | None, ...]:
    """Each made call gets an expected one that it fits, as many as possible (augmenting paths)."""
    fits = [[index for index, call in enumerate(expected) if _fits(one, call)] for one in made]
    owner: dict[int, int] = {}

    def place(one: int, seen: set[int]) -> bool:
        for index in fits[one]:
            if index not in seen:
                seen.add(index)
                if index not in owner or place(owner[index], seen):
                    owner[index] = one
                    return True
        return False

    for one in range(len(made)):
        place(one, set())
    found: list[int | None] = [None] * len(made)
    for index, one in owner.items():
        found[one] = index
    return tuple(found)


def fits_schema(call: MadeCall, tools: Sequence[dict[str, Any]]) -> bool:
    """It names an offered tool, and its arguments satisfy that tool's JSON schema."""
    given = call.parsed()
    for tool in tools:
        function = tool["function"]
        if function["name"] == call.name and given is not None:
            try:
                return bool(Draft202012Validator(function.get("parameters") or {}).is_valid(given))
            except SchemaError as error:
                raise EvaluateError(f"tool {call.name}: its parameters are no JSON schema: {error.message}") from error
    return False
