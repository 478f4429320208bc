"""A KV scale inside the weights: divided out before the cache, multiplied in after it, so that no server has to know.

The cache is to hold x / s, with s = 2^a. Every line below leaves attention's output as it was, in exact arithmetic:

    GQA   k   k_norm × 2^-a            q_norm × 2^a         with per-head norms (a factor before a norm has no effect)
              k_proj, its bias × 2^-a  q_proj, its bias × 2^a    without; rotation is linear and keeps it
          v   v_proj, its bias × 2^-a  o_proj × 2^a
    MLA   latent (c)   kv_a_layernorm × 2^-c                kv_b_proj: K rows × 2^(c-p), V rows × 2^c
          k_pe   (p)   kv_a_proj's rotary rows × 2^-p       all of the query × 2^p: q_a_layernorm, or q_proj

The rotated key of MLA meets the same query vector as the unrotated part, so the query carries 2^p whole and the K rows of
kv_b_proj take it out again. What a power of two does to stored numbers: BF16 and F32 change their exponent alone; FP8
codes stay as they are and their scale changes its exponent, E8M0 scales (written as F32) too. FP8 activations keep
their codes as well, because their scales are made on the fly. Only overflow or numbers near the type's smallest could
round, and overflow is refused.

A `Fold` is the rows' exponents, as a pattern that repeats: ``((128, -2), (128, 1))`` is 128 rows × 2^-2, 128 rows × 2^1,
and so on to the last row. FP8 blocks must not lie across two exponents; where they would (kv_b_proj of models with heads
that are no multiples of the block), k_pe is left as it is, with that reason, unless the attention becomes BF16.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from moepress.formats.storage import StoredWeight

Bands = tuple[tuple[int, int], ...]
Rows = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True, slots=True)
class Fold:
    """Rows of a weight times powers of two.

    Attributes:
        bands: (rows, exponent), repeated until the weight's rows end.
    """

    bands: Bands

    @property
    def uniform(self) -> int | None:
        """The one exponent of all rows, if there is one."""
        found = {exponent for _, exponent in self.bands}
        return found.pop() if len(found) == 1 else None

    def exponents(self, rows: Rows) -> Rows:
        """Exponents of some rows: int64 [n] row indices -> int64 [n]."""
        ends = np.cumsum([count for count, _ in self.bands])
        place = np.searchsorted(ends, rows % ends[-1], side="right")
        found: Rows = np.array([exponent for _, exponent in self.bands], np.int64)[place]
        return found

    def as_json(self) -> list[list[int]]:
        """``[[rows, exponent], …]``, as receipts and the report hold it."""
        return [list(band) for band in self.bands]


def uniform(exponent: int) -> Fold:
    """All rows × 2^exponent."""
    return Fold(((1, exponent),))


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """What of a configuration decides where scales go: rows of MLA's matrices; all zero for GQA.

    Attributes:
        kind: ``mla`` or ``gqa``.
        rank: columns of the latent.
        rope: columns of the rotated key.
        nope, v: rows of K and of V in each head's part of kv_b_proj.
    """

    kind: str
    rank: int = 0
    rope: int = 0
    nope: int = 0
    v: int = 0

    @classmethod
    def of(cls, kind: str, text: Mapping[str, Any]) -> AttentionShape:
        """From a text model's configuration."""
        if kind != "mla":
            return cls(kind)
        fields = ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
        return cls(kind, *(int(text[field]) for field in fields))

    @property
    def cached(self) -> tuple[str, str]:
        """What the cache holds, in the words of `calibration.kv_cache`."""
        return ("latent", "k_pe") if self.kind == "mla" else ("k", "v")


def layer_folds(shape: AttentionShape, present: Iterable[str], exponents: Mapping[str, int]) -> dict[str, Fold]:
    """The folds of one layer, by name inside ``self_attn``; weights that would be × 1 are left out.

    Args:
        shape: of the model's attention.
        present: names inside ``self_attn`` that the layer has, such as ``k_norm.weight``.
        exponents: cached tensor -> a, for s = 2^a; absent is 0.
    """
    have = set(present)
    first, second = (exponents.get(name, 0) for name in shape.cached)
    if shape.kind == "mla":
        query = "q_a_layernorm" if "q_a_layernorm.weight" in have else "q_proj"
        rotary = Fold(((shape.rank, 0), (shape.rope, -second)))
        wanted = {
            "kv_a_layernorm.weight": uniform(-first),
            "kv_b_proj.weight": Fold(((shape.nope, first - second), (shape.v, first))),
            "kv_a_proj_with_mqa.weight": rotary,
            "kv_a_proj_with_mqa.bias": rotary,
            f"{query}.weight": uniform(second),
            f"{query}.bias": uniform(second),
        }
    else:
        normed = "k_norm.weight" in have
        key, query = ("k_norm", "q_norm") if normed else ("k_proj", "q_proj")
        wanted = {
            f"{key}.weight": uniform(-first),
            f"{key}.bias": uniform(-first),
            f"{query}.weight": uniform(first),
            f"{query}.bias": uniform(first),
            "v_proj.weight": uniform(-second),
            "v_proj.bias": uniform(-second),
            "o_proj.weight": uniform(second),
        }
    folds = {name: Fold(_merged(fold.bands)) for name, fold in wanted.items() if name in have}
    return {name: fold for name, fold in folds.items() if fold.uniform != 0}


def _merged(bands: Bands) -> Bands:
    """One band where all have the same exponent."""
    return ((1, bands[0][1]),) if len({exponent for _, exponent in bands}) == 1 else bands


def straddled(stored: StoredWeight, fold: Fold) -> str | None:
    """Why an FP8 weight cannot take a fold without a change of its codes; None where it can."""
    if fold.uniform is not None or not stored.kind.startswith("fp8") or stored.kind == "fp8_channel":
        return None
    high = stored.block[0] if stored.block else stored.shape[0]
    rows = np.arange(stored.shape[0])
    exponents = fold.exponents(rows)
    if bool((exponents == exponents[rows // high * high]).all()):
        return None
    return f"an FP8 scale of {stored.name.rpartition('self_attn.')[2]} covers rows of two factors"
