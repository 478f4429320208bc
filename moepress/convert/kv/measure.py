"""KV scales in a pass of their own: for recipes that round, and for layers that a calibrated run did not measure.

    embed ─► [measure] layer 0 ─► [measure] layer 1 ─► …      the source model, one layer at a time

The pass ends with the last layer that is missing; that one's experts are not run. What is held is what any calibrated
run holds: one layer, a block of its experts, the activations. A calibrated run measures on its own way instead
(`layers`), and with the same figures: the source run is the same, and blocks of experts of any size give the same sums.
"""

from __future__ import annotations

from moepress.calibration.activations import Scratch
from moepress.calibration.checkpoint_weights import CheckpointWeights
from moepress.calibration.mtp import mtp_stream
from moepress.calibration.stream import Stream
from moepress.calibration.streamed_model import StreamedModel
from moepress.calibration.text import CalibrationSet
from moepress.convert.calibrated.layers import run_settings
from moepress.convert.executor import Executor
from moepress.convert.journal import Journal
from moepress.convert.kv.scales import KvScales
from moepress.convert.watcher import Watcher
from moepress.formats.checkpoint import Checkpoint


def measure_source(
    checkpoint: Checkpoint,
    kv: KvScales,
    journal: Journal,
    samples: CalibrationSet,
    executor: Executor,
    watcher: Watcher,
    *,
    device: str = "cpu",
) -> None:
    """Measures every layer that `kv` misses; nothing to do when it misses none.

    Args:
        checkpoint: the source.
        samples: the calibration set.
        executor: does the work.
        watcher: told about layers.
        device: where layers compute.

    Raises:
        QuantizeError, CheckpointError: named by layer; measured layers stay.
    """
    if not kv.missing:
        return
    calibration = kv.plan.recipe.calibration
    settings = run_settings(checkpoint, kv.plan, device=device)
    folder = journal.state / "scratch"
    with (
        CheckpointWeights(checkpoint, ahead_bytes=settings.ahead_bytes, device=device) as weights,
        Scratch(folder, memory_bytes=calibration.activations_memory) as scratch,
    ):
        model = StreamedModel(checkpoint.config, weights, scratch, settings)
        stream = model.embed(samples.token_ids)
        for index in range(model.num_layers):
            if kv.missing:
                _layer(model, index, stream, kv, executor, watcher)
        if kv.missing:
            model.finish(stream)
            for index in model.mtp_layers:
                theirs = mtp_stream(model, index, samples.token_ids, stream)
                _layer(model, index, theirs, kv, executor, watcher)
                theirs.release()
    if folder.exists() and not any(folder.iterdir()):
        folder.rmdir()


def _layer(
    model: StreamedModel, index: int, stream: Stream, kv: KvScales, executor: Executor, watcher: Watcher
) -> None:
    watcher.layer(index, "measure")
    with model.open_layer(index) as layer:
        measured = kv.measure(layer, stream, executor)
        if kv.missing <= {index}:
            measured()
            return
        routed = executor.dense(layer, stream)
        if routed is not None:
            executor.experts(layer, stream, routed, None)
            routed.release()
        measured()
