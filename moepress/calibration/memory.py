"""How much memory a calibration run needs, from the configuration alone: for `plan`, before a byte is read.

    resident = max over stages of
        embedding:  V·C·4 + one batch                              first and last stage hold one [V, C] matrix
        layer:      dense part of the largest layer + its largest matrix once more in float32 (being decoded)
                    + block of experts + one expert in float32 + the next block, or layer, as it is stored
                    + the batches at work
      + activations kept in memory (`scratch_memory_bytes`, or all of them when they are fewer)
      + statistics and quantization, which belong to the caller

    activations = N·S·C · (streams · b  +  b for the tapped x of one layer  +  4 for the routed sum); b: the run's type

Only the batch term is a guess (widest intermediates of attention and the dense MLP, see `_dense_bytes`); everything
else is counted. No torch here: a plan must come at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moepress.formats.architecture import WeightSpec, expected_weights
from moepress.formats.families import Component, identify_family, text_config

FLOAT32 = 4
DENSE_TOKENS = 2048
STORED_BYTES = 2
"""Most bytes of a stored weight that is read ahead: BF16. Larger types are read ahead in part."""
_OUTSIDE = (Component.EMBEDDING, Component.LM_HEAD, Component.VISION, Component.PROJECTOR)


@dataclass(frozen=True)
class MemoryNeed:
    """Bytes of the parts of a run.

    Attributes:
        dense_layer: the largest layer without its routed experts, and what decoding it takes.
        experts: the block of experts held at once, and one being decoded.
        ahead: what is read while that is computed: the next block of experts, or the next layer's dense part, as stored.
        vocabulary: the embedding or head, whichever is held; never at the same time as a layer.
        batch: the batches of samples that are in work inside a layer.
        activations: all activations of the run together, in memory or in files.
    """

    dense_layer: int
    experts: int
    ahead: int
    vocabulary: int
    batch: int
    activations: int

    def resident(self, scratch_memory_bytes: int) -> int:
        """Peak bytes in memory when activations may take this many; the rest of them goes to files."""
        working = max(self.dense_layer + self.experts + self.ahead, self.vocabulary) + self.batch
        return working + min(self.activations, scratch_memory_bytes)

    def scratch_files(self, scratch_memory_bytes: int) -> int:
        """Bytes of scratch files then; arrays are placed whole, so at most this."""
        return 0 if self.activations <= scratch_memory_bytes else self.activations


def available_memory() -> int:
    """Bytes that this process may still take: what the kernel calls available, and no more than its control group allows."""
    text = Path("/proc/meminfo").read_text()
    available = int(text.split("MemAvailable:")[1].split()[0]) * 1024
    group = Path("/sys/fs/cgroup")
    try:
        limit = int((group / "memory.max").read_text())
        used = int((group / "memory.current").read_text())
        # clean file pages count as used there, and are given back when needed
        pages = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        available = min(available, limit - used + int(pages.get("inactive_file", 0)) + int(pages.get("active_file", 0)))
    except (OSError, ValueError):
        pass  # no control group, or no limit in it ("max")
    return available


def memory_need(
    config: Mapping[str, Any],
    *,
    samples: int,
    length: int,
    batch_size: int,
    expert_bytes: int,
    streams: int = 1,
    dtype_bytes: int = FLOAT32,
    dense_at_once: int = 1,
) -> MemoryNeed:
    """What a run will need.

    Args:
        config: the published ``config.json``.
        samples, length: N and S.
        batch_size, expert_bytes: as in ``RunSettings``.
        streams: runs side by side: 2 for error-aware targets (source and quantized).
        dtype_bytes: bytes of the type the layers compute in.
        dense_at_once: as in ``RunSettings``.
    """
    text = text_config(identify_family(config), config)
    specs = [spec for spec in expected_weights(config) if spec.copy_of is None]
    layers: dict[int, list[WeightSpec]] = {}
    experts: list[WeightSpec] = []
    for spec in specs:
        if spec.identity.component is Component.ROUTED_EXPERT:
            experts.append(spec)
        elif spec.identity.layer is not None and spec.identity.component not in _OUTSIDE:
            layers.setdefault(spec.identity.layer, []).append(spec)
    one_expert = sum(spec.numel for spec in experts if spec.identity.expert == 0) // max(
        len({spec.identity.layer for spec in experts}), 1
    )
    per_layer = len({spec.identity.expert for spec in experts})
    held = min(max(1, expert_bytes // (one_expert * dtype_bytes)), per_layer)
    hidden = samples * length * int(text["hidden_size"])
    return MemoryNeed(
        dense_layer=max(_layer_bytes(specs, dtype_bytes) for specs in layers.values()),
        experts=held * one_expert * dtype_bytes + one_expert * FLOAT32,
        ahead=min(
            held * one_expert * STORED_BYTES,
            max(held * _stored_bytes(experts) // max(len(experts) // 3, 1), *map(_stored_bytes, layers.values())),
        ),
        vocabulary=int(text["vocab_size"]) * int(text["hidden_size"]) * FLOAT32,
        batch=max(
            dense_at_once * _dense_bytes(text, dense_samples(batch_size, length) * length, dtype_bytes),
            _routed_bytes(text, min(batch_size, samples) * length),
        ),
        activations=hidden * (dtype_bytes * (streams + 1) + FLOAT32),
    )


def _stored_bytes(specs: list[WeightSpec]) -> int:
    """As the configuration says that they are published; scales apart, which are small."""
    wide = {"bf16": 2, "f32": 4}
    return sum(spec.numel * wide.get(spec.published.kind, 1) for spec in specs)


def _layer_bytes(specs: list[WeightSpec], dtype_bytes: int) -> int:
    return sum(spec.numel for spec in specs) * dtype_bytes + max(spec.numel for spec in specs) * FLOAT32


def dense_samples(batch_size: int, length: int) -> int:
    """Samples of a batch of the dense part: as few as give products of `DENSE_TOKENS` rows, since each thread holds one."""
    return min(batch_size, max(1, DENSE_TOKENS // max(length, 1)))


def dense_at_once(
    config: Mapping[str, Any], *, batch_size: int, length: int, dtype_bytes: int, threads: int, available: int
) -> int:
    """How many batches go through the dense part at once: one a thread, while they take a quarter of the free memory.

    Args:
        config: the published ``config.json``.
        batch_size, length, dtype_bytes: as in `memory_need`.
        threads: on a processor; 1 on a device.
        available: bytes of free memory.
    """
    text = text_config(identify_family(config), config)
    each = _dense_bytes(text, dense_samples(batch_size, length) * length, dtype_bytes)
    return max(1, min(threads, available // 4 // each))


def _routed_bytes(text: Mapping[str, Any], tokens: int) -> int:
    """The experts' inputs and outputs, what one window of experts adds, and their inner width."""
    return tokens * (4 * int(text["hidden_size"]) + 3 * int(text.get("moe_intermediate_size") or 0)) * FLOAT32


def _dense_bytes(text: Mapping[str, Any], tokens: int, dtype_bytes: int) -> int:
    """Hidden states a few times over, queries, keys and values, and the inner width of the MLP twice."""
    heads = int(text["num_attention_heads"])
    head_dim = int(text.get("head_dim") or int(text["hidden_size"]) // heads)
    if text.get("kv_lora_rank"):
        head_dim = int(text["qk_nope_head_dim"]) + int(text["qk_rope_head_dim"]) + int(text["v_head_dim"])
    inner = max(int(text.get(field) or 0) for field in ("intermediate_size", "moe_intermediate_size"))
    return tokens * (6 * int(text["hidden_size"]) + 4 * heads * head_dim + 3 * inner) * dtype_bytes
