"""Shards in and out, side by side with safetensors: bytes into memory that is already there, and durable bytes on the
disk.

    python benchmarks/bench_shard_io.py --folder /mnt/nvme --gib 4 --threads 4 --rounds 7

Reading (each tensor of one shard into one reused buffer, front to back):

    moepress        TensorReader.read_into, parallel preads
    pread           one thread, the same pieces
    safetensors     safe_open's map, copied into the buffer (a lazy tensor is not yet read)

cold (the file dropped from the page cache with posix_fadvise) and warm. Writing (the same tensors to a new file,
ending with fsync):

    moepress        ShardWriter: SHA-256 of the file included
    save_file+sha   safetensors' save_file, fsync, then SHA-256 by reading the file again: what a receipt would cost
    save_file       the same without SHA-256
    plain           write calls of 8 MiB, nothing else: what the disk and the page cache allow

Methods take turns inside a round and the order rotates, so that a busy machine hurts all alike; medians, and the
median of the per-round ratios to moepress. Peak memory is what copying the shard adds to a fresh process.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import safetensors
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from moepress.formats.checkpoint import Checkpoint, open_checkpoint
from moepress.formats.reader import PIECE_BYTES, TensorReader
from moepress.formats.tensor_bytes import byte_view
from moepress.formats.writer import ShardWriter

EXPERT = (2048, 7168)  # one projection of a Kimi expert, FP8: 14.7 MB
WRITE_BYTES = 8 << 20


def build(folder: Path, gib: float) -> Checkpoint:
    """One shard of FP8 matrices and their scales, of random bytes, written by safetensors."""
    generator = torch.Generator().manual_seed(0)
    count = max(1, round(gib * 2**30 / (EXPERT[0] * EXPERT[1])))
    source = torch.randint(0, 256, EXPERT, dtype=torch.uint8, generator=generator)
    tensors = {}
    for expert in range(count):
        name = f"model.layers.3.mlp.experts.{expert}.down_proj.weight"
        tensors[name] = source.clone().view(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = torch.ones(EXPERT[0] // 128, EXPERT[1] // 128)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text("{}")
    return open_checkpoint(folder)


def drop_cache(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def readers(checkpoint: Checkpoint, threads: int) -> dict[str, Callable[[], None]]:
    path = checkpoint.path("model.safetensors")
    refs = list(checkpoint.tensors.values())
    buffer = np.zeros(max(ref.nbytes for ref in refs), dtype=np.uint8)
    target = torch.from_numpy(buffer)

    def moepress() -> None:
        with TensorReader(checkpoint, threads=threads) as reader:
            for ref in refs:
                reader.read_into(ref, buffer[: ref.nbytes])

    def pread() -> None:
        with path.open("rb", buffering=0) as file:
            for ref in refs:
                for at in range(0, ref.nbytes, PIECE_BYTES):
                    part = memoryview(buffer)[at : min(at + PIECE_BYTES, ref.nbytes)]
                    os.preadv(file.fileno(), [part], ref.start + at)

    def mapped() -> None:
        with safe_open(path, "pt") as file:
            for ref in refs:
                target[: ref.nbytes].copy_(file.get_tensor(ref.name).reshape(-1).view(torch.uint8))

    return {"moepress": moepress, "pread": pread, "safetensors": mapped}


def writers(checkpoint: Checkpoint, out: Path) -> dict[str, Callable[[], None]]:
    with TensorReader(checkpoint) as reader:
        tensors = {name: reader.tensor(ref) for name, ref in checkpoint.tensors.items()}
    listing = [(ref.name, ref.dtype, ref.shape) for ref in checkpoint.tensors.values()]

    def moepress() -> None:
        with ShardWriter(out, listing, {"format": "pt"}) as writer:
            for name in writer.order:
                writer.write(name, tensors[name])

    def sync() -> None:
        with out.open("rb") as file:
            os.fsync(file.fileno())

    def library() -> None:
        save_file(tensors, out, metadata={"format": "pt"})
        sync()

    def library_and_digest() -> None:
        library()
        with out.open("rb") as file:
            hashlib.file_digest(file, "sha256")

    def plain() -> None:
        with out.open("wb", buffering=0) as file:
            for tensor in tensors.values():
                raw = memoryview(byte_view(tensor))
                for at in range(0, raw.nbytes, WRITE_BYTES):
                    file.write(raw[at : at + WRITE_BYTES])
            os.fsync(file.fileno())

    return {"moepress": moepress, "save_file+sha": library_and_digest, "save_file": library, "plain": plain}


def compare(
    methods: dict[str, Callable[[], None]], before: Callable[[], None], rounds: int, size: int
) -> dict[str, dict[str, float]]:
    """Seconds of every method in every round, as medians and ratios."""
    seconds: dict[str, list[float]] = {name: [] for name in methods}
    names = list(methods)
    for turn in range(rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            before()
            start = time.perf_counter()
            methods[name]()
            seconds[name].append(time.perf_counter() - start)
    ours = seconds["moepress"]
    return {
        name: {
            "gb_per_s": round(size / statistics.median(times) / 1e9, 3),
            "best_gb_per_s": round(size / min(times) / 1e9, 3),
            "moepress_is_times_as_fast": round(statistics.median(t / o for t, o in zip(times, ours, strict=True)), 3),
        }
        for name, times in seconds.items()
    }


def stream_copy(checkpoint: Checkpoint, out: Path) -> None:
    """The shard from disk to disk, as the converter carries a tensor that it keeps."""
    refs = checkpoint.tensors
    listing = [(ref.name, ref.dtype, ref.shape) for ref in refs.values()]
    with TensorReader(checkpoint) as reader, ShardWriter(out, listing, {"format": "pt"}) as writer:
        for name in writer.order:
            for chunk in reader.chunks(refs[name]):
                writer.write_chunk(name, chunk)


def load_and_save(checkpoint: Checkpoint, out: Path) -> None:
    """The same with save_file, which needs every tensor at once."""
    with safe_open(checkpoint.path("model.safetensors"), "pt") as file:
        save_file({name: file.get_tensor(name) for name in checkpoint.tensors}, out)


def peak_mb(copy: str, folder: Path) -> int:
    """MB that copying the shard adds to a fresh process's high-water mark."""
    command = [sys.executable, __file__, "--folder", str(folder), "--peak-of", copy]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def high_water_kb() -> int:
    """The most memory this process ever had. (ru_maxrss would start at its parent's.)"""
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))


def measure_peak(copy: str, folder: Path) -> None:
    checkpoint, out = open_checkpoint(folder), folder.with_name("out.safetensors")
    before = high_water_kb()
    {"moepress": stream_copy, "save_file": load_and_save}[copy](checkpoint, out)
    print((high_water_kb() - before) // 1000)
    out.unlink()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path.cwd(), help="on the disk to measure")
    parser.add_argument("--gib", type=float, default=1.0, help="size of the shard")
    parser.add_argument("--threads", type=int, default=4, help="preads in flight")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", choices=("read", "write"))
    parser.add_argument("--peak-of", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.peak_of:
        measure_peak(arguments.peak_of, arguments.folder)
        return
    with TemporaryDirectory(dir=arguments.folder) as name:
        folder = Path(name) / "source"
        folder.mkdir()
        checkpoint = build(folder, arguments.gib)
        shard, out, size = (
            checkpoint.path("model.safetensors"),
            folder.with_name("out.safetensors"),
            checkpoint.total_bytes,
        )
        result: dict[str, object] = {
            "bytes": size,
            "threads": arguments.threads,
            "rounds": arguments.rounds,
            "cpu_count": os.cpu_count(),
            "load": os.getloadavg()[0],
            "machine": f"{platform.system()} {platform.release()} {platform.machine()}",
            "versions": {"safetensors": safetensors.__version__, "torch": torch.__version__, "numpy": np.__version__},
        }
        if arguments.only != "write":
            methods = readers(checkpoint, arguments.threads)
            result["read_cold"] = compare(methods, lambda: drop_cache(shard), arguments.rounds, size)
            for method in methods.values():
                method()
            result["read_warm"] = compare(methods, lambda: None, arguments.rounds, size)
        if arguments.only != "read":
            methods = writers(checkpoint, out)
            result["write"] = compare(methods, lambda: out.unlink(missing_ok=True), arguments.rounds, size)
            out.unlink(missing_ok=True)
            result["copy_peak_mb"] = {copy: peak_mb(copy, folder) for copy in ("moepress", "save_file")}
        print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
