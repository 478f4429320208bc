"""Why a server died: from its log to one cause, the line that shows it, and what to do.

The first traceback is the cause, later ones are its echoes in the other processes (SGLang's parent ends with "Received
sigquit from a child process"). A cause is looked for in the order of the table, over all exception lines; what matches
nothing is reported as it is, so that no failure is ever swallowed. Two ends leave no exception: a time limit of SGLang's
own, and a process that a signal ended; the line by which its parent notices stands for them. SGLang then kills itself, so
its exit status (137) says nothing about memory.
"""

from __future__ import annotations

import re
import signal
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
    TIME_LIMIT = "a time limit of SGLang's own"
    KILLED = "a process was killed"
    CRASHED = "a process crashed"
    OTHER = "other"


@dataclass(frozen=True)
class Death:
    """One cause. `line` is the log's own words, `hint` says what to try."""

    cause: Cause
    line: str
    hint: str


_KILLED_HINT = (
    "the kernel does this when the machine's memory runs out (`dmesg -T | grep -i oom`): end other programs, or fewer "
    "--max-total-tokens"
)
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
        r"|Cannot allocate memory|std::bad_alloc|leave no GPU memory for the KV cache",
        "more GPUs, another --mem-fraction-static, fewer --max-total-tokens; `moepress plan` says what fits",
    ),
    (
        Cause.BAD_ARGUMENT,
        r"(launch_server\.py|sglang serve): error: ",
        "compare the flags with this SGLang version: python -m sglang.launch_server --help",
    ),
    (Cause.PORT_TAKEN, r"address already in use", "choose another port (--port), or end what listens there: ss -ltnp"),
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
    (
        Cause.TIME_LIMIT,
        r"Scheduler watchdog timeout \(|Read timed out\. \(read timeout=",
        "a forward took longer than SGLang allows: another try finds compiled kernels in its cache; on a busy machine "
        "--flags '--watchdog-timeout 1800', and SGLANG_WARMUP_TIMEOUT=1800 in the environment",
    ),
    (Cause.KILLED, r"died during initialization \(exit code: -9\)", _KILLED_HINT),
)
_COMPILED = tuple((cause, re.compile(pattern, re.IGNORECASE), hint) for cause, pattern, hint in _TABLE)

# An exception's own line ("RuntimeError: ...", "torch.OutOfMemoryError: ..."), argparse's or uvicorn's complaint, the
# watchdog's, or our plug-in's.
_EXCEPTION = re.compile(
    r"^(?:\[[^\]]*\] )?"
    r"(?:[\w.]+(?:Error|Exception|Exit|Interrupt|Timeout)\b.*|(?:\S*launch_server\.py|sglang serve): error: .*"
    r"|ERROR: +\[Errno \d+\].*|Scheduler watchdog timeout .*"
    r"|moepress (?:CPU lab|KV integrity): (?:made|this|refused).*)"
)
# What the parent says of a process that raised nothing. -15 is what it makes of its own end.
_SIGNALLED = re.compile(r"^(?:\[[^\]]*\] )?Subprocess \S+ \(pid=\d+\) crashed with exit code (-\d+)\.")
_ASKED_TO_END = -15
_ECHO = re.compile(r"Received sigquit|KeyboardInterrupt|BrokenPipeError|ConnectionResetError|EOFError")
# Lines that follow every end and tell nothing of it.
_AFTERWARDS = re.compile(r"kill_process_tree called|^nanobind: |^ - |^See https://nanobind|^\s*$")


def explain(log: str) -> Death | None:
    """The cause of death that a log shows, or None if it shows none."""
    lines = [line.strip() for line in log.splitlines()]
    raised = [line for line in lines if _EXCEPTION.match(line) and not _ECHO.search(line)]
    for cause, pattern, hint in _COMPILED:
        for line in raised:
            if pattern.search(line):
                return Death(cause, line[:500], hint)
    if raised:
        return Death(Cause.OTHER, _with_its_code(raised[0], lines)[:500], "read the log from the first traceback on")
    for line in lines:
        if (found := _SIGNALLED.match(line)) and (status := int(found[1])) != _ASKED_TO_END:
            killed = status == -signal.SIGKILL
            hint = _KILLED_HINT if killed else "read the log before this line; a crash in a kernel leaves no traceback"
            return Death(Cause.KILLED if killed else Cause.CRASHED, line[:500], hint)
    return None


def _with_its_code(line: str, lines: Sequence[str]) -> str:
    """An exception that says nothing beside its name, with the line of code above it in the traceback."""
    if ": " in line:
        return line
    above = [before for before in lines[: lines.index(line)] if before.strip("^~ ")]
    return f"{line} at `{above[-1]}`" if above else line


def last_lines(log: str, count: int = 5) -> str:
    """The last lines that say something, indented, each of 300 characters at most; ``(nothing)`` for an empty log."""
    telling = [line.rstrip()[:300] for line in log.splitlines() if not _AFTERWARDS.search(line)]
    return "\n".join(f"    {line}" for line in telling[-count:]) or "    (nothing)"
