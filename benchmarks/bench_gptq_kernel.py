"""GPTQ of one layer's gate and up, side by side with llm-compressor's kernel: same weights, Hessians, damping, threads.

    python -m benchmarks.bench_gptq_kernel --experts 4 --intermediate 768 --hidden 2048 --threads 2 --rounds 5

    llm-compressor     quantize_weight for gate, then for up, expert by expert, as it runs on a CPU; order static
    its batch          the same call on all experts at once
    expert, max        moepress with one Hessian per expert; gate and up are the rows of one weight and share its
                       factor; the same scales as llm-compressor, max|w| / 7.5
    expert, mse        the same with searched scales, which is the default
    expert, polished   the same and two polishing passes
    layer, max | mse   moepress with one Hessian for all experts: factored once

Contenders take turns inside a round, so a slow minute of a shared machine hits all of them. Times are medians of wall
and of processor seconds; ratios are those of the quicker of llm-compressor's two ways over the contender's, round by
round. The loss is Σ tr(D H Dᵀ) over experts in float64, D being what is served, against each expert's own Hessian, for
``layer`` against the layer's. JSON on standard output.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from importlib.metadata import version

import torch
from compressed_tensors.quantization import QuantizationArgs
from llmcompressor.modifiers.gptq.gptq_quantize import quantize_weight

from benchmarks.measure import machine
from moepress.quantize.gptq import gptq
from moepress.quantize.grid import Grid, usable_scales

Contender = Callable[[], torch.Tensor]


def problem(experts: int, rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights [E, R, C] and Hessians [E, C, C] of correlated inputs with a few loud channels."""
    g = torch.Generator().manual_seed(0)
    weight = torch.randn(experts, rows, columns, generator=g) * columns**-0.5
    mix = torch.randn(columns, columns // 4, generator=g) / (columns // 4) ** 0.5
    hessian = []
    for _ in range(experts):
        x = torch.randn(columns, columns // 4, generator=g) @ mix.t() + 0.3 * torch.randn(columns, columns, generator=g)
        x[:, : columns // 32] *= 4
        hessian.append(x.t() @ x * (2 / columns))
    return weight, torch.stack(hessian)


def peer(weight: torch.Tensor, hessian: torch.Tensor, grid: Grid, *, at_once: bool) -> Contender:
    """llm-compressor's kernel on gate and up as it is called there: two modules, each with a Hessian of its own."""
    half = weight.shape[1] // 2
    args = QuantizationArgs(
        num_bits=grid.num_bits, symmetric=True, strategy="group", group_size=grid.group_size, actorder="static"
    )
    peaks = weight.unflatten(-1, (-1, grid.group_size)).abs().amax(-1)
    scales = usable_scales(peaks / grid.half_range).to(torch.bfloat16)
    batches = [slice(None)] if at_once else [slice(e, e + 1) for e in range(len(weight))]

    def run() -> torch.Tensor:
        projections = []
        for rows in (slice(0, half), slice(half, None)):
            served = []
            for batch in batches:
                scale = scales[batch, rows].contiguous()
                zero = torch.zeros_like(scale, dtype=torch.int8)
                w, h = weight[batch, rows].clone(), hessian[batch].clone()  # it works in place
                served.append(quantize_weight(w, h, scale, zero, None, args, 128, 0.01)[0])
            projections.append(torch.cat(served))
        return torch.cat(projections, 1)

    return run


def ours(
    weight: torch.Tensor, hessian: torch.Tensor, grid: Grid, threads: int, *, scale: str, passes: int = 0
) -> Contender:
    def run() -> torch.Tensor:
        return gptq(weight, hessian, grid, scale=scale, passes=passes, threads=threads).weight.dequantize()

    return run


def loss(weight: torch.Tensor, served: torch.Tensor, hessian: torch.Tensor) -> float:
    total = 0.0
    for e in range(len(weight)):
        d = (weight[e] - served[e].float()).double()
        h = (hessian if hessian.ndim == 2 else hessian[e]).double()
        total += float(((d @ h) * d).sum())
    return total


def figures(times: dict[str, list[float]], name: str) -> dict[str, object]:
    """Median and runs in seconds, and how many times faster than the quicker of llm-compressor's two ways."""
    best = [min(pair) for pair in zip(times["llm-compressor"], times["its batch"], strict=True)]
    ratios = [theirs / mine for theirs, mine in zip(best, times[name], strict=True)]
    return {
        "median": round(statistics.median(times[name]), 3),
        "runs": [round(seconds, 3) for seconds in times[name]],
        "times_faster": round(statistics.median(ratios), 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experts", type=int, default=4)
    parser.add_argument("--intermediate", type=int, default=768)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--group", type=int, default=128)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    grid = Grid(4, options.group)
    weight, hessian = problem(options.experts, 2 * options.intermediate, options.hidden)
    pooled = hessian.mean(0)
    contenders: dict[str, tuple[Contender, torch.Tensor]] = {
        "llm-compressor": (peer(weight, hessian, grid, at_once=False), hessian),
        "its batch": (peer(weight, hessian, grid, at_once=True), hessian),
        "expert, max": (ours(weight, hessian, grid, options.threads, scale="max"), hessian),
        "expert, mse": (ours(weight, hessian, grid, options.threads, scale="mse"), hessian),
        "expert, polished": (ours(weight, hessian, grid, options.threads, scale="mse", passes=2), hessian),
        "layer, max": (ours(weight, pooled, grid, options.threads, scale="max"), pooled),
        "layer, mse": (ours(weight, pooled, grid, options.threads, scale="mse"), pooled),
    }
    losses = {name: loss(weight, run(), h) for name, (run, h) in contenders.items()}  # compiles and warms up too
    wall: dict[str, list[float]] = {name: [] for name in contenders}
    processor: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(options.rounds):
        for name, (run, _) in contenders.items():
            started, used = time.perf_counter(), time.process_time()
            run()
            wall[name].append(time.perf_counter() - started)
            processor[name].append(time.process_time() - used)
    report = {
        "options": vars(options),
        "machine": machine(),
        "versions": {
            package: version(package) for package in ("torch", "llmcompressor", "compressed-tensors", "numba")
        },
        "contenders": {
            name: {"loss": losses[name], "wall": figures(wall, name), "processor": figures(processor, name)}
            for name in contenders
        },
    }
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
