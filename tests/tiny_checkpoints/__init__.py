"""Tiny untrained checkpoints of every model family, written as their publishers write the real ones.

    checkpoint = build("kimi", tmp_path)
    checkpoint.config                 the parsed config.json
    checkpoint.tensors[name]          what the file holds, bit for bit (F8_E4M3 codes, scales, packed words, …)
    checkpoint.truth[name]            float32 value of every logical weight, dequantized by plain torch

Same names, dtypes, ragged blocks and side files as the real checkpoints; a few MB each, made in well under a second.
Every 128 × 128 tile of a matrix has its own magnitude (1, 30 or 0.1 times), so a wrong block size, a transposed scale
or a shifted row is an error of 10 to 300 times, not noise. An expert's gate and up projections differ strongly, so
swapping them shows.

Nothing here imports moepress: this package is the other side of the comparison.
"""

from __future__ import annotations

from tests.tiny_checkpoints.generator import TinyCheckpoint, build
from tests.tiny_checkpoints.models import FAMILIES

__all__ = ["FAMILIES", "TinyCheckpoint", "build"]
