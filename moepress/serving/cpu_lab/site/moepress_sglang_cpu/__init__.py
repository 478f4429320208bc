"""CPU LAB ONLY: kernels in plain torch, so that SGLang 0.5.23 serves quantized checkpoints on a machine without a GPU.

What is replaced is arithmetic and nothing else: the INT4 and FP8 expert kernels, the FP8 linear kernels, the conversion
of the MLA up-projection, the attention of a sparse (DSA) layer, the FP8 cache's quantize and dequantize, and what of a
prefill server's hand-over needs pinned memory. Reading the
configuration, matching config groups, choosing schemes, parameter names, dtypes and shapes, weight loaders, sharding,
routing, scheduling and the HTTP server stay SGLang's own. So a checkpoint that loads here was really loaded by SGLang;
that a CUDA kernel computes the right thing is not shown here.

Differences from a GPU that matter when results are compared:

    weights       dequantized in float32, rounded to bfloat16 once, as transformers holds them
    activations   stay bfloat16; CUDA's FP8 kernels round them to FP8 as well
    MLA           always the absorbed form
    DSA           dense attention, which is the same result while a request is not longer than `index_topk`; longer ones
                  are refused. The indexer's weights are loaded, its arithmetic is not run

SGLang finds this through the entry-point group `sglang.srt.plugins`; it is active only where this folder is on
PYTHONPATH. It refuses any other SGLang version and any process that sees a GPU, by ending the process: SGLang catches
exceptions of plug-ins and would go on with half of it.
"""

from __future__ import annotations

import logging
import pkgutil
import sys

SGLANG_VERSION = "0.5.23"
MARKER = "moepress CPU lab: kernels replaced"

log = logging.getLogger("sglang.moepress_cpu")


def register() -> None:
    """Entry point, called by SGLang once in every process before a model is built."""
    import sglang
    import torch

    if sglang.__version__ != SGLANG_VERSION:
        sys.exit(
            f"moepress CPU lab: made for sglang {SGLANG_VERSION}, this is {sglang.__version__}. "
            "Take the lab's folder off PYTHONPATH, or install the pinned version (python -m moepress.environments sglang-cpu)."
        )
    if torch.cuda.is_available():
        sys.exit(
            "moepress CPU lab: this process sees a GPU. The lab replaces kernels by slow ones; take it off PYTHONPATH."
        )

    from . import attention, experts, fp8_cache, linears, transfer

    replaced = 0
    for part in (experts, linears, attention, fp8_cache, transfer):
        for target, function in part.replacements().items():
            _replace(target, function)
            replaced += 1
        part.prepare()
    log.warning("%s (%d functions). For tests and demonstrations, never for a GPU.", MARKER, replaced)


def _replace(target: str, function) -> None:
    """Put `function` in the place of a method or function that must be there.

    SGLang's own HookRegistry would search every module of the process for copies of each name: half a minute of boot.
    """
    path, _, name = target.rpartition(".")
    owner = pkgutil.resolve_name(path)
    if not hasattr(owner, name):
        sys.exit(f"moepress CPU lab: sglang {SGLANG_VERSION} has no {target}")
    setattr(owner, name, function)
