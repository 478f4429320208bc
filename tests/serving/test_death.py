"""Causes of death from log lines; the tracebacks are SGLang 0.5.23's own (shortened)."""

from __future__ import annotations

import pytest

from moepress.serving.death import Cause, explain, last_lines

SIGQUIT = "[17:10:24] Received sigquit from a child process. It usually means the child failed.\n"


@pytest.mark.parametrize(
    ("cause", "line"),
    [
        (
            Cause.OUT_OF_MEMORY,
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 3.00 GiB. GPU 0 has a total",
        ),
        (
            Cause.OUT_OF_MEMORY,
            "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static. "
            "Current value: mem_fraction_static=0.8",
        ),
        (Cause.MISSING_KERNEL, "NotImplementedError: sgl_kernel.silu_and_mul: not in moepress's CPU lab"),
        (Cause.MISSING_KERNEL, "RuntimeError: CUDA error: no kernel image is available for execution on the device"),
        (Cause.BAD_QUANTIZATION_CONFIG, "KeyError: 'Linear'"),
        (
            Cause.BAD_QUANTIZATION_CONFIG,
            "ValueError: Unable to find matching target for model.layers.0.mlp.gate_up_proj in the compressed-tensors config.",
        ),
        (
            Cause.BAD_QUANTIZATION_CONFIG,
            "ValueError: ('For Fused MoE layers, only ', 'pack-quantized ', 'is supported for the following bits: ', '[4, 8]')",
        ),
        (
            Cause.BAD_QUANTIZATION_CONFIG,
            "ValueError: Weight output_partition_size = 192 is not divisible by weight quantization block_n = 128.",
        ),
        (Cause.UNKNOWN_TENSOR, "KeyError: 'model.layers.0.self_attn.qkv_proj.k_scale'"),
        (
            Cause.WRONG_SHAPE,
            "RuntimeError: The size of tensor a (8) must match the size of tensor b (4) at non-singleton dimension 0",
        ),
        (
            Cause.WRONG_SHAPE,
            "AssertionError: Attempted to load weight (torch.Size([1, 256])) into parameter (torch.Size([256]))",
        ),
        (Cause.BAD_ARGUMENT, "sglang serve: error: unrecognized arguments: --no-such-flag"),
        (Cause.PORT_TAKEN, "OSError: [Errno 98] error while attempting to bind on address: address already in use"),
        (
            Cause.PORT_TAKEN,
            "[2026-11-30 06:30:59] ERROR:    [Errno 98] error while attempting to bind on address "
            "('127.0.0.1', 47383): address already in use",
        ),
        (Cause.TIME_LIMIT, "[17:15:20] Scheduler watchdog timeout (self.watchdog_timeout=300, self.soft=False)"),
        (
            Cause.TIME_LIMIT,
            "requests.exceptions.ReadTimeout: HTTPConnectionPool(host='127.0.0.1', port=30000): Read timed out. "
            "(read timeout=600)",
        ),
        (
            Cause.KILLED,
            "RuntimeError: Rank 0 scheduler died during initialization (exit code: -9). If exit code is -9 (SIGKILL), "
            "a common cause is the OS OOM killer.",
        ),
        (
            Cause.KILLED,
            "[17:10:30] Subprocess scheduler_0 (pid=5158) crashed with exit code -9. Triggering SIGQUIT for cleanup...",
        ),
        (
            Cause.CRASHED,
            "[17:10:30] Subprocess scheduler_0 (pid=5158) crashed with exit code -11. Triggering SIGQUIT for cleanup...",
        ),
        (
            Cause.OUT_OF_MEMORY,
            "ValueError: Loaded weights leave no GPU memory for the KV cache under --mem-fraction-static=0.8. Raise it",
        ),
        (Cause.MISSING_FILE, "FileNotFoundError: [Errno 2] No such file or directory: '/models/m/config.json'"),
        (Cause.WRONG_VERSION, "moepress CPU lab: made for sglang 0.5.23, this is 0.6.0. Take the lab's folder off"),
        (
            Cause.NOT_GUARDED,
            "moepress KV integrity: refused to start: streaming sessions: a row moves from request to request",
        ),
        (Cause.OTHER, "ZeroDivisionError: integer division or modulo by zero"),
    ],
)
def test_the_line_that_tells(cause: Cause, line: str) -> None:
    log = f"[17:10:20] Load weight begin. avail mem=16.01 GB\nTraceback (most recent call last):\n  File x\n{line}\n\n{SIGQUIT}"
    death = explain(log)
    assert death is not None
    assert death.cause is cause
    assert death.line == line
    assert death.hint


def test_a_cause_is_preferred_to_its_echo() -> None:
    log = "EOFError\nRuntimeError: something went wrong in a worker\ntorch.OutOfMemoryError: CUDA out of memory.\n"
    death = explain(log)
    assert death is not None
    assert death.cause is Cause.OUT_OF_MEMORY


def test_an_exception_is_preferred_to_what_the_parent_says_of_it() -> None:
    killed = "[x] Subprocess scheduler_0 (pid=5158) crashed with exit code -9. Triggering SIGQUIT for cleanup...\n"
    death = explain(f"ZeroDivisionError: division by zero\n{killed}")
    assert death is not None
    assert (death.cause, death.line) == (Cause.OTHER, "ZeroDivisionError: division by zero")


def test_a_server_that_was_asked_to_end_has_died_of_nothing() -> None:
    assert explain("[x] Subprocess scheduler_0 (pid=5) crashed with exit code -15. Triggering SIGQUIT for ...") is None


def test_an_exception_without_words_is_told_with_its_line_of_code() -> None:
    death = explain('  File "x.py", line 205, in f\n    assert x1.is_cuda\n           ^^^^^^^^^^\nAssertionError\n')
    assert death is not None
    assert death.line == "AssertionError at `assert x1.is_cuda`"


def test_the_last_lines_are_those_that_tell() -> None:
    log = "a\nb\n\n[x] kill_process_tree called: parent_pid=1\nnanobind: leaked 4 instances!\n - leaked instance 0x7f\n"
    assert last_lines(log, 2) == "    a\n    b"
    assert last_lines("\n") == "    (nothing)"


def test_warnings_are_no_death() -> None:
    assert (
        explain(
            "[x] Ignore import error when loading sglang.srt.models.mamba: cannot import name 'y'\nUserWarning: z\n"
        )
        is None
    )
    assert explain("") is None
    assert explain(SIGQUIT) is None
