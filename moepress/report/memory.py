"""Memory of one GPU: weights, what is left for the KV cache, and how many tokens that is.

    KV pool = GPU memory · fraction − weights          tokens = KV pool / bytes per token

By the plan's arithmetic (`formats.sizes`) for source and output; beside it what a booted server said, where `validate`
was run. Bytes throughout.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, cast

from moepress.formats.architecture import expected_weights
from moepress.formats.checkpoint import Checkpoint
from moepress.formats.sizes import KvDtype, bytes_per_gpu, kv_bytes_per_token, kv_pool_bytes, kv_tokens
from moepress.report.output import PressedOutput


@dataclass(frozen=True)
class Gpu:
    """The GPU that figures are for. ``fraction``: share of it for weights and KV cache."""

    bytes: int
    fraction: float
    kv_dtype: KvDtype


@dataclass(frozen=True)
class GpuMemory:
    """One side's memory on one GPU, in bytes; `kv_tokens` per replica. ``kv_pool`` is negative when weights do not fit."""

    side: Literal["source", "pressed"]
    origin: Literal["computed", "measured"]
    weights: int
    kv_pool: int
    kv_tokens: int
    kv_bytes_per_token: int


def computed_memory(output: PressedOutput, gpu: Gpu) -> list[GpuMemory]:
    """The plan's figures: of the source, where its headers are there, and of the output."""
    sides = []
    if output.source_checkpoint is not None:
        sides.append(_computed("source", output.source_checkpoint, output, gpu))
    sides.append(_computed("pressed", output.checkpoint, output, gpu))
    return sides


def _computed(side: Literal["source", "pressed"], checkpoint: Checkpoint, output: PressedOutput, gpu: Gpu) -> GpuMemory:
    ranks = output.recipe.serving.tensor_parallel
    config = checkpoint.config
    weights = bytes_per_gpu(config, expected_weights(config), tp=ranks).total
    per_token = kv_bytes_per_token(config, gpu.kv_dtype, tp=ranks)
    pool = kv_pool_bytes(gpu.bytes, gpu.fraction, weights)
    return GpuMemory(side, "computed", weights, pool, kv_tokens(pool, per_token), per_token)


def gpu_of(size: int, fraction: float, kv_dtype: str) -> Gpu:
    """A GPU from the words of a command line.

    Raises:
        ValueError: another dtype than ``bf16`` or ``fp8``.
    """
    if kv_dtype not in ("bf16", "fp8"):
        raise ValueError(f"{kv_dtype!r} is not one of bf16, fp8")
    return Gpu(size, fraction, cast(KvDtype, kv_dtype))
