"""Element types: the table is the format's, and sizes agree with safetensors and torch."""

from __future__ import annotations

import re
from math import prod

import pytest
import safetensors
import torch
from handwritten import entry, shard_bytes
from hypothesis import given
from hypothesis import strategies as st

from moepress.errors import FormatError
from moepress.formats.dtypes import DTYPES, nbytes


@pytest.mark.oracle
def test_the_table_is_the_one_of_the_safetensors_library() -> None:
    with pytest.raises(safetensors.SafetensorError) as refused:
        safetensors.deserialize(shard_bytes({"a": entry("NONE", [1], 0, 1)}, b"\0"))
    known = re.findall(r"`([A-Z0-9_]+)`", str(refused.value))[1:]
    assert set(known) == set(DTYPES)


@pytest.mark.oracle
@pytest.mark.parametrize("dtype", DTYPES)
def test_sizes_are_those_the_safetensors_library_accepts(dtype: str) -> None:
    size = nbytes(dtype, (3, 4))
    safetensors.deserialize(shard_bytes({"a": entry(dtype, [3, 4], 0, size)}, bytes(size)))
    with pytest.raises(safetensors.SafetensorError):
        safetensors.deserialize(shard_bytes({"a": entry(dtype, [3, 4], 0, size + 1)}, bytes(size + 1)))


@pytest.mark.parametrize("dtype", [dtype for dtype in DTYPES.values() if dtype.torch_name])
def test_torch_types_have_the_bits_of_the_table(dtype) -> None:
    values = 2 if dtype.name == "F4" else 1  # torch's F4 element is a byte of two values
    assert getattr(torch, dtype.torch_name).itemsize * 8 == dtype.bits * values


@given(st.sampled_from([d.name for d in DTYPES.values() if d.bits >= 8]), st.lists(st.integers(0, 5000), max_size=5))
def test_bytes_are_elements_times_size(dtype: str, shape: list[int]) -> None:
    assert nbytes(dtype, tuple(shape)) == prod(shape) * DTYPES[dtype].bits // 8


def test_a_scalar_has_one_element_and_a_zero_dimension_none() -> None:
    """ST-04: zero-size tensors are tensors."""
    assert nbytes("F32", ()) == 4
    assert nbytes("BF16", (0, 16)) == 0


def test_an_odd_fp4_width_is_refused() -> None:
    """ST-07: [2, 7] would share a byte between two rows, and readers cut it silently."""
    assert nbytes("F4", (2, 8)) == 8
    for shape in [(2, 7), (4, 1), (), (3,)]:
        with pytest.raises(FormatError, match="inside a byte"):
            nbytes("F4", shape)
    assert nbytes("F6_E2M3", (2, 4)) == 6
    with pytest.raises(FormatError, match="inside a byte"):
        nbytes("F6_E2M3", (2, 2))


@pytest.mark.parametrize(
    ("dtype", "shape", "message"),
    [
        ("F5", (1,), "unknown dtype 'F5'"),
        ("f32", (1,), "unknown dtype"),
        ("F32", (-1, -1), "negative"),
        ("F32", (2**63,), "does not fit"),
        ("F32", (2**40, 2**40), "more elements"),
        ("F32", (0, 2**62, 2**62), "more elements"),
        ("F32", (1,) * 65, "65 dimensions"),
    ],
)
def test_what_cannot_be_a_tensor_is_refused(dtype: str, shape: tuple[int, ...], message: str) -> None:
    with pytest.raises(FormatError, match=message):
        nbytes(dtype, shape)
