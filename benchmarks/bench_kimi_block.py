"""GPTQ of some experts in Kimi K2's true shape, 7168 × 2048, with real-sized Hessians; and the whole model on paper.

    python -m benchmarks.bench_kimi_block --experts 1 --threads 2

An expert is gate and up, one weight [4096, 7168], and down [7168, 2048]. Its Hessians [7168, 7168] and [2048, 2048] come from
random tokens of correlated channels; what is timed is what `convert` does with them: error-aware targets, searched scales, the
sweep, polish, with products in BF16 and float32 sums as by default, or in float32 (`--precision`). Seconds are wall and, for a
shared machine, the processor's of all threads; peak memory is the process's.

On paper, for 60 layers of 384 experts (convert.forecast.calibration_cost counts, docs/guides/calibration.md):

    operations   of the whole calibrated conversion, over 790 TFLOP/s (BF16 products of an H200)
    bytes        each Hessian, weight and target read and written once a step, over 4.3 TB/s

Both are bounds from below: nothing runs at its peak, and the sweep's inner loop is not a matrix product. JSON on stdout.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from benchmarks.measure import machine
from moepress.calibration.memory import available_memory
from moepress.convert.forecast.calibration_cost import operations
from moepress.quantize.error_aware import error_aware_target
from moepress.quantize.gptq import gptq
from moepress.quantize.grid import Grid
from moepress.quantize.hessian import add_gram, mirror
from moepress.quantize.products import products_in
from moepress.recipe import load_recipe

CONFIG = Path(__file__).resolve().parents[1] / "tests" / "configs" / "kimi_k2_instruct.json"
HIDDEN, INNER, EXPERTS, LAYERS = 7168, 2048, 384, 60
H200_PRODUCTS, H200_BYTES = 790e12, 4.3e12
LIMIT = 20 << 30
"""Bytes that this must stay below."""


def statistics(columns: int, tokens: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """(Hessian, cross term) [C, C] float32 of correlated inputs and of a slightly disturbed copy."""
    mix = torch.randn(columns // 8, columns, generator=generator) * (columns // 8) ** -0.5
    hessian, cross = torch.zeros(columns, columns), torch.zeros(columns, columns)
    for first in range(0, tokens, 1024):
        rows = min(1024, tokens - first)
        x = torch.randn(rows, columns // 8, generator=generator) @ mix + 0.3 * torch.randn(
            rows, columns, generator=generator
        )
        seen = x + 0.05 * torch.randn(rows, columns, generator=generator)
        add_gram(hessian, seen)
        cross.addmm_((x - seen).t(), seen)
    mirror(hessian)
    scale = 2 / tokens
    hessian.mul_(scale).diagonal().add_(0.1)  # what shrinkage adds where tokens are few
    return hessian, cross.mul_(scale)


def one_matrix(
    rows: int, columns: int, tokens: int, grid: Grid, passes: int, generator: torch.Generator
) -> dict[str, float]:
    """Seconds of the target and of GPTQ with polish (wall; processor), and relative error, for one [rows, columns]."""
    hessian, cross = statistics(columns, tokens, generator)
    weight = torch.randn(rows, columns, generator=generator) * columns**-0.5
    moments = [(time.perf_counter(), time.process_time())]
    target = error_aware_target(weight, cross, hessian, tokens)
    moments.append((time.perf_counter(), time.process_time()))
    del cross
    result = gptq(target.weight[None], hessian[None], grid, passes=passes, source=weight[None])
    moments.append((time.perf_counter(), time.process_time()))
    wall, cpu = ([b[i] - a[i] for a, b in pairwise(moments)] for i in (0, 1))
    return {
        "target_wall": round(wall[0], 2),
        "gptq_wall": round(wall[1], 2),
        "target_processor": round(cpu[0], 2),
        "gptq_processor": round(cpu[1], 2),
        "relative_error": round(result.weight.fidelity[0].relative_error, 4),
    }


def on_paper(passes: int, samples: int, length: int) -> dict[str, Any]:
    """Operations and bytes of the full model, and the hours they would take at an H200's peak rates."""
    config = json.loads(CONFIG.read_text())
    options = ["weights.algorithm=gptq", f"calibration.passes={passes}"]
    options += [f"calibration.samples={samples}", f"calibration.length={length}"]
    todo = operations(config, load_recipe("kimi-k2", options))
    steps = 3 + 2 * passes  # factor, target, sweep; gradient and move of each pass
    per_expert = sum(
        4 * (columns**2 * 2 + rows * columns * 3) for rows, columns in ((2 * INNER, HIDDEN), (HIDDEN, INNER))
    )
    moved = per_expert * steps * EXPERTS * LAYERS
    return {
        "calibration_tokens": samples * length,
        "operations": {"forward": todo.forward, "moments": todo.moments, "gptq": todo.gptq},
        "bytes": moved,
        "h200_hours_at_peak": {
            "products": round(todo.total / H200_PRODUCTS / 3600, 2),
            "memory": round(moved / H200_BYTES / 3600, 2),
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experts", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--precision", choices=["mixed", "float32"], default="mixed")
    parser.add_argument("--passes", type=int, default=3)
    parser.add_argument("--group-size", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=2048, help="tokens behind each Hessian")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    free = available_memory()
    if free < 4 << 30:
        sys.exit(f"{free:,} bytes are free, this takes about 3 GB")
    grid, generator = Grid(4, arguments.group_size), torch.Generator().manual_seed(0)
    warm = torch.randn(1, 32, 64, generator=generator)
    gptq(warm, torch.eye(64)[None], Grid(4, 32), passes=1)  # compiles the loops
    experts: list[dict[str, Any]] = []
    for _ in range(arguments.experts):
        with products_in(arguments.precision):
            gate_up = one_matrix(2 * INNER, HIDDEN, arguments.tokens, grid, arguments.passes, generator)
            down = one_matrix(HIDDEN, INNER, arguments.tokens, grid, arguments.passes, generator)
        total = {
            clock: round(sum(part[f"{step}_{clock}"] for part in (gate_up, down) for step in ("target", "gptq")), 2)
            for clock in ("wall", "processor")
        }
        experts.append({"gate_up": gate_up, "down": down, **total})
        print(experts[-1], file=sys.stderr, flush=True)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    assert peak < LIMIT, peak
    each = sum(expert["processor"] for expert in experts) / len(experts)
    paper = on_paper(arguments.passes, samples=512, length=2048)
    report = {
        "options": vars(arguments),
        "machine": machine(),
        "experts": experts,
        "processor_seconds_per_expert": round(each, 2),
        "peak_bytes": peak,
        "whole_model_here_processor_hours": round(each * EXPERTS * LAYERS / 3600, 1),
        "on_paper": paper,
    }
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
