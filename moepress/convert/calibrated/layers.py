"""Calibrated conversion: layer by layer, each one's experts quantized on what the quantized layers before it give.

    embed ─► layer 0 ─┬► layer 1 ─► …                      source run x        (with error-aware targets)
                      └► [tap] experts → integers ─► …     quantized run x̃

Up to the first experts that are quantized both runs are one, and computed once.

For every layer: attention, router and shared experts of both runs; statistics of the tapped tokens; a block of experts at a
time into integers, which a thread writes into the layer's shards; then the experts' outputs with the integers just made, so
that the next layer sees what the server will give it. Held at once: one layer's dense part, one block of experts and the next
one as it is stored, and the activations.

With ``calibration.loss: kl`` a backward pass of the source comes before all of it (`fishers`).

With ``weights.awq.norm`` the layer's shards begin with the rescaled norm and its readers (`norm_smoothing`).

Resume: a layer whose shards all have receipts is run with the experts read back from them; the others are pressed again. The
numbers of a run that was never stopped come out, because nothing of a layer depends on when it was run.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from moepress.calibration.activations import Scratch
from moepress.calibration.checkpoint_weights import CheckpointWeights
from moepress.calibration.device import device_memory
from moepress.calibration.expert_tap import RoutedTokens
from moepress.calibration.layer_fill import ExpertBlock
from moepress.calibration.layer_runner import OpenLayer
from moepress.calibration.memory import available_memory, dense_at_once
from moepress.calibration.mtp import mtp_stream
from moepress.calibration.run_settings import RunSettings
from moepress.calibration.statistics import PooledMoments
from moepress.calibration.stream import Stream
from moepress.calibration.streamed_model import StreamedModel
from moepress.calibration.text import CalibrationSet
from moepress.calibration.weights import WeightSource
from moepress.convert.calibrated.expert_block import LayerInputs, PressedBlock
from moepress.convert.calibrated.fishers import LayerFishers
from moepress.convert.calibrated.layer_shards import LayerShards, matrices, packed
from moepress.convert.calibrated.norm_smoothing import find_norm_scales, rescaled_weights, scales_between
from moepress.convert.decide import EXPERTS_NORM
from moepress.convert.executor import Executor
from moepress.convert.forecast.calibration_cost import block_bytes, inner_size
from moepress.convert.journal import Journal
from moepress.convert.kv.scales import KvScales
from moepress.convert.layout import ShardPlan
from moepress.convert.plan import ConversionPlan
from moepress.convert.watcher import Watcher
from moepress.errors import QuantizeError
from moepress.formats.checkpoint import Checkpoint
from moepress.formats.families import expert_count, text_config
from moepress.formats.int4 import unpack_int4
from moepress.quantize.awq import smoothed_hessian
from moepress.quantize.grid import Grid, dequantize
from moepress.quantize.side_by_side import width_on


@dataclass
class _Runs:
    """The quantized run, and the source run beside it once they differ.

    Attributes:
        ours: the quantized run.
        wants_source: somebody looks at the source run.
        source: the source run; None while it is the same as ours, or nobody looks at it.
    """

    ours: Stream
    wants_source: bool
    source: Stream | None = None

    def streams(self) -> list[Stream]:
        """Those that there are."""
        return [self.ours] if self.source is None else [self.ours, self.source]

    def each(self, following: Callable[[Stream], Stream]) -> _Runs:
        """New runs that go on from these."""
        source = None if self.source is None else following(self.source)
        return _Runs(following(self.ours), self.wants_source, source)


class CalibratedLayers:
    """Presses the expert shards of a plan.

    Args:
        checkpoint: the source.
        plan: with a recipe that calibrates.
        journal: of the open output folder; finished layers are taken from it.
        samples: the calibration set.
        executor: does the work.
        watcher: told about layers, bytes and finished units.
        kv: measures the source run's layers on the way; None without KV scales.
        device: where layers compute, and blocks of experts are pressed that the executor presses in this process.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        plan: ConversionPlan,
        journal: Journal,
        samples: CalibrationSet,
        executor: Executor,
        watcher: Watcher,
        kv: KvScales | None = None,
        *,
        device: str = "cpu",
    ) -> None:
        self.checkpoint, self.plan, self.journal = checkpoint, plan, journal
        self.samples, self.executor, self.watcher, self.kv = samples, executor, watcher, kv
        self.device = device
        self.shards: dict[int, list[ShardPlan]] = {}
        for shard in plan.shards:
            if shard.layer is not None:
                self.shards.setdefault(shard.layer, []).append(shard)
        self.done = {
            layer for layer, shards in self.shards.items() if all(journal.receipt(shard.name) for shard in shards)
        }
        self.fishers = LayerFishers(journal) if plan.recipe.weighs_predictions else None
        self._last = -1
        self.names = {
            (d.identity.layer, d.identity.expert, d.identity.projection): name
            for name, d in plan.decisions.items()
            if d.action == "quantize"
        }

    def run(self) -> None:
        """Runs to the last layer that still has work.

        Raises:
            QuantizeError, CheckpointError, ConvertError: named by layer; finished layers stay.
        """
        work = sorted(set(self.shards) - self.done)
        if not work:
            return
        measured = self.kv.missing if self.kv is not None else set()
        work = sorted({*work, *measured})
        self._last = work[-1]
        recipe = self.plan.recipe
        settings = run_settings(self.checkpoint, self.plan, device=self.device)
        folder = self.journal.state / "scratch"
        with (
            CheckpointWeights(self.checkpoint, ahead_bytes=settings.ahead_bytes, device=self.device) as weights,
            Scratch(folder, memory_bytes=recipe.calibration.activations_memory) as scratch,
        ):
            model = StreamedModel(self.checkpoint.config, weights, scratch, settings)
            self._measure_fishers(model)
            runs = _Runs(model.embed(self.samples.token_ids), self._error_aware or bool(measured))
            for index in range(min(model.num_layers, work[-1] + 1)):
                self._layer(model, index, runs)
            if work[-1] >= model.num_layers:
                for stream in runs.streams():
                    model.finish(stream)
                for index in model.mtp_layers:
                    mtp = runs.each(partial(mtp_stream, model, index, self.samples.token_ids))
                    self._layer(model, index, mtp)
                    for stream in mtp.streams():
                        stream.release()
        if folder.exists() and not any(folder.iterdir()):
            folder.rmdir()

    def _measure_fishers(self, model: StreamedModel) -> None:
        """What errors of the layers still to be pressed cost, where the recipe asks; MTP layers have no such figure."""
        if self.fishers is None:
            return
        todo = {index for index in set(self.shards) - self.done if index < model.num_layers}
        if missing := self.fishers.missing(todo):
            self.watcher.step("the source backwards: what errors of each layer cost")
            self.fishers.measure(model, self.samples.token_ids, missing)

    @property
    def _error_aware(self) -> bool:
        recipe = self.plan.recipe
        return recipe.calibration.error_aware and "gptq" in recipe.weights.algorithm

    def _layer(self, model: StreamedModel, index: int, runs: _Runs) -> None:
        self.watcher.layer(index, "press" if index in self.shards and index not in self.done else "follow")
        with model.open_layer(index) as layer:
            measured = self._measure(layer, runs)
            theirs = self.executor.dense(layer, runs.source) if runs.source is not None else None
            mine = self.executor.dense(layer, runs.ours)
            if mine is None:
                measured()
                return
            read_on = index < min(self._last, model.num_layers)  # nobody reads what comes out of the last one
            if index in self.shards and runs.wants_source and runs.source is None:
                runs.source, theirs = runs.ours.copied(model.scratch), mine
            if index not in self.shards:
                self.executor.experts(layer, runs.ours, mine, None)
            elif index in self.done:
                seen = self._as_the_written_norm_gives(model, index, mine)
                finished = partial(read_back, self.journal.out, self.plan, index)
                self.executor.experts(layer, runs.ours, seen, finished)
            else:
                beside = theirs if self._error_aware and theirs is not mine else None
                self._press(layer, index, runs.ours if read_on else None, mine, beside, model)
            if theirs is not None and runs.source is not None and read_on:
                self.executor.experts(layer, runs.source, theirs, None)
            measured()
            for routed in filter(None, {id(mine): mine, id(theirs): theirs}.values()):
                routed.release()

    def _measure(self, layer: OpenLayer, runs: _Runs) -> Callable[[], None]:
        """Has the layer's KV scales measured where somebody wants them; returns what waits for them."""
        if self.kv is None or not runs.wants_source:
            return lambda: None
        return self.kv.measure(layer, runs.source or runs.ours, self.executor)

    def _press(
        self,
        layer: OpenLayer,
        index: int,
        stream: Stream | None,
        mine: RoutedTokens,
        theirs: RoutedTokens | None,
        model: StreamedModel,
    ) -> None:
        """Quantizes the layer's experts block by block, and writes them as they come. `stream`: None if nobody reads on."""
        one_for_all = self.plan.recipe.calibration.hessian == "layer"
        pooled = self.executor.pooled(layer, mine, theirs if one_for_all else None)
        with LayerShards(self.shards[index], self.plan, self.journal, self.watcher, device=self.device) as writer:
            if self.plan.recipe.smooths_norms:
                factors = self._rescale(index, pooled, model.source, writer)
                mine, theirs = mine.smoothed(factors), None if theirs is None else theirs.smoothed(factors)
                on_device = factors.to(pooled.gram.device)
                cross = None if pooled.cross is None else smoothed_hessian(pooled.cross, on_device)
                pooled = PooledMoments(pooled.tokens, smoothed_hessian(pooled.gram, on_device), cross)

            def take(block: PressedBlock) -> None:
                made = [
                    (self.names[index, expert, projection], codes, scales, block.records[expert, projection])
                    for expert, projection, codes, scales in matrices(block)
                ]
                writer.add_behind((name, packed(name, codes, scales), record) for name, codes, scales, record in made)
                for name, *_ in made:
                    self.watcher.advance(self.plan.decisions[name].stored.nbytes)

            fisher = None if self.fishers is None or index >= model.num_layers else self.fishers.read(index)
            self.executor.press(layer, stream, LayerInputs(mine, theirs, pooled, fisher), take, writer.written)
        if self.fishers is not None:
            self.fishers.forget(index)

    def _rescale(self, index: int, pooled: PooledMoments, weights: WeightSource, writer: LayerShards) -> torch.Tensor:
        """Finds the layer's s [C], and writes the norm and its readers with it."""
        recipe = self.plan.recipe
        readers = [name for (layer, _, p), name in self.names.items() if layer == index and p != "down_proj"]
        hessian = pooled.gram * (2 / max(pooled.tokens, 1))
        grid = Grid(recipe.weights.num_bits, recipe.weights.group_size, recipe.weights.signed_scales)
        plans = [weight for shard in self.shards[index] for weight in shard.weights if weight.action == "rescale"]
        try:
            found = find_norm_scales(weights, readers, hessian, grid, recipe.weights.scale)
            for weight in rescaled_weights(weights, plans, self.plan.decisions, found):
                writer.add(weight.name, [(weight.name, weight.value)], weight.record)
                self.watcher.advance(self.plan.decisions[weight.name].stored.nbytes)
        except QuantizeError as error:
            raise QuantizeError(error.what, where=f"layer {index}, {error.where}", hint=error.hint) from error
        return found.scales

    def _as_the_written_norm_gives(self, model: StreamedModel, index: int, routed: RoutedTokens) -> RoutedTokens:
        """The tokens of a finished layer, which may have been pressed behind a rescaled norm."""
        for shard in self.shards[index]:
            for weight in shard.weights:
                if weight.action == "rescale" and weight.name.endswith(EXPERTS_NORM):
                    with safe_open(self.journal.out / shard.name, framework="pt") as file:
                        written = file.get_tensor(weight.name).float()
                    return routed.smoothed(scales_between(model.source.load(weight.name), written))
        return routed


def run_settings(
    checkpoint: Checkpoint, plan: ConversionPlan, *, device: str = "cpu", processes: int = 1
) -> RunSettings:
    """How the plan's recipe runs layers of this checkpoint.

    Args:
        processes: that share this machine's memory.
    """
    recipe, text = plan.recipe, text_config(plan.family, checkpoint.config)
    precision = recipe.calibration.precision
    dtype = torch.bfloat16 if precision == "bfloat16" else torch.float32
    held = block_bytes(
        recipe, int(text["hidden_size"]), inner_size(text), expert_count(text), memory=device_memory(device)
    )
    return RunSettings(
        batch_size=recipe.calibration.batch_size,
        device=device,
        dtype=dtype,
        products=precision,
        expert_bytes=held * dtype.itemsize // torch.float32.itemsize,
        dense_at_once=dense_at_once(
            checkpoint.config,
            batch_size=recipe.calibration.batch_size,
            length=recipe.calibration.length,
            dtype_bytes=dtype.itemsize,
            threads=width_on(device),
            available=available_memory() // processes,
        ),
    )


def read_back(out: Path, plan: ConversionPlan, layer: int, experts: range) -> ExpertBlock:
    """Consecutive experts of a layer whose shards are finished, as the server will compute with them."""
    names = {
        (decision.identity.expert, decision.identity.projection): name
        for name, decision in plan.decisions.items()
        if decision.action == "quantize" and decision.identity.layer == layer
    }
    gate_up, down = [], []
    with ExitStack() as stack:
        files: dict[str, Any] = {}
        for shard in plan.shards:
            if shard.layer == layer:
                file = stack.enter_context(safe_open(out / shard.name, framework="pt"))
                files |= {tensor.name: file for tensor in shard.tensors}

        def load(expert: int, projection: str) -> torch.Tensor:
            name = names[expert, projection]
            packed, scale = f"{name}_packed", f"{name}_scale"
            codes = unpack_int4(files[packed].get_tensor(packed), plan.decisions[name].stored.shape[1])
            return dequantize(codes, files[scale].get_tensor(scale))

        for expert in experts:
            gate_up.append(torch.cat([load(expert, "gate_proj"), load(expert, "up_proj")]))
            down.append(load(expert, "down_proj"))
    return ExpertBlock(experts.start, torch.stack(gate_up), torch.stack(down))
