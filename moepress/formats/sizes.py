"""Bytes: of a checkpoint, of a GPU's share of it, and of a token in the KV cache. Arithmetic only, nothing is read.

Stored forms, for a matrix of r rows, c columns, n = r · c:

    bf16         2n
    fp8_block    n + 4 · ceil(r/128) · ceil(c/128)          one F32 scale per block
    fp8_channel  n + 4 · r                                  one F32 scale per row
    int4         n/2 + 2 · r · c/g + 16                     BF16 scale per group of g columns; weight_shape is two int64

A GPU's share under tensor parallelism (SGLang 0.5.23 on CUDA: models/deepseek_v2.py, deepseek_common's
post_load_weights, layers/attention/dsa/dsa_indexer.py):

    split over the ranks    experts, shared and dense MLPs, q_b, kv_b, o (MLA), q, k, v, o (GQA), embedding, head
    a whole copy each       norms, router, q_a and kv_a, indexer, vision tower and projector
    and on top              kv_b once more in BF16, absorbed into the query and output (w_kc, w_vc);
                            the indexer's wk in BF16, fused with weights_proj

GQA heads fewer than the ranks are repeated. Expert parallelism moves whole experts instead of columns: the same bytes
when it divides the experts. These rules reproduce the known per-GPU figures to their last digit (see the tests).

A token's KV cache, per GPU:

    MLA   layers · (kv_rank + rope) · bytes                 every rank holds the whole latent
    GQA   2 · layers · max(kv_heads/tp, 1) · head_dim · bytes
    DSA   MLA's latent, as 656-byte rows in FP8 on Hopper (512 codes, 4 F32 scales, 64 BF16 rotary values), and per
          'full' layer a 132-byte index key (128 codes, 1 F32 scale)

All sizes are in bytes; GB is 1e9 and GiB is 2**30.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from moepress.formats.architecture import BF16, StoredAs, WeightSpec, dimensions, full_indexer_layers
from moepress.formats.families import Component, Config, identify_family, text_config

GB = 10**9
GIB = 2**30
BLOCK = 128

KvDtype = Literal["bf16", "fp8"]


@dataclass(frozen=True)
class Policy:
    """What to store how; a component that is not named stays as it is published. F32 weights stay F32 whatever is said.

    Attributes:
        components: of the main layers and the top level.
        mtp: of MTP layers; None = as ``components``.
    """

    components: Mapping[Component, StoredAs] = field(default_factory=dict)
    mtp: Mapping[Component, StoredAs] | None = None


def pressed(specs: Iterable[WeightSpec], policy: Policy) -> list[WeightSpec]:
    """The same weights, stored as the policy says."""
    changed = []
    for spec in specs:
        chosen = policy.mtp if spec.identity.is_mtp and policy.mtp is not None else policy.components
        stored = chosen.get(spec.identity.component)
        keep = stored is None or spec.published.kind == "f32" or (len(spec.shape) < 2 and stored.kind != "bf16")
        changed.append(spec if keep or stored is None else replace(spec, published=stored))
    return changed


def stored_bytes(shape: Sequence[int], stored: StoredAs) -> int:
    """Bytes of one weight with its scales. ``shape``: logical; leading dimensions beyond two count as rows."""
    n = math.prod(shape)
    columns = shape[-1] if shape else 1
    rows = n // columns if columns else 0
    match stored.kind:
        case "bf16":
            return 2 * n
        case "f32":
            return 4 * n
        case "fp8_block":
            return n + 4 * -(-rows // BLOCK) * -(-columns // BLOCK)
        case "fp8_channel":
            return n + 4 * rows
        case "fp8_tensor":
            return n + 4
        case "int4":
            group = stored.group_size or -1
            return 4 * rows * -(-columns // 8) + 2 * rows * (-(-columns // group) if group > 0 else 1) + 16


def checkpoint_bytes(specs: Iterable[WeightSpec]) -> int:
    """Bytes of all tensors; copies of other weights (`WeightSpec.copy_of`) are not counted."""
    return sum(stored_bytes(spec.shape, spec.published) for spec in specs if spec.copy_of is None)


@dataclass(frozen=True)
class GpuWeights:
    """Bytes of weights on one GPU.

    Attributes:
        split: this rank's share of what is split.
        replicated: what every rank holds whole.
        absorbed: the server's second, BF16 copy of kv_b_proj.
    """

    split: int
    replicated: int
    absorbed: int

    @property
    def total(self) -> int:
        """All weights on the GPU."""
        return self.split + self.replicated + self.absorbed


_WHOLE_COMPONENTS = frozenset(
    (
        Component.NORM,
        Component.ROUTER,
        Component.INDEXER,
        Component.MTP_PROJECTION,
        Component.VISION,
        Component.PROJECTOR,
    )
)
_WHOLE_PROJECTIONS = frozenset(("q_a_proj", "kv_a_proj_with_mqa"))


def bytes_per_gpu(
    config: Config, specs: Iterable[WeightSpec], *, tp: int, ep: int = 1, mtp: bool = False
) -> GpuWeights:
    """A GPU's share of the weights (the first rank's, where shares differ).

    Args:
        config: the parsed ``config.json``.
        specs: from ``expected_weights``, or `pressed`.
        tp: tensor-parallel ranks.
        ep: expert-parallel ranks among them.
        mtp: count the MTP layers too (speculative decoding is on). Their copies of embedding and head are never
            loaded.
    """
    sizes = dimensions(identify_family(config), config)
    kv_ranks = min(tp, int(text_config(identify_family(config), config).get("num_key_value_heads") or tp))
    experts = sizes["experts"]
    expert_share = -(-experts // ep) / experts * ep / tp
    split = replicated = absorbed = 0.0
    for spec in specs:
        identity = spec.identity
        if spec.copy_of is not None or (identity.is_mtp and not mtp):
            continue
        stored = spec.published
        if identity.projection == "wk":
            stored = BF16
        size = stored_bytes(spec.shape, stored)
        if identity.component in _WHOLE_COMPONENTS or identity.projection in _WHOLE_PROJECTIONS:
            replicated += size
        elif identity.component is Component.ROUTED_EXPERT:
            split += size * expert_share
        elif identity.projection in ("k_proj", "v_proj"):
            split += size / kv_ranks
        else:
            split += size / tp
        if identity.projection == "kv_b_proj":
            absorbed += stored_bytes(spec.shape, BF16) / tp
    return GpuWeights(round(split), round(replicated), round(absorbed))


def kv_bytes_per_token(config: Config, kv_dtype: KvDtype, *, tp: int) -> int:
    """KV-cache bytes of one token on one GPU, without MTP layers.

    Args:
        config: the parsed ``config.json``.
        kv_dtype: ``bf16`` or ``fp8``.
        tp: tensor-parallel ranks; matters for GQA only.
    """
    family = identify_family(config)
    text = text_config(family, config)
    layers = int(text["num_hidden_layers"])
    width = 1 if kv_dtype == "fp8" else 2
    if family.attention == "gqa":
        head_dim = dimensions(family, config)["head_dim"]
        return 2 * layers * max(int(text["num_key_value_heads"]) // tp, 1) * head_dim * width
    rank, rope = int(text["kv_lora_rank"]), int(text["qk_rope_head_dim"])
    full = sum(full_indexer_layers(text))
    if not full:
        return layers * (rank + rope) * width
    row = _scaled_row(rank) + 2 * rope if kv_dtype == "fp8" else 2 * (rank + rope)
    return layers * row + full * _scaled_row(int(text["index_head_dim"]))


def _scaled_row(values: int) -> int:
    """Bytes of e4m3 values with one F32 scale per 128 of them."""
    return values + 4 * -(-values // BLOCK)


def kv_tokens(pool_bytes: int, bytes_per_token: int) -> int:
    """Tokens that fit a KV pool (before the server rounds down to whole pages); 0 when the pool is negative."""
    return max(pool_bytes, 0) // bytes_per_token


def kv_pool_bytes(gpu_bytes: int, fraction: float, weight_bytes: int) -> int:
    """What is left for the KV cache on one GPU: memory · fraction − weights. Negative: the weights do not fit.

    Args:
        gpu_bytes: memory of the GPU.
        fraction: the share of it that the server takes for weights and cache (SGLang: ``--mem-fraction-static``).
        weight_bytes: `GpuWeights.total`.
    """
    return math.floor(gpu_bytes * fraction) - weight_bytes


def groups_per_rank(intermediate: int, group_size: int, tp: int) -> float:
    """Scale groups in one rank's share of down_proj's columns. Anything but a whole number is wrong or refused."""
    return intermediate / tp / group_size


def largest_tensor_parallel(intermediate: int, group_size: int) -> int:
    """The largest power of two that splits down_proj's columns into whole groups; 0 when not even one rank works.

    Args:
        intermediate: ``moe_intermediate_size``.
        group_size: columns per scale; -1 is the whole row, whose one scale every rank keeps, so that it splits
            anywhere between packed words of 8.
    """
    whole, remainder = divmod(intermediate, 8 if group_size == -1 else group_size)
    return 0 if remainder else whole & -whole


def tensor_parallel_problems(config: Config, specs: Iterable[WeightSpec], *, tp: int, ep: int = 1) -> list[str]:
    """Why these weights cannot be split over the ranks; empty = they can.

    The server cuts the columns of row-parallel layers (down, o) and the rows of column-parallel ones (gate, up, …).
    INT4 groups and FP8 blocks must fall on the cuts: SGLang floor-divides groups in silence and refuses blocks.

    Args:
        config: the parsed ``config.json``.
        specs: from ``expected_weights``, or `pressed`.
        tp: tensor-parallel ranks.
        ep: expert-parallel ranks among them; experts are then split over tp/ep ranks only.

    Returns:
        Those of INT4 groups first, which a recipe chooses, then those of the model as it is.
    """
    text = text_config(identify_family(config), config)
    heads, experts = int(text["num_attention_heads"]), dimensions(identify_family(config), config)["experts"]
    problems = []
    if heads % tp:
        problems.append(f"{heads} attention heads do not divide over {tp} ranks")
    if tp % ep:
        problems.append(f"{tp} tensor-parallel ranks do not divide into {ep} expert-parallel ones")
    if experts % ep:
        problems.append(f"{experts} experts do not divide over {ep} expert-parallel ranks")
    seen = set()
    of_groups: list[str] = []
    for spec in specs:
        identity, stored = spec.identity, spec.published
        key = (identity.component, identity.projection, spec.shape, stored)
        if len(spec.shape) != 2 or key in seen:
            continue
        seen.add(key)
        ranks = max(tp // ep, 1) if identity.component is Component.ROUTED_EXPERT else tp
        if identity.projection in ("k_proj", "v_proj"):
            ranks = min(tp, int(text["num_key_value_heads"]))
        (of_groups if stored.kind == "int4" else problems).extend(_cut_problems(spec, ranks))
    return of_groups + problems


def _cut_problems(spec: WeightSpec, ranks: int) -> list[str]:
    identity, stored = spec.identity, spec.published
    what = f"{identity.component.value} {identity.projection}"
    rows, columns = spec.shape
    by_columns = identity.projection in ("down_proj", "o_proj")
    if stored.kind == "int4":
        group = stored.group_size if stored.group_size and stored.group_size > 0 else -1
        share, unit = columns / ranks if by_columns else columns, max(group, 8)
        if share % unit:
            best = largest_tensor_parallel(columns, group)
            hint = f"; the largest split that fits is {best}" if by_columns and best else ""
            unit_name = "packed words" if group == -1 else "groups"
            return [f"{what}: {share:g} columns per rank are {share / unit:g} {unit_name} of {unit}{hint}"]
    whole = identity.component in _WHOLE_COMPONENTS or identity.projection in _WHOLE_PROJECTIONS
    if stored.kind == "fp8_block" and not whole and ranks > 1:
        axis, share = ("columns", columns / ranks) if by_columns else ("rows", rows / ranks)
        if share % BLOCK:
            return [f"{what}: {share:g} {axis} per rank are {share / BLOCK:g} FP8 blocks of {BLOCK}"]
    return []
