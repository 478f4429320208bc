"""Matrix products in BF16 with sums in float32, where the processor has units for that.

    mixed      float32 tensors; both sides of a product are rounded to BF16 on the way into it, its sum is float32
    float32    products in float32
    bfloat16   the tensors themselves are BF16 (`RunSettings.dtype`); nothing to switch here

A product of two BF16 numbers is exact in float32, so `mixed` loses what rounding its factors loses, 2⁻⁹ of each, and nothing
else: second moments stay positive semidefinite (those of the rounded inputs), and what layers pass on stays float32. Intel's
AMX does 3 to 4 times as many of them a second as of float32 products. Where the processor has neither AMX nor AVX512-BF16,
and on a GPU, `mixed` is float32.

torch has one switch for the process (oneDNN's), so it is turned around work that is done before anything else starts; threads
inside that work may ask for the same again. Factorizations stay in float32 (`exact_products`): rounding H after it was
summed would cost it its definiteness.

Neither oneDNN nor MKL gives the same bits with any number of threads: `side_by_side` is there for that.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch

_lock = threading.Lock()
_users = 0
_alone = "none"
"""What the switch said before anybody turned it."""
_here = threading.local()

Precision = Literal["mixed", "float32", "bfloat16"]


@contextmanager
def products_in(precision: Precision) -> Iterator[None]:
    """Matrix products of float32 tensors on the processor as `precision` says, for as long as the block lasts."""
    with _switched("bf16" if precision == "mixed" else "ieee"):
        yield


@contextmanager
def exact_products() -> Iterator[None]:
    """Matrix products in float32, whatever is around."""
    with _switched("ieee"):
        yield


@contextmanager
def _switched(to: str) -> Iterator[None]:
    """The switch, which threads share: those that want the same may come and go, one that wants another must be alone."""
    global _users, _alone
    matmul: Any = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    mine = getattr(_here, "depth", 0)
    with _lock:
        before = matmul.fp32_precision
        if before != to and _users > mine:
            raise RuntimeError(f"products in {to} while another thread multiplies in {before}")
        if _users == 0:
            _alone = before
        matmul.fp32_precision = to
        _users += 1
    _here.depth = mine + 1
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            _here.depth = mine
            if _users == mine:  # nobody else is left who wants it
                matmul.fp32_precision = before if mine else _alone
