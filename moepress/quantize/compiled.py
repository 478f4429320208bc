"""One set of compiler flags for every CPU kernel of this package.

A kernel here is a plain loop over arrays that its caller allocated. The flags are chosen so that a kernel gives the
same bits as its torch twin:

- no ``fastmath``: no reassociation and no fused multiply-add, so a sum has the order in which it is written. Loops that
  should run in SIMD are written with independent lanes instead of a single accumulator;
- ``error_model="numpy"``: a division needs no check for zero, which would keep a loop from being vectorised;
- ``nogil``: Python threads run kernels side by side, each on its own experts or rows. That is the only parallelism: the
  result of a row never depends on how rows were shared out, so it never depends on the number of threads;
- ``cache``: compiled once per machine, beside the source, or in the user's cache folder where the package is read-only.

A kernel calls only kernels of its own file: the cache notices a change in that one file only.

On processors with AVX-512 the compiler is asked for vectors of 512 bits, where it would use half of each register by
itself: the scale search gains a factor of 1.6. ``NUMBA_CPU_FEATURES`` in the environment has the last word.

Nothing is compiled at import: a kernel is compiled, or read from the cache, when it is first called.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar, cast

import numba
from numba.core.codegen import get_host_cpu_features

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def _use_whole_registers() -> None:
    """Sets numba's own option, before the first kernel is compiled."""
    if numba.config.CPU_FEATURES is None and "+avx512f" in (features := get_host_cpu_features()):
        numba.config.CPU_FEATURES = f"{features},-prefer-256-bit"


_use_whole_registers()


def kernel(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """``function`` as a compiled kernel, compiled at its first call."""
    compiled = numba.njit(nogil=True, cache=True, error_model="numpy", boundscheck=False)(function)
    return cast("Callable[Arguments, Result]", compiled)
