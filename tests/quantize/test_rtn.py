"""Rounding to nearest: against its torch twin bit for bit, and against compressed-tensors code for code."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import moepress.quantize.rtn as rtn_module
from moepress.errors import QuantizeError
from moepress.quantize.grid import ZERO_GROUP_SCALE, Grid, QuantizedWeight, Scale
from moepress.quantize.rtn import rtn, rtn_band, rtn_plain

SCALES: tuple[Scale, ...] = ("max", "mse")


def weight(rows: int, columns: int, *, seed: int = 0, spread: float = 0.02) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * spread


@settings(deadline=None, max_examples=40)
@given(
    bits=st.integers(3, 8),
    group=st.sampled_from([32, 64, 128, -1]),
    scale=st.sampled_from(SCALES),
    rows=st.integers(1, 9),
    groups=st.integers(1, 5),
    exponent=st.integers(-40, 36),
    seed=st.integers(0, 2**20),
)
def test_kernel_agrees_with_torch_bit_for_bit(
    bits: int, group: int, scale: Scale, rows: int, groups: int, exponent: int, seed: int
) -> None:
    """Any magnitude from underflow to near overflow, with zero groups and rows of a grid among them."""
    columns = 128 * groups
    w = weight(rows, columns, seed=seed, spread=10.0**exponent)
    w[0, :128] = 0
    w[-1] = torch.randint(-7, 8, (columns,), generator=torch.Generator().manual_seed(seed)) * 2.0**-5
    fast, plain = rtn(w, Grid(bits, group), scale=scale), rtn_plain(w, Grid(bits, group), scale=scale)
    assert torch.equal(fast.codes, plain.codes)
    assert torch.equal(fast.scales.view(torch.int16), plain.scales.view(torch.int16))
    assert fast.fidelity[0].sum_sq_error == pytest.approx(plain.fidelity[0].sum_sq_error, rel=1e-12)
    assert fast.fidelity[0].sum_sq_weight == pytest.approx(plain.fidelity[0].sum_sq_weight, rel=1e-12)
    assert fast.fidelity[0].max_abs_error == plain.fidelity[0].max_abs_error


@pytest.mark.parametrize("columns", [7, 37, 513, 1408, 7168])
@pytest.mark.parametrize("scale", SCALES)
def test_whole_row_groups_of_any_width(columns: int, scale: Scale) -> None:
    w = weight(5, columns)
    fast, plain = rtn(w, Grid(4, -1), scale=scale), rtn_plain(w, Grid(4, -1), scale=scale)
    assert torch.equal(fast.codes, plain.codes)
    assert torch.equal(fast.scales, plain.scales)


@pytest.mark.oracle
@pytest.mark.parametrize("group", [32, 128, -1])
@pytest.mark.parametrize("bits", [4, 8])
def test_codes_are_those_of_compressed_tensors(bits: int, group: int) -> None:
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import quantize
    from compressed_tensors.quantization.utils import calculate_qparams

    w = weight(64, 512)
    w[3, :128] = 0
    w[5, 128:256] *= 1e3
    strategy = {"strategy": "channel"} if group == -1 else {"strategy": "group", "group_size": group}
    args = QuantizationArgs(num_bits=bits, symmetric=True, scale_dtype=torch.bfloat16, **strategy)
    blocks = w.reshape(64, -1, 512 if group == -1 else group)
    scale, zero_point = calculate_qparams(blocks.amin(-1), blocks.amax(-1), args)
    theirs = quantize(w, scale, zero_point, args, dtype=torch.int8)
    ours = rtn(w, Grid(bits, group))
    assert torch.equal(ours.scales.float(), scale)
    assert torch.equal(ours.codes, theirs)
    assert ours.scales[3, 0].item() == (ZERO_GROUP_SCALE if group != -1 else scale[3, 0].item())


@pytest.mark.oracle
def test_bf16_arithmetic_of_llm_compressor_differs_only_at_rounding_boundaries() -> None:
    """On a BF16 weight it divides in BF16: same scales, and codes that differ by one where w/s is near a half."""
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import quantize
    from compressed_tensors.quantization.utils import calculate_qparams

    w = weight(256, 512).bfloat16()
    args = QuantizationArgs(num_bits=4, symmetric=True, strategy="group", group_size=32)
    blocks = w.reshape(256, -1, 32)
    scale, zero_point = calculate_qparams(blocks.amin(-1), blocks.amax(-1), args)
    theirs = quantize(w, scale, zero_point, args, dtype=torch.int8)
    ours = rtn(w.float(), Grid(4, 32))
    assert torch.equal(ours.scales, scale)
    ratio = w.float() / ours.scales.float().repeat_interleave(32, -1)
    differ = ours.codes != theirs
    assert (ours.codes.int() - theirs.int()).abs().max() <= 1
    assert differ.float().mean() < 0.02
    assert ((ratio[differ] - ratio[differ].floor() - 0.5).abs() < 2.0**-6).all()


def test_search_beats_max_by_a_stated_margin() -> None:
    w = weight(128, 1024)
    for group in (32, 128):
        plain, searched = rtn(w, Grid(4, group)).fidelity[0], rtn(w, Grid(4, group), scale="mse").fidelity[0]
        assert searched.sum_sq_error < 0.86 * plain.sum_sq_error


def test_every_extra_bit_is_worth_about_six_decibels() -> None:
    w = weight(64, 1024)
    levels = [rtn(w, Grid(bits, 32), scale="mse").fidelity[0].sqnr_db for bits in range(3, 9)]
    assert all(5.0 < b - a < 7.5 for a, b in pairwise(levels))


@pytest.mark.parametrize("step", [0.01, 0.0123, 3.7])
@pytest.mark.parametrize("low", [-7, -8])
def test_a_source_on_a_grid_passes_exactly(step: float, low: int) -> None:
    """I4-10: weights that are q · s already, s in BF16; some groups without their largest code."""
    generator = torch.Generator().manual_seed(1)
    codes = torch.randint(low, 8, (16, 512), generator=generator)
    codes[:, ::32] = low
    codes[4:, 64:96] = torch.randint(-3, 4, (12, 32), generator=generator)
    codes[4:, 96:128] = 0
    codes[4:, 100] = 5
    scale = torch.tensor(step).bfloat16().float() * (1 + torch.arange(16.0)).bfloat16().float()[:, None]
    scale = scale.bfloat16().float()
    done = rtn(codes * scale, Grid(4, 32), scale="mse")
    assert torch.equal(done.dequantize(), codes * scale)
    assert done.fidelity[0].sum_sq_error == 0


def test_a_grid_source_that_went_through_bf16_keeps_its_codes() -> None:
    """A BF16 copy of an INT4 checkpoint: q · s was rounded to 8 bits, so no scale is exact, but the codes still are."""
    generator = torch.Generator().manual_seed(2)
    codes = torch.randint(-7, 8, (32, 1024), generator=generator)
    codes[:, ::32] = 7
    scale = (torch.rand(32, 32, generator=generator) * 0.01 + 0.001).bfloat16().float().repeat_interleave(32, -1)
    done = rtn((codes * scale).bfloat16().float(), Grid(4, 32), scale="mse")
    assert (done.codes != codes).float().mean() < 1e-3
    assert done.fidelity[0].sqnr_db > 45


@pytest.mark.parametrize("scale", SCALES)
def test_zero_and_tiny_groups_have_a_valid_scale_and_codes_of_zero(scale: Scale) -> None:
    w = torch.zeros(2, 128)
    w[0, 32:64] = 1e-44
    w[1, 0] = 2.0**-130
    done = rtn(w, Grid(4, 32), scale=scale)
    assert (done.codes == 0).all()
    assert (done.scales == ZERO_GROUP_SCALE).all()
    assert done.dequantize().isfinite().all()


@pytest.mark.parametrize("scale", SCALES)
def test_nan_and_infinity_are_refused_with_counts(scale: Scale) -> None:
    w = weight(8, 128)
    w[1, 5], w[1, 6], w[7, 127], w[0, 0] = torch.nan, -torch.nan, torch.inf, -torch.inf
    with pytest.raises(QuantizeError, match="2 NaN and 2 infinite values among 1,024"):
        rtn(w, Grid(4, 32), scale=scale)
    with pytest.raises(QuantizeError, match="2 NaN and 2 infinite values among 1,024"):
        rtn_plain(w, Grid(4, 32), scale=scale)
    with pytest.raises(QuantizeError) as failure:
        rtn(torch.stack([weight(8, 128), w]), Grid(4, 32), scale=scale)
    assert failure.value.where == "matrix 1 of the stack"


def test_a_stack_is_its_matrices_one_by_one() -> None:
    w = torch.stack([weight(8, 256, seed=seed) for seed in range(6)]).reshape(2, 3, 8, 256)
    done = rtn(w, Grid(4, 64))
    assert done.scales.shape == (2, 3, 8, 4)
    for i, matrix in enumerate(w.reshape(6, 8, 256)):
        alone = rtn(matrix, Grid(4, 64))
        assert torch.equal(done.codes.reshape(6, 8, 256)[i], alone.codes)
        assert done.fidelity[i] == alone.fidelity[0]


@pytest.mark.parametrize("scale", SCALES)
def test_bands_in_threads_give_the_same_codes(scale: Scale) -> None:
    w = weight(96, 512).numpy()
    w[10] = np.round(w[10] * 100)  # one row on a grid must not change its neighbours' scales
    codes, scales = np.empty(w.shape, np.int8), np.empty((96, 16), np.uint16)
    with ThreadPoolExecutor(4) as pool:
        bands = [slice(start, start + 7) for start in range(0, 96, 7)]
        list(pool.map(lambda band: rtn_band(w[band], codes[band], scales[band], Grid(4, 32), scale), bands))
    whole = rtn(torch.from_numpy(w), Grid(4, 32), scale=scale)
    assert np.array_equal(codes, whole.codes.numpy())
    assert np.array_equal(scales, whole.scales.view(torch.uint16).numpy())


def test_out_is_written_and_returned() -> None:
    w = weight(4, 128)
    first = rtn(w, Grid())
    out = QuantizedWeight(torch.zeros(4, 128, dtype=torch.int8), torch.zeros(4, 4, dtype=torch.bfloat16), Grid(), ())
    again = rtn(w, Grid(), out=out)
    assert again.codes is out.codes
    assert torch.equal(out.codes, first.codes)
    assert torch.equal(out.scales, first.scales)


def test_wrong_shapes_and_types_are_refused() -> None:
    with pytest.raises(QuantizeError, match="bfloat16"):
        rtn(torch.zeros(4, 128, dtype=torch.bfloat16), Grid())
    with pytest.raises(QuantizeError, match="100 columns"):
        rtn(torch.zeros(4, 100), Grid())
    with pytest.raises(QuantizeError, match="buffers of shape"):
        rtn_band(np.zeros((4, 128), np.float32), np.zeros((4, 128), np.int8), np.zeros((4, 2), np.uint16), Grid(4, 32))


def test_an_empty_weight_is_fine() -> None:
    assert rtn(torch.zeros(0, 128), Grid()).codes.shape == (0, 128)


@pytest.mark.slow
def test_kernels_work_where_the_package_is_read_only(tmp_path: Path) -> None:
    """Numba's cache falls back to the user's folder; importing compiles nothing."""
    package, home = tmp_path / "site" / "moepress", tmp_path / "home"
    source = Path(rtn_module.__file__).parent
    (package / "quantize").mkdir(parents=True)
    for file in [source.parent / "__init__.py", source.parent / "errors.py", *source.glob("*.py")]:
        (package / file.relative_to(source.parent)).write_bytes(file.read_bytes())
    (package / "quantize" / "__pycache__").write_text("a file: no folder can be made here, not even by root")
    code = (
        "import sys, torch\n"
        "from moepress.quantize import rtn, rounding_kernel\n"
        "assert rtn.__file__.startswith(sys.argv[1]), rtn.__file__\n"
        "assert not rounding_kernel.round_rows.signatures, 'compiled at import'\n"
        "from moepress.quantize.grid import Grid\n"
        "done = rtn.rtn(torch.ones(2, 32), Grid())\n"
        "assert rounding_kernel.round_rows.signatures\n"
        "print(int(done.codes.sum()), sum(rounding_kernel.round_rows.stats.cache_hits.values()))\n"
    )
    environment = {
        **os.environ,
        "PYTHONPATH": str(package.parent),
        "HOME": str(home),
        "XDG_CACHE_HOME": str(home / ".cache"),
    }
    environment.pop("NUMBA_CACHE_DIR", None)
    command = [sys.executable, "-c", code, str(package)]
    for cache_hits in (0, 1):
        run = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert run.returncode == 0, run.stderr
        assert run.stdout.split() == [str(7 * 64), str(cache_hits)]


@pytest.mark.parametrize("group", [32, 128, -1])
def test_scales_of_either_sign_agree_with_torch_and_lose_less(group: int) -> None:
    w = weight(64, 512)
    fast, plain = rtn(w, Grid(4, group, True), scale="mse"), rtn_plain(w, Grid(4, group, True), scale="mse")
    assert torch.equal(fast.codes, plain.codes)
    assert torch.equal(fast.scales.view(torch.int16), plain.scales.view(torch.int16))
    positive = rtn(w, Grid(4, group), scale="mse")
    assert fast.fidelity[0].sum_sq_error < (0.97 if group == 32 else 1.0) * positive.fidelity[0].sum_sq_error
    mirrored = rtn(-w, Grid(4, group, True), scale="mse")
    assert torch.equal(mirrored.dequantize(), -fast.dequantize())
