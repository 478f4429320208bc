"""Two checkpoints of one model, one for prefill and one for decode: what one writes into a KV cache, the other must read.

The cache's bytes travel between them, the scales do not. A cached value is x / s, and the s of a layer can stand in three
places; each moves the meaning of the bytes, and no server compares them:

    in the files     k_scale, v_scale: the same values on both sides, where the server reads them; kv_cache_scheme on both or none
    in the weights   2^a folded around the cache: the weights before it are equal up to rounding, or a power of two apart
    nowhere          s = 1

The tensors decide, no report is asked, so either side may be a checkpoint that moepress never saw. The weights before the
cache are, for MLA, kv_a_layernorm and kv_a_proj_with_mqa (its rows for the latent and those for k_pe apart), for GQA k_norm,
k_proj and v_proj with their biases. They are read with the safetensors library and decoded in plain torch, so FP8 on
one side and BF16 on the other compare well. A fold is one factor for all rows of a part, so `rows` of them show it: a launch
reads a few rows of each (megabytes), `verify` all of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import safe_open

from moepress.errors import CheckpointError
from moepress.formats.checkpoint import Checkpoint, TensorRef
from moepress.formats.families import Family, classify, identify_family, text_config
from moepress.formats.kv_contract import SCALE_ENDINGS, KvScales
from moepress.formats.storage import StoredWeight, resolve_storage

ATTENTION = ".self_attn."
ROUNDING = 4e-3
"""Relative difference that BF16 on one side and FP8 on the other may have: 2^-9 at most for a number, far less for a weight."""

Part = tuple[int, str, str]
"""Layer, cached tensor, name inside ``self_attn``."""


@dataclass(frozen=True)
class KvDifference:
    """What makes cached bytes mean two things. ``where``: ``layer 7`` or ``config.json``."""

    where: str
    what: str

    def __str__(self) -> str:
        return f"{self.where}: {self.what}"


def kv_differences(
    one: Checkpoint,
    other: Checkpoint,
    contract: KvScales,
    *,
    names: tuple[str, str] = ("prefill", "decode"),
    rows: int | None = None,
) -> list[KvDifference]:
    """Compares them.

    Args:
        one, other: opened.
        contract: of the server: scales in the files count only where it reads them.
        names: what to call the two.
        rows: so many rows of each weight are read; all by default.

    Returns:
        One difference a layer and place; empty when every byte means the same to both.

    Raises:
        CheckpointError: they are of two families, or a scale is no single number.
    """
    mine, theirs = _Side(one, contract, rows), _Side(other, contract, rows)
    if mine.family is not theirs.family:
        raise CheckpointError(f"{names[0]} is {mine.family.title}, {names[1]} is {theirs.family.title}")
    found = _in_files(mine, theirs, names)
    different: dict[tuple[int, str, str], list[str]] = {}
    for part in sorted({*mine.parts, *theirs.parts}):
        layer, cached, inner = part
        if part not in mine.parts or part not in theirs.parts:
            found.append(KvDifference(f"layer {layer}", f"{inner} is in one of the two alone"))
        elif (difference := _in_weights(mine.decoded(part), theirs.decoded(part), names)) is not None:
            different.setdefault((layer, cached, difference), []).append(inner)
    for (layer, cached, difference), weights in different.items():
        found.append(KvDifference(f"layer {layer}", f"{cached} {difference} ({', '.join(weights)})"))
    return found


def _in_files(mine: _Side, theirs: _Side, names: tuple[str, str]) -> list[KvDifference]:
    found = []
    for layer, suffix in sorted({*mine.scales, *theirs.scales}):
        a, b = mine.scales.get((layer, suffix), 1.0), theirs.scales.get((layer, suffix), 1.0)
        if a != b:
            what = f"{suffix} is {a:g} in {names[0]} and {b:g} in {names[1]}"
            found.append(KvDifference(f"layer {layer}", what))
    fields = ("num_bits", "type", "strategy", "symmetric", "dynamic")
    schemes = [None if side.scheme is None else [side.scheme.get(field) for field in fields] for side in (mine, theirs)]
    if schemes[0] != schemes[1]:
        what = f"kv_cache_scheme is {mine.scheme} in {names[0]} and {theirs.scheme} in {names[1]}"
        found.append(KvDifference("config.json", f"{what}: the caches would have two types"))
    return found


def _in_weights(a: torch.Tensor, b: torch.Tensor, names: tuple[str, str]) -> str | None:
    """What two weights before a cache differ in; None when they are equal up to rounding."""
    if a.shape != b.shape:
        return f"is {list(a.shape)} in {names[0]} and {list(b.shape)} in {names[1]}"
    size, other = float(a.double().norm()), float(b.double().norm())
    if size == 0 or other == 0:
        return None if size == other else "is zero in one of the two"
    exponent = round(math.log2(size / other))
    distance = float((a.double() - b.double() * 2.0**exponent).norm()) / size
    if distance > ROUNDING:
        return f"comes from other weights, relative difference {distance:.3f}: the two are not of one model"
    if exponent:
        return (
            f"is cached × 2^{exponent} by {names[0]} of what {names[1]} reads: KV scales folded into the weights differ"
        )
    return None


class _Side:
    """One checkpoint: what of it decides about the cache's bytes."""

    def __init__(self, checkpoint: Checkpoint, contract: KvScales, limit: int | None) -> None:
        self._checkpoint = checkpoint
        config = checkpoint.config
        self.family: Family = identify_family(config)
        text = text_config(self.family, config)
        quantization = config.get("quantization_config") or text.get("quantization_config") or {}
        self.scheme: Mapping[str, Any] | None = quantization.get("kv_cache_scheme")
        self.scales: dict[tuple[int, str], float] = {}
        self.parts: dict[Part, tuple[StoredWeight, int, int]] = {}
        rank = int(text["kv_lora_rank"]) if self.family.attention == "mla" else 0
        for name, stored in resolve_storage(checkpoint).items():
            inner = name.partition(ATTENTION)[2]
            layer = classify(self.family, config, name).layer
            if layer is None or not inner:
                continue
            if name.endswith(SCALE_ENDINGS) and contract.reads(inner):
                self.scales[layer, inner] = self._scale(stored.parts["weight"])
            for cached, first, last in _before_the_cache(
                self.family, inner, rank, stored.shape[0] if stored.shape else 1
            ):
                last = last if limit is None else min(last, first + limit)
                self.parts[layer, cached, inner] = (stored, first, last)

    def decoded(self, part: Part) -> torch.Tensor:
        """The part's values, float32."""
        stored, first, last = self.parts[part]
        with self._open(stored.parts["weight"]) as file:
            weight: torch.Tensor = file.get_slice(stored.parts["weight"].name)[first:last].float()
        if "scale" not in stored.parts:
            return weight
        with self._open(stored.parts["scale"]) as file:
            scale: torch.Tensor = file.get_tensor(stored.parts["scale"].name)
        e8m0 = stored.scale_encoding == "e8m0"
        scale = torch.exp2(scale.contiguous().view(torch.uint8).float() - 127) if e8m0 else scale.float()
        if not stored.block:
            scale = scale.reshape(-1, 1)
            return weight * (scale if len(scale) == 1 else scale[first:last])
        high, wide = stored.block
        scale = scale[torch.arange(first, last) // high]
        return weight * scale.repeat_interleave(wide, 1)[:, : weight.shape[1]]

    def _scale(self, ref: TensorRef) -> float:
        with self._open(ref) as file:
            tensor: torch.Tensor = file.get_tensor(ref.name)
        if tensor.numel() != 1 or not tensor.is_floating_point():
            raise CheckpointError(
                f"a KV scale is {ref.dtype} {list(ref.shape)}; servers read one number", where=ref.name
            )
        return float(tensor)

    def _open(self, ref: TensorRef) -> Any:
        return safe_open(self._checkpoint.path(ref.shard), framework="pt")


def _before_the_cache(family: Family, inner: str, rank: int, rows: int) -> list[tuple[str, int, int]]:
    """(cached tensor, first row, row after the last) that a weight inside ``self_attn`` gives to the cache."""
    module, _, kind = inner.rpartition(".")
    if kind not in ("weight", "bias"):
        return []
    if family.attention != "mla":
        cached = {"k_norm": "k", "k_proj": "k", "v_proj": "v"}.get(module)
        return [(cached, 0, rows)] if cached else []
    return {
        "kv_a_layernorm": [("latent", 0, rows)],
        "kv_a_proj_with_mqa": [("latent", 0, rank), ("k_pe", rank, rows)],
    }.get(module, [])
