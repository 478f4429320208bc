"""Causes of death from log lines; the tracebacks are SGLang 0.5.23's own (shortened)."""

from __future__ import annotations

import pytest

from moepress.serving.death import Cause, explain

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


def test_warnings_are_no_death() -> None:
    assert (
        explain(
            "[x] Ignore import error when loading sglang.srt.models.mamba: cannot import name 'y'\nUserWarning: z\n"
        )
        is None
    )
    assert explain("") is None
    assert explain(SIGQUIT) is None
