"""A checkpoint's address on the Hub: ``org/name``, with ``@revision`` for a branch, a tag or a commit.

A path that exists on this machine is always the path. Text that is spelt like a path (``./x``, ``/x``, ``~/x``, three
parts) is never an address.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

_NAME = r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]{0,94}[A-Za-z0-9_])?"
_ADDRESS = re.compile(rf"(?:https://huggingface\.co/|hf://)?({_NAME}/{_NAME})(?:/tree/([^@\s]+)|@([^@\s]+))?/?")


@dataclass(frozen=True)
class Address:
    """A repository of models, and which of its revisions; None is the default branch."""

    repo: str
    revision: str | None = None

    def __str__(self) -> str:
        return self.repo if self.revision is None else f"{self.repo}@{self.revision}"


def parse_address(text: str) -> Address | None:
    """The address that a text spells, also as the page's URL; None if it spells none."""
    match = _ADDRESS.fullmatch(text)
    if not match or "--" in match[1] or ".." in match[1] or match[1].endswith(".git"):
        return None
    return Address(match[1], match[2] or match[3])


def hub_address(source: str | Path) -> Address | None:
    """The address meant by a command's SRC; None where it is a path: one that exists, or one that is spelt like one."""
    text = str(source)
    if isinstance(source, Path) or Path(text).expanduser().exists():
        return None
    return parse_address(text)
