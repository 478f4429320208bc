"""What an option takes: a parser for each kind, which says in a sentence of ours what is wrong and what would be right."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import typer


def whole(least: int = 1, most: int | None = None) -> Callable[[str], int]:
    """Reads a whole number between two bounds, both included.

    Raises:
        typer.BadParameter: from the parser.
    """

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise typer.BadParameter(f"{text!r} is not a whole number; {_bounds(least, most)}") from None
        return int(_checked(value, least, most))

    return parse


def number(least: float, most: float | None = None) -> Callable[[str], float]:
    """Reads a number between two bounds, both included.

    Raises:
        typer.BadParameter: from the parser.
    """

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if math.isnan(value):
            raise typer.BadParameter(f"{text!r} is not a number; {_bounds(least, most)}")
        return _checked(value, least, most)

    return parse


def one_of(words: Sequence[str]) -> Callable[[str], str]:
    """Reads one of these words.

    Raises:
        typer.BadParameter: from the parser.
    """

    def parse(text: str) -> str:
        if text not in words:
            raise typer.BadParameter(f"{text!r} is not one of {', '.join(words)}")
        return text

    return parse


def _checked(value: float, least: float, most: float | None) -> float:
    if value < least or (most is not None and value > most):
        raise typer.BadParameter(f"{value:g} is too {'small' if value < least else 'large'}; {_bounds(least, most)}")
    return value


def _bounds(least: float, most: float | None) -> str:
    return f"it must be {least:g} or more" if most is None else f"it must be from {least:g} to {most:g}"
