"""A world of simulated tools in a process of its own: file system, tickets, orders … as bfcl-eval ships them.

    python -I tool_world_process.py FOLDER         one JSON object a line, in and out; FOLDER holds the package bfcl_eval
    {"classes", "config", "long"}  →  {"offers"}   the world, made anew, and its twin; names of what can be called
    {"calls": [{"name", "arguments"}, …]}  →  {"results": [text, …]}
    {"expected": ["cd(folder='x')", …]}    →  {"right"}

The twin makes the expected calls. A turn is right when both worlds are then in the same state and the model has seen, by now,
every result that the twin's calls gave: the leaderboard's own rule. Nothing is ever evaluated as code: a model gives names and
values, expected calls are read as literals. Limits of time and memory, because a value can be any size. Standard library only.
"""

from __future__ import annotations

import ast
import copy
import importlib
import json
import resource
import sys
from typing import Any

CPU_SECONDS, MEMORY = 120, 2 << 30
PACKAGE = "bfcl_eval.eval_checker.multi_turn_eval.func_source_code"
MODULES = {
    "GorillaFileSystem": "gorilla_file_system",
    "MathAPI": "math_api",
    "MessageAPI": "message_api",
    "TicketAPI": "ticket_api",
    "TradingBot": "trading_bot",
    "TravelAPI": "travel_booking",
    "TwitterAPI": "posting_api",
    "VehicleControlAPI": "vehicle_control",
}


class World:
    """Instances by class, and every result that calls have given so far."""

    def __init__(self, classes: list[str], config: dict[str, Any], *, long: bool) -> None:
        self.instances: dict[str, Any] = {}
        self.results: list[str] = []
        for name in classes:
            made = getattr(importlib.import_module(f"{PACKAGE}.{MODULES[name]}"), name)()
            if hasattr(made, "_load_scenario"):
                made._load_scenario(copy.deepcopy(config.get(name, {})), long_context=long)
            self.instances[name] = made

    def offers(self) -> list[str]:
        """Names of all public methods."""
        return sorted(
            {
                name
                for made in self.instances.values()
                for name in dir(made)
                if name[0] != "_" and callable(getattr(made, name))
            }
        )

    def call(self, name: str, positional: list[Any], named: dict[str, Any]) -> str:
        """One call's result as text; a failure is a result too."""
        owner = next((made for made in self.instances.values() if name[:1] != "_" and hasattr(made, name)), None)
        try:
            if owner is None:
                raise NameError(f"there is no tool {name!r}")
            text = _as_text(getattr(owner, name)(*positional, **named))
        except Exception as error:  # noqa: BLE001 (somebody else's simulation: whatever it raises is what the model is told)
            text = f"Error during execution: {error}"
        self.results.append(text)
        return text

    def same_state(self, other: World) -> bool:
        """All public attributes are equal."""
        return all(
            getattr(self.instances[name], field) == value
            for name, theirs in other.instances.items()
            for field, value in vars(theirs).items()
            if not field.startswith("_")
        )


def _as_text(found: object) -> str:
    if isinstance(found, dict):
        try:
            return json.dumps(found)
        except TypeError:  # numbers of mpmath
            return str(found)
    return found if isinstance(found, str) else str(found)


def expected_call(text: str) -> tuple[str, list[Any], dict[str, Any]]:
    """``f(1, x='a')`` -> name, positional and named values; literals alone.

    Raises:
        ValueError: anything else.
    """
    node = ast.parse(text, mode="eval").body
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
        raise ValueError(f"not a call: {text!r}")
    named = {str(word.arg): ast.literal_eval(word.value) for word in node.keywords}
    return node.func.id, [ast.literal_eval(value) for value in node.args], named


def seen_all(seen: list[str], wanted: list[str]) -> bool:
    """Every wanted result was seen, as often as it is wanted."""
    left = list(seen)
    for text in wanted:
        if text not in left:
            return False
        left.remove(text)
    return True


def serve() -> None:
    """Answers line by line until the input ends."""
    answers, sys.stdout = sys.stdout, sys.stderr  # what a tool prints is no answer of ours
    ours = twin = World([], {}, long=False)
    for line in sys.stdin:
        asked = json.loads(line)
        answer: dict[str, Any]
        if "classes" in asked:
            ours, twin = (World(asked["classes"], asked["config"], long=asked["long"]) for _ in range(2))
            answer = {"offers": ours.offers()}
        elif "calls" in asked:
            answer = {"results": [ours.call(call["name"], [], call["arguments"]) for call in asked["calls"]]}
        else:
            wanted = [twin.call(*expected_call(text)) for text in asked["expected"]]
            answer = {"right": ours.same_state(twin) and seen_all(ours.results, wanted)}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    sys.path.insert(0, sys.argv[1])
    serve()
