"""Where the work of a conversion is done: in this process, or by workers elsewhere (`moepress.cluster`).

A conversion asks for six things. Each is cut so that its parts know nothing of each other, and so every place gives the
same bytes:

    shards     output shards that need no calibration, pressed and written       parts: shards
    measure    KV scales of a layer                                              one part, beside the layer's other work
    dense      a layer's attention, norms, router and shared experts             parts: batches of samples
    pooled     second moments of all the tokens of a layer                       parts: panels of the matrix
    press      a layer's experts into integers                                   parts: blocks of experts
    experts    what a layer's experts add to their tokens                        parts: batches of samples

The plan, the journal, the order of layers and every receipt stay with whoever runs the conversion.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from moepress.convert.layout import ShardPlan
from moepress.convert.plan import ConversionPlan
from moepress.formats.checkpoint import Checkpoint

if TYPE_CHECKING:
    from moepress.calibration.expert_tap import RoutedTokens
    from moepress.calibration.layer_fill import ExpertBlock
    from moepress.calibration.layer_runner import OpenLayer
    from moepress.calibration.statistics import PooledMoments
    from moepress.calibration.stream import Stream
    from moepress.convert.calibrated.expert_block import LayerInputs, PressedBlock
    from moepress.convert.kv.layer_scales import LayerScales


class Executor(Protocol):
    """Does the work. All calls come from the thread that runs the conversion."""

    def shards(
        self,
        shards: Sequence[ShardPlan],
        plan: ConversionPlan,
        started: Callable[[ShardPlan], None],
        progress: Callable[[int], None],
    ) -> Iterator[tuple[ShardPlan, dict[str, Any]]]:
        """Presses and writes shards; gives each with its receipt as soon as it is durable, in any order.

        Args:
            plan: what the shards' weights become.
            started: called with a shard when work on it begins.
            progress: called with source bytes as they are finished.

        Raises:
            FormatError, QuantizeError, ConvertError: as `units.run_unit`.
        """
        ...

    def measure(self, layer: OpenLayer, stream: Stream) -> Callable[[], LayerScales]:
        """`kv.scales.measure_layer`; the stream is not needed any more when this returns, the scales may come later.

        Raises:
            QuantizeError: from the returned function: values that are not finite, or all zero.
        """
        ...

    def dense(self, layer: OpenLayer, stream: Stream) -> RoutedTokens | None:
        """`OpenLayer.dense_part`."""
        ...

    def pooled(self, layer: OpenLayer, ours: RoutedTokens, source: RoutedTokens | None) -> PooledMoments:
        """`statistics.pooled_moments` of a layer's tapped tokens.

        Raises:
            QuantizeError: inputs that are not finite.
        """
        ...

    def press(
        self,
        layer: OpenLayer,
        stream: Stream | None,
        inputs: LayerInputs,
        take: Callable[[PressedBlock], None],
        written: Callable[[], None],
    ) -> None:
        """Quantizes all experts of a layer and adds the outputs of the quantized ones to the stream.

        Args:
            stream: None where nobody reads on: no outputs are computed.
            take: is given the blocks in ascending order, and writes them in the background.
            written: waits until all that were taken are safe in files.

        Raises:
            QuantizeError: named by layer and experts.
        """
        ...

    def experts(
        self, layer: OpenLayer, stream: Stream, routed: RoutedTokens, finished: Callable[[range], ExpertBlock] | None
    ) -> None:
        """`OpenLayer.experts` with the source's experts, or with finished ones of the output."""
        ...


Place = Callable[[Checkpoint, ConversionPlan, Path], AbstractContextManager[Executor]]
"""Opens an executor for a conversion into a folder that this run owns."""
