"""Tiny checkpoints whose KV cache does not fit e4m3 at a scale of 1.0, and that compute what they computed before.

Weights before the cache are multiplied, those after it divided, by factors that are no powers of two: only the cached
values grow past 448 (layers 0 and 1) or shrink below the normal range (layer 2). Written by hand here, from the formulas
of attention alone: nothing of moepress's folding is used.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests.cases.rewritten import rewrite_tensors, tensors_of
from tests.tiny_checkpoints import TinyCheckpoint, build

SCALE_NAMES = ("weight_scale_inv", "weight_scale")
FACTORS = {0: 300.0, 1: 900.0, 2: 1e-5}
"""Layer -> factor on K, V and the latent."""


def stretched(family: str, folder: Path, **options: object) -> TinyCheckpoint:
    """A tiny checkpoint with a K/V range that needs a scale. `options`: of `build`."""
    tiny = build(family, folder, **options)  # type: ignore[arg-type]
    rewrite_tensors(tiny, stretch)
    return tiny


def stretch_folder(folder: Path, factors: Mapping[int, float]) -> None:
    """The same to a checkpoint that `build` did not make; shards are edited where they are."""
    held = tensors_of(folder)
    before = dict(held)
    stretch(held, factors)
    for shard in sorted(folder.glob("*.safetensors")):
        tensors = load_file(shard)
        if any(held[name] is not before[name] for name in tensors):
            save_file({name: held[name] for name in tensors}, shard, metadata={"format": "pt"})


def stretch(tensors: dict[str, torch.Tensor], factors: Mapping[int, float] = FACTORS) -> None:
    """Changes the attention of some layers."""
    head_norms = "model.layers.0.self_attn.k_norm.weight" in tensors
    for layer, factor in factors.items():
        prefix = f"model.layers.{layer}.self_attn."
        if f"{prefix}kv_a_layernorm.weight" in tensors:
            _times(tensors, f"{prefix}kv_a_layernorm", factor)
            _times(tensors, f"{prefix}kv_b_proj", 1 / factor)
            continue
        key, query = ("k_norm", "q_norm") if head_norms else ("k_proj", "q_proj")
        _times(tensors, f"{prefix}{key}", factor)
        _times(tensors, f"{prefix}{query}", 1 / factor)
        _times(tensors, f"{prefix}v_proj", factor)
        _times(tensors, f"{prefix}o_proj", 1 / factor)


def _times(tensors: dict[str, torch.Tensor], module: str, factor: float) -> None:
    """A module's weight × factor, in its scale where it is FP8; and its bias, unless it comes after the cache."""
    scale = next((f"{module}.{end}" for end in SCALE_NAMES if f"{module}.{end}" in tensors), None)
    names = [scale or f"{module}.weight"]
    names += [f"{module}.bias"] if f"{module}.bias" in tensors and not module.endswith("o_proj") else []
    for name in names:
        tensors[name] = (tensors[name].float() * factor).to(tensors[name].dtype)
