"""Tool calls over a server: single, parallel, and over several turns, where an early error spoils what follows.

    results given     user ─► model: calls? ─► judged ─► results of the calls ─► model: text ─► next user turn …
    tools that run    user ─► model: calls ─► results ─► model: calls … until it calls nothing ─► judged ─► next (`tool_worlds`)

The history of a conversation is the model's own: its wrong calls stay in it, and are answered with an error. So a turn is
judged as it would go in use, and two figures come out: the share of turns that are right, and how many conversations have
had no error up to turn t. A conversation counts as right when all its turns are.

The server must turn the model's text into calls (SGLang: ``--tool-call-parser``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from moepress.evaluate.answers import Contestant
from moepress.evaluate.call_match import STEPS, MadeCall, Match, match_calls
from moepress.evaluate.survival import Curve, kaplan_meier
from moepress.evaluate.tool_cases import CaseKind, ToolCase
from moepress.evaluate.tool_worlds import MOST_STEPS, WorldCase, judge_turn, open_world

CHAT = "/v1/chat/completions"
CONVERSATIONS = ("multi-turn", "stateful")
"""Kinds of more than one turn: results that are given, and tools that run."""

_NOT_JSON = '{"error": "the arguments are not a JSON object"}'
REPLY_TOKENS = 128
"""For the sentence that the model says after its calls' results; it is history, and not judged."""


@dataclass(frozen=True)
class Played:
    """One case as one model played it: the match of every turn, whether it called anything, answers cut off."""

    matches: tuple[Match, ...]
    calls: int
    truncated: int

    @property
    def correct(self) -> bool:
        return all(match.correct for match in self.matches)

    @property
    def first_error(self) -> int | None:
        """Turn of the first error, from 1."""
        return next((turn for turn, match in enumerate(self.matches, start=1) if not match.correct), None)


def play_cases(who: Contestant, cases: Sequence[ToolCase | WorldCase], *, max_tokens: int) -> list[Played]:
    """Has one model play all cases. `max_tokens`: of an answer that may call tools."""
    jobs = [
        lambda case=case: (_play_in_world if isinstance(case, WorldCase) else _play)(who, case, max_tokens)
        for case in cases
    ]
    return who.each(jobs, label="tool calls")


def _play_in_world(who: Contestant, case: WorldCase, max_tokens: int) -> Played:
    messages: list[dict[str, Any]] = []
    matches: list[Match] = []
    calls = truncated = 0
    with open_world(case) as world:
        for turn in case.turns:
            messages.append({"role": "user", "content": turn.user})
            called: list[MadeCall] = []
            ended = False
            for _ in range(MOST_STEPS):
                message, cut = _answer(who, messages, turn.tools, max_tokens)
                made = _made_calls(message)
                truncated += cut
                messages.append(_as_history(message, made))
                if not made:
                    ended = True
                    break
                called += made
                results = iter(world.run([call for call in made if call.parsed() is not None]))
                for call in made:
                    said = next(results) if call.parsed() is not None else _NOT_JSON
                    messages.append({"role": "tool", "tool_call_id": call.id, "content": said})
            right = world.right(turn.calls)
            matches.append(judge_turn(called, turn, right=right and ended))
            calls += len(called)
    return Played(tuple(matches), calls, truncated)


def _play(who: Contestant, case: ToolCase, max_tokens: int) -> Played:
    messages = list(case.before)
    matches: list[Match] = []
    calls = truncated = 0
    for number, turn in enumerate(case.turns, start=1):
        messages.append({"role": "user", "content": turn.user})
        message, cut = _answer(who, messages, case.tools, max_tokens)
        made = _made_calls(message)
        match = match_calls(made, turn.calls, case.tools)
        matches.append(match)
        calls += len(made)
        truncated += cut
        if number == len(case.turns):
            break
        messages.append(_as_history(message, made))
        if made:
            for call, pair in zip(made, match.pairs, strict=True):
                messages.append({"role": "tool", "tool_call_id": call.id, "content": _result(call, pair, turn.results)})
            reply, _ = _answer(who, messages, case.tools, REPLY_TOKENS)
            messages.append({"role": "assistant", "content": reply.get("content") or ""})
    return Played(tuple(matches), calls, truncated)


def _answer(
    who: Contestant, messages: list[dict[str, Any]], tools: Sequence[dict[str, Any]], max_tokens: int
) -> tuple[dict[str, Any], bool]:
    body = {"messages": messages, "tools": list(tools), "temperature": 0, "max_tokens": max_tokens}
    choice = (who.ask(CHAT, body).get("choices") or [{}])[0]
    return choice.get("message") or {}, choice.get("finish_reason") == "length"


def _made_calls(message: dict[str, Any]) -> list[MadeCall]:
    found = []
    for number, call in enumerate(message.get("tool_calls") or []):
        function = call.get("function") or {}
        name = str(function.get("name") or "")
        found.append(
            MadeCall(str(call.get("id") or f"functions.{name}:{number}"), name, str(function.get("arguments") or ""))
        )
    return found


def _as_history(message: dict[str, Any], made: Sequence[MadeCall]) -> dict[str, Any]:
    """What the model said, as it goes back to the server. Chat templates fail on arguments that are no JSON object."""
    said: dict[str, Any] = {"role": "assistant", "content": message.get("content") or ""}
    if made:
        said["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments if call.parsed() is not None else "{}"},
            }
            for call in made
        ]
    return said


def _result(call: MadeCall, pair: int | None, results: Sequence[str]) -> str:
    if pair is not None:
        return results[pair] if results else '{"ok": true}'
    if call.parsed() is None:
        return _NOT_JSON
    return '{"error": "nothing found for these arguments"}'


def step_shares(played: Sequence[Played]) -> dict[str, float]:
    """Share of turns that passed each step; a step needs those before it."""
    matches = [match for one in played for match in one.matches]
    return {
        step: sum(match.steps > index for match in matches) / max(1, len(matches)) for index, step in enumerate(STEPS)
    }


def error_free(played: Sequence[Played], *, confidence: float) -> Curve:
    """Share of conversations without an error up to each turn."""
    steps = [one.first_error or len(one.matches) for one in played]
    return kaplan_meier(steps, [one.first_error is not None for one in played], confidence=confidence)


def tool_calls_json(
    cases: Sequence[ToolCase | WorldCase], source: Sequence[Played], candidate: Sequence[Played], *, confidence: float
) -> dict[str, Any]:
    """The result's ``tool_calls``: by kind."""
    found: dict[str, Any] = {}
    kinds: tuple[CaseKind, ...] = ("single", "parallel", "multi-turn", "stateful")
    for kind in kinds:
        rows = [index for index, case in enumerate(cases) if case.kind == kind]
        if not rows:
            continue
        sides = {"source": [source[i] for i in rows], "candidate": [candidate[i] for i in rows]}
        found[kind] = {"cases": len(rows), **{side: step_shares(played) for side, played in sides.items()}}
        if kind in CONVERSATIONS:
            found[kind] |= _turns_json(sides, confidence)
    return found


def _turns_json(sides: dict[str, list[Played]], confidence: float) -> dict[str, Any]:
    longest = max(len(one.matches) for one in sides["source"])
    by_turn = []
    for turn in range(longest):
        there = {
            side: [one.matches[turn].correct for one in played if len(one.matches) > turn]
            for side, played in sides.items()
        }
        share = {side: sum(right) / len(right) for side, right in there.items()}
        by_turn.append({"turn": turn + 1, "of": len(there["source"]), **share})
    return {
        "conversations": len(sides["source"]),
        "turns": sum(len(one.matches) for one in sides["source"]),
        "by_turn": by_turn,
        "survival": {side: error_free(played, confidence=confidence).as_json() for side, played in sides.items()},
    }
