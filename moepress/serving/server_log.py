"""What SGLang's log says: sizes, dtypes, warnings about tensors, and why a server died.

The HTTP interface repeats what was asked for; the log says what was decided (`kv_cache_dtype` is "auto" in
/server_info, the dtype of the pool is in the log). Lines are read from SGLang 0.5.23; a line that is not met leaves its
field None, never a guess.

    Load weight end. elapsed=0.45 s, type=DeepseekV3ForCausalLM, quant=compressed-tensors, …, mem usage=0.06 GB.
    KV Cache is allocated. dtype: torch.bfloat16, #tokens: 20000, KV size: 0.02 GB
    max_total_num_tokens=20000, chunked_prefill_size=4096, ..., available_gpu_mem=15.82 GB
    The server is fired up and ready to roll!

SGLang's "GB" is 2^30 bytes. With several ranks every rank writes such lines, marked "TP3" after the time: the figures
here are of the rank that needs the most, because that one decides whether the server fits.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeVar

from moepress.serving.death import Death, explain

_Number = TypeVar("_Number", int, float)

_READY = "The server is fired up and ready to roll!"
_WEIGHTS = re.compile(
    r"Load weight end\. elapsed=([\d.]+) s, type=(\w+),(?: quant=([^,]+),)? .*mem usage=(-?[\d.]+) GB"
)
_KV_POOL = re.compile(r"KV Cache is allocated\. dtype: torch\.(\w+), #tokens: (\d+), (.*)")
_SIZE = re.compile(r"size: ([\d.]+) GB")
_TOKENS = re.compile(r"max_total_num_tokens=(\d+), ")
_LEFT = re.compile(r"available_[cg]pu_mem=(-?[\d.]+) GB")
_CPU_LAB = "moepress CPU lab: kernels replaced"

# Lines by which SGLang's loaders say that they did not use a tensor, or put a default in its place.
_UNUSED = (
    re.compile(r"(\S+) not found in params_dict"),
    re.compile(r"Parameter (\S+) not found in params_dict"),
    re.compile(r"Some weights are not initialized from checkpoints: (.*)"),
)
_KV_SCALES = re.compile(r"Using KV cache scaling factor 1\.0|Ignoring compressed-tensors kv_cache_scheme")


@dataclass(frozen=True)
class ServerLog:
    """One server's log, read. Sizes in GiB per GPU, of the largest rank.

    Attributes:
        ready: the server said that it serves.
        model_class: SGLang's class, e.g. ``DeepseekV3ForCausalLM``.
        quantization: SGLang's word for the format, None = unquantized (or not reached).
        weights_gib: memory taken by the weights.
        load_seconds: time to read and place them.
        kv_dtype: the resolved dtype of the KV cache, e.g. ``bfloat16``, ``float8_e4m3fn``.
        kv_gib: memory of the KV pool.
        kv_tokens: tokens that fit in it, per replica.
        free_gib: left over after start.
        unused_tensors: names a loader said it did not use.
        kv_scale_warnings: lines saying that KV scales were ignored or replaced by 1.0.
        cpu_lab: the CPU lab's kernels were in use; speed and kernel correctness say nothing then.
        death: why the server ended, if the log tells.
    """

    ready: bool = False
    model_class: str | None = None
    quantization: str | None = None
    weights_gib: float | None = None
    load_seconds: float | None = None
    kv_dtype: str | None = None
    kv_gib: float | None = None
    kv_tokens: int | None = None
    free_gib: float | None = None
    unused_tensors: tuple[str, ...] = ()
    kv_scale_warnings: tuple[str, ...] = ()
    cpu_lab: bool = False
    death: Death | None = None


def parse_log(text: str) -> ServerLog:
    """Read a whole log (or what there is of one so far)."""
    lines = text.splitlines()
    weights = [m for line in lines if (m := _WEIGHTS.search(line))]
    pools = [m for line in lines if (m := _KV_POOL.search(line))]
    largest = max(weights, key=lambda m: float(m[4]), default=None)
    pool_sizes = [sum(float(size) for size in _SIZE.findall(m[3])) for m in pools]
    return ServerLog(
        ready=any(_READY in line for line in lines),
        model_class=largest[2] if largest else None,
        quantization=largest[3] if largest else None,
        weights_gib=float(largest[4]) if largest else None,
        load_seconds=max((float(m[1]) for m in weights), default=None),
        kv_dtype=pools[0][1] if pools else None,
        kv_gib=max(pool_sizes, default=None),
        kv_tokens=min(_numbers(_TOKENS, lines, int), default=None),
        free_gib=min(_numbers(_LEFT, lines, float), default=None),
        unused_tensors=_unused(lines),
        kv_scale_warnings=tuple(dict.fromkeys(line.strip() for line in lines if _KV_SCALES.search(line))),
        cpu_lab=any(_CPU_LAB in line for line in lines),
        death=explain(text),
    )


def _numbers(pattern: re.Pattern[str], lines: Iterable[str], kind: type[_Number]) -> list[_Number]:
    return [kind(m[1]) for line in lines if (m := pattern.search(line))]


def _unused(lines: Iterable[str]) -> tuple[str, ...]:
    names: dict[str, None] = {}
    for line in lines:
        for pattern in _UNUSED:
            if found := pattern.search(line):
                names[found[1]] = None
    names.pop("Parameter", None)
    return tuple(names)
