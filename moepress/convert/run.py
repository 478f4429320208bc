"""A conversion from start to finish: plan minus receipts, in parallel inside this process, then the finishing files.

The command may be stopped at any moment, also by kill -9, and given again: finished shards are recognised by their
receipts, half-written ones were never visible, and the folder becomes a checkpoint (index, config) only at the very end.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from moepress.convert.arrivals import Arrivals
from moepress.convert.estimate import check_disk
from moepress.convert.executor import Place, in_process
from moepress.convert.finish import finish
from moepress.convert.journal import Journal
from moepress.convert.kv_plan import reads_calibration_text
from moepress.convert.kv_scales import KvScales
from moepress.convert.layout import ShardPlan
from moepress.convert.plan import ConversionPlan, make_plan
from moepress.formats.checkpoint import Checkpoint, open_checkpoint
from moepress.formats.families import identify_family, text_config
from moepress.recipe import Recipe

if TYPE_CHECKING:
    from moepress.calibration.text import CalibrationSet


class Watcher(Protocol):
    """What somebody who looks at a run is told. All calls come from the thread that runs the conversion."""

    def begin(self, plan: ConversionPlan, bytes_done: int) -> None: ...
    def unit(self, label: str) -> None: ...
    def advance(self, source_bytes: int) -> None: ...
    def unit_done(self, receipt: dict[str, Any]) -> None: ...


class Silent:
    """Watches nothing."""

    def begin(self, plan: ConversionPlan, bytes_done: int) -> None: ...
    def unit(self, label: str) -> None: ...
    def advance(self, source_bytes: int) -> None: ...
    def unit_done(self, receipt: dict[str, Any]) -> None: ...


@dataclass(frozen=True)
class Conversion:
    """A finished conversion. ``report`` is what ``moepress_report.json`` holds; ``resumed`` counts shards found finished."""

    plan: ConversionPlan
    out: Path
    report: dict[str, Any]
    seconds: float
    resumed: int


def convert(
    source: str | Path,
    out: Path,
    recipe: Recipe,
    *,
    threads: int | None = None,
    trust_remote_code: bool = False,
    watcher: Watcher | None = None,
    place: Place | None = None,
    arrivals: Arrivals | None = None,
    device: str = "cpu",
) -> Conversion:
    """Presses the checkpoint at ``source`` into ``out``.

    Args:
        source: a local checkpoint folder.
        out: a new or empty folder, or one that the same conversion was begun in.
        threads: pressing threads; the machine's processors by default. Does not change a byte of the result.
        trust_remote_code: run the Python code that a checkpoint brings for its tokenizer; only calibration needs one.
        watcher: is told about progress.
        place: where the work is done, for example by workers of a cluster; this process by default. Changes no byte.
        arrivals: the source is still arriving; then ``source`` is what it is called.
        device: where layers and calibrated experts are computed: ``auto``, ``cpu`` or ``cuda``. Changes codes in a few places.

    Raises:
        CheckpointError, FormatError: the source is incomplete or damaged.
        PlanRefused: it cannot work, found before any work.
        QuantizeError, ConvertError: it stopped on the way; the same command resumes.
    """
    started = time.monotonic()
    watcher = watcher or Silent()
    checkpoint = arrivals.checkpoint if arrivals is not None else open_checkpoint(source)
    needed = reads_calibration_text(identify_family(checkpoint.config), recipe)
    if needed:
        from moepress.calibration.device import resolve_device

        device = resolve_device(device)
    samples = calibration_samples(checkpoint, recipe, trust_remote_code=trust_remote_code) if needed else None
    plan = make_plan(checkpoint, recipe, calibration=samples.token_sha256 if samples is not None else None)
    journal = Journal(out, plan)
    journal.check()
    done = {shard.name: receipt for shard in plan.shards if (receipt := journal.receipt(shard.name))}
    check_disk(plan, out, finished=set(done))
    if recipe.engine == "llmcompressor":
        from moepress.convert.llmcompressor_engine import check_engine

        check_engine(checkpoint, plan)
    todo = [s for s in plan.shards if s.name not in done and not (recipe.calibrated and s.layer is not None)]
    if arrivals is not None:
        todo = arrivals.begin(plan, todo)
    place = place or partial(in_process, threads=threads or os.cpu_count() or 1)
    with journal.open(), place(checkpoint, plan, out) as executor:
        watcher.begin(plan, sum(shard_source_bytes(plan, s) for s in plan.shards if s.name in done))
        kv = KvScales(plan, journal) if plan.kv.layers else None

        def write(shards: list[ShardPlan], as_planned: ConversionPlan) -> None:
            def keep(shard: ShardPlan, receipt: dict[str, Any]) -> None:
                journal.write_receipt(shard.name, receipt)
                watcher.unit_done(receipt)
                if arrivals is not None:
                    arrivals.finished(shard)

            carried = [shard for shard in shards if not shard.added]
            for shard, receipt in executor.shards(carried, as_planned, watcher.unit, watcher.advance):
                keep(shard, receipt)
            for shard in shards:
                if shard.added and kv is not None:
                    watcher.unit(shard.label)
                    keep(shard, kv.write_shard(shard, out))

        first = [shard for shard in todo if kv is None or shard.layer is not None]
        layers_first = (
            arrivals is not None and recipe.calibrated
        )  # the layers arrive in order, kept tensors are in all shards
        if not layers_first:
            write(first, plan)
        if samples is not None and recipe.calibrated and recipe.engine == "llmcompressor":
            from moepress.convert.llmcompressor_engine import LlmCompressorEngine

            LlmCompressorEngine(checkpoint, plan, journal, samples, watcher, threads).run()
        elif samples is not None and recipe.calibrated:
            from moepress.convert.layers import CalibratedLayers

            CalibratedLayers(checkpoint, plan, journal, samples, executor, watcher, kv, device=device).run()
        if layers_first:
            write(first, plan)
        if samples is not None and kv is not None:
            from moepress.convert.kv_measure import measure_source

            measure_source(checkpoint, kv, journal, samples, watcher, device=device)
            # the weights around the cache are among the kept tensors, which have waited for what goes into them
            write([shard for shard in todo if shard.layer is None], kv.pressed_plan())
        report = finish(checkpoint, plan, journal, kv)
    return Conversion(plan, out, report, time.monotonic() - started, resumed=len(done))


def calibration_samples(checkpoint: Checkpoint, recipe: Recipe, *, trust_remote_code: bool = False) -> CalibrationSet:
    """The recipe's calibration text through the checkpoint's own tokenizer, cut into samples.

    Raises:
        PlanRefused: too little text, or none where the recipe says it is.
        CheckpointError: the checkpoint has no tokenizer, or one that is not its own.
    """
    from moepress.calibration.text import default_documents, hub_documents, load_tokenizer, make_samples, read_documents

    wish = recipe.calibration
    family = identify_family(checkpoint.config)
    documents: Any
    if wish.text == "default":
        documents = default_documents()
    elif wish.text.startswith("hub:"):
        documents = hub_documents(wish.text.removeprefix("hub:"))
    else:
        documents = read_documents(Path(wish.text))
    return make_samples(
        documents,
        load_tokenizer(checkpoint.path("config.json").parent, trust_remote_code=trust_remote_code),
        samples=wish.samples,
        length=wish.length,
        seed=wish.seed,
        vocab_size=int(text_config(family, checkpoint.config)["vocab_size"]),
    )


def shard_source_bytes(plan: ConversionPlan, shard: ShardPlan) -> int:
    """Source bytes that go into a shard."""
    return sum(plan.decisions[weight.name].stored.nbytes for weight in shard.weights)
