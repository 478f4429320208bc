"""The compiled pass against the chain of tensors it stands for: the same bytes, the same digest, the same refusals."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from moepress.convert.decide import Decision
from moepress.convert.press import chain as press_chain
from moepress.convert.press import press
from moepress.convert.press.fused import fused_bf16, fused_int4
from moepress.convert.press.pieces import Piece, Pressed, Scratch
from moepress.errors import FormatError, MoepressError, QuantizeError
from moepress.formats.families import Component, Identity
from moepress.formats.fp8 import encode_fp8_block
from moepress.formats.reader import TensorReader
from moepress.formats.storage import resolve_storage
from moepress.recipe import Recipe, load_recipe
from tests.formats.one_shard import FP8_BLOCK, one_shard
from tests.pressing import press as convert_family
from tests.tiny_checkpoints import build

NAME = "experts.0.down_proj.weight"


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    """Small tensors: a thread pool costs more than it brings."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def every_code(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    """FP8 codes in a random order, NaN left out; one in 16 is subnormal."""
    random = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (rows, columns), dtype=torch.uint8, generator=random)
    codes[(codes & 0x7F) == 0x7F] = 0x7E
    return codes.view(torch.float8_e4m3fn)


def block_scales(rows: int, columns: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    scale = torch.rand(-(-rows // 128), -(-columns // 128), generator=torch.Generator().manual_seed(1))
    return ((scale + 0.01) * 1e-3).to(dtype)


class Source:
    """One weight in a checkpoint of its own, pressed by both ways."""

    def __init__(self, folder: Path, weight: torch.Tensor, scale: torch.Tensor | None = None, **config: Any) -> None:
        tensors = {NAME: weight} if scale is None else {NAME: weight, f"{NAME}_scale_inv": scale}
        quantization = None if scale is None else FP8_BLOCK | config
        if scale is not None and quantization is not None and scale.ndim < 2:
            quantization["weight_block_size"] = None
        self.checkpoint = one_shard(folder, tensors, quantization)
        self.stored = resolve_storage(self.checkpoint)[NAME]

    def piece(self, first: int = 0, last: int | None = None) -> Piece:
        identity = Identity(Component.ROUTED_EXPERT, 0, 0, "down_proj", False)
        rows = self.stored.shape[0] if last is None else last
        return Piece(Decision(self.stored, identity, "quantize", "routed expert"), first, rows)

    def both(self, recipe: Recipe, *pieces: Piece) -> list[tuple[Pressed, Pressed]]:
        scratch = Scratch()
        with TensorReader(self.checkpoint, threads=1) as reader:
            made = []
            for piece in pieces or (self.piece(),):
                fused = fused_int4(piece, reader, recipe, scratch)
                assert fused is not None, "not covered"
                made.append((fused, press_chain.quantize(piece, reader, recipe, Scratch())))
            return made


def recipe(group_size: int = 32, scale: str = "max") -> Recipe:
    return load_recipe("kimi-k2", [f"weights.group_size={group_size}", f"weights.scale={scale}"])


def assert_same(fused: Pressed, chain: Pressed) -> None:
    for mine, theirs in zip(fused.outputs, chain.outputs, strict=True):
        assert np.array_equal(mine, theirs)
    assert fused.digest == chain.digest
    if chain.fidelity is not None:
        assert fused.fidelity is not None
        assert fused.fidelity.max_abs_error == chain.fidelity.max_abs_error
        assert fused.fidelity.sum_sq_error == pytest.approx(chain.fidelity.sum_sq_error, rel=2e-6, abs=1e-300)
        assert fused.fidelity.sum_sq_weight == pytest.approx(chain.fidelity.sum_sq_weight, rel=2e-6, abs=1e-300)


@pytest.mark.parametrize("scale", ["max", "mse"])
@pytest.mark.parametrize(
    ("group_size", "columns"),
    [(32, 352), (32, 2048), (64, 576), (128, 640), (-1, 8), (-1, 72), (-1, 520), (-1, 1568), (32, 32), (128, 128)],
)
def test_fp8_in_every_group_size_and_with_ragged_edges(
    group_size: int, columns: int, scale: str, tmp_path: Path
) -> None:
    """Widths below, at and over the strips of 512 columns; rows of a cut-off block; pieces that begin inside one."""
    source = Source(tmp_path, every_code(200, columns), block_scales(200, columns))
    for pair in source.both(recipe(group_size, scale), source.piece(), source.piece(128), source.piece(70, 133)):
        assert_same(*pair)


@pytest.mark.parametrize("group_size", [32, 64, 128, -1])
@pytest.mark.parametrize("scale", ["max", "mse"])
def test_bf16_with_ties_zeros_and_very_small_numbers(group_size: int, scale: str, tmp_path: Path) -> None:
    """Few significant bits make ties at every half step; a group of zeros; groups below what a scale can be."""
    random = torch.Generator().manual_seed(3)
    weight = torch.randint(-15, 16, (24, 768), generator=random).float() * 0.5
    weight[3] = 0
    weight[4, :128] = 0
    weight[5] *= 2.0**-130
    weight[6] = torch.randn(768, generator=random) * 1e-38
    weight[8, ::2] = -0.0
    weight[9:12] = torch.randn(3, 768, generator=random)
    weight[12] = 7.5
    weight[13] = -7.5
    source = Source(tmp_path, weight.bfloat16())
    for pair in source.both(recipe(group_size, scale), source.piece(), source.piece(8)):
        assert_same(*pair)
    (fused, _), *_ = source.both(recipe(group_size, "max"))
    scales = fused.outputs[1].view(np.uint16).reshape(24, -1)
    assert set(scales[3].tolist()) == {0x3C00}, "2^-7 where there is nothing to scale"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_block_scales_of_sixteen_bits(dtype: torch.dtype, tmp_path: Path) -> None:
    source = Source(tmp_path, every_code(130, 256), block_scales(130, 256, dtype) * 8)
    assert_same(*source.both(recipe())[0])


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e8m0fnu])
def test_e8m0_scales(dtype: torch.dtype, tmp_path: Path) -> None:
    """SC: exponent bytes, in their own type or as plain bytes; 0 is 2^-127."""
    exponents = torch.randint(100, 128, (2, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    exponents[0, 0] = 0
    source = Source(tmp_path, every_code(256, 384), exponents.view(dtype), scale_fmt="ue8m0")
    assert source.stored.scale_encoding == "e8m0"
    assert_same(*source.both(recipe())[0])


@pytest.mark.parametrize("shape", [(96,), (96, 1), (1,), ()])
def test_scales_of_a_channel_and_of_a_tensor(shape: tuple[int, ...], tmp_path: Path) -> None:
    scale = torch.rand(shape, generator=torch.Generator().manual_seed(2)) * 1e-2 + 1e-3
    source = Source(tmp_path, every_code(96, 544), scale, weight_block_size=None)
    for pair in source.both(recipe(), source.piece(), source.piece(32, 64)):
        assert_same(*pair)


def test_large_trained_like_weights_over_many_pieces(tmp_path: Path) -> None:
    weight = torch.randn(640, 1536, generator=torch.Generator().manual_seed(5)) * 0.02
    weight[17, 33] = 3.0  # the rest of its block becomes subnormal codes
    source = Source(tmp_path, *encode_fp8_block(weight))
    for pair in source.both(recipe(), *(source.piece(first, first + 128) for first in range(0, 640, 128))):
        assert_same(*pair)


def refusals(source: Source, recipe: Recipe) -> list[MoepressError]:
    """What the pass and the chain raise."""
    raised: list[MoepressError] = []
    with TensorReader(source.checkpoint, threads=1) as reader:
        for way in (fused_int4, press_chain.quantize):
            with pytest.raises(MoepressError) as failure:
                way(source.piece(), reader, recipe, Scratch())
            raised.append(failure.value)
    return raised


@pytest.mark.parametrize("scale", ["max", "mse"])
def test_nan_codes_are_refused_by_name(scale: str, tmp_path: Path) -> None:
    codes = every_code(64, 256).view(torch.uint8)
    codes[3, 5], codes[60, 255] = 0x7F, 0xFF
    source = Source(tmp_path, codes.view(torch.float8_e4m3fn), block_scales(64, 256))
    for error in refusals(source, recipe(32, scale)):
        assert isinstance(error, FormatError)
        assert error.what == "2 FP8 codes are NaN (0x7F or 0xFF)"
        assert error.where == NAME


@pytest.mark.parametrize("scale", ["max", "mse"])
def test_nan_and_infinity_in_bf16_are_refused_by_name(scale: str, tmp_path: Path) -> None:
    weight = torch.randn(16, 256)
    weight[2, 0], weight[2, 1], weight[15, 255], weight[7, 7] = torch.nan, torch.inf, -torch.inf, -torch.nan
    for error in refusals(Source(tmp_path, weight.bfloat16()), recipe(32, scale)):
        assert isinstance(error, QuantizeError)
        assert error.what == "2 NaN and 2 infinite values among 4,096 weights"
        assert error.where == f"{NAME}, rows 0 to 16"


def test_products_that_overflow_are_refused(tmp_path: Path) -> None:
    scale = torch.tensor([[1e-3, 3e38]])
    for error in refusals(Source(tmp_path, torch.full((4, 256), 2.0).to(torch.float8_e4m3fn), scale), recipe()):
        assert isinstance(error, QuantizeError)
        assert error.what == "0 NaN and 512 infinite values among 1,024 weights"


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf, -1e-3])
def test_scales_that_cannot_be_meant_are_refused(wrong: float, tmp_path: Path) -> None:
    scale = block_scales(256, 256)
    scale[1, 1] = wrong
    first, second = refusals(Source(tmp_path, every_code(256, 256), scale), recipe())
    assert isinstance(first, FormatError)
    assert str(first) == str(second)


def test_what_the_pass_does_not_cover_goes_through_the_chain(tmp_path: Path) -> None:
    codes = every_code(128, 256)
    codes.view(torch.uint8)[:, 128:] = 0
    zero_block = Source(tmp_path / "zero", codes, torch.tensor([[1e-3, 0.0]]))
    wide = Source(tmp_path / "f32", torch.randn(32, 256))
    odd = Source(tmp_path / "odd", torch.randn(32, 100).bfloat16())
    huge = Source(tmp_path / "huge", (torch.randn(32, 128) * 1e37).bfloat16())
    minute = Source(tmp_path / "minute", (torch.randn(32, 128) * 1e-25).bfloat16())
    zeros = Source(tmp_path / "zeros", torch.zeros(32, 128).bfloat16())
    for source, group_size in ((zero_block, 32), (wide, 32), (odd, -1), (huge, 32), (minute, 32), (zeros, 32)):
        with TensorReader(source.checkpoint, threads=1) as reader:
            piece = source.piece()
            assert fused_int4(piece, reader, recipe(group_size), Scratch()) is None
            expected = press_chain.quantize(piece, reader, recipe(group_size), Scratch())
            assert_same(press(piece, reader, recipe(group_size), Scratch()), expected)


@pytest.mark.parametrize("scale_dtype", ["block", "channel", "tensor"])
def test_fp8_widened_to_bf16(scale_dtype: str, tmp_path: Path) -> None:
    """Every code, minus zero and subnormals included, rounded once."""
    scales = {"block": block_scales(200, 520), "channel": torch.rand(200) + 0.01, "tensor": torch.tensor(0.3)}
    source = Source(tmp_path, every_code(200, 520), scales[scale_dtype])
    with TensorReader(source.checkpoint, threads=1) as reader:
        for piece in (source.piece(), source.piece(70, 133)):
            fused = fused_bf16(piece, reader, Scratch())
            assert fused is not None
            assert_same(fused, press_chain.to_bf16(piece, reader, Scratch()))


def test_rounding_an_fp8_checkpoint_needs_no_torch(tmp_path: Path) -> None:
    """Its start would take longer than pressing a gigabyte; the bytes are those of a process that has it."""
    source = build("kimi", tmp_path / "src")
    convert_family(source.folder, tmp_path / "with", "kimi")
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "from moepress.convert.run import convert\n"
        "from moepress.recipe import load_recipe\n"
        "recipe = load_recipe('kimi-k2', ['serving.tensor_parallel=1'])\n"
        f"convert({str(source.folder)!r}, Path({str(tmp_path / 'without')!r}), recipe, threads=1)\n"
        "print(sorted({'torch', 'transformers'} & set(sys.modules)))\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"
    for shard in (tmp_path / "with").glob("*.safetensors"):
        assert shard.read_bytes() == (tmp_path / "without" / shard.name).read_bytes()
