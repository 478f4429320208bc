"""How much a second worker brings, and how much this machine can give: calibrated conversions with no, one, two and four workers.

    python -m benchmarks.bench_workers FOLDER --layers 2 --experts 32 --tokens 16384

The model is `bench_oneshot`'s: Kimi K2's architecture with experts of 1024 × 512 in BF16, here with more experts and tokens.
Contenders, one thread each, once a round:

    in process       moepress convert
    1 worker         moepress convert --workers 1
    2 workers        moepress convert --workers 2
    4 workers        moepress convert --workers 4
    products, 1      what is left without moepress: float32 matrix products in one process …
    products, 2      … and the same number of products, half in each of two processes

The last two say what two processors of this machine are worth. Two hardware threads of one core share its multipliers, and
then no program gets 1.6. JSON on standard output; the files of all conversions are compared byte for byte.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import sys
from pathlib import Path

from benchmarks.bench_oneshot import LENGTH, TINY, build
from benchmarks.measure import Cost, interleaved, machine, run, summary

PRODUCTS = """
import multiprocessing, sys
def work(count):
    import torch
    torch.set_num_threads(1)
    a, b = torch.randn(1024, 1024), torch.randn(1024, 1024)
    for _ in range(count):
        torch.mm(a, b)
if __name__ == "__main__":
    processes = int(sys.argv[1])
    start = multiprocessing.get_context("spawn").Process
    each = [start(target=work, args=(int(sys.argv[2]) // processes,)) for _ in range(processes)]
    [process.start() for process in each]
    [process.join() for process in each]
"""


def digests(folder: Path) -> dict[str, str]:
    """SHA-256 of every shard."""
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.glob("*.safetensors"))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--experts", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--products", type=int, default=1500)
    parser.add_argument(
        "--only", nargs="+", metavar="NAME", help="of the runs, for example: --only '1 worker' '2 workers'"
    )
    arguments = parser.parse_args()
    folder: Path = arguments.folder
    parameters = build(folder / "source", layers=arguments.layers, experts=arguments.experts)
    options = ["serving.tensor_parallel=1", "weights.algorithm=gptq", "weights.group_size=128", "kv_cache.scales=none"]
    options += [f"calibration.text={TINY / 'calibration.txt'}", f"calibration.length={LENGTH}"]
    options += [f"calibration.samples={arguments.tokens // LENGTH}"]
    environment = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
    made: dict[str, dict[str, str]] = {}

    def conversion(name: str, *extra: str) -> Cost:
        out = folder / "out"
        shutil.rmtree(out, ignore_errors=True)
        command = [sys.executable, "-m", "moepress.cli", "convert", str(folder / "source"), str(out)]
        command += ["--recipe", "kimi-k2-bf16", "--json", "--threads", "1", *extra]
        cost = run([*command, *(word for option in options for word in ("--set", option))], env=environment)
        made[name] = digests(out)
        print(name, cost, file=sys.stderr, flush=True)
        return cost

    script = folder / "products.py"
    script.write_text(PRODUCTS)

    def products(processes: int) -> Cost:
        return run([sys.executable, str(script), str(processes), str(arguments.products)], env=environment)

    runs = {
        "in process": lambda: conversion("in process"),
        "1 worker": lambda: conversion("1 worker", "--workers", "1"),
        "2 workers": lambda: conversion("2 workers", "--workers", "2"),
        "4 workers": lambda: conversion("4 workers", "--workers", "4"),
        "products, 1": lambda: products(1),
        "products, 2": lambda: products(2),
    }
    medians = summary(interleaved(arguments.rounds, {name: runs[name] for name in arguments.only or runs}))

    def speedup(one: str, two: str) -> float | None:
        if not {one, two} <= medians.keys():
            return None
        seconds = [float(medians[name]["wall_median"]) for name in (one, two)]
        return round(seconds[0] / seconds[1], 2)

    report = {
        "options": {key: str(value) for key, value in vars(arguments).items() if key != "folder"},
        "machine": machine(),
        "parameters": parameters,
        "costs": medians,
        "same_bytes": len({json.dumps(each) for each in made.values()}) == 1,
        "two_workers_over_one": speedup("1 worker", "2 workers"),
        "two_workers_over_in_process": speedup("in process", "2 workers"),
        "two_processes_of_products_over_one": speedup("products, 1", "products, 2"),
    }
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
