"""Runs every benchmark once and keeps what it printed: what `make bench` does.

    python benchmarks/run_all.py [--scratch FOLDER]         results go to benchmarks/results/*.json

About half an hour on two cores, and 8 GB of scratch space. Figures belong to the machine that printed them; docs/benchmarks.md says
which machine its figures come from.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scratch", type=Path, help="where synthetic checkpoints go [default: a temporary folder]")
    arguments = parser.parse_args()
    RESULTS.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="moepress-bench-") as temporary:
        scratch = str(arguments.scratch or temporary)
        steps = {
            "convert-2gb": ["-m", "benchmarks.bench_convert", scratch, "--layers", "1", "--experts", "40"],
            "convert-4gb": [
                *("-m", "benchmarks.bench_convert", scratch, "--layers", "2", "--experts", "40"),
                *("--rounds", "1", "--without-peer"),
            ],
        }
        for name, command in steps.items():
            print(f"{name}: python {' '.join(command)}", flush=True)
            done = subprocess.run([sys.executable, *command], cwd=HERE.parent, stdout=subprocess.PIPE, check=True)
            (RESULTS / f"{name}.json").write_bytes(done.stdout)


if __name__ == "__main__":
    main()
