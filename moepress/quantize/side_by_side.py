"""Problems side by side: one Python thread each, one BLAS thread inside each.

A layer has hundreds of equal problems (experts, batches of samples, panels of a matrix), so that is where the parallelism is.
It scales better than splitting one product over many cores, and it is the only way to bits that do not depend on the number
of threads. A product that is split over threads adds in another order. MKL_CBWR=AUTO,STRICT does not prevent that for every
shape and processor, and oneDNN promises nothing: on an EPYC with AVX-512 a third of small float32 products changed between 1
and 64 threads, and BF16 products of 2,048 summands between 1 and 2.

So every product, factorization and large sum whose bits reach an output is made in here, and what is made here is cut the same
way whatever the number of threads. Work outside is elementwise, or a sum over a row.

torch's thread count is one number for the whole process: it is set to 1 while any problem runs here and put back when the last
one ends.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import torch

Item = TypeVar("Item")
Result = TypeVar("Result")

_lock = threading.Lock()
_inside = 0
_outside_threads = 1
_here = threading.local()


@contextmanager
def one_blas_thread() -> Iterator[None]:
    """Everything in the block with one thread, as a problem of `side_by_side` would be."""
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


@contextmanager
def at_most(threads: int | None) -> Iterator[None]:
    """So many threads for torch and for `side_by_side` in the block; None = as they are."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def width() -> int:
    """How many problems may run at once: torch's thread count; 1 inside a problem."""
    with _lock:
        return 1 if getattr(_here, "is_problem", False) else _outside_threads if _inside else torch.get_num_threads()


def width_on(device: torch.device | str) -> int:
    """`width` where one thread computes at a time; 1 where a device does the work."""
    return width() if torch.device(device).type == "cpu" else 1


def side_by_side(function: Callable[[Item], Result], items: Iterable[Item], threads: int | None = None) -> list[Result]:
    """``[function(item) for item in items]``, several at a time.

    Args:
        function: one problem; it may use torch and compiled kernels, and sees one BLAS thread and the caller's grad mode.
        items: the problems.
        threads: how many at once; `width` when not given. Memory grows with it, results do not change.

    Raises:
        the first problem's exception, after those already running have ended.
    """
    items, at_once = list(items), threads or width()
    with one_blas_thread():
        if min(at_once, len(items)) <= 1:
            return [function(item) for item in items]
        pool = ThreadPoolExecutor(
            min(at_once, len(items)),
            thread_name_prefix="moepress-problem",
            initializer=_begin,
            initargs=(torch.is_grad_enabled(),),
        )
        with pool:
            return list(pool.map(function, items))


def in_windows(items: Sequence[Item], size: int | None = None) -> Iterator[Sequence[Item]]:
    """As many of `items` after each other as run at once: for results that must not all be held. ``size``: `width`."""
    size = size or width()
    for first in range(0, len(items), size):
        yield items[first : first + size]


def _begin(grad: bool) -> None:
    """In a thread that is new: its grad mode is torch's default and not its caller's, and oneDNN asks OpenMP how many threads
    there are, which torch tells it only when it is asked itself."""
    _here.is_problem = True
    torch.set_grad_enabled(grad)
    torch.get_num_threads()
