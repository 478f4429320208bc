"""Conversations whose tools really run: the Berkeley leaderboard's multi-turn cases, in worlds that remember.

    user ─► model: calls ─► the world runs them ─► results ─► model: more calls … or text, which ends the turn ─► judged ─► next

An answer may take several steps (``cd``, ``mkdir``, ``mv``), each on what the one before returned, and nothing is mended between
turns: a file moved to the wrong folder stays there. A turn is right when the world is then as the expected calls make it and the
model has seen what they return, whichever way it came there. Where no call is expected (a tool, a value is missing) any is wrong.

    base            all that is needed is there              miss_param      something must be asked for first
    miss_func       a tool comes one turn later              long_context    worlds with hundreds of files or orders

Cases and worlds are read from an unpacked ``bfcl-eval`` (Apache-2.0); its programs run in `tool_world_process`, never in this one.
"""

from __future__ import annotations

import contextlib
import json
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moepress.errors import EvaluateError
from moepress.evaluate import tool_world_process
from moepress.evaluate.call_match import STEPS, MadeCall, Match, fits_schema
from moepress.evaluate.tool_cases import CaseKind, bfcl_tool, json_lines

WORLD_CATEGORIES = ("base", "miss_func", "miss_param", "long_context")
MOST_STEPS = 20
"""Answers with calls that a turn may take, as on the leaderboard; a turn that needs more is wrong."""

SECONDS = 30.0
MORE_TOOLS = "More tools are there now. Go on with them."


@dataclass(frozen=True)
class WorldTurn:
    """What the user says, the tools that are offered, and the calls that would be right (Python calls of literals)."""

    user: str
    tools: tuple[dict[str, Any], ...]
    calls: tuple[str, ...]


@dataclass(frozen=True)
class WorldCase:
    """A conversation in a world. folder: where the package ``bfcl_eval`` lies."""

    id: str
    turns: tuple[WorldTurn, ...]
    classes: tuple[str, ...]
    config: dict[str, Any]
    long: bool
    folder: Path

    @property
    def kind(self) -> CaseKind:
        return "stateful"


def read_worlds(data: Path, limit: int | None = None) -> list[WorldCase]:
    """The multi-turn cases of ``bfcl_eval/data``; none where the package's programs are not beside them.

    Args:
        limit: first cases of each category only.

    Raises:
        EvaluateError: files of another form than version 4's.
    """
    found = []
    programs = data.resolve().parent / "eval_checker" / "multi_turn_eval" / "func_source_code"
    for category in WORLD_CATEGORIES:
        asked, right = (folder / f"BFCL_v4_multi_turn_{category}.json" for folder in (data, data / "possible_answer"))
        if programs.is_dir() and asked.is_file() and right.is_file():
            try:
                truth = {row["id"]: row["ground_truth"] for row in json_lines(right)}
                found += [_case(row, truth[row["id"]], data) for row in json_lines(asked)[:limit]]
            except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
                raise EvaluateError(f"not a BFCL v4 file: {error!r}", where=str(asked)) from error
    return found


def _case(row: dict[str, Any], truth: list[list[str]], data: Path) -> WorldCase:
    classes = tuple(row["involved_classes"])
    left_out = set(row.get("excluded_function", ()))
    tools = [tool for name in classes for tool in _tools_of(name, data) if tool["function"]["name"] not in left_out]
    missing = {int(turn): set(names) for turn, names in (row.get("missed_function") or {}).items()}
    turns = []
    for number, (messages, calls) in enumerate(zip(row["question"], truth, strict=True)):
        hidden = {name for turn, names in missing.items() if turn > number for name in names}
        offered = tuple(tool for tool in tools if tool["function"]["name"] not in hidden)
        said = "\n".join(message["content"] for message in messages) or MORE_TOOLS
        for call in calls:
            tool_world_process.expected_call(call)  # a call that is none is found now, not after an hour
        turns.append(WorldTurn(said, offered, tuple(calls)))
    long = "long_context" in row["id"]
    return WorldCase(row["id"], tuple(turns), classes, row["initial_config"], long, data.resolve().parents[1])


def _tools_of(name: str, data: Path) -> list[dict[str, Any]]:
    path = data / "multi_turn_func_doc" / f"{tool_world_process.MODULES[name]}.json"
    return [bfcl_tool(function) for function in json_lines(path)]


class World:
    """A running world. Use `open_world`."""

    def __init__(self, process: subprocess.Popen[str], folder: Path) -> None:
        self.process, self.folder = process, folder
        self._lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self.process.stdout or ():
            self._lines.put(line)
        self._lines.put("")

    def ask(self, question: dict[str, Any]) -> dict[str, Any] | None:
        """The world's answer; None when it died or took too long, as it does when a value was monstrous."""
        try:
            if self.process.stdin is not None:
                self.process.stdin.write(json.dumps(question) + "\n")
                self.process.stdin.flush()
            line = self._lines.get(timeout=SECONDS)
        except (OSError, queue.Empty):
            line = ""
        if not line:
            self.process.kill()
            return None
        answer: dict[str, Any] = json.loads(line)
        return answer

    def run(self, calls: Sequence[MadeCall]) -> list[str]:
        """Results of calls whose arguments are JSON objects."""
        asked = [{"name": call.name, "arguments": call.parsed()} for call in calls]
        answer = self.ask({"calls": asked})
        return answer["results"] if answer else ["Error during execution: it took too long"] * len(calls)

    def right(self, expected: Sequence[str]) -> bool:
        """Whether it is as the expected calls of this turn make it."""
        answer = self.ask({"expected": list(expected)})
        return bool(answer and answer["right"])


@contextlib.contextmanager
def open_world(case: WorldCase) -> Iterator[World]:
    """A world in its first state.

    Raises:
        EvaluateError: the package's programs do not run.
    """
    with contextlib.ExitStack() as stack:
        said = stack.enter_context(
            tempfile.TemporaryFile(mode="w+")
        )  # no pipe: nobody reads it, a full one would block
        process = subprocess.Popen(
            [sys.executable, "-I", "-B", tool_world_process.__file__, str(case.folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=said,
            text=True,
            env={"TZ": "UTC"},
        )
        stack.callback(_end, process)
        world = World(process, case.folder)
        if world.ask({"classes": list(case.classes), "config": case.config, "long": case.long}) is None:
            process.wait()
            said.seek(0)
            words = said.read().strip().splitlines() or ["no message"]
            raise EvaluateError(
                f"BFCL's simulated tools do not run: {words[-1]}",
                where=str(case.folder / "bfcl_eval"),
                hint="unpack bfcl-eval whole, or name a folder with its single-turn files alone",
            )
        yield world


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()


def judge_turn(made: Sequence[MadeCall], turn: WorldTurn, *, right: bool) -> Match:
    """Steps passed by all calls of a turn. A right turn passes all: what went wrong on the way was mended on the way."""
    if not turn.calls:
        return Match(0 if made else len(STEPS), ())
    if not made:
        return Match(0, ())
    if right:
        return Match(len(STEPS), ())
    if any(call.parsed() is None for call in made):
        return Match(1, ())
    if not all(fits_schema(call, turn.tools) for call in made):
        return Match(2, ())
    wanted = {tool_world_process.expected_call(call)[0] for call in turn.calls}
    return Match(4 if wanted <= {call.name for call in made} else 3, ())
