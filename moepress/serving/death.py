"""Why a server died: from its log to one cause, the line that shows it, and what to do.

The first traceback is the cause, later ones are its echoes in the other processes (SGLang's parent ends with "Received
sigquit from a child process"). A cause is looked for in the order of the table, over all exception lines; what matches
nothing is reported as it is, so that no failure is ever swallowed.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from moepress.environments import command


class Cause(StrEnum):
    """What kind of thing went wrong: decides the hint, and whether the checkpoint or the machine is to blame."""

    OUT_OF_MEMORY = "out of memory"
    MISSING_KERNEL = "missing kernel"
    UNKNOWN_TENSOR = "tensor without a place"
    WRONG_SHAPE = "tensor of the wrong shape"
    BAD_QUANTIZATION_CONFIG = "quantization_config not accepted"
    MISSING_FILE = "missing or damaged file"
    UNKNOWN_MODEL = "unknown model"
    PORT_TAKEN = "port taken"
    BAD_ARGUMENT = "launch argument not accepted"
    WRONG_VERSION = "wrong SGLang version"
    NOT_GUARDED = "refused by KV integrity"
    OTHER = "other"


@dataclass(frozen=True)
class Death:
    """One cause. `line` is the log's own words, `hint` says what to try."""

    cause: Cause
    line: str
    hint: str


_TABLE: Sequence[tuple[Cause, str, str]] = (
    (
        Cause.WRONG_VERSION,
        r"moepress CPU lab: (made for|this process)",
        f"run it in the environment that {command('sglang-cpu')} makes, or without the CPU lab",
    ),
    (
        Cause.NOT_GUARDED,
        r"moepress KV integrity: (made for|refused)",
        "start without what it names, or without KV integrity (in the documentation: KV-cache page integrity)",
    ),
    (
        Cause.OUT_OF_MEMORY,
        r"OutOfMemoryError|out of memory|Not enough memory\. Please try to increase|can't allocate memory"
        r"|Cannot allocate memory|std::bad_alloc",
        "more GPUs, another --mem-fraction-static, fewer --max-total-tokens; `moepress plan` says what fits",
    ),
    (
        Cause.BAD_ARGUMENT,
        r"(launch_server\.py|sglang serve): error: ",
        "compare the flags with this SGLang version: python -m sglang.launch_server --help",
    ),
    (Cause.PORT_TAKEN, r"address already in use", "choose another port, or let moepress choose a free one"),
    (
        Cause.BAD_QUANTIZATION_CONFIG,
        r"KeyError: '(Linear|weights|quant_method|config_groups)'|Unable to find matching target for"
        r"|Found different quantization schemes|All MoE projections need to have same"
        r"|No compressed-tensors compatible scheme|For Fused MoE layers, only|Unsupported FusedMoe scheme"
        r"|is not divisible by weight quantization block|validation errors? for QuantizationArgs"
        r"|Unknown quantization method|does not match the quantization method",
        "the layout is not one that this SGLang version reads for this family: moepress inspect, then convert with "
        "another `layout`",
    ),
    (
        Cause.UNKNOWN_TENSOR,
        r"KeyError: '[\w.]*(layers|experts|lm_head|embed_tokens|norm|proj)[\w.]*'"
        r"|has no attribute 'weight(_scale|_scale_inv|_packed)?'",
        "the checkpoint names a tensor that the server has no parameter for: compare with `moepress verify`",
    ),
    (
        Cause.WRONG_SHAPE,
        r"must match the (size|existing size) of tensor|Attempted to load weight|shape mismatch|size mismatch"
        r"|start \(\d+\) \+ length \(\d+\) exceeds|AssertionError: .*torch\.Size"
        r"|AssertionError: .*loaded_weight",
        "group size, block size or tensor parallelism do not fit this tensor: see `moepress plan`",
    ),
    (
        Cause.MISSING_KERNEL,
        r"not in moepress's CPU lab|no kernel image is available|No module named '(sgl_kernel|flash_mla|deep_gemm|"
        r"flashinfer|vllm)|not compiled with CUDA|has no attribute '\w+_cpu'|undefined symbol"
        r"|is not supported (on|for) (this|the current) (GPU|platform|device)|sgl_kernel[^:]*: not",
        "this installation or GPU has no kernel for the layout: try another --attention-backend or "
        "--moe-runner-backend, or another SGLang build",
    ),
    (
        Cause.MISSING_FILE,
        r"FileNotFoundError|No such file or directory|SafetensorError|Error while deserializing header"
        r"|Cannot find any model weights|incomplete metadata|missing.*safetensors",
        "check the folder: moepress inspect",
    ),
    (
        Cause.UNKNOWN_MODEL,
        r"does not recognize this architecture|are not supported for now|Unrecognized (model|configuration class)"
        r"|should have a `model_type` key|trust_remote_code",
        "this SGLang version does not know the architecture of config.json (or needs --trust-remote-code)",
    ),
)
_COMPILED = tuple((cause, re.compile(pattern, re.IGNORECASE), hint) for cause, pattern, hint in _TABLE)

# An exception's own line ("RuntimeError: ...", "torch.OutOfMemoryError: ..."), argparse's complaint, or our plug-in's.
_EXCEPTION = re.compile(
    r"^(?:\[[^\]]*\] )?"
    r"(?:[\w.]+(?:Error|Exception|Exit|Interrupt)\b.*|(?:\S*launch_server\.py|sglang serve): error: .*"
    r"|moepress (?:CPU lab|KV integrity): (?:made|this|refused).*)"
)
_ECHO = re.compile(r"Received sigquit|KeyboardInterrupt|BrokenPipeError|ConnectionResetError|EOFError")


def explain(log: str) -> Death | None:
    """The cause of death that a log shows, or None if it shows no exception."""
    raised = [line.strip() for line in log.splitlines() if _EXCEPTION.match(line.strip()) and not _ECHO.search(line)]
    for cause, pattern, hint in _COMPILED:
        for line in raised:
            if pattern.search(line):
                return Death(cause, line[:500], hint)
    if raised:
        return Death(Cause.OTHER, raised[0][:500], "read the log from the first traceback on")
    return None
