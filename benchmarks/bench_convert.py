"""A round-to-nearest conversion against plainly copying the same bytes, and against llm-compressor's `model_free_ptq`.

    python benchmarks/bench_convert.py FOLDER --layers 1 --experts 40 --rounds 3          about 2 GB, Kimi K2's shapes

One round runs, one after the other: the copy (reads the source's bytes, writes as many as the conversion writes, fsync), ours
with both kinds of scales, and the peer. Ratios of medians; JSON on stdout.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from benchmarks.measure import Cost, interleaved, machine, run, summary

COPY = """
import os, sys
source, target, limit = sys.argv[1], sys.argv[2], int(sys.argv[3])
buffer = bytearray(16 << 20)
out = os.open(target, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
written = 0
for name in sorted(os.listdir(source)):
    if name.endswith(".safetensors"):
        with open(os.path.join(source, name), "rb", buffering=0) as file:
            while count := file.readinto(buffer):
                part = memoryview(buffer)[: min(count, limit - written)]
                written += os.write(out, part) if part else 0
os.fsync(out)
"""


def drop_cache(folder: Path) -> None:
    """Asks the kernel to forget a folder's pages, so that every contender reads from the disk."""
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="scratch folder; about three times the checkpoint's size")
    parser.add_argument("--model", choices=["glm-5.2", "kimi-k2"], default="kimi-k2")
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--experts", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--without-peer", action="store_true")
    arguments = parser.parse_args()
    source = arguments.folder / f"{arguments.model}-{arguments.layers}x{arguments.experts}"
    if not (source / "model.safetensors.index.json").exists():
        # in a process of its own: a child's peak memory counts what its parent held when it was forked
        shape = ["--model", arguments.model, "--layers", str(arguments.layers), "--experts", str(arguments.experts)]
        subprocess.run(
            [sys.executable, "-m", "benchmarks.synthetic", str(source), *shape], check=True, stdout=sys.stderr
        )
    source_bytes = sum(path.stat().st_size for path in source.glob("*.safetensors"))
    recipe = "kimi-k2" if arguments.model == "kimi-k2" else "glm-5"
    output_bytes = 0

    def ours(scale: str) -> Cost:
        nonlocal output_bytes
        out = arguments.folder / "ours"
        shutil.rmtree(out, ignore_errors=True)
        drop_cache(source)
        command = [sys.executable, "-m", "moepress.cli", "convert", str(source), str(out), "--recipe", recipe, "--json"]
        cost = run([*command, "--set", f"weights.scale={scale}"])
        output_bytes = sum(path.stat().st_size for path in out.glob("*.safetensors"))
        shutil.rmtree(out)
        return cost

    def copy() -> Cost:
        drop_cache(source)
        target = arguments.folder / "copy.bin"
        cost = run([sys.executable, "-c", COPY, str(source), str(target), str(output_bytes)])
        target.unlink()
        return cost

    def peer() -> Cost:
        out = arguments.folder / "peer"
        shutil.rmtree(out, ignore_errors=True)
        drop_cache(source)
        script = Path(__file__).parent / "peers" / "model_free_ptq.py"
        cost = run([sys.executable, str(script), str(source), str(out)])
        shutil.rmtree(out)
        return cost

    ours("max")  # compiles the loops once, as a first run on a machine does
    contenders = {"moepress max": lambda: ours("max"), "moepress mse": lambda: ours("mse"), "copy": copy}
    if not arguments.without_peer:
        contenders["model_free_ptq"] = peer
    costs = summary(interleaved(arguments.rounds, contenders))
    base = costs["moepress max"]["wall_median"]
    print(
        json.dumps(
            {
                "machine": machine(),
                "checkpoint": source.name,
                "source_bytes": source_bytes,
                "output_bytes": output_bytes,
                "costs": costs,
                "wall_over_copy": {
                    n: round(c["wall_median"] / costs["copy"]["wall_median"], 3) for n, c in costs.items()
                },
                "wall_over_moepress_max": {n: round(c["wall_median"] / base, 2) for n, c in costs.items()},
            },
            indent=1,
        )
    )


if __name__ == "__main__":
    main()
