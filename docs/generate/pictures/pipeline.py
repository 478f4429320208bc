"""From an FP8 checkpoint to INT4 experts, and what judges them. The two sizes are those of the planner, for GLM-5.2."""

from __future__ import annotations

from pathlib import Path

from moepress.api import plan
from moepress.convert.press.pieces import PIECE_BYTES
from moepress.recipe import load_recipe
from pictures.drawing import GOOD, PLAIN, PRESSED, QUIET, SOURCE, arrow, box, frame, picture, words

CONFIG = Path(__file__).resolve().parents[3] / "tests" / "configs" / "glm_5.2_fp8.json"
STEPS = (
    ("decode", "FP8 → float32"),
    ("round", "rtn · gptq · awq"),
    ("pack", "8 codes a word"),
    ("write", "SHA-256, fsync"),
)
JUDGES = (
    ("verify", "every tensor, by others’ code"),
    ("fidelity", "KL divergence, layer by layer"),
    ("validate", "SGLang: loads, fits, answers"),
    ("evaluate", "tool calls, code, tasks"),
)


def svg() -> str:
    outlook = plan(CONFIG, load_recipe("glm-5"))
    before, after = (f"{side.bytes / 2**30:.0f} GiB" for side in (outlook.source, outlook.pressed))
    parts = [box(10, 40, 150, 80, ["FP8 checkpoint", "as published", before], fill=SOURCE, size=13, bold=True)]
    parts += [arrow(160, 80, 208, 80), frame(210, 10, 410, 140)]
    memory = f"one output shard at a time: a few pieces of {PIECE_BYTES >> 20} MiB in memory"
    parts.append(words(415, 30, memory, size=11, at="middle"))
    parts += [box(220 + 99 * i, 50, 92, 60, step, fill=PRESSED, size=11, bold=True) for i, step in enumerate(STEPS)]
    parts.append(words(415, 136, "receipt: what was done to each weight, and what it cost", size=11, at="middle"))
    parts.append(arrow(620, 80, 657, 80))
    parts.append(box(660, 40, 150, 80, ["INT4 experts", "compressed-tensors", after], fill=GOOD, size=13, bold=True))
    middles = [105 + 201 * i for i in range(len(JUDGES))]
    branches = " ".join(f"M{x} 172 V192" for x in middles[1:])
    parts.append(
        f'<path d="M735 120 V172 H{middles[0]} V192 {branches}" fill="none" stroke="{QUIET}" stroke-width="1.6"/>'
    )
    parts += [box(x - 95, 193, 190, 50, judge, fill=PLAIN, bold=True) for x, judge in zip(middles, JUDGES, strict=True)]
    parts.append(words(10, 270, "Figures: GLM-5.2, from its config.json, by moepress plan.", size=11))
    return picture("From an FP8 checkpoint to INT4 experts, and what judges them", 820, 280, parts)
