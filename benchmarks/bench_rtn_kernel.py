"""Rounding to nearest on one core: nanoseconds per weight, side by side with compressed-tensors' own functions.

    python -m benchmarks.bench_rtn_kernel --rows 512 --columns 7168 --rounds 7

    float32 → codes, scales and error sums, into buffers that are reused
        moepress max | mse     rtn_band
        compressed-tensors     calculate_qparams and quantize in float32: codes and scales, the same as ``max``
        torch                  rtn_plain, the twin that the kernels are held to
    block FP8 → packed words and scales, as a conversion does it
        fused max              press.kernel: one compiled pass
        chain max              decode_band, rtn_band, pack_int4 in tiles of a megabyte: the pass's twin

Contenders take turns inside a round; medians and minima of processor seconds of the one thread. JSON on standard output.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from importlib.metadata import version

import numpy as np
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import quantize
from compressed_tensors.quantization.utils import calculate_qparams

from benchmarks.measure import machine
from moepress.convert.press.kernel import press_fp8_rows
from moepress.formats.fp8 import decode_band, encode_fp8_block
from moepress.formats.int4 import pack_int4
from moepress.quantize.grid import Grid, Scale
from moepress.quantize.rtn import rtn_band, rtn_plain


def contenders(weight: torch.Tensor, grid: Grid) -> dict[str, Callable[[], object]]:
    rows, columns = weight.shape
    array = weight.numpy()
    codes, scales = np.empty((rows, columns), np.int8), np.empty((rows, grid.groups(columns)), np.uint16)
    args = QuantizationArgs(
        num_bits=grid.num_bits,
        symmetric=True,
        strategy="group",
        group_size=grid.group_size,
        scale_dtype=torch.bfloat16,
    )

    def band(scale: Scale) -> Callable[[], object]:
        return lambda: rtn_band(array, codes, scales, grid, scale)

    def peer() -> object:
        groups = weight.unflatten(-1, (-1, grid.group_size))
        scale, zero_point = calculate_qparams(groups.amin(-1), groups.amax(-1), args)
        return quantize(weight, scale, zero_point, args, dtype=torch.int8)

    stored, block_scales = encode_fp8_block(weight)
    fp8_bits, fp8_scales = stored.view(torch.int8).numpy(), block_scales.numpy()
    packed = torch.empty((rows, columns // 8), dtype=torch.int32)
    words = packed.numpy().view(np.uint32)
    tile_rows = (1 << 20) // (4 * columns)
    values = torch.empty(tile_rows, columns)

    def chain() -> None:
        for first in range(0, rows, tile_rows):
            last = min(first + tile_rows, rows)
            tile, tile_codes = values[: last - first], codes[: last - first]
            decode_band(stored[first:last], block_scales, 128, 128, first, tile)
            rtn_band(tile.numpy(), tile_codes, scales[first:last], grid, "max")
            pack_int4(torch.from_numpy(tile_codes), out=packed[first:last])

    return {
        "moepress max": band("max"),
        "moepress mse": band("mse"),
        "compressed-tensors": peer,
        "torch": lambda: rtn_plain(weight, grid),
        "fused max": lambda: press_fp8_rows(fp8_bits, fp8_scales, (128, 128), 0, words, scales, grid.half_range),
        "chain max": chain,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--columns", type=int, default=7168)
    parser.add_argument("--group", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    torch.set_num_threads(1)
    weight = torch.randn(options.rows, options.columns, generator=torch.Generator().manual_seed(0)) * 0.02
    each = contenders(weight, Grid(4, options.group))
    for run in each.values():
        run()
    times: dict[str, list[float]] = {name: [] for name in each}
    for _ in range(options.rounds):
        for name, run in each.items():
            started = time.thread_time()
            run()
            times[name].append((time.thread_time() - started) / weight.numel() * 1e9)
    report = {
        "options": vars(options),
        "machine": machine(),
        "versions": {package: version(package) for package in ("torch", "compressed-tensors", "numba")},
        "nanoseconds_per_weight": {name: round(statistics.median(taken), 3) for name, taken in times.items()},
        "least": {name: round(min(taken), 3) for name, taken in times.items()},
        "runs": {name: [round(each, 3) for each in taken] for name, taken in times.items()},
    }
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
