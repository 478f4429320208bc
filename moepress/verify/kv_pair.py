"""Two artifacts of one model, one for prefill and one for decode: what one writes into a KV cache, the other must read.

The cache's bytes travel between them, the scales do not. So what decides about the bytes is compared, in the tensors
themselves (either side may be a checkpoint that moepress never saw):

    scales in the files          the same names with the same values, and kv_cache_scheme on both sides or on neither
    weights before the cache     equal up to rounding; a power of two between them is a fold on one side alone

The weights before the cache are, for MLA, kv_a_layernorm and kv_a_proj_with_mqa (its rows for the latent and those for
k_pe apart), for GQA k_norm, k_proj and v_proj with their biases. They are read with the safetensors library and decoded
in plain torch, so FP8 on one side and BF16 on the other compare well. (`kv_agreement` asks headers and reports alone, for a
launch that cannot wait for this.)
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from moepress.errors import CheckpointError
from moepress.formats.checkpoint import Checkpoint, TensorRef, open_checkpoint
from moepress.formats.families import Family, classify, identify_family, text_config
from moepress.formats.kv_contract import SCALE_ENDINGS
from moepress.formats.storage import StoredWeight, resolve_storage
from moepress.verify.findings import Findings

ATTENTION = ".self_attn."
ROUNDING = 4e-3
"""Relative difference that BF16 on one side and FP8 on the other may have: 2^-9 at most for a number, far less for a weight."""

Part = tuple[int, str, str]
"""Layer, cached tensor, name inside ``self_attn``."""


def compare_kv(out: Path, other: str | Path, findings: Findings) -> list[str]:
    """Compares two checkpoints; problems are named by layer. Returns what was compared, in words.

    Raises:
        CheckpointError: one of them cannot be read, or they are of two families.
    """
    mine, theirs = _Side(open_checkpoint(out)), _Side(open_checkpoint(other))
    if mine.family is not theirs.family:
        raise CheckpointError(f"{out} is {mine.family.title}, {other} is {theirs.family.title}", where=str(other))
    _compare_written(mine, theirs, findings)
    layers: set[int] = set()
    different: dict[tuple[int, str, str], list[str]] = {}
    for part in sorted({*mine.parts, *theirs.parts}):
        layer, cached, inner = part
        layers.add(layer)
        if part not in mine.parts or part not in theirs.parts:
            findings.problem(f"layer {layer}", f"{inner} is in one of the two alone")
            continue
        a, b = mine.decoded(part), theirs.decoded(part)
        if (difference := _difference(a, b)) is not None:
            different.setdefault((layer, cached, difference), []).append(inner)
    for (layer, cached, difference), weights in different.items():
        findings.problem(f"layer {layer}", f"{cached} {difference} ({', '.join(weights)})")
    return [f"KV scales: the same as in {other}, in {len(layers)} layers"]


def _difference(a: torch.Tensor, b: torch.Tensor) -> str | None:
    """What two weights before a cache differ in; None when they are equal up to rounding."""
    if a.shape != b.shape:
        return f"is {list(a.shape)} here and {list(b.shape)} there"
    size, other = float(a.double().norm()), float(b.double().norm())
    if size == 0 or other == 0:
        return None if size == other else "is zero in one of the two"
    exponent = round(math.log2(size / other))
    distance = float((a.double() - b.double() * 2.0**exponent).norm()) / size
    if distance > ROUNDING:
        return f"comes from other weights, relative difference {distance:.3f}: the two are not of one model"
    if exponent:
        ratio = f"is cached × 2^{exponent} of what the other caches"
        return f"{ratio}: a KV scale is folded into one of the two, or into each another one"
    return None


def _compare_written(mine: _Side, theirs: _Side, findings: Findings) -> None:
    for layer, suffix in sorted({*mine.scales, *theirs.scales}):
        a, b = mine.scales.get((layer, suffix)), theirs.scales.get((layer, suffix))
        if a is None or b is None or not torch.equal(a.float().reshape(-1), b.float().reshape(-1)):
            findings.problem(f"layer {layer}", f"{suffix} is {_number(a)} here and {_number(b)} there")
    if (mine.scheme is None) != (theirs.scheme is None):
        findings.problem("config.json", "kv_cache_scheme is on one side alone: the caches would have two types")
    elif mine.scheme is not None and theirs.scheme is not None:
        fields = ("num_bits", "type", "strategy", "symmetric", "dynamic")
        if any(mine.scheme.get(field) != theirs.scheme.get(field) for field in fields):
            findings.problem("config.json", f"kv_cache_scheme is {mine.scheme} here and {theirs.scheme} there")


def _number(scale: torch.Tensor | None) -> str:
    return "absent" if scale is None else ", ".join(f"{value:g}" for value in scale.float().reshape(-1).tolist()[:4])


class _Side:
    """One checkpoint: what of it decides about the cache's bytes."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        config = checkpoint.config
        self.family: Family = identify_family(config)
        text = text_config(self.family, config)
        quantization = config.get("quantization_config") or text.get("quantization_config") or {}
        self.scheme: Mapping[str, Any] | None = quantization.get("kv_cache_scheme")
        self.scales: dict[tuple[int, str], torch.Tensor] = {}
        self.parts: dict[Part, tuple[StoredWeight, slice]] = {}
        rank = int(text["kv_lora_rank"]) if self.family.attention == "mla" else 0
        for name, stored in resolve_storage(checkpoint).items():
            inner = name.partition(ATTENTION)[2]
            layer = classify(self.family, config, name).layer
            if layer is None or not inner:
                continue
            if name.endswith(SCALE_ENDINGS):
                self.scales[layer, inner] = self._read(stored.parts["weight"])
            for cached, rows in _before_the_cache(self.family, inner, rank):
                self.parts[layer, cached, inner] = (stored, rows)

    def decoded(self, part: Part) -> torch.Tensor:
        """The part's values, float32."""
        stored, rows = self.parts[part]
        weight = self._read(stored.parts["weight"]).float()
        if "scale" in stored.parts:
            scale = self._read(stored.parts["scale"])
            e8m0 = stored.scale_encoding == "e8m0"
            scale = torch.exp2(scale.contiguous().view(torch.uint8).float() - 127) if e8m0 else scale.float()
            if stored.block:
                high, wide = stored.block
                scale = scale.repeat_interleave(high, 0)[: weight.shape[0]]
                scale = scale.repeat_interleave(wide, 1)[:, : weight.shape[1]]
            else:
                scale = scale.reshape(-1, 1)
            weight = weight * scale
        return weight[rows]

    def _read(self, ref: TensorRef) -> torch.Tensor:
        with safe_open(self._checkpoint.path(ref.shard), framework="pt") as file:
            tensor: torch.Tensor = file.get_tensor(ref.name)
        return tensor


def _before_the_cache(family: Family, inner: str, rank: int) -> list[tuple[str, slice]]:
    """(cached tensor, rows of the weight) that a weight inside ``self_attn`` gives to the cache."""
    module, _, kind = inner.rpartition(".")
    if kind not in ("weight", "bias"):
        return []
    if family.attention != "mla":
        return {
            "k_norm": [("k", slice(None))],
            "k_proj": [("k", slice(None))],
            "v_proj": [("v", slice(None))],
        }.get(module, [])
    return {
        "kv_a_layernorm": [("latent", slice(None))],
        "kv_a_proj_with_mqa": [("latent", slice(0, rank)), ("k_pe", slice(rank, None))],
    }.get(module, [])
