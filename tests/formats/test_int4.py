"""INT4 packing, byte for byte against compressed-tensors."""

from __future__ import annotations

import pytest
import torch
from compressed_tensors.compressors.pack_quantized import pack_to_int32, unpack_from_int32
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import dequantize
from hypothesis import given, settings
from hypothesis import strategies as st

from moepress.errors import FormatError
from moepress.formats.int4 import dequantize_int4, pack_int4, pack_plain, unpack_int4, unpack_plain


def random_codes(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(-8, 8, shape, dtype=torch.int8, generator=torch.Generator().manual_seed(seed))


def test_layout_is_low_nibble_first_with_offset_eight() -> None:
    words = pack_int4(torch.arange(-8, 8, dtype=torch.int8)[None])
    assert [word & 0xFFFFFFFF for word in words[0].tolist()] == [0x76543210, 0xFEDCBA98]


@pytest.mark.oracle
@settings(max_examples=40, deadline=None)
@given(shape=st.lists(st.integers(1, 20), min_size=2, max_size=3), seed=st.integers(0, 2**31))
def test_same_bytes_as_compressed_tensors_for_every_shape(shape: list[int], seed: int) -> None:
    """I4-03, I4-04: matrices and stacks of experts, widths that do not fill a word."""
    codes = random_codes(*shape, seed=seed)
    packed = pack_int4(codes)
    assert packed.dtype == torch.int32
    assert torch.equal(packed, pack_to_int32(codes, 4))
    columns = shape[-1]
    assert torch.equal(unpack_int4(packed, columns), codes)
    if len(shape) == 2:
        assert torch.equal(unpack_from_int32(packed, 4, torch.Size(shape)), codes)


def test_stack_of_experts_packs_like_its_matrices() -> None:
    """I4-03: [2, 4, 32] gives [2, 4, 4]."""
    codes = random_codes(2, 4, 32)
    packed = pack_int4(codes)
    assert packed.shape == (2, 4, 4)
    assert torch.equal(packed, torch.stack([pack_int4(expert) for expert in codes]))


def test_a_width_that_is_not_the_packed_one_is_refused() -> None:
    """I4-04: 20 columns are 3 words; 24 would also be, 25 and 16 are not."""
    packed = pack_int4(random_codes(4, 20))
    assert packed.shape == (4, 3)
    assert unpack_int4(packed, 20).shape == (4, 20)
    for columns in (16, 25, 4):
        with pytest.raises(FormatError, match=f"3 packed words a row cannot be {columns} columns"):
            unpack_int4(packed, columns)


def test_unused_nibbles_are_zero() -> None:
    packed = pack_int4(torch.full((1, 9), 7, dtype=torch.int8))
    assert [word & 0xFFFFFFFF for word in packed[0].tolist()] == [0xFFFFFFFF, 0x0000000F]


@settings(max_examples=40, deadline=None)
@given(rows=st.integers(1, 20), words=st.integers(1, 20), seed=st.integers(0, 2**31))
def test_compiled_loops_equal_their_plain_twins(rows: int, words: int, seed: int) -> None:
    codes = random_codes(rows, words * 8, seed=seed)
    packed = pack_int4(codes)
    assert torch.equal(packed, pack_plain(codes))
    assert torch.equal(unpack_int4(packed, words * 8), unpack_plain(packed))


@pytest.mark.parametrize("offset", [1, 3, 4, 8])
def test_views_that_begin_inside_a_word(offset: int) -> None:
    codes = random_codes(1000)[offset : offset + 64].view(4, 16)
    packed = pack_int4(codes)
    assert torch.equal(packed, pack_plain(codes))
    buffer = torch.empty(1000, dtype=torch.int8)[offset : offset + 64].view(4, 16)
    assert torch.equal(unpack_int4(packed, 16, out=buffer), codes)
    assert torch.equal(pack_int4(random_codes(8, 32).T), pack_plain(random_codes(8, 32).T.contiguous()))


@pytest.mark.parametrize("code", [-9, 8, 127, -128, 16])
def test_codes_that_would_lose_bits_are_refused_with_a_count(code: int) -> None:
    for columns in (16, 13):
        codes = random_codes(3, columns)
        codes[1, 5] = code
        with pytest.raises(FormatError, match=rf"1 of {3 * columns} codes to pack are outside -8 … 7"):
            pack_int4(codes)


def test_fills_the_callers_buffer_and_refuses_one_that_does_not_fit() -> None:
    codes = random_codes(6, 40)
    packed, unpacked = torch.empty(6, 5, dtype=torch.int32), torch.empty(6, 40, dtype=torch.int8)
    assert pack_int4(codes, out=packed) is packed
    assert unpack_int4(packed, 40, out=unpacked) is unpacked
    assert torch.equal(unpacked, codes)
    with pytest.raises(FormatError, match="the buffer is"):
        pack_int4(codes, out=torch.empty(5, 6, dtype=torch.int32))
    with pytest.raises(FormatError, match="the buffer is"):
        unpack_int4(packed, 40, out=torch.empty(6, 40, dtype=torch.int16))
    with pytest.raises(FormatError, match="must be int8"):
        pack_int4(codes.to(torch.int32))
    with pytest.raises(FormatError, match="must be int32"):
        unpack_int4(codes, 40)


def test_empty_matrices() -> None:
    assert pack_int4(torch.empty(0, 16, dtype=torch.int8)).shape == (0, 2)
    assert unpack_int4(torch.empty(0, 2, dtype=torch.int32), 16).shape == (0, 16)
    assert pack_int4(torch.empty(4, 0, dtype=torch.int8)).shape == (4, 0)


@pytest.mark.oracle
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group_size", [32, 128, 256])
def test_dequantizes_as_compressed_tensors_does(group_size: int, symmetric: bool) -> None:
    """I4-07: zero points are read back, too. [8, 256], and one group that is the whole row."""
    codes = random_codes(8, 256)
    scale = torch.rand(8, 256 // group_size) + 0.01
    zero_point = None if symmetric else random_codes(8, 256 // group_size, seed=1)
    arguments = QuantizationArgs(num_bits=4, symmetric=symmetric, strategy="group", group_size=group_size)
    expected = dequantize(codes, scale, zero_point, arguments, dtype=torch.float32)
    assert torch.equal(dequantize_int4(codes, scale, zero_point=zero_point), expected)


def test_group_index_picks_each_columns_scale() -> None:
    codes = random_codes(4, 64)
    scale, zero_point = torch.rand(4, 2) + 0.1, random_codes(4, 2, seed=1)
    g_idx = torch.randperm(64, generator=torch.Generator().manual_seed(0)) % 2
    decoded = dequantize_int4(codes, scale, zero_point=zero_point, g_idx=g_idx)
    for row, column in [(0, 0), (3, 63), (2, 17)]:
        group = int(g_idx[column])
        difference = float(codes[row, column]) - float(zero_point[row, group])
        assert decoded[row, column] == torch.tensor(difference) * scale[row, group]


def test_groups_that_do_not_divide_are_refused() -> None:
    with pytest.raises(FormatError, match="do not divide"):
        dequantize_int4(random_codes(4, 64), torch.ones(4, 3))
    with pytest.raises(FormatError, match="do not divide"):
        dequantize_int4(random_codes(4, 64), torch.ones(3, 2))
    with pytest.raises(FormatError, match="zero points of shape"):
        dequantize_int4(random_codes(4, 64), torch.ones(4, 2), zero_point=random_codes(4, 1))
