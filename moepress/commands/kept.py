"""What a command found is kept beside the output for ``moepress report``, where there is an output to keep it with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from moepress.commands.console import note
from moepress.errors import MoepressError
from moepress.results import REPORT_NAME, write_result


def keep(out: Path, name: str, verdict: str, found: dict[str, Any]) -> None:
    """Writes the result; a folder that takes none costs a warning, never the finding itself.

    Args:
        verdict: ``pass``, ``fail`` or ``not judged``.
    """
    if not (out / REPORT_NAME).exists():  # not finished by convert: a result would be bound to nothing
        note(f"this finding is not kept: {out} holds no {REPORT_NAME} that it would belong to")
        return
    try:
        write_result(out, name, verdict, found)
    except MoepressError as error:
        note(f"not kept for the report: {error}")
