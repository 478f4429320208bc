"""All that an output folder says about itself: report, plan, receipts, headers, and the results of later commands.

    moepress_report.json      must be there: what convert did
    .moepress/plan.json       the source's place; gone in a published copy
    .moepress/receipts        errors of every weight; gone in a published copy
    .moepress/results         what verify, fidelity, validate, evaluate found, if they belong to this conversion

Only headers are read, never weights: a report of a 421 GiB checkpoint takes seconds.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moepress.convert.made_from import recorded_source, refuse_two_models
from moepress.convert.receipts import weight_records
from moepress.errors import MoepressError
from moepress.formats.checkpoint import Checkpoint, open_checkpoint
from moepress.formats.families import Family, identify_family
from moepress.formats.inspection import Inspection, inspect_checkpoint
from moepress.formats.runtime_contract import Contract, contract_for
from moepress.recipe import Recipe
from moepress.results import REPORT_NAME, output_digest, read_results


@dataclass(frozen=True)
class PressedOutput:
    """One output, read.

    Attributes:
        report: moepress_report.json.
        digest: SHA-256 of that file, which holds every shard's.
        records: weight name in the source → its receipt's record; empty without receipts.
        checkpoint: the output's headers and configuration.
        inspection: what it holds.
        source: where the source was, as convert was told; None when the plan is gone.
        source_checkpoint: the source's headers; None when it is not there (any more), or another model lies there.
        source_problem: why not, in words; empty when it is there.
        results: by command, those of this conversion.
        stale: commands whose results are of an earlier one.
    """

    folder: Path
    report: dict[str, Any]
    digest: str
    recipe: Recipe
    family: Family
    contract: Contract
    records: dict[str, dict[str, Any]]
    checkpoint: Checkpoint
    inspection: Inspection
    source: str | None
    source_checkpoint: Checkpoint | None
    source_problem: str
    results: dict[str, dict[str, Any]]
    stale: tuple[str, ...]

    def found(self, name: str) -> dict[str, Any] | None:
        """What command `name` found, or None if it was not run on this conversion."""
        result = self.results.get(name)
        return None if result is None else result["found"]

    @property
    def source_words(self) -> str:
        """The source for command lines: its folder, or a placeholder."""
        return self.source or "SRC"


def read_pressed_output(folder: Path, *, source: str | None = None) -> PressedOutput:
    """Reads an output folder.

    Args:
        source: where the source is now; None = where it was when the output was made.

    Raises:
        MoepressError: not a finished conversion, its state files are damaged, or ``source`` is another model.
    """
    digest = output_digest(folder)
    report = _report(folder)
    recipe = Recipe.model_validate(report["recipe"])
    checkpoint = open_checkpoint(folder)
    family = identify_family(checkpoint.config)
    place = source or recorded_source(folder)
    source_checkpoint, problem = _open_source(place, checkpoint, named=source is not None)
    fresh, stale = read_results(folder)
    return PressedOutput(
        folder=folder,
        report=report,
        digest=digest,
        recipe=recipe,
        family=family,
        contract=contract_for(recipe.serving.server, recipe.serving.version, family.key),
        records=weight_records(folder),
        checkpoint=checkpoint,
        inspection=inspect_checkpoint(checkpoint),
        source=place,
        source_checkpoint=source_checkpoint,
        source_problem=problem,
        results=fresh,
        stale=tuple(stale),
    )


def _report(folder: Path) -> dict[str, Any]:
    path = folder / REPORT_NAME
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
        for field in ("recipe", "family", "layout", "quantized", "kept", "fallbacks", "shards", "source_bytes"):
            report[field]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise MoepressError(f"not a report of convert: {error!r}", where=str(path), hint="convert again") from error
    return dict(report)


def _open_source(place: str | None, output: Checkpoint, *, named: bool) -> tuple[Checkpoint | None, str]:
    """The source's headers; a source that was named on the command line has to be there, and of this model."""
    if place is None:
        return None, "where it was is not recorded in this copy; name it with --source"
    try:
        source = open_checkpoint(place)
        refuse_two_models(output, source, option="--source")
        return source, ""
    except MoepressError as error:
        if named:
            raise
        return None, f"{place}: {error.what}"
