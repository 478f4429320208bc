"""Everything that is settled before work begins. ``plan`` ends here, ``convert`` goes on from here: what one refuses, both do.

    recipe against family ─▶ output folder ─▶ disk ─▶ engine ─▶ calibration text ─▶ resume key
    └──────────── headers and configuration: seconds ─────────┘  └─ a long one: minutes ─┘

What is cheap to refuse comes first. The resume key holds the digest of the calibration tokens, which is known last; so a folder
that was begun before is held against the plan with the digest that it was begun with, and against the true one at the end.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moepress.convert.calibrated.samples import calibration_samples
from moepress.convert.forecast.estimate import check_disk
from moepress.convert.journal import Journal, begun_calibration
from moepress.convert.kv.plan import reads_calibration_text
from moepress.convert.kv.taken import take_scales
from moepress.convert.plan import ConversionPlan, make_plan
from moepress.formats.checkpoint import Checkpoint
from moepress.formats.families import identify_family
from moepress.recipe import Recipe

if TYPE_CHECKING:
    from moepress.calibration.text import CalibrationSet


@dataclass(frozen=True)
class Prepared:
    """A conversion that may begin.

    Attributes:
        plan: complete, with its resume key.
        journal: of the output folder, checked and not opened; nothing was written.
        done: the receipt of every finished shard, by its name.
        samples: calibration text; None where the recipe needs none.
    """

    plan: ConversionPlan
    journal: Journal
    done: dict[str, dict[str, Any]]
    samples: CalibrationSet | None


def prepare(
    checkpoint: Checkpoint,
    out: Path,
    recipe: Recipe,
    *,
    same_kv_as: str | Path | None = None,
    trust_remote_code: bool = False,
    reading_text: Callable[[], None] = lambda: None,
) -> Prepared:
    """Plans, and refuses what cannot work. Reads no tensor, writes nothing.

    Args:
        checkpoint: the source: headers, configuration, and its tokenizer's files where the recipe calibrates.
        out: the output folder, there or not.
        same_kv_as: another output of this model, whose KV scales are taken over instead of measuring any.
        trust_remote_code: run the checkpoint's own Python code for its tokenizer.
        reading_text: told before the calibration text is read.

    Raises:
        CheckpointError, PlanRefused: it cannot work.
        ConvertError: the output folder's own files are damaged.
    """
    taken = take_scales(same_kv_as, checkpoint) if same_kv_as is not None else None
    reads = reads_calibration_text(identify_family(checkpoint.config), recipe, taken)
    plan = make_plan(checkpoint, recipe, calibration=begun_calibration(out) if reads else None, taken=taken)
    journal, done = _in_folder(plan, out)
    if recipe.engine == "llmcompressor":
        from moepress.convert.llmcompressor.engine import check_engine

        check_engine(checkpoint, plan)
    if not reads:
        return Prepared(plan, journal, done, None)
    reading_text()
    samples = calibration_samples(checkpoint, recipe, trust_remote_code=trust_remote_code)
    if samples.token_sha256 != plan.calibration:
        plan = plan.with_calibration(samples.token_sha256)
        journal, done = _in_folder(plan, out)
    return Prepared(plan, journal, done, samples)


def _in_folder(plan: ConversionPlan, out: Path) -> tuple[Journal, dict[str, dict[str, Any]]]:
    """The output folder takes this plan, and its disk what is still to be written."""
    journal = Journal(out, plan)
    journal.check()
    done = {shard.name: receipt for shard in plan.shards if (receipt := journal.receipt(shard.name))}
    check_disk(plan, out, finished=set(done))
    return journal, done
