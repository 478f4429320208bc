"""The main job from end to end on a real, trained, tiny checkpoint: what `make demo` runs.

Every line that begins with `$` is a command you could have typed. The tiny Kimi (7.9 M parameters, trained, in
examples/tiny_kimi) is written out the way Kimi K2 ships, pressed, verified, handed to transformers, and served
by SGLang where that is installed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(os.path.relpath(Path(__file__).resolve().parent))


def step(title: str, *command: str) -> None:
    """Prints and runs one command; its failure ends the demo with its exit code."""
    print(f"\n\033[1m# {title}\033[0m" if sys.stdout.isatty() else f"\n# {title}")
    print(f"$ {' '.join(command)}", flush=True)
    status = subprocess.run(command, check=False).returncode
    if status:
        raise SystemExit(status)


def sglang_is_there() -> bool:
    """`make sglang-cpu` has built its environment, or the user names one."""
    return "MOEPRESS_SGLANG_PYTHON" in os.environ or Path(".venv-sglang/.installed").exists()


def main() -> None:
    out = Path(sys.argv[1] if len(sys.argv) > 1 else "demo-out")
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    source, pressed = str(out / "tiny-kimi-fp8"), str(out / "tiny-kimi-int4")
    recipe = ["--recipe", "kimi-k2-bf16", "--set", "serving.tensor_parallel=1", "--set", "weights.algorithm=gptq"]
    recipe += ["--set", f"calibration.text={HERE / 'tiny_kimi' / 'calibration.txt'}"]
    heldout = [
        part for path in sorted((HERE / "tiny_kimi" / "heldout").glob("*.txt")) for part in ("--text", str(path))
    ]
    step(
        "A block-FP8 checkpoint, written as Kimi K2 ships",
        sys.executable,
        str(HERE / "tiny_kimi" / "export.py"),
        source,
    )
    step("What is in it?", "moepress", "inspect", source)
    print(
        "\n# This recipe turns everything but the experts from FP8 into BF16, because transformers is to read the result. In so"
        "\n# small a model that costs as much as INT4 experts save; Kimi K2 would go from 958 to 553 GiB."
    )
    step("What would pressing it need and give?", "moepress", "plan", source, pressed, *recipe)
    step("Press", "moepress", "convert", source, pressed, *recipe)
    step("Re-read every tensor with other people's code", "moepress", "verify", pressed, "--source", source)
    step(
        "How far is it from the source, layer by layer?",
        *("moepress", "fidelity", pressed, "--source", source, *heldout),
        *("--samples", "8", "--length", "256", "--picture", str(out / "errors.svg")),
    )
    step("Load it in transformers and hold it against the source", sys.executable, str(HERE / "judge.py"), pressed)
    if sglang_is_there():
        step(
            "Boot SGLang on it, with kernels for a CPU: does it load whole, and answer as its weights mean?",
            *("moepress", "validate", pressed, "--baseline", source, "--cpu-lab", "--only", "loads,sanity"),
            *("--prompts", str(HERE / "tiny_kimi" / "prompts.jsonl"), "--tokens", "32"),
        )
    else:
        print("\n# Not shown: SGLang serving it. `make sglang-cpu demo` installs it first (3.5 GB, some minutes).")
    print(f"\nThe pressed checkpoint is in {pressed}; its receipts are in {pressed}/.moepress.")


if __name__ == "__main__":
    main()
