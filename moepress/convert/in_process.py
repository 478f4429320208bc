"""The executor of one process: a pool of threads for shards, torch's own threads for layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moepress.convert.executor import Executor
from moepress.convert.layout import ShardPlan
from moepress.convert.plan import ConversionPlan
from moepress.convert.units import Pool, run_unit
from moepress.errors import QuantizeError
from moepress.formats.checkpoint import Checkpoint
from moepress.formats.reader import TensorReader
from moepress.recipe import Recipe

if TYPE_CHECKING:
    from moepress.calibration.expert_tap import RoutedTokens
    from moepress.calibration.layer_fill import ExpertBlock
    from moepress.calibration.layer_runner import OpenLayer
    from moepress.calibration.statistics import PooledMoments
    from moepress.calibration.stream import Stream
    from moepress.convert.calibrated.expert_block import LayerInputs, PressedBlock
    from moepress.convert.kv.layer_scales import LayerScales


class InProcess:
    """See `executor.Executor`."""

    def __init__(
        self, plan: ConversionPlan, reader: TensorReader, pool: Pool, out: Path, *, device: str = "cpu"
    ) -> None:
        self._plan, self._reader, self._pool, self._out, self._device = plan, reader, pool, out, device

    def shards(
        self,
        shards: Sequence[ShardPlan],
        plan: ConversionPlan,
        started: Callable[[ShardPlan], None],
        progress: Callable[[int], None],
    ) -> Iterator[tuple[ShardPlan, dict[str, Any]]]:
        for shard in shards:
            started(shard)
            yield shard, run_unit(shard, plan, self._reader, self._out, self._pool, progress, self._device)

    def measure(self, layer: OpenLayer, stream: Stream) -> Callable[[], LayerScales]:
        from moepress.convert.kv.scales import measure_layer

        found = measure_layer(layer, stream, self._plan)
        return lambda: found

    def dense(self, layer: OpenLayer, stream: Stream) -> RoutedTokens | None:
        return layer.dense_part(stream)

    def pooled(self, layer: OpenLayer, ours: RoutedTokens, source: RoutedTokens | None) -> PooledMoments:
        from moepress.calibration.statistics import pooled_moments
        from moepress.quantize.products import products_in

        with products_in(self._plan.recipe.calibration.precision):
            return pooled_moments(ours, source=source, device=layer.device)

    def press(
        self,
        layer: OpenLayer,
        stream: Stream | None,
        inputs: LayerInputs,
        take: Callable[[PressedBlock], None],
        written: Callable[[], None],
    ) -> None:
        del written  # nobody here reads the files: weights are those that were just made
        import torch

        again = inputs.source is not None and stream is not None  # for the source run's outputs

        def pressed(experts: range) -> PressedBlock:
            weights = layer.load_and_expect(experts, dtype=torch.float32, again=again)
            block = press_experts(layer, weights, inputs, self._plan.recipe)
            take(block)
            return block

        if stream is not None:
            layer.experts(stream, inputs.ours, lambda experts: pressed(experts).dequantized())
            return
        for experts in layer.expert_blocks():
            pressed(experts)

    def experts(
        self, layer: OpenLayer, stream: Stream, routed: RoutedTokens, finished: Callable[[range], ExpertBlock] | None
    ) -> None:
        layer.experts(stream, routed, finished)


@contextmanager
def in_process(
    checkpoint: Checkpoint, plan: ConversionPlan, out: Path, *, threads: int, device: str = "cpu"
) -> Iterator[Executor]:
    """An executor of this process, with its open files and threads. ``device``: where shards' weights are rounded."""
    with TensorReader(checkpoint) as reader, Pool(threads) as pool:
        yield InProcess(plan, reader, pool, out, device=device)


def press_experts(layer: OpenLayer, weights: ExpertBlock, inputs: LayerInputs, recipe: Recipe) -> PressedBlock:
    """Quantizes a block of the layer's experts.

    Args:
        weights: the source's, float32.

    Raises:
        QuantizeError: named by layer and experts.
    """
    from moepress.convert.calibrated.expert_block import press_block

    try:
        return press_block(weights, inputs, recipe)
    except QuantizeError as error:
        place = f"layer {layer.index}, experts {weights.experts.start} to {weights.experts.stop - 1}"
        raise QuantizeError(error.what, where=place, hint=error.hint) from error
