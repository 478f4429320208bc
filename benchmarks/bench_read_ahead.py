"""What reading ahead brings: a calibrated run's layers with the next block of experts read meanwhile, and without.

    python -m benchmarks.bench_read_ahead FOLDER --layers 2 --experts 16 --tokens 1024 --disk 20

The model is `bench_oneshot`'s in BF16. Each contender runs GPTQ without polish over all layers in this process, on one thread, with
blocks of four experts; the output is thrown away. Cold: the source was dropped from the page cache before. Once a round:

    plain, cold      every tensor read when it is wanted, by whoever wants it; the next ones are announced to the kernel
    ahead, cold      a thread reads the next block
    plain, warm      the same from the page cache: what a thread costs where there is nothing to wait for
    ahead, warm
    plain, slow      from a disk of so many MB/s: every read sleeps as long as it would take there
    ahead, slow

JSON on standard output; the integers of all contenders are compared.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import resource
import sys
import threading
import time
from pathlib import Path

import torch

from benchmarks.bench_convert import drop_cache
from benchmarks.bench_oneshot import build
from benchmarks.measure import Cost, interleaved, machine, summary
from moepress.calibration import checkpoint_weights
from moepress.calibration.activations import Scratch
from moepress.calibration.checkpoint_weights import CheckpointWeights
from moepress.calibration.run_settings import RunSettings
from moepress.calibration.statistics import pooled_moments
from moepress.calibration.streamed_model import StreamedModel
from moepress.convert.calibrated.expert_block import LayerInputs, PressedBlock
from moepress.convert.in_process import InProcess
from moepress.convert.plan import make_plan
from moepress.convert.units import Pool
from moepress.formats.checkpoint import TensorRef, open_checkpoint
from moepress.formats.reader import TensorReader
from moepress.recipe import load_recipe

BLOCK = 4
OPTIONS = ("weights.algorithm=gptq", "calibration.error_aware=false", "calibration.passes=0", "kv_cache.scales=none")


class SlowDisk(TensorReader):
    """A reader whose reads take as long as on a disk of ``rate`` bytes a second, one after the other."""

    rate = 0.0
    _disk = threading.Lock()

    def _pread(self, descriptor: int, position: int, view: memoryview, ref: TensorRef) -> None:
        if self.rate:
            with self._disk:
                time.sleep(view.nbytes / self.rate)
        super()._pread(descriptor, position, view, ref)


def pressed(source: Path, *, tokens: int, ahead: bool) -> str:
    """All layers of the model once; SHA-256 of all integers."""
    checkpoint = open_checkpoint(source)
    text = checkpoint.config
    recipe = load_recipe("kimi-k2-bf16", list(OPTIONS))
    settings = RunSettings(expert_bytes=BLOCK * 4 * 3 * text["hidden_size"] * text["moe_intermediate_size"])
    digest = hashlib.sha256()

    def take(block: PressedBlock) -> None:
        digest.update(block.gate_up.codes.numpy().data)
        digest.update(block.down.codes.numpy().data)

    with (
        CheckpointWeights(checkpoint, ahead_bytes=settings.ahead_bytes if ahead else 0) as weights,
        Scratch(source, memory_bytes=1 << 40) as scratch,
        TensorReader(checkpoint) as reader,
        Pool(1) as pool,
    ):
        here = InProcess(make_plan(checkpoint, recipe, calibration="0" * 64), reader, pool, source)
        model = StreamedModel(text, weights, scratch, settings)
        ids = torch.randint(text["vocab_size"], (tokens // 256, 256), generator=torch.Generator().manual_seed(0))
        stream = model.embed(ids)
        for index in range(model.num_layers):
            with model.open_layer(index) as layer:
                routed = here.dense(layer, stream)
                assert routed is not None
                here.press(layer, stream, LayerInputs(routed, None, pooled_moments(routed)), take, lambda: None)
                routed.release()
    return digest.hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--experts", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--disk", type=float, default=20.0, help="MB/s of the slow disk")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    checkpoint_weights.TensorReader = SlowDisk  # type: ignore[attr-defined]
    source = arguments.folder / "source"
    parameters = build(source, layers=arguments.layers, experts=arguments.experts)
    pressed(source, tokens=arguments.tokens, ahead=True)  # compiles, imports
    made = set()

    def once(name: str, *, ahead: bool, cold: bool = False, rate: float = 0.0) -> Cost:
        SlowDisk.rate = rate
        if cold:
            drop_cache(source)
        before, started = resource.getrusage(resource.RUSAGE_SELF), time.monotonic()
        made.add(pressed(source, tokens=arguments.tokens, ahead=ahead))
        after = resource.getrusage(resource.RUSAGE_SELF)
        cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        cost = Cost(time.monotonic() - started, cpu, after.ru_maxrss * 1024)
        print(name, cost, file=sys.stderr, flush=True)
        return cost

    medians = summary(
        interleaved(
            arguments.rounds,
            {
                "plain, cold": lambda: once("plain, cold", ahead=False, cold=True),
                "ahead, cold": lambda: once("ahead, cold", ahead=True, cold=True),
                "plain, warm": lambda: once("plain, warm", ahead=False),
                "ahead, warm": lambda: once("ahead, warm", ahead=True),
                "plain, slow": lambda: once("plain, slow", ahead=False, rate=arguments.disk * 1e6),
                "ahead, slow": lambda: once("ahead, slow", ahead=True, rate=arguments.disk * 1e6),
            },
        )
    )

    def ratio(first: str, second: str, figure: str) -> float:
        return round(float(medians[first][figure]) / float(medians[second][figure]), 3)

    report = {
        "options": {key: str(value) for key, value in vars(arguments).items() if key != "folder"},
        "machine": machine(),
        "parameters": parameters,
        "costs": medians,
        "same_integers": len(made) == 1,
        "cold_plain_over_ahead": ratio("plain, cold", "ahead, cold", "wall_median"),
        "slow_plain_over_ahead": ratio("plain, slow", "ahead, slow", "wall_median"),
        "warm_plain_over_ahead": ratio("plain, warm", "ahead, warm", "wall_median"),
        "warm_cpu_ahead_over_plain": ratio("ahead, warm", "plain, warm", "cpu_median"),
    }
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
