"""kill -9 at random moments, resumed until done: the bytes must be those of a run that nobody touched.

    python -m benchmarks.chaos FOLDER [--moments 100] [--workers 2] [--seed 0] [--algorithm gptq]

A tiny mixture-of-experts checkpoint is converted again and again. In each round processes are killed at a random moment of
the run: the conversion itself, alone or with workers, or one of its workers. After each kill of the conversion nothing
of it may live on, and no half-written file may stand under a final name. A round ends when the conversion has ended by
itself; its files are then compared with those of the undisturbed run.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tests.tiny_checkpoints import build

GRACE = 90.0
"""Seconds within which everything that a killed conversion had started must be gone. Ray's own agents look for their parent only
once they have started, which takes a busy machine a while; how long it took is in the result."""


def command(source: Path, out: Path, algorithm: str, workers: int | None) -> list[str]:
    """The conversion as a user would run it."""
    sets = [
        f"weights.algorithm={algorithm}",
        "serving.tensor_parallel=1",
        "calibration.samples=8",
        "calibration.length=64",
        "output.shard_size=1MB",
    ]
    words = [sys.executable, "-m", "moepress.cli", "convert", str(source), str(out), "--recipe", "kimi-k2", "--json"]
    for each in sets:
        words += ["--set", each]
    return words + (["--workers", str(workers)] if workers else [])


def digests(folder: Path) -> dict[str, str]:
    """SHA-256 of every file of the checkpoint; the state folder holds times."""
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and ".moepress" not in path.parts
    }


def descendants(session: int) -> dict[int, str]:
    """Living processes of a session: a conversion is started as the leader of one."""
    found = {}
    for entry in Path("/proc").iterdir():
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            if int(fields[3]) == session and fields[0] != "Z":
                found[int(entry.name)] = (entry / "cmdline").read_bytes().split(b"\0")[0].decode(errors="replace")
        except (OSError, ValueError, IndexError):
            continue
    return found


def one_round(words: list[str], out: Path, longest: float, spread: bool, chance: random.Random) -> dict[str, Any]:
    """Kills until the conversion has ended by itself, at most six times; what happened."""
    kills: list[str] = []
    longest_life = 0.0
    while True:
        process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True)
        if len(kills) < 6:
            after = chance.uniform(0.3, longest)
            if spread and chance.random() < 0.6:
                kill = kill_worker(process, after / 4, chance)
            else:
                kill = kill_conversion(process, after)
            kills += [kill] if kill else []
        status = process.wait()
        leftover, life = wait_for_end(process.pid)
        longest_life = max(longest_life, life)
        if leftover:
            raise RuntimeError(f"{GRACE:.0f} s after the end of the conversion these live on: {leftover}")
        check_whole(out)
        if status == 0:
            return {"kills": kills, "longest_life": longest_life}
        if status != -signal.SIGKILL:
            error = process.stderr.read().decode() if process.stderr else ""
            raise RuntimeError(f"the conversion ended with {status}: {error[-2000:]}")


def kill_conversion(process: subprocess.Popen[bytes], after: float) -> str | None:
    """kill -9 of the conversion, a time after its start; None when it has ended before."""
    try:
        process.wait(after)
    except subprocess.TimeoutExpired:
        process.kill()
        return "conversion"
    return None


def kill_worker(process: subprocess.Popen[bytes], after: float, chance: random.Random) -> str | None:
    """kill -9 of one of its workers, a time after the first was there; None when the conversion has ended before."""
    seen = None
    while process.poll() is None:
        workers = [pid for pid, name in descendants(process.pid).items() if name.startswith("ray::_RayWorker")]
        seen = seen or (time.monotonic() if workers else None)
        if workers and seen and time.monotonic() > seen + after:
            try:
                os.kill(chance.choice(workers), signal.SIGKILL)
            except ProcessLookupError:
                continue
            return "worker"
        time.sleep(0.05)
    return None


def wait_for_end(session: int) -> tuple[dict[int, str], float]:
    """What is left of a session after the grace time, and the seconds until nothing was."""
    started = time.monotonic()
    while (left := descendants(session)) and time.monotonic() < started + GRACE:
        time.sleep(0.2)
    return left, time.monotonic() - started


def check_whole(out: Path) -> None:
    """No shard under its final name is shorter or longer than its receipt says, and no index names a missing one."""
    for receipt in (out / ".moepress" / "receipts").glob("*.json"):
        data = json.loads(receipt.read_text())
        if "file_bytes" in data and (out / data["unit"]).stat().st_size != data["file_bytes"]:
            raise RuntimeError(f"{data['unit']} differs from its receipt")
    index = out / "model.safetensors.index.json"
    if index.exists():
        missing = [s for s in set(json.loads(index.read_text())["weight_map"].values()) if not (out / s).exists()]
        if missing:
            raise RuntimeError(f"the index names {missing[0]}, which is not there")


def chaos(folder: Path, *, moments: int, workers: int, seed: int, algorithm: str) -> dict[str, Any]:
    """Rounds until `moments` processes were killed."""
    chance = random.Random(seed)
    source = build("kimi", folder / "src", layers=4, experts=16)
    started = time.monotonic()
    subprocess.run(command(source.folder, folder / "whole", algorithm, None), check=True, stdout=subprocess.DEVNULL)
    alone = time.monotonic() - started
    expected = digests(folder / "whole")
    counts = {"conversion": 0, "worker": 0}
    rounds, longest_life = 0, 0.0
    while sum(counts.values()) < moments:
        spread = workers if chance.random() < 0.5 else None
        out = folder / "out"
        shutil.rmtree(out, ignore_errors=True)
        words = command(source.folder, out, algorithm, spread)
        happened = one_round(words, out, alone * (3 if spread else 1.1), spread is not None, chance)
        for kill in happened["kills"]:
            counts[kill] += 1
        longest_life = max(longest_life, happened["longest_life"])
        if digests(out) != expected:
            raise RuntimeError(f"round {rounds}: the bytes differ")
        rounds += 1
        print(f"round {rounds}: {counts}", flush=True)
    return {
        "algorithm": algorithm,
        "seed": seed,
        "rounds": rounds,
        "kills": counts,
        "longest_life_after_a_kill": round(longest_life, 1),
        "seconds": time.monotonic() - started,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--moments", type=int, default=100)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--algorithm", default="gptq")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    found = chaos(
        arguments.folder,
        moments=arguments.moments,
        workers=arguments.workers,
        seed=arguments.seed,
        algorithm=arguments.algorithm,
    )
    print(json.dumps(found))


if __name__ == "__main__":
    main()
