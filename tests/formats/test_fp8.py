"""FP8 decoding and encoding, against arithmetic one value at a time and against compressed-tensors."""

from __future__ import annotations

import math

import pytest
import torch
from compressed_tensors.entrypoints.convert.converters.fp8block_dequantizer import FP8BlockDequantizer
from hypothesis import given, settings
from hypothesis import strategies as st

from moepress.errors import FormatError
from moepress.formats.fp8 import (
    check_scale,
    decode_band,
    decode_band_plain,
    decode_e8m0,
    decode_fp8,
    encode_fp8_block,
)


def finite_codes(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    """Every code but the two NaN, at random."""
    random = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (rows, columns), dtype=torch.uint8, generator=random)
    codes[(codes & 0x7F) == 0x7F] = 0x7E
    return codes.view(torch.float8_e4m3fn)


def value_of(code: int) -> float:
    """e4m3 by its definition: sign, 4 exponent bits of bias 7, 3 mantissa bits, no infinity."""
    exponent, mantissa = (code >> 3) & 15, code & 7
    magnitude = mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return -magnitude if code & 128 else magnitude


def one_by_one(codes: torch.Tensor, scale: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    raw = codes.view(torch.uint8).tolist()
    factors = scale.to(torch.float32).tolist()
    rows = [
        [value_of(code) * factors[r // block[0]][c // block[1]] for c, code in enumerate(line)]
        for r, line in enumerate(raw)
    ]
    return torch.tensor(rows, dtype=torch.float64).to(torch.float32)


@pytest.mark.parametrize("shape", [(192, 32), (130, 257), (576, 8), (1, 1), (128, 128)])
def test_ragged_edge_blocks_are_cut_off(shape: tuple[int, int]) -> None:
    """FP-01: kv_a_proj_with_mqa has 576 rows, no multiple of 128; the output has the input's shape."""
    codes = finite_codes(*shape)
    scale = torch.rand(math.ceil(shape[0] / 128), math.ceil(shape[1] / 128)) + 0.1
    decoded = decode_fp8(codes, scale, block=(128, 128))
    assert decoded.dtype == torch.float32
    assert torch.equal(decoded, one_by_one(codes, scale, (128, 128)))


def test_block_size_is_the_declared_one_and_never_guessed() -> None:
    """FP-02: 576 rows under 5 scales are blocks of 128, although blocks of 116 give five as well."""
    truth = torch.randn(576, 256)
    truth *= torch.tensor([1.0, 30.0])[torch.arange(576) // 128 % 2, None]
    codes, scale = encode_fp8_block(truth)
    assert scale.shape == (5, 2)
    decoded = decode_fp8(codes, scale, block=(128, 128))
    assert (decoded - truth).norm() / truth.norm() < 0.03
    guessed = one_by_one(codes, scale, (math.ceil(576 / 5), 128))
    assert (guessed - truth).norm() / truth.norm() > 0.5, "the fixture must be able to tell"
    for wrong in [(64, 128), (116, 116), (128, 64)]:
        with pytest.raises(FormatError, match=rf"expected .* for blocks of {wrong[0]}×{wrong[1]}"):
            decode_fp8(codes, scale, block=wrong)
    with pytest.raises(FormatError, match="expected one scale per channel or per tensor"):
        decode_fp8(codes, scale, block=None)


@pytest.mark.parametrize(
    ("scale_shape", "block"),
    [((96, 1), (1, 64)), ((96,), (1, 64)), ((), (96, 64)), ((1,), (96, 64)), ((1, 1), (96, 64))],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_one_scale_per_channel_or_per_tensor(
    scale_shape: tuple[int, ...], block: tuple[int, int], dtype: torch.dtype
) -> None:
    codes = finite_codes(96, 64)
    scale = (torch.rand(scale_shape) + 0.1).to(dtype)
    expected = one_by_one(codes, scale.reshape(-1, 1), block)
    assert torch.equal(decode_fp8(codes, scale, block=None), expected)


def test_all_codes_decode_by_definition() -> None:
    codes = torch.tensor([code for code in range(256) if code & 127 != 127], dtype=torch.uint8)
    decoded = decode_fp8(codes.view(torch.float8_e4m3fn)[None], torch.ones(1, 1), block=(128, 256))
    assert decoded[0].tolist() == [value_of(code) for code in codes.tolist()]


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 70),
    columns=st.integers(1, 70),
    block=st.tuples(st.integers(1, 80), st.integers(1, 80)),
    seed=st.integers(0, 2**31),
    data=st.data(),
)
def test_compiled_loop_is_bit_equal_to_its_plain_twin(
    rows: int, columns: int, block: tuple[int, int], seed: int, data: st.DataObject
) -> None:
    first = data.draw(st.integers(0, rows - 1))
    last = data.draw(st.integers(first + 1, rows))
    random = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (rows, columns), dtype=torch.uint8, generator=random).view(torch.float8_e4m3fn)
    scale = torch.rand(math.ceil(rows / block[0]), math.ceil(columns / block[1]), generator=random)
    compiled, plain = torch.empty(last - first, columns), torch.empty(last - first, columns)
    band = codes[first:last]
    counts = [f(band, scale, *block, first, out) for f, out in [(decode_band, compiled), (decode_band_plain, plain)]]
    assert counts[0] == counts[1] == int(band.to(torch.float32).isnan().sum())
    not_a_number = plain.isnan()  # refused by whoever calls; which NaN it is means nothing
    assert torch.equal(compiled.isnan(), not_a_number)
    assert torch.equal(compiled.view(torch.int32)[~not_a_number], plain.view(torch.int32)[~not_a_number])


@pytest.mark.oracle
@pytest.mark.parametrize("shape", [(192, 256), (130, 257), (576, 384)])
def test_agrees_with_compressed_tensors_dequantizer(shape: tuple[int, int]) -> None:
    codes, scale = encode_fp8_block(torch.randn(shape))
    oracle = FP8BlockDequantizer(targets=["Linear"], dtype=torch.float32)
    expected = oracle.process({"a.weight": codes, "a.weight_scale_inv": scale})["a.weight"]
    assert torch.equal(decode_fp8(codes, scale, block=(128, 128)), expected)


def test_a_band_of_rows_equals_the_rows_of_the_whole() -> None:
    codes, scale = encode_fp8_block(torch.randn(300, 200))
    whole = decode_fp8(codes, scale, block=(128, 128))
    for first, last in [(0, 300), (0, 1), (127, 129), (130, 131), (256, 300), (70, 70)]:
        band = decode_fp8(codes[first:last], scale, block=(128, 128), first_row=first, rows=300)
        assert torch.equal(band, whole[first:last])
    with pytest.raises(FormatError, match="rows 290 to 310 were asked for of a weight that has 300"):
        decode_fp8(finite_codes(20, 200), scale, block=(128, 128), first_row=290, rows=300)


def test_fills_the_callers_buffer_and_refuses_one_that_does_not_fit() -> None:
    codes, scale = encode_fp8_block(torch.randn(40, 60))
    buffer = torch.full((40, 60), math.nan)
    assert decode_fp8(codes, scale, block=(128, 128), out=buffer) is buffer
    assert torch.equal(buffer, decode_fp8(codes, scale, block=(128, 128)))
    for wrong in [torch.empty(60, 40), torch.empty(40, 60, dtype=torch.bfloat16), torch.empty(60, 40).T]:
        with pytest.raises(FormatError, match="must be contiguous float32"):
            decode_fp8(codes, scale, block=(128, 128), out=wrong)


def test_e8m0_bytes_are_exponents() -> None:
    """FP-05: byte 120 is 2^-7; read as a number it would be 120, some 15,000 times too large."""
    stored = torch.arange(255, dtype=torch.int16).to(torch.uint8)
    expected = [2.0 ** (byte - 127) for byte in range(255)]
    assert decode_e8m0(stored).tolist() == expected
    assert decode_e8m0(stored.view(torch.float8_e8m0fnu)).tolist() == expected
    assert decode_e8m0(torch.tensor([120], dtype=torch.uint8)).item() == 0.0078125


def test_e8m0_scales_decode_a_weight() -> None:
    codes = finite_codes(64, 64)
    stored = torch.tensor([[120, 121]], dtype=torch.uint8).view(torch.float8_e8m0fnu)
    expected = one_by_one(codes, torch.tensor([[2.0**-7, 2.0**-6]]), (64, 32))
    assert torch.equal(decode_fp8(codes, stored, block=(64, 32)), expected)


def test_e8m0_nan_is_refused_with_a_count() -> None:
    stored = torch.tensor([[1, 255], [255, 2]], dtype=torch.uint8)
    with pytest.raises(FormatError, match="2 of 4 E8M0 scales are NaN") as caught:
        decode_e8m0(stored, name="layer.scale")
    assert caught.value.where == "layer.scale"
    with pytest.raises(FormatError, match="is bytes"):
        decode_e8m0(stored.to(torch.float32))


def test_e8m0_bytes_that_were_stored_as_numbers_are_recognised() -> None:
    """FP-06: scales of 110 to 127 in float32 are exponent bytes somebody copied as values."""
    with pytest.raises(FormatError, match="weights beyond 14,000 in every block") as caught:
        check_scale(torch.tensor([[118.0, 121.0], [117.0, 120.0]]), name="w")
    assert caught.value.hint
    assert "E8M0" in caught.value.hint
    check_scale(torch.tensor([[30.0, 120.0]]), name="w")  # one odd block is no pattern


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (math.inf, "1 of 4 scales are NaN or infinite"),
        (math.nan, "1 of 4 scales"),
        (-0.5, "1 of 4 scales are negative"),
    ],
)
def test_scales_that_cannot_be_meant_are_refused(value: float, message: str) -> None:
    """FP-10: a float32 scale holding infinity."""
    codes, scale = encode_fp8_block(torch.randn(200, 200))
    scale[1, 0] = value
    with pytest.raises(FormatError, match=message) as caught:
        decode_fp8(codes, scale, block=(128, 128), name="model.layers.1.mlp.up_proj.weight")
    assert caught.value.where == "model.layers.1.mlp.up_proj.weight"


def test_nan_codes_are_refused_by_name_with_a_count() -> None:
    """FP-10: bytes 0x7F and 0xFF; quantized further they would quietly become zeros."""
    codes, scale = encode_fp8_block(torch.randn(130, 140))
    codes.view(torch.uint8)[3, 139] = 0x7F
    codes.view(torch.uint8)[129, 0] = 0xFF
    with pytest.raises(FormatError, match=r"2 of 18200 FP8 codes are NaN \(0x7F or 0xFF\)") as caught:
        decode_fp8(codes, scale, block=(128, 128), name="w")
    assert caught.value.where == "w"


def test_zero_scale_is_fine_over_zeros_and_refused_over_weights() -> None:
    codes, scale = encode_fp8_block(torch.randn(256, 128))
    codes[:128] = 0
    scale[0] = 0
    assert not decode_fp8(codes, scale, block=(128, 128))[:128].any()
    codes[5, 7] = 1
    with pytest.raises(FormatError, match="1 nonzero FP8 codes lie under a scale of zero"):
        decode_fp8(codes, scale, block=(128, 128))


@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16, torch.float8_e8m0fnu])
def test_encoding_divides_by_the_scale_that_is_stored(scale_dtype: torch.dtype) -> None:
    """FP-08: dividing by the unrounded scale and storing the rounded one doubles weights (relative error 0.69)."""
    weight = torch.randn(128, 128, generator=torch.Generator().manual_seed(3))
    codes, scale = encode_fp8_block(weight, scale_dtype=scale_dtype)
    assert scale.dtype == scale_dtype
    decoded = decode_fp8(codes, scale, block=(128, 128))
    assert (decoded - weight).norm() / weight.norm() < 0.028
    if scale_dtype == torch.float8_e8m0fnu:
        exact = weight.abs().max() / 448
        wrong = (weight / exact).to(torch.float8_e4m3fn).to(torch.float32) * decode_e8m0(scale)
        assert (wrong - weight).norm() / weight.norm() > 0.3, "the fixture must be able to tell"
        assert decode_e8m0(scale).item() == 2.0 ** math.ceil(math.log2(exact))


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.floats(-(2.0**127), 2.0**127, width=32), min_size=1, max_size=40),
    st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_encoding_clamps_before_every_cast(values: list[float], scale_dtype: torch.dtype) -> None:
    """FP-10: no NaN byte comes out, whatever finite values go in."""
    codes, scale = encode_fp8_block(torch.tensor([values]), block=(1, 8), scale_dtype=scale_dtype)
    assert not codes.to(torch.float32).isnan().any()
    assert torch.isfinite(scale.to(torch.float32)).all()


def test_encoding_keeps_exact_powers_of_two_and_zero_blocks() -> None:
    weight = torch.zeros(4, 8)
    weight[0, 0], weight[0, 5] = 448.0, 2.0**-10
    codes, scale = encode_fp8_block(weight, block=(4, 4), scale_dtype=torch.float8_e8m0fnu)
    assert torch.equal(decode_fp8(codes, scale, block=(4, 4)), weight)
    assert decode_e8m0(scale)[0, 0] == 1.0


def test_encoding_refuses_nan_and_infinity() -> None:
    for bad in (math.nan, math.inf):
        with pytest.raises(FormatError, match="NaN or infinity"):
            encode_fp8_block(torch.tensor([[1.0, bad]]))


def test_other_dtypes_are_refused() -> None:
    with pytest.raises(FormatError, match="expected float8_e4m3fn"):
        decode_fp8(torch.zeros(2, 2, dtype=torch.float8_e5m2), torch.ones(1, 1), block=(128, 128))
