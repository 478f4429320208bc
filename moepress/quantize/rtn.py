"""Rounding to nearest: the quickest method, the baseline of every other, and the fallback without a usable Hessian.

    s = scale of the group             ``max``: bf16(max|w| / 7.5)       ``mse``: the least-error one (scale_search)
    q = clamp(round(w / s), −8, 7)

Three ways in, the same codes from each:

- ``rtn_band``: one band of rows in caller-owned numpy arrays, for a conversion that streams a checkpoint: decode a
  band, round it, pack it, all in reused buffers, one thread per band;
- ``rtn``: a tensor or a stack of them, as a value;
- ``rtn_plain``: the same in plain torch, on any device. It is what the compiled kernels are held to, bit for bit.

Time per weight on one core of a 2023 server CPU: about 1 ns for ``max``, 4 to 5 ns for ``mse``. For ``max`` the codes
are those of compressed-tensors in float32. llm-compressor on a BF16 weight also divides in BF16, where w / s has 8
bits: weights within 0.4 % of a rounding boundary then fall to either side, so about one code in a hundred is off by
one there.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from moepress.errors import QuantizeError
from moepress.quantize.fidelity import Fidelity
from moepress.quantize.gptq_batched import scales_batched
from moepress.quantize.grid import Grid, QuantizedWeight, Scale, dequantize, usable_scales
from moepress.quantize.rounding_kernel import (
    Bf16Bits,
    Codes,
    Floats,
    group_peaks,
    measure_rows,
    refuse_not_finite,
    round_rows,
)
from moepress.quantize.scale_search import search_scales, search_scales_plain


def rtn_band(w: Floats, codes: Codes, scales: Bf16Bits, grid: Grid, scale: Scale = "max") -> tuple[float, float, float]:
    """Round a band of rows to nearest, on the CPU, without the GIL.

    Args:
        w: float32 [R, C], C-contiguous; read only.
        codes: int8 [R, C], C-contiguous, written.
        scales: uint16 [R, G], C-contiguous, written with BF16 bits.
        grid: bits and group size; G is ``grid.groups(C)``.
        scale: "max" or "mse".

    Returns:
        Σ (w − q s)², Σ w², max |w − q s|. The sums are exact to float64 rounding, whose last digits depend on how
        rows are cut into bands; codes and scales do not.

    Raises:
        QuantizeError: NaN or infinity in ``w`` (with counts), shapes that do not match, columns that groups do not
            fill.
    """
    rows, columns = w.shape
    width = grid.width(columns)
    if codes.shape != w.shape or scales.shape != (rows, columns // width):
        raise QuantizeError(
            f"buffers of shape {codes.shape} and {scales.shape} for a weight of shape {w.shape} in groups of {width}",
            where="rtn_band",
        )
    if w.size == 0:
        return 0.0, 0.0, 0.0
    divisor = grid.half_range
    if scale == "mse":
        groups = w.reshape(-1, width)
        peaks = np.empty(groups.shape[0], np.float32)
        refuse_not_finite(*group_peaks(groups.view(np.int32), peaks.view(np.int32)), w.size)
        found = search_scales(groups, np.ones((1, width), np.float32), peaks, columns // width, grid)
        np.copyto(scales, (found.view(np.uint32) >> 16).astype(np.uint16).reshape(scales.shape))
        divisor = 0.0
    limits = (float(grid.qmin), float(grid.qmax))
    error, energy, worst, nans, infinities = round_rows(w, w.view(np.int32), codes, scales, divisor, limits)
    refuse_not_finite(nans, infinities, w.size)
    return error, energy, worst


def rtn(
    weight: torch.Tensor, grid: Grid, *, scale: Scale = "max", out: QuantizedWeight | None = None
) -> QuantizedWeight:
    """Round a weight, or a stack of weights, to nearest.

    Args:
        weight: float32 [..., R, C]; read only. On the CPU the compiled kernel runs, elsewhere torch, and Triton's scale search.
        grid: bits and group size.
        scale: "max" or "mse".
        out: codes and scales to write into (contiguous, of the right shapes); without it they are allocated.

    Returns:
        codes int8 [..., R, C], scales bfloat16 [..., R, G] and one ``Fidelity`` per matrix.

    Raises:
        QuantizeError: not float32, NaN or infinity (with counts), columns that groups do not fill.
    """
    if weight.dtype != torch.float32 or weight.ndim < 2:
        raise QuantizeError(
            f"a weight is float32 [..., R, C], this one is {weight.dtype} {list(weight.shape)}", where="rtn"
        )
    if weight.device.type != "cpu":
        stacked = weight.reshape(-1, *weight.shape[-2:])
        ones = torch.ones(len(stacked), weight.shape[-1], device=weight.device)
        return rtn_plain(weight, grid, scales=scales_batched(stacked, ones, grid, scale))
    *stack, rows, columns = weight.shape
    codes = torch.empty(weight.shape, dtype=torch.int8) if out is None else out.codes
    scales = torch.empty((*stack, rows, grid.groups(columns)), dtype=torch.bfloat16) if out is None else out.scales
    count = math.prod(stack)
    matrices = weight.detach().contiguous().view(count, rows, columns).numpy()
    all_codes = codes.view(count, rows, columns).numpy()
    all_scales = scales.view(count, rows, scales.shape[-1]).view(torch.uint16).numpy()
    fidelity = []
    for i, (w, q, s) in enumerate(zip(matrices, all_codes, all_scales, strict=True)):
        try:
            fidelity.append(Fidelity(*rtn_band(w, q, s, grid, scale)))
        except QuantizeError as error:
            raise QuantizeError(
                error.what, where=f"matrix {i} of the stack" if stack else None, hint=error.hint
            ) from error
    return QuantizedWeight(codes, scales, grid, tuple(fidelity))


def rtn_plain(
    weight: torch.Tensor, grid: Grid, *, scale: Scale = "max", scales: torch.Tensor | None = None
) -> QuantizedWeight:
    """``rtn`` in plain torch on ``weight``'s device; codes and scales agree bit for bit with the kernel.

    Args:
        scales: float32 [..., R, G] that were found already; None = by ``scale``.
    """
    *stack, rows, columns = weight.shape
    width = grid.width(columns)
    refuse_not_finite(int(weight.isnan().sum()), int(weight.isinf().sum()), weight.numel())
    groups = weight.reshape(-1, width)
    if scales is not None:
        s = scales.reshape(-1)
    elif scale == "mse":
        s = search_scales_plain(groups, torch.ones(1, width, device=weight.device), columns // width, grid)
    else:
        s = usable_scales(groups.abs().amax(-1) / grid.half_range)
    codes = (groups / s[:, None]).clamp(grid.qmin, grid.qmax).round()
    errors = (groups - codes * s[:, None]).reshape(-1, rows * columns)
    energy = weight.reshape(-1, rows * columns)
    sums = zip(
        errors.double().square().sum(1).tolist(),
        energy.double().square().sum(1).tolist(),
        errors.abs().amax(1).tolist() if errors.numel() else [0.0] * len(errors),
        strict=True,
    )
    return QuantizedWeight(
        codes.to(torch.int8).reshape(weight.shape),
        s.to(torch.bfloat16).reshape(*stack, rows, columns // width),
        grid,
        tuple(Fidelity(*each) for each in sums),
    )


def measure(weight: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> Fidelity:
    """Error sums of codes and scales that came from anywhere.

    Args:
        weight: float32 [R, C], contiguous: the source.
        codes: int8 [R, C], contiguous.
        scales: bfloat16 [R, G], contiguous.
    """
    if weight.device.type != "cpu":
        errors = weight - dequantize(codes, scales)
        energy = float(weight.double().square_().sum())
        return Fidelity(float(errors.double().square_().sum()), energy, float(errors.abs().max()))
    return Fidelity(*measure_rows(weight.numpy(), codes.numpy(), scales.view(torch.uint16).numpy()))
