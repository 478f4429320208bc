"""What calibration will take, before it begins: memory from arithmetic, time from operations over measured rates.

For T = N·S tokens, s runs side by side (2 with error-aware targets or KV scales: source and quantized), experts of I × C,
K of them a token:

    forward    2·T·s·(dense parameters + K·3·I·C) + 2·T·s·S·heads·(qk + v)               matrix products
    moments    T·C² + T·K·(C² + I²) + 2·T·K·(C² + I²) with cross terms + the extra pass through gate and up
    GPTQ       per matrix [R, C]: C³/3 to factor, C³/3 + 4·R·C² for the target, (1 + 2·passes)·R·C² to round and polish
    decoding   the source once for each run
    with `calibration.loss: kl`, for d·T tokens (d: how often labels are drawn):
    backward   2·d·T·(4·dense parameters + 8/3·K·3·I·C) + 5 times a run's attention; the source decoded twice more
    GPTQ       R²·C·(½ + 6·passes) more for each matrix: one a pass is there to do beside loops over rows that wait for
               each other, as long as 6 of plain GPTQ's (9 measured at 2048 × 3584, 3 at 3584 × 1024)

Rates are measured for about a second on this machine: a matrix product, GPTQ of one synthetic expert, decoding of real
weights. They are those of an idle machine and of large matrices; small experts run slower, a shared machine slower still.

Memory is `calibration.memory` (what streaming holds) + what pressing a block holds beside it + the process itself.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from moepress.calibration.memory import FLOAT32, STORED_BYTES, MemoryNeed, dense_at_once, memory_need
from moepress.convert.forecast.estimate import about
from moepress.convert.kv.plan import emission_for
from moepress.formats.architecture import expected_weights
from moepress.formats.families import Component, Family, expert_count, identify_family, text_config
from moepress.formats.runtime_contract import contract_for
from moepress.recipe import Recipe

if TYPE_CHECKING:
    from moepress.convert.plan import ConversionPlan
    from moepress.formats.checkpoint import Checkpoint

PROCESS_BYTES = 800 << 20
"""Python with torch, transformers and the compiled loops, before anything is loaded."""

LABELS_PER_COLUMN = 8
"""Labels drawn for every column of a layer's Fisher matrix, at least (`calibration.loss: kl`)."""

WORTH_A_PROBE = 1e11
"""Operations below which calibration takes a few seconds on any machine: about what measuring its rates takes."""

_DENSE = (Component.ATTENTION, Component.INDEXER, Component.SHARED_EXPERT, Component.DENSE_MLP, Component.ROUTER)


@dataclass(frozen=True)
class Operations:
    """Floating-point operations of the parts of a calibrated conversion; ``decoded``: bytes of the source to decode."""

    forward: float
    moments: float
    gptq: float
    decoded: int

    @property
    def total(self) -> float:
        return self.forward + self.moments + self.gptq


@dataclass(frozen=True)
class CalibrationCost:
    """What calibration takes.

    Attributes:
        memory: peak bytes of the process.
        scratch: bytes of activations in files, at most.
        available: bytes of memory that are free now.
        operations: what is to be computed.
        seconds: None where it was not measured.
    """

    memory: int
    scratch: int
    available: int
    operations: Operations
    seconds: float | None

    def lines(self) -> list[str]:
        """For people."""
        gib = 1 << 30
        text = f"calibration: {self.memory / gib:,.2f} GiB of memory of {self.available / gib:,.1f} free"
        if self.scratch:
            text += f", {self.scratch / gib:,.2f} GiB of scratch files"
        text += f", {_operations(self.operations.total)} operations"
        if self.seconds is not None:
            text += f", {about(self.seconds)} here (from rates measured now)"
        elif self.operations.total < WORTH_A_PROBE:
            text += ", seconds of work: less than it takes to measure how many"
        found = [text]
        if self.memory > self.available:
            found.append(
                "that is more memory than is free: lower calibration.memory, calibration.activations_memory or "
                "calibration.batch_size"
            )
        return found

    def as_json(self) -> dict[str, Any]:
        return {
            "memory": self.memory,
            "scratch": self.scratch,
            "available": self.available,
            "operations": self.operations.__dict__,
            "seconds": self.seconds,
        }


def calibration_cost(config: Mapping[str, Any], recipe: Recipe, *, available: int) -> CalibrationCost:
    """Everything but the time, from the configuration alone.

    Args:
        config: the published ``config.json``.
        available: bytes of free memory.
    """
    text = text_config(identify_family(config), config)
    hidden, inner = int(text["hidden_size"]), inner_size(text)
    calibration, threads = recipe.calibration, os.cpu_count() or 1
    held = block_bytes(recipe, hidden, inner, expert_count(text))
    need: MemoryNeed = memory_need(
        config,
        samples=calibration.samples,
        length=calibration.length,
        batch_size=calibration.batch_size,
        expert_bytes=held,
        streams=_streams(identify_family(config), recipe),
        dense_at_once=dense_at_once(
            config,
            batch_size=calibration.batch_size,
            length=calibration.length,
            dtype_bytes=FLOAT32,
            threads=threads,
            available=available,
        ),
    )
    if recipe.weighs_predictions:  # the backward pass keeps what every layer was given
        kept = calibration.samples * calibration.length * label_draws(recipe, hidden) * hidden * FLOAT32
        need = replace(need, activations=max(need.activations, kept * (int(text["num_hidden_layers"]) + 5)))
    block = max(1, held // (4 * 3 * inner * hidden))
    widest = max(hidden, inner)
    pressing = block * 4 * (4 * inner * hidden + (2 * widest**2 if "gptq" in recipe.weights.algorithm else inner**2))
    pressing += block * 3 * inner * hidden * 5 // 8  # packed integers in the hands of the thread that writes them
    pressing += 4 * min(threads, block) * (widest**2 + 6 * inner * hidden)
    if recipe.weighs_predictions:
        outputs = max(hidden, 2 * inner)
        pressing += block * 4 * 2 * (2 * inner) ** 2 + 4 * min(threads, block) * 3 * outputs**2
    return CalibrationCost(
        memory=PROCESS_BYTES + need.resident(calibration.activations_memory) + pressing,
        scratch=need.scratch_files(calibration.activations_memory),
        available=available,
        operations=operations(config, recipe),
        seconds=None,
    )


def operations(config: Mapping[str, Any], recipe: Recipe) -> Operations:
    """The formulas of the module's docstring."""
    text = text_config(identify_family(config), config)
    hidden, inner, calibration = int(text["hidden_size"]), inner_size(text), recipe.calibration
    tokens, runs = calibration.samples * calibration.length, _streams(identify_family(config), recipe)
    specs = [spec for spec in expected_weights(config) if spec.copy_of is None and spec.identity.layer is not None]
    dense = sum(spec.numel for spec in specs if spec.identity.component in _DENSE)
    experts = [spec for spec in specs if spec.identity.component is Component.ROUTED_EXPERT]
    sparse = len({spec.identity.layer for spec in experts})
    layers = len({spec.identity.layer for spec in specs})
    top_k = int(text["num_experts_per_tok"])
    heads, width = int(text["num_attention_heads"]), int(text.get("head_dim") or 0)
    width = width or int(text.get("qk_nope_head_dim") or 0) + int(text.get("qk_rope_head_dim") or 0) or hidden // heads
    routed = tokens * top_k * 3 * inner * hidden * sparse
    forward: float = (
        2 * runs * (tokens * dense + routed) + 2 * runs * tokens * calibration.length * heads * width * layers
    )
    gptq_here, cross = "gptq" in recipe.weights.algorithm, calibration.error_aware
    pairs = (hidden**2 if gptq_here else 0) + inner**2
    moments = sparse * tokens * (hidden**2 + top_k * pairs * (3 if cross else 1))
    moments += 2 * routed * 2 // 3 * (2 if cross else 1)
    each = sum(
        columns**3 / 3 * (2 if cross else 1) + rows * columns**2 * (1 + 2 * calibration.passes + (4 if cross else 0))
        for rows, columns in ((2 * inner, hidden), (hidden, inner))
    )
    if recipe.weighs_predictions:
        times = label_draws(recipe, hidden)
        forward += times * (
            2 * (4 * tokens * dense + 8 / 3 * routed) + 10 * tokens * calibration.length * heads * width * layers
        )
        each += sum(
            rows**2 * columns * (0.5 + 6 * calibration.passes)
            for rows, columns in ((2 * inner, hidden), (hidden, inner))
        )
        runs += 2
    decoded = sum(spec.numel for spec in specs) * runs  # a byte a weight, as in FP8
    return Operations(forward, moments, len(experts) // 3 * each if gptq_here else 0.0, decoded)


def timed(cost: CalibrationCost, checkpoint: Checkpoint, plan: ConversionPlan) -> CalibrationCost:
    """The same with seconds, from rates measured now; without them where the work is too little to be worth it."""
    if cost.operations.total < WORTH_A_PROBE:
        return cost
    text = text_config(plan.family, checkpoint.config)
    todo = cost.operations
    seconds = (todo.forward + todo.moments) / _product_rate()
    if todo.gptq:
        seconds += todo.gptq / _gptq_rate(plan.recipe, min(inner_size(text), 512), min(int(text["hidden_size"]), 1024))
    seconds += todo.decoded / _decoding_rate(checkpoint, plan)
    return CalibrationCost(cost.memory, cost.scratch, cost.available, todo, seconds)


def block_bytes(recipe: Recipe, hidden: int, inner: int, experts: int, *, memory: int | None = None) -> int:
    """Bytes of decoded experts in a block, such that they, their Hessians, cross terms and targets fit the memory.

    Per expert and matrix pair, float32: weights, target and quantized values 3 × 3·I·C; gram and cross 2 × C² (gate and up),
    then 2 × I² (down); and one more C² each while they are factored. A GPU has all experts of the block in every step
    at once, so there all of them are counted: factor and panels 2 × C², and twice the weights (see ``gptq_batched``); and the
    next block as it is stored, which is on its way meanwhile.

    Args:
        memory: of a GPU; None = main memory, as much as the recipe says.
    """
    weights = 4 * 3 * inner * hidden
    if "gptq" not in recipe.weights.algorithm:
        each = 4 * weights + 4 * 2 * inner**2
    else:
        each = 3 * weights + 4 * 2 * max(hidden, inner) ** 2
        each += 4 * 2 * (2 * inner) ** 2 if recipe.weighs_predictions else 0  # slopes and metric of gate and up
    working = 4 * 4 * max(hidden, inner) ** 2
    if memory is not None:
        each += 2 * weights + 4 * 2 * max(hidden, inner) ** 2 + STORED_BYTES * 3 * inner * hidden
    fitting = max(1, int(((memory or recipe.calibration.memory) - working) // each))
    return min(fitting, experts) * weights


def label_draws(recipe: Recipe, hidden: int) -> int:
    """How often the text is run for its labels: until there are `LABELS_PER_COLUMN` for every column, at most 16 times."""
    tokens = recipe.calibration.samples * recipe.calibration.length
    return min(16, max(1, -(-LABELS_PER_COLUMN * hidden // tokens)))


def inner_size(text: Mapping[str, Any]) -> int:
    """Columns of an expert's down_proj; MiniMax calls it ``intermediate_size``."""
    return int(text.get("moe_intermediate_size") or text["intermediate_size"])


def _streams(family: Family, recipe: Recipe) -> int:
    """Runs side by side: the quantized one, and the source's for error-aware targets or for KV scales."""
    error_aware = recipe.calibration.error_aware and "gptq" in recipe.weights.algorithm
    contract = contract_for(recipe.serving.server, recipe.serving.version, family.key)
    return 2 if error_aware or emission_for(recipe, contract)[0] != "none" else 1


def _product_rate(size: int = 1024, budget: float = 0.25) -> float:
    """Operations per second of float32 matrix products."""
    import torch

    a, b = torch.randn(size, size), torch.randn(size, size)
    torch.mm(a, b)
    started, done = time.perf_counter(), 0
    while time.perf_counter() - started < budget:
        torch.mm(a, b)
        done += 1
    return done * 2 * size**3 / (time.perf_counter() - started)


def _gptq_rate(recipe: Recipe, rows: int, columns: int) -> float:
    """Operations per second, as `operations` counts them, of GPTQ with the recipe's passes, on all threads."""
    import torch

    from moepress.quantize.gptq import gptq
    from moepress.quantize.grid import Grid

    threads, passes = torch.get_num_threads(), recipe.calibration.passes
    x = torch.randn(2 * columns, columns)
    hessian = (x.t() @ x).expand(threads, -1, -1).contiguous()
    weight = torch.randn(threads, rows, columns)
    grid = Grid(recipe.weights.num_bits, recipe.weights.group_size if columns % recipe.weights.group_size == 0 else -1)
    gptq(weight[:1, :8].contiguous(), hessian[:1], grid, scale=recipe.weights.scale, passes=passes)  # compiles
    started = time.perf_counter()
    gptq(weight, hessian, grid, scale=recipe.weights.scale, passes=passes)
    done = threads * (columns**3 / 3 + rows * columns**2 * (1 + 2 * passes))
    return done / (time.perf_counter() - started)


def _decoding_rate(checkpoint: Checkpoint, plan: ConversionPlan, budget: float = 0.3) -> float:
    """Weights per second, read and decoded."""
    from moepress.calibration.checkpoint_weights import CheckpointWeights

    names = [name for name, decision in plan.decisions.items() if decision.action == "quantize"]
    done = 0
    with CheckpointWeights(checkpoint) as weights:
        started = time.perf_counter()
        for name in names:
            done += weights.load(name).numel()
            if time.perf_counter() - started > budget:
                break
    return done / (time.perf_counter() - started)


def _operations(count: float) -> str:
    for unit, scale in (("P", 1e15), ("T", 1e12), ("G", 1e9)):
        if count >= scale:
            return f"{count / scale:,.1f} {unit}"
    return f"{count:,.0f}"
