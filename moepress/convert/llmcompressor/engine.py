"""``engine: llmcompressor``: the experts' integers from llm-compressor's `oneshot`, everything else as always.

    source ─► BF16 folder (only where it is not BF16 already) ─► oneshot, in a process of its own ─► codes and scales per layer
                                                                      │
    plan, kept tensors, shards, receipts, report, verify: moepress' own ◄┘

It is here to compare with, and for who wants that library's numbers in files that a server is known to read. It holds the
whole model in memory, so a model that does not fit is refused before any work. Known of llm-compressor 0.14, and refused with the
way out: it has no MTP layers, it cannot calibrate block FP8 (decoded first, given the disk), its AWQ rescales norms in place.

The result of the process is kept until the output is finished: a conversion stopped while shards were being written goes on
from it. One stopped inside `oneshot` starts that again, from its beginning.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open

from moepress.calibration.checkpoint_weights import CheckpointWeights
from moepress.calibration.decoder import decoder_classes
from moepress.calibration.memory import available_memory
from moepress.calibration.text import CalibrationSet
from moepress.convert.calibrated.layer_shards import LayerShards, packed
from moepress.convert.forecast.estimate import check_free
from moepress.convert.journal import Journal, read_json
from moepress.convert.layout import ShardPlan
from moepress.convert.llmcompressor.process import DONE, Request
from moepress.convert.plan import ConversionPlan
from moepress.convert.units import METADATA
from moepress.convert.watcher import Watcher
from moepress.errors import ConvertError, PlanRefused
from moepress.formats.atomic import atomic_write_json
from moepress.formats.checkpoint import Checkpoint
from moepress.formats.families import expert_count, text_config
from moepress.formats.storage import resolve_storage
from moepress.formats.writer import ShardWriter, write_index
from moepress.quantize.decision import Quantized
from moepress.quantize.grid import Grid
from moepress.quantize.rtn import measure

LOG_LINES = 12
"""Of the process's log, shown when it failed."""


@dataclass(frozen=True)
class EngineNeed:
    """Bytes that `oneshot` will hold, and bytes of a decoded copy of the source (0 where it is BF16 already).

    ``memory``: all weights in BF16, one layer's Hessians (every expert's gate, up and down: float32), twice the activations.
    """

    memory: int
    decoded: int


def engine_need(checkpoint: Checkpoint, plan: ConversionPlan) -> EngineNeed:
    """From headers and recipe alone."""
    text = text_config(plan.family, checkpoint.config)
    hidden, experts = int(text["hidden_size"]), expert_count(text)
    inner = int(text.get("moe_intermediate_size") or text["intermediate_size"])
    calibration = plan.recipe.calibration
    bf16 = 2 * plan.total_parameters
    hessians = 4 * experts * (2 * hidden**2 + inner**2)
    activations = 2 * 2 * calibration.samples * calibration.length * hidden
    return EngineNeed(bf16 + hessians + activations, 0 if _is_bf16(plan) else bf16)


def check_engine(checkpoint: Checkpoint, plan: ConversionPlan) -> EngineNeed:
    """Refuses what `oneshot` cannot do, or this machine cannot hold.

    Raises:
        PlanRefused: with the numbers, and what to do instead.
    """
    ours = "--set engine=moepress"
    if plan.recipe.weights.algorithm != "gptq":
        raise PlanRefused(
            f"llm-compressor is used for gptq, the recipe says {plan.recipe.weights.algorithm}: its AWQ rescales the norms it "
            "finds, and those are kept tensors here",
            where="weights.algorithm",
            hint=f"--set weights.algorithm=gptq, or {ours}",
        )
    mtp = [d for d in plan.decisions.values() if d.action == "quantize" and d.identity.is_mtp]
    if mtp:
        raise PlanRefused(
            f"llm-compressor does not run MTP layers, and {len(mtp)} of their weights are to be quantized",
            where="mtp.experts",
            hint=f"--set mtp.experts=source, or {ours}",
        )
    if plan.family.text_field is not None:
        raise PlanRefused(
            f"llm-compressor is used for text models alone, this is {plan.family.title}", where="engine", hint=ours
        )
    decoder_classes(plan.family)
    need, free = engine_need(checkpoint, plan), available_memory()
    if need.memory > free:
        raise PlanRefused(
            f"llm-compressor holds the whole model: about {need.memory:,} bytes, {free:,} are free here",
            where="engine",
            hint=f"{ours}, which holds one layer",
        )
    return need


class LlmCompressorEngine:
    """Presses the expert shards of a plan with llm-compressor.

    Args:
        checkpoint: the source.
        plan, journal: of the open output folder.
        samples: the calibration set.
        watcher: told about stages, bytes and finished units.
        threads: of the process; None = torch's choice.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        plan: ConversionPlan,
        journal: Journal,
        samples: CalibrationSet,
        watcher: Watcher,
        threads: int | None = None,
    ) -> None:
        self.checkpoint, self.plan, self.journal, self.samples = checkpoint, plan, journal, samples
        self.watcher, self.threads = watcher, threads
        self.folder = journal.state / "llmcompressor"

    def run(self) -> None:
        """To the last expert shard.

        Raises:
            PlanRefused: no room for the decoded copy.
            ConvertError: the process failed; its last words are in the message, the rest in its log.
        """
        layers: dict[int, list[ShardPlan]] = {}
        for shard in self.plan.shards:
            if shard.layer is not None and self.journal.receipt(shard.name) is None:
                layers.setdefault(shard.layer, []).append(shard)
        if not layers:
            return
        if not (self.folder / DONE).exists():
            self._oneshot()
        about = read_json(self.folder / DONE)
        with CheckpointWeights(self.checkpoint) as weights:
            for layer, shards in layers.items():
                self.watcher.step(f"layer {layer}: codes into shards")
                self._write_layer(layer, shards, weights, about)
        shutil.rmtree(self.folder)

    def _oneshot(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        model = Path(self.plan.source)
        if not _is_bf16(self.plan):
            self.watcher.step("decoding to BF16 for llm-compressor")
            model = self.folder / "bf16"
            write_bf16(self.checkpoint, self.plan, model)
        np.save(self.folder / "tokens.npy", self.samples.token_ids.numpy())
        recipe, classes = self.plan.recipe, decoder_classes(self.plan.family)
        request = self.folder / "request.json"
        Request(
            model=str(model),
            model_type=classes.model_type,
            decoder_layer=f"{classes.prefix}DecoderLayer",
            tokens=str(self.folder / "tokens.npy"),
            out=str(self.folder),
            num_bits=recipe.weights.num_bits,
            group_size=recipe.weights.group_size,
            batch_size=recipe.calibration.batch_size,
            threads=self.threads,
        ).write(request)
        self.watcher.step("llm-compressor: oneshot")
        log = self.journal.state / "llmcompressor.log"
        command = [sys.executable, "-m", "moepress.convert.llmcompressor.process", str(request)]
        with log.open("wb") as said:
            failed = subprocess.run(command, stdout=said, stderr=subprocess.STDOUT, check=False).returncode
        if failed or not (self.folder / DONE).exists():
            words = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
            raise ConvertError(
                f"llm-compressor failed (exit code {failed}); the end of its log:\n  "
                + "\n  ".join(words[-LOG_LINES:]),
                where=str(log),
                hint="--set engine=moepress",
            )
        shutil.rmtree(self.folder / "bf16", ignore_errors=True)

    def _write_layer(
        self, layer: int, shards: list[ShardPlan], weights: CheckpointWeights, about: dict[str, Any]
    ) -> None:
        grid = Grid(self.plan.recipe.weights.num_bits, self.plan.recipe.weights.group_size)
        path = self.folder / f"layer-{layer:05d}.safetensors"
        if not path.exists():
            raise ConvertError(f"llm-compressor gave nothing for layer {layer}", where=str(path))
        with safe_open(path, framework="pt") as file, LayerShards(shards, self.plan, self.journal, self.watcher) as out:
            for name in (weight.name for shard in shards for weight in shard.weights):
                identity = self.plan.decisions[name].identity
                key = f"{layer}.{identity.expert}.{identity.projection}"
                codes, scales = file.get_tensor(f"{key}.codes"), file.get_tensor(f"{key}.scales")
                if not bool((scales > 0).all() & scales.isfinite().all()):
                    raise ConvertError("llm-compressor gave scales that are not positive numbers", where=name)
                fidelity = measure(weights.load(name), codes, scales)
                record = {"action": "quantize", **Quantized("gptq", grid, fidelity).as_json()}
                record |= {"engine": f"llmcompressor {about['llmcompressor']}", "tokens": about["tokens"]}
                out.add(name, packed(name, codes, scales), record)
                self.watcher.advance(self.plan.decisions[name].stored.nbytes)


def write_bf16(checkpoint: Checkpoint, plan: ConversionPlan, folder: Path) -> None:
    """The source decoded to BF16 (F32 stays), as transformers reads it: one shard a layer, without MTP layers.

    Raises:
        PlanRefused: too little room on the disk.
    """
    folder.mkdir(parents=True)
    check_free(folder, engine_need(checkpoint, plan).decoded, "the source decoded to BF16")
    layers: dict[int | None, list[str]] = {}
    for name in resolve_storage(checkpoint):
        identity = plan.decisions[name].identity
        if not identity.is_mtp:
            layers.setdefault(identity.layer, []).append(name)
    weight_map: dict[str, str] = {}
    total = 0
    with CheckpointWeights(checkpoint) as weights:
        for number, names in enumerate(layers.values(), start=1):
            shard = f"model-{number:05d}-of-{len(layers):05d}.safetensors"
            wanted = [(n, _dtype(plan, n), plan.decisions[n].stored.shape) for n in names]
            with ShardWriter(folder / shard, wanted, METADATA) as writer:
                for name in writer.order:
                    dtype = torch.float32 if _dtype(plan, name) == "F32" else torch.bfloat16
                    writer.write(name, weights.load(name).to(dtype))
                    weight_map[name] = shard
                total += writer.file_bytes
    write_index(folder / "model.safetensors.index.json", weight_map, total_size=total, total_parameters=0)
    config = {k: v for k, v in checkpoint.config.items() if k not in ("quantization_config", "auto_map")}
    atomic_write_json(folder / "config.json", config)
    for side_file in plan.side_files:
        (folder / side_file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(checkpoint.path(side_file), folder / side_file)


def _dtype(plan: ConversionPlan, name: str) -> str:
    main = plan.decisions[name].stored.parts.get("weight")
    return "F32" if main is not None and main.dtype == "F32" else "BF16"


def _is_bf16(plan: ConversionPlan) -> bool:
    return all(d.stored.kind == "dense" for d in plan.decisions.values())
