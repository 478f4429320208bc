"""What an output was made from: its plan says so, as long as the output lies where convert wrote it.

Commands that compare an output with its source are given the source anew, perhaps from another place, and perhaps another
model's by mistake; then the plan's own word is the best hint there is.
"""

from __future__ import annotations

import shlex
from pathlib import Path

from moepress.convert.journal import begun_plan
from moepress.errors import CheckpointError, MoepressError
from moepress.formats.checkpoint import Checkpoint
from moepress.formats.same_model import two_models


def recorded_source(out: Path) -> str | None:
    """Where the source was, as convert was told; None where no plan is left, as in a published copy.

    Raises:
        ConvertError: the plan cannot be read.
    """
    plan = begun_plan(out)
    return str(plan.get("source")) if plan else None


def refuse_two_models(output: Checkpoint, source: Checkpoint, *, option: str) -> None:
    """Refuses to compare an output with another model, before any work.

    Args:
        output: any checkpoint that was made from another; it need not be ours.
        source: what it is to be held against.
        option: that names the source, for the hint.

    Raises:
        CheckpointError: with what differs.
    """
    if problem := two_models(output.config, source.config):
        raise CheckpointError(
            problem,
            where=f"{output.location}; {source.location}",
            hint=right_source(Path(output.location), source.location, option),
        )


def right_source(out: Path, wrong: str, option: str) -> str:
    """How to name the right source, in a hint: by its place where that is recorded, and another than was given."""
    try:
        recorded = recorded_source(out)
    except MoepressError:
        recorded = None
    if recorded is None or Path(recorded).resolve() == Path(wrong).resolve():
        return f"name the checkpoint that {out} was made from: {option} SRC"
    return f"{out} was made from {recorded}: {option} {shlex.quote(recorded)}"
