"""``re:`` lines of a quantization config, compiled: somebody else's patterns, asked of every module of a model.

Python's matcher backtracks. ``(a+)+$`` against a name of forty letters takes longer than anybody waits, and a
configuration comes from the Hub. So a pattern is looked at before it is used: one repetition without an end inside
another, or many of them in a row, is refused by name. What publishers write (``.*self_attn.*``,
``.*mlp\\.(gate|up|gate_up|down)_proj.*``) has one to three, side by side.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache
from re import _constants, _parser  # type: ignore[attr-defined]  # the parse tree; no public name for it
from typing import Any

from moepress.errors import CheckpointError

MAX_LENGTH = 2000
MAX_REPEATS = 6
"""Repetitions without an end in one pattern: with n of them a name of length L takes up to L^n / n! steps."""

MANY = 16
"""A repetition that may go on for more than this counts as one without an end."""

_REPEATS = (_constants.MAX_REPEAT, _constants.MIN_REPEAT, _constants.POSSESSIVE_REPEAT)


def module_pattern(line: str, *, where: str = "config.json: quantization_config") -> re.Pattern[str]:
    """The pattern of a ``re:`` line, to be used with ``match``.

    Raises:
        CheckpointError: it is no regular expression, or one that may take for ever.
    """
    try:
        return _compiled(line.removeprefix("re:"))
    except (re.error, RecursionError, OverflowError, ValueError) as error:
        shown = line if len(line) <= 80 else f"{line[:80]}…"
        raise CheckpointError(f"{shown!r} is not a pattern that can be used: {error}", where=where) from error


@lru_cache(maxsize=4096)
def _compiled(pattern: str) -> re.Pattern[str]:
    if len(pattern) > MAX_LENGTH:
        raise ValueError(f"it has {len(pattern):,} characters, the longest that is read has {MAX_LENGTH:,}")
    compiled = re.compile(pattern)
    depths = list(_open_repeats(_parser.parse(pattern), 0))
    if any(depth > 0 for depth in depths):
        raise ValueError("it repeats a repetition, which can take for ever")
    if len(depths) > MAX_REPEATS:
        raise ValueError(f"it has {len(depths)} repetitions without an end; {MAX_REPEATS} are the most that is read")
    return compiled


def _open_repeats(tree: Any, depth: int) -> Iterator[int]:
    """For every repetition that can be of many lengths: how many large ones it lies inside."""
    for operation, argument in tree:
        if operation in _REPEATS:
            least, most, body = argument
            endless = most is _constants.MAXREPEAT or most > MANY
            if endless or (depth and least != most and most > 1):
                yield depth
            yield from _open_repeats(body, depth + endless)
        elif isinstance(argument, list | tuple):
            for part in _subtrees(argument):
                yield from _open_repeats(part, depth)


def _subtrees(argument: Any) -> Iterator[Any]:
    for part in argument:
        if isinstance(part, _parser.SubPattern):
            yield part
        elif isinstance(part, list | tuple):
            yield from _subtrees(part)
