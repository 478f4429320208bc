"""Folds applied to stored numbers: exponents change, nothing else. The arithmetic of `fold`, in tensors.

    kept BF16, F32    the numbers themselves
    kept FP8          its scales; the codes stay
    FP8 → BF16        the decoded rows, before they are rounded once

x · 2^a is exact in any binary floating-point type until it overflows, which is refused, or meets the type's smallest
numbers, where it is rounded as the type rounds.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from moepress.convert.kv.fold import Fold, Rows
from moepress.errors import QuantizeError
from moepress.formats.storage import StoredWeight

HINT = "--set kv_cache.scales=none converts without KV scales"


def fold_rows(values: torch.Tensor, first_row: int, fold: Fold, name: str) -> None:
    """Decoded rows × their powers of two, in place. values: float32 [n, C], rows from `first_row` on of the weight.

    Raises:
        QuantizeError: a value overflows float32.
    """
    values.mul_(_factors(fold.exponents(np.arange(first_row, first_row + len(values))))[:, None])
    if not bool(torch.isfinite(values).all()):
        raise QuantizeError("folding a KV scale overflows float32", where=name, hint=HINT)


def fold_part(flat: torch.Tensor, first: int, stored: StoredWeight, part: str, fold: Fold) -> torch.Tensor:
    """A kept tensor's numbers × their powers of two, in their own type.

    Args:
        flat: [n], consecutive numbers of the stored tensor, from its number `first` on. Of an FP8 weight: of its scale.
        stored: the weight.
        part: the tensor's role in it.
        fold: the weight's.

    Raises:
        QuantizeError: a number overflows its type.
    """
    rows = np.arange(first, first + len(flat)) // _per_row(stored.parts[part].shape, rows=stored.shape[0])
    if part == "scale":
        rows *= stored.block[0] if stored.block else 1
    folded = (flat.float() * _factors(fold.exponents(rows))).to(flat.dtype)
    if bool((~torch.isfinite(folded) & torch.isfinite(flat.float())).any()):
        raise QuantizeError("folding a KV scale overflows the weight's type", where=stored.name, hint=HINT)
    return folded


def _factors(exponents: Rows) -> torch.Tensor:
    return torch.exp2(torch.from_numpy(exponents).float())


def _per_row(shape: Sequence[int], rows: int) -> int:
    """Numbers of a stored tensor that belong to one row of it; a lone scale is one row of the whole weight."""
    if len(shape) < 2:
        return 1 if shape and shape[0] > 1 else max(rows, 1)
    return shape[1]
