"""What every part of a recipe is: strict and frozen. And sizes as people write them."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, PlainSerializer

_SIZE = re.compile(r"^\s*([0-9]+(?:\.[0-9]+)?)\s*(B|kB|KB|MB|GB|TB|KiB|MiB|GiB|TiB)?\s*$")
_UNITS = {"B": 1, "kB": 10**3, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


def parse_size(text: str | int) -> int:
    """Bytes of a size such as ``5GB`` (decimal) or ``4.5GiB`` (binary); a bare number is bytes.

    Raises:
        ValueError: the text is not a size.
    """
    if isinstance(text, int) and not isinstance(text, bool):
        return text
    match = _SIZE.match(str(text))
    if not match:
        raise ValueError(f"{text!r} is not a size; write for example 5GB or 4.5GiB")
    return int(float(match[1]) * _UNITS[match[2] or "B"])


def _size_text(value: int) -> str:
    for unit in ("TB", "TiB", "GB", "GiB", "MB", "MiB", "kB", "KiB"):
        if value % _UNITS[unit] == 0:
            return f"{value // _UNITS[unit]}{unit}"
    return f"{value}B"


Size = Annotated[int, BeforeValidator(parse_size), PlainSerializer(_size_text, return_type=str)]


class Section(BaseModel):
    """Strict and frozen: the base of every part of a recipe."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)
