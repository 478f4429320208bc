"""Calibrated conversion: layer by layer, each one's experts quantized on what the quantized layers before it give.

    embed ─► layer 0 ─► layer 1 ─► …                      source run x        (with error-aware targets)
    embed ─► layer 0 ─► [tap] experts → integers ─► …     quantized run x̃

For every layer: attention, router and shared experts of both runs; statistics of the tapped tokens; a block of experts at a
time into integers, and straight into the layer's shards; then the experts' outputs with the integers just made, so that the next
layer sees what the server will give it. Held at once: one layer's dense part, one block of experts, and the activations.

Resume: a layer whose shards all have receipts is run with the experts read back from them; the others are pressed again. The
numbers of a run that was never stopped come out, because nothing of a layer depends on when it was run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
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
from moepress.calibration.statistics import pooled_moments
from moepress.calibration.streamed_model import StreamedModel
from moepress.calibration.text import CalibrationSet
from moepress.convert.expert_block import LayerInputs, PressedBlock, press_block
from moepress.convert.journal import Journal
from moepress.convert.layout import PROJECTIONS, ShardPlan
from moepress.convert.plan import ConversionPlan
from moepress.convert.units import METADATA, make_receipt
from moepress.errors import QuantizeError
from moepress.formats.checkpoint import Checkpoint
from moepress.formats.families import expert_count, text_config
from moepress.formats.int4 import pack_int4, unpack_int4
from moepress.formats.writer import ShardWriter
from moepress.quantize.grid import dequantize
from moepress.recipe import Recipe

UnitDone = Callable[[dict[str, Any]], None]


class CalibratedLayers:
    """Presses the expert shards of a plan.

    Args:
        checkpoint: the source.
        plan: with a recipe that calibrates.
        journal: of the open output folder; finished layers are taken from it.
        samples: the calibration set.
        watcher: told about layers, bytes and finished units.
    """

    def __init__(
        self, checkpoint: Checkpoint, plan: ConversionPlan, journal: Journal, samples: CalibrationSet, watcher: Any
    ) -> None:
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
            source = model.embed(self.samples.token_ids) if self._error_aware else None
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
            theirs = layer.dense_part(source) if source is not None else None
            mine = layer.dense_part(ours)
            if mine is not None:
                if index not in self.shards:
                    layer.experts(ours, mine)
                elif index in self.done:
                    layer.experts(ours, mine, lambda experts: self._read_back(index, experts))
                else:
                    self._press(layer, index, ours, mine, theirs)
                mine.release()
            if theirs is not None and source is not None:
                layer.experts(source, theirs)
                theirs.release()

    def _press(
        self, layer: OpenLayer, index: int, stream: Stream, mine: RoutedTokens, theirs: RoutedTokens | None
    ) -> None:
        """Quantizes the layer's experts block by block while the quantized run's second half asks for them."""
        inputs = LayerInputs(mine, theirs, pooled_moments(mine))
        writer = _LayerShards(self.shards[index], self.plan, self.journal, self.watcher)

        def pressed(experts: range) -> ExpertBlock:
            source = layer.load_experts(experts)
            try:
                block = press_block(source, inputs, self.plan.recipe)
            except QuantizeError as error:
                raise QuantizeError(
                    error.what, where=f"layer {index}, experts {experts.start} to {experts.stop - 1}", hint=error.hint
                ) from error
            writer.add(block, lambda expert, projection: self.names[index, expert, projection])
            self.watcher.advance(sum(self._source_bytes(index, expert) for expert in experts))
            return block.dequantized()

        with writer:
            layer.experts(stream, mine, pressed)

    def _source_bytes(self, layer: int, expert: int) -> int:
        return sum(self.plan.decisions[self.names[layer, expert, p]].stored.nbytes for p in PROJECTIONS)

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

    def add(self, block: PressedBlock, name_of: Callable[[int, str], str]) -> None:
        """Writes a block's experts; a shard that is full is closed, and gets its receipt."""
        for expert, projection, codes, scales in _matrices(block):
            name = name_of(expert, projection)
            if self._writer is None:
                self._open()
            assert self._writer is not None  # noqa: S101 (opened above)
            module = name.removesuffix(".weight")
            self._writer.write(f"{module}.weight_packed", pack_int4(codes))
            self._writer.write(f"{module}.weight_scale", scales)
            self._writer.write(f"{module}.weight_shape", np.array(codes.shape, np.int64))
            self._records[name] = block.records[expert, projection]
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
