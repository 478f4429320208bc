"""Experts side by side: one Python thread per expert, one BLAS thread inside each.

A layer has hundreds of equal problems, so that is where the parallelism is. Kernels and BLAS calls release the GIL.
Keeping BLAS at one thread inside a problem makes the result independent of how many run at once (a matrix product
split over threads adds in another order), and scales better than splitting one factorization over many cores.

torch's thread count is one number for the whole process: it is set to 1 while any problem runs here and put back when
the last one ends.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import torch

Item = TypeVar("Item")
Result = TypeVar("Result")

_lock = threading.Lock()
_inside = 0
_outside_threads = 1


@contextmanager
def _one_blas_thread() -> Iterator[None]:
    global _inside, _outside_threads
    with _lock:
        if _inside == 0:
            _outside_threads = torch.get_num_threads()
            torch.set_num_threads(1)
        _inside += 1
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if _inside == 0:
                torch.set_num_threads(_outside_threads)


def side_by_side(function: Callable[[Item], Result], items: Sequence[Item], threads: int | None = None) -> list[Result]:
    """``[function(item) for item in items]``, several at a time.

    Args:
        function: one problem; it may use torch and compiled kernels, and sees one BLAS thread.
        items: the problems.
        threads: how many at once; as many as torch uses when not given. Memory grows with it, results do not change.

    Raises:
        the first problem's exception, after those already running have ended.
    """
    with _one_blas_thread():
        width = min(threads or _outside_threads, len(items))
        if width <= 1:
            return [function(item) for item in items]
        with ThreadPoolExecutor(width, thread_name_prefix="moepress-quantize") as pool:
            return list(pool.map(function, items))
