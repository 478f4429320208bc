"""A conversion from start to finish: plan minus receipts, in parallel inside this process, then the finishing files.

The command may be stopped at any moment, also by kill -9, and given again: finished shards are recognised by their
receipts, half-written ones were never visible, and the folder becomes a checkpoint (index, config) only at the very end.
"""

from __future__ import annotations

import os
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moepress.convert.arrivals import Arrivals
from moepress.convert.course import course_of
from moepress.convert.executor import Executor, Place
from moepress.convert.finish import finish
from moepress.convert.in_process import in_process
from moepress.convert.journal import Journal
from moepress.convert.kv.plan import nothing_to_fold
from moepress.convert.kv.scales import KvScales
from moepress.convert.layout import ShardPlan
from moepress.convert.plan import ConversionPlan
from moepress.convert.prepare import prepare
from moepress.convert.source_state import refuse_changes, shard_states
from moepress.convert.watcher import Silent, Watcher
from moepress.formats.checkpoint import Checkpoint, open_checkpoint
from moepress.recipe import Recipe

if TYPE_CHECKING:
    from moepress.calibration.text import CalibrationSet


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
    same_kv_as: str | Path | None = None,
) -> Conversion:
    """Presses the checkpoint at ``source`` into ``out``.

    Args:
        source: a local checkpoint folder.
        out: a new or empty folder, or one that the same conversion was begun in.
        threads: for pressing and calibration; the machine's processors by default. Does not change a byte of the result.
        trust_remote_code: run the Python code that a checkpoint brings for its tokenizer; only calibration needs one.
        watcher: is told about progress.
        place: where the work is done, for example by workers of a cluster; this process by default. Changes no byte.
        arrivals: the source is still arriving; then ``source`` is what it is called.
        device: where layers and calibrated experts are computed: ``auto``, ``cpu`` or ``cuda``. Changes codes in a few
            places. Without calibration experts are rounded there too, with the same bytes; then ``auto`` is the processor.
        same_kv_as: another output of this model, whose KV scales are taken over instead of measuring any.

    Raises:
        CheckpointError, FormatError: the source is incomplete or damaged.
        PlanRefused: it cannot work, found before any work.
        QuantizeError, ConvertError: it stopped on the way; the same command resumes.
    """
    started = time.monotonic()
    watcher = watcher or Silent()
    checkpoint = arrivals.checkpoint if arrivals is not None else open_checkpoint(source)
    state = shard_states(checkpoint) if arrivals is None else {}
    rounds_on = "cpu"
    if device not in ("auto", "cpu"):
        from moepress.calibration.device import resolve_device

        rounds_on = device = resolve_device(device)
    prepared = prepare(
        checkpoint,
        out,
        recipe,
        same_kv_as=same_kv_as,
        trust_remote_code=trust_remote_code,
        reading_text=lambda: watcher.step("reading the calibration text"),
    )
    plan, journal, done, samples = prepared.plan, prepared.journal, prepared.done, prepared.samples
    if samples is not None:
        from moepress.calibration.device import resolve_device

        device = resolve_device(device)
    todo = [s for s in plan.shards if s.name not in done and not (recipe.calibrated and s.layer is not None)]
    if arrivals is not None:
        todo = arrivals.begin(plan, todo)
    watcher.step("opening the output" if place is None else "waiting for workers")
    place = place or partial(in_process, threads=threads or os.cpu_count() or 1, device=rounds_on)
    with journal.open(), place(checkpoint, plan, out) as executor:
        kv = KvScales(plan, journal) if plan.kv.layers else None
        watcher.begin(plan, course_of(plan, done, kv.missing if kv is not None else ()))
        run = _Run(checkpoint, plan, journal, samples, executor, watcher, kv, arrivals, device)
        with _torch_threads(threads if samples is not None else None):
            run.press(todo, threads)
        refuse_changes(checkpoint, state, journal, {shard.name for shard in plan.shards} - set(done))
        report = finish(checkpoint, plan, journal, kv)
    return Conversion(plan, out, report, time.monotonic() - started, resumed=len(done))


def _torch_threads(threads: int | None) -> AbstractContextManager[None]:
    """What a calibrated run computes with; without a number nothing is set, and torch not imported for it."""
    if threads is None:
        return nullcontext()
    from moepress.quantize.side_by_side import at_most

    return at_most(threads)


@dataclass(frozen=True)
class _Run:
    """The stages of one run, in the order that what they need is there."""

    checkpoint: Checkpoint
    plan: ConversionPlan
    journal: Journal
    samples: CalibrationSet | None
    executor: Executor
    watcher: Watcher
    kv: KvScales | None
    arrivals: Arrivals | None
    device: str

    def press(self, todo: list[ShardPlan], threads: int | None) -> None:
        """Presses the shards that need no calibration and every calibrated layer; KV scales last, and what they go into.

        Args:
            todo: unfinished shards outside calibrated layers.
        """
        planned, waiting = self.plan, []
        if self.kv is not None and self.kv.missing:
            # kept tensors wait for KV scales: the weights around the cache are among them
            waiting = [shard for shard in todo if shard.layer is None]
        elif self.kv is not None:
            planned = self._folded(self.kv)
        ready = [shard for shard in todo if shard not in waiting]
        # layers arrive in order, kept tensors are spread over all shards of the source
        if layers_first := self.arrivals is not None and self.plan.recipe.calibrated:
            self.calibrated_layers(threads)
        self.write(ready, planned)
        if not layers_first:
            self.calibrated_layers(threads)
        if self.samples is not None and self.kv is not None:
            from moepress.convert.kv.measure import measure_source

            measure_source(
                self.checkpoint, self.kv, self.journal, self.samples, self.executor, self.watcher, device=self.device
            )
            self.write(waiting, self._folded(self.kv))

    def _folded(self, kv: KvScales) -> ConversionPlan:
        """The plan with KV scales in it, all of them known."""
        if self.plan.recipe.keeps_experts and not kv.folds():
            raise nothing_to_fold("every layer's cache holds its values as well at a scale of 1.0")
        return kv.pressed_plan()

    def calibrated_layers(self, threads: int | None) -> None:
        """The experts' shards, where the recipe calibrates them."""
        if self.samples is None or not self.plan.recipe.calibrated:
            return
        if self.plan.recipe.engine == "llmcompressor":
            from moepress.convert.llmcompressor.engine import LlmCompressorEngine

            LlmCompressorEngine(self.checkpoint, self.plan, self.journal, self.samples, self.watcher, threads).run()
            return
        from moepress.convert.calibrated.layers import CalibratedLayers

        CalibratedLayers(
            self.checkpoint,
            self.plan,
            self.journal,
            self.samples,
            self.executor,
            self.watcher,
            self.kv,
            device=self.device,
        ).run()

    def write(self, shards: list[ShardPlan], as_planned: ConversionPlan) -> None:
        """Shards that need no calibration, and those that hold nothing but KV scales."""
        carried = [shard for shard in shards if not shard.added]
        for shard, receipt in self.executor.shards(carried, as_planned, self.watcher.shard, self.watcher.advance):
            self._keep(shard, receipt)
        for shard in shards:
            if shard.added and self.kv is not None:
                self.watcher.shard(shard)
                self._keep(shard, self.kv.write_shard(shard, self.journal.out))

    def _keep(self, shard: ShardPlan, receipt: dict[str, Any]) -> None:
        self.journal.write_receipt(shard.name, receipt)
        self.watcher.unit_done(receipt)
        if self.arrivals is not None:
            self.arrivals.finished(shard)
