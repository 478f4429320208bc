"""Calibrated conversion: layer by layer, each one's experts quantized on what the quantized layers before it give.

    embed ─► layer 0 ─► layer 1 ─► …                      source run x        (with error-aware targets)
    embed ─► layer 0 ─► [tap] experts → integers ─► …     quantized run x̃

For every layer: attention, router and shared experts of both runs; statistics of the tapped tokens; a block of experts at a
time into integers, and straight into the layer's shards; then the experts' outputs with the integers just made, so that the next
layer sees what the server will give it. Held at once: one layer's dense part, one block of experts, and the activations.

With ``weights.awq.norm`` the layer's shards begin with the rescaled norm and its readers (`norm_smoothing`).

Resume: a layer whose shards all have receipts is run with the experts read back from them; the others are pressed again. The
numbers of a run that was never stopped come out, because nothing of a layer depends on when it was run.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
from safetensors import safe_open

from moepress.calibration.activations import Scratch
from moepress.calibration.checkpoint_weights import CheckpointWeights
from moepress.calibration.expert_tap import RoutedTokens
from moepress.calibration.layer_fill import ExpertBlock
from moepress.calibration.layer_runner import OpenLayer, RunSettings, Stream
from moepress.calibration.mtp import mtp_stream
from moepress.calibration.statistics import PooledMoments, pooled_moments
from moepress.calibration.streamed_model import StreamedModel
from moepress.calibration.text import CalibrationSet
from moepress.calibration.weights import WeightSource
from moepress.convert.decide import EXPERTS_NORM
from moepress.convert.expert_block import LayerInputs, PressedBlock, press_block
from moepress.convert.journal import Journal
from moepress.convert.kv_scales import KvScales
from moepress.convert.layout import ShardPlan
from moepress.convert.norm_smoothing import find_norm_scales, rescaled_weights, scales_between
from moepress.convert.plan import ConversionPlan
from moepress.convert.units import METADATA, make_receipt
from moepress.errors import QuantizeError
from moepress.formats.checkpoint import Checkpoint
from moepress.formats.families import expert_count, text_config
from moepress.formats.int4 import pack_int4, unpack_int4
from moepress.formats.writer import ShardWriter
from moepress.quantize.awq import smoothed_hessian
from moepress.quantize.grid import Grid, dequantize
from moepress.recipe import Recipe


class CalibratedLayers:
    """Presses the expert shards of a plan.

    Args:
        checkpoint: the source.
        plan: with a recipe that calibrates.
        journal: of the open output folder; finished layers are taken from it.
        samples: the calibration set.
        watcher: told about layers, bytes and finished units.
        kv: measures the source run's layers on the way; None without KV scales.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        plan: ConversionPlan,
        journal: Journal,
        samples: CalibrationSet,
        watcher: Any,
        kv: KvScales | None = None,
    ) -> None:
        self.kv = kv
        self.checkpoint, self.plan, self.journal, self.samples, self.watcher = (
            checkpoint,
            plan,
            journal,
            samples,
            watcher,
        )
        self.shards: dict[int, list[ShardPlan]] = {}
        for shard in plan.shards:
            if shard.layer is not None:
                self.shards.setdefault(shard.layer, []).append(shard)
        self.done = {
            layer for layer, shards in self.shards.items() if all(journal.receipt(shard.name) for shard in shards)
        }
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
        recipe = self.plan.recipe
        text = text_config(self.plan.family, self.checkpoint.config)
        settings = RunSettings(
            batch_size=recipe.calibration.batch_size,
            expert_bytes=block_bytes(recipe, int(text["hidden_size"]), _inner(text), expert_count(text)),
        )
        folder = self.journal.state / "scratch"
        with (
            CheckpointWeights(self.checkpoint) as weights,
            Scratch(folder, memory_bytes=recipe.calibration.activations_memory) as scratch,
        ):
            model = StreamedModel(self.checkpoint.config, weights, scratch, settings)
            ours = model.embed(self.samples.token_ids)
            source = model.embed(self.samples.token_ids) if self._error_aware or measured else None
            for index in range(min(model.num_layers, work[-1] + 1)):
                self._layer(model, index, ours, source)
            if work[-1] >= model.num_layers:
                for stream in filter(None, (ours, source)):
                    model.finish(stream)
                for index in model.mtp_layers:
                    mine = mtp_stream(model, index, self.samples.token_ids, ours)
                    theirs = mtp_stream(model, index, self.samples.token_ids, source) if source else None
                    self._layer(model, index, mine, theirs)
                    mine.release()
                    if theirs is not None:
                        theirs.release()
        if folder.exists() and not any(folder.iterdir()):
            folder.rmdir()

    @property
    def _error_aware(self) -> bool:
        recipe = self.plan.recipe
        return recipe.calibration.error_aware and "gptq" in recipe.weights.algorithm

    def _layer(self, model: StreamedModel, index: int, ours: Stream, source: Stream | None) -> None:
        self.watcher.unit(f"layer {index}")
        with model.open_layer(index) as layer:
            if self.kv is not None and source is not None:
                self.kv.measure(layer, source)
            theirs = layer.dense_part(source) if source is not None else None
            mine = layer.dense_part(ours)
            if mine is not None:
                if index not in self.shards:
                    layer.experts(ours, mine)
                elif index in self.done:
                    seen = self._as_the_written_norm_gives(model, index, mine)
                    layer.experts(ours, seen, lambda experts: self._read_back(index, experts))
                else:
                    self._press(layer, index, ours, mine, theirs if self._error_aware else None, model.source)
                mine.release()
            if theirs is not None and source is not None:
                layer.experts(source, theirs)
                theirs.release()

    def _press(
        self,
        layer: OpenLayer,
        index: int,
        stream: Stream,
        mine: RoutedTokens,
        theirs: RoutedTokens | None,
        weights: WeightSource,
    ) -> None:
        """Quantizes the layer's experts block by block while the quantized run's second half asks for them."""
        recipe, pooled = self.plan.recipe, pooled_moments(mine)
        factors: torch.Tensor | None = None
        with _LayerShards(self.shards[index], self.plan, self.journal, self.watcher) as writer:
            if recipe.smooths_norms:
                factors = self._rescale(index, pooled, weights, writer)
                mine, theirs = mine.smoothed(factors), None if theirs is None else theirs.smoothed(factors)
                pooled = PooledMoments(pooled.tokens, smoothed_hessian(pooled.gram, factors))
            inputs = LayerInputs(mine, theirs, pooled)

            def pressed(experts: range) -> ExpertBlock:
                source = layer.load_experts(experts)
                if factors is not None:
                    source.gate_up.mul_(factors)
                try:
                    block = press_block(source, inputs, recipe)
                except QuantizeError as error:
                    raise QuantizeError(
                        error.what,
                        where=f"layer {index}, experts {experts.start} to {experts.stop - 1}",
                        hint=error.hint,
                    ) from error
                for expert, projection, codes, scales in _matrices(block):
                    name = self.names[index, expert, projection]
                    writer.add(name, _packed(name, codes, scales), block.records[expert, projection])
                    self.watcher.advance(self.plan.decisions[name].stored.nbytes)
                return block.dequantized()

            layer.experts(stream, mine, pressed)

    def _rescale(self, index: int, pooled: PooledMoments, weights: WeightSource, writer: _LayerShards) -> torch.Tensor:
        """Finds the layer's s [C], and writes the norm and its readers with it."""
        recipe = self.plan.recipe
        readers = [name for (layer, _, p), name in self.names.items() if layer == index and p != "down_proj"]
        hessian = pooled.gram * (2 / max(pooled.tokens, 1))
        grid = Grid(recipe.weights.num_bits, recipe.weights.group_size)
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

    def _read_back(self, layer: int, experts: range) -> ExpertBlock:
        """The integers of a finished layer, as the server will compute with them."""
        gate_up, down = [], []
        with ExitStack() as stack:
            files: dict[str, Any] = {}
            for shard in self.shards[layer]:
                file = stack.enter_context(safe_open(self.journal.out / shard.name, framework="pt"))
                files |= {tensor.name: file for tensor in shard.tensors}

            def load(expert: int, projection: str) -> torch.Tensor:
                name = self.names[layer, expert, projection]
                packed, scale = f"{name}_packed", f"{name}_scale"
                codes = unpack_int4(files[packed].get_tensor(packed), self.plan.decisions[name].stored.shape[1])
                return dequantize(codes, files[scale].get_tensor(scale))

            for expert in experts:
                gate_up.append(torch.cat([load(expert, "gate_proj"), load(expert, "up_proj")]))
                down.append(load(expert, "down_proj"))
        return ExpertBlock(experts.start, torch.stack(gate_up), torch.stack(down))


class _LayerShards:
    """The shards of one layer, written one after the other while experts come in ascending order."""

    def __init__(self, shards: list[ShardPlan], plan: ConversionPlan, journal: Journal, watcher: Any) -> None:
        self._queue = list(shards)
        self._plan, self._journal, self._watcher = plan, journal, watcher
        self._writer: ShardWriter | None = None
        self._records: dict[str, dict[str, Any]] = {}
        self._started = time.monotonic()

    def __enter__(self) -> _LayerShards:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        if self._writer is not None:
            self._writer.__exit__(kind, error, trace)
            self._writer = None

    def add(self, name: str, tensors: Iterable[tuple[str, Any]], record: dict[str, Any]) -> None:
        """Writes a weight's tensors (name, data); a shard that is full is closed, and gets its receipt."""
        if self._writer is None:
            self._open()
        assert self._writer is not None  # noqa: S101 (opened above)
        for tensor, data in tensors:
            self._writer.write(tensor, data)
        self._records[name] = record
        if len(self._records) == len(self._queue[0].weights):
            self._close()

    def _open(self) -> None:
        shard = self._queue[0]
        self._writer = ShardWriter(
            self._journal.out / shard.name, [(t.name, t.dtype, t.shape) for t in shard.tensors], METADATA
        )
        self._writer.__enter__()
        self._records = {}
        self._started = time.monotonic()

    def _close(self) -> None:
        shard, writer = self._queue.pop(0), self._writer
        assert writer is not None  # noqa: S101 (closed once, after it was opened)
        self._writer = None
        writer.__exit__(None, None, None)
        receipt = make_receipt(shard, self._plan, writer, self._records, self._started)
        self._journal.write_receipt(shard.name, receipt)
        self._watcher.unit_done(receipt)


def _matrices(block: PressedBlock) -> Iterator[tuple[int, str, torch.Tensor, torch.Tensor]]:
    """(expert, projection, codes int8 [R, C], scales bfloat16 [R, G]) in the order of the shard."""
    inner = block.down.codes.shape[-1]
    for slot, expert in enumerate(block.experts):
        for projection, rows in (("gate_proj", slice(0, inner)), ("up_proj", slice(inner, 2 * inner))):
            yield (
                expert,
                projection,
                block.gate_up.codes[slot, rows].contiguous(),
                block.gate_up.scales[slot, rows].contiguous(),
            )
        yield expert, "down_proj", block.down.codes[slot], block.down.scales[slot]


def _packed(name: str, codes: torch.Tensor, scales: torch.Tensor) -> Iterator[tuple[str, Any]]:
    """The three tensors of a quantized weight, in the order of the shard."""
    yield f"{name}_packed", pack_int4(codes)
    yield f"{name}_scale", scales
    yield f"{name}_shape", np.array(codes.shape, np.int64)


def block_bytes(recipe: Recipe, hidden: int, inner: int, experts: int) -> int:
    """Bytes of decoded experts in a block, such that they, their Hessians, cross terms and targets fit the recipe's memory.

    Per expert and matrix pair, float32: weights, target and quantized values 3 × 3·I·C; gram and cross 2 × C² (gate and up),
    then 2 × I² (down); and one more C² each while they are factored.
    """
    weights = 4 * 3 * inner * hidden
    if "gptq" not in recipe.weights.algorithm:
        each = 4 * weights + 4 * 2 * inner**2
    else:
        each = 3 * weights + 4 * 2 * max(hidden, inner) ** 2
    working = 4 * 4 * max(hidden, inner) ** 2
    fitting = max(1, int((recipe.calibration.memory - working) // each))
    return min(fitting, experts) * weights


def _inner(text: Any) -> int:
    """Columns of an expert's down_proj; MiniMax calls it ``intermediate_size``."""
    return int(text.get("moe_intermediate_size") or text["intermediate_size"])
