"""The example card of docs/example-card.md, made again: `python examples/card.py DIR`.

The trained tiny Kimi is pressed, verified, compared layer by layer, booted in SGLang and asked questions (where that is
installed: `make sglang-cpu`), and its card is written. What cannot be run here stands in the card as not run.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(os.path.relpath(Path(__file__).resolve().parent))
ROOT = HERE.parent


def run(*words: str, may_fail: bool = False) -> None:
    print(f"$ {' '.join(words)}", flush=True)
    status = subprocess.run(words, check=False).returncode
    if status and not (may_fail and status == 1):  # 1: checked and found wanting, which the card then says
        raise SystemExit(status)


def main() -> None:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "card-out")
    source, out = str(folder / "tiny-kimi-fp8"), str(folder / "tiny-kimi-int4")
    text = str(HERE / "tiny_kimi" / "calibration.txt")
    heldout = [
        word for path in sorted((HERE / "tiny_kimi" / "heldout").glob("*.txt")) for word in ("--text", str(path))
    ]
    recipe = ["kimi-k2-bf16", "--set", "serving.tensor_parallel=1", "--set", "weights.algorithm=gptq"]
    if not Path(out, "moepress_report.json").exists():
        run(sys.executable, str(HERE / "tiny_kimi" / "export.py"), source)
        front = "---\nlicense: apache-2.0\nlanguage: [en]\npipeline_tag: text-generation\n---\n# Tiny Kimi\n"
        Path(source, "README.md").write_text(front)
    run("moepress", "convert", source, out, "--recipe", *recipe, "--set", f"calibration.text={text}")
    run("moepress", "verify", out, "--source", source)
    run("moepress", "fidelity", out, "--source", source, *heldout, "--samples", "8", "--length", "256")
    if "MOEPRESS_SGLANG_PYTHON" in os.environ or Path(".venv-sglang/.installed").exists():
        run("moepress", "validate", out, "--baseline", source, "--cpu-lab", may_fail=True)
        run("moepress", "evaluate", out, "--baseline", source, "--cpu-lab", "--top-k", "256", may_fail=True)
    card = str(ROOT / "docs" / "example-card.md")
    run("moepress", "card", out, "--title", "tiny-kimi-int4", "--base-model", "press/tiny-kimi", "--output", card)


if __name__ == "__main__":
    main()
