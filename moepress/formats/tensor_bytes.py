"""Tensors as the bytes a shard holds, and back: views, no conversion.

numpy has no FP8, BF16 or FP4 type, so anything that goes through ``tensor.numpy()`` dies on exactly the tensors that
matter here. Bytes have no such problem: a tensor is viewed as uint8 and never interpreted. The one difference between
header and torch is F4, whose header shape counts values and whose torch shape counts bytes of two.

torch is imported at the first tensor and not before, so that writing bytes, text and JSON starts in a moment.
"""

from __future__ import annotations

import sys
from functools import cache
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from moepress.errors import FormatError
from moepress.formats.dtypes import DTYPES

if TYPE_CHECKING:
    import torch

ByteArray: TypeAlias = np.ndarray[Any, np.dtype[np.uint8]]

_NUMPY_NAMES = {
    dtype.torch_name: dtype.name for dtype in DTYPES.values()
}  # where numpy has a type, its name is torch's


@cache
def _torch_dtypes() -> dict[str, torch.dtype]:
    import torch

    named = [(dtype.name, dtype.torch_name) for dtype in DTYPES.values() if dtype.torch_name]
    return {name: getattr(torch, attribute) for name, attribute in named if hasattr(torch, attribute)}


@cache
def _header_names() -> dict[torch.dtype, str]:
    return {torch_dtype: name for name, torch_dtype in _torch_dtypes().items()}


def torch_dtype(dtype: str) -> torch.dtype:
    """The torch type of a header's dtype.

    Raises:
        FormatError: this torch has none (the F6 types).
    """
    known = _torch_dtypes().get(dtype)
    if known is None:
        raise FormatError(f"this torch has no type for {dtype}; read its bytes instead")
    return known


def torch_shape(dtype: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape torch gives a tensor of the header's ``shape``: the same, but for F4 half as many columns."""
    return (*shape[:-1], shape[-1] // 2) if dtype == "F4" else shape


def header_dtype(tensor: torch.Tensor) -> str:
    """How a header spells a tensor's type.

    Raises:
        FormatError: safetensors has no such type.
    """
    name = _header_names().get(tensor.dtype)
    if name is None:
        raise FormatError(f"safetensors has no dtype for {tensor.dtype}")
    return name


def header_shape(tensor: torch.Tensor) -> tuple[int, ...]:
    """The shape a header gives a tensor: the same, but for F4 twice as many columns."""
    shape = tuple(tensor.shape)
    return (*shape[:-1], shape[-1] * 2) if header_dtype(tensor) == "F4" else shape


def byte_view(tensor: torch.Tensor) -> ByteArray:
    """The bytes of a tensor as uint8 [nbytes], sharing its memory.

    Args:
        tensor: contiguous, on the CPU.
    """
    import torch

    view: ByteArray = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return view


def bytes_of(data: Any, *, dtype: str, shape: tuple[int, ...] | None) -> ByteArray:
    """``data`` as uint8 [nbytes], checked against what its header promises. Copies only what is not contiguous.

    Args:
        data: a torch tensor on any device; a numpy array, where uint8 stands for raw bytes; or any contiguous buffer,
            for raw bytes.
        dtype: what the header says; a tensor or array of another type is refused.
        shape: what the header says; None for a part of a tensor.

    Raises:
        FormatError: another dtype or shape. The number of bytes is for the caller to check.
    """
    # absent, or being imported by another thread at this moment: then nobody can have made a tensor
    tensor_type = getattr(sys.modules.get("torch"), "Tensor", None)
    if tensor_type is not None and isinstance(data, tensor_type):
        _check(header_dtype(data), header_shape(data), dtype, shape)
        return byte_view(data.cpu().contiguous())
    if isinstance(data, np.ndarray):
        if data.dtype != np.uint8:
            native = data.dtype.name if data.dtype.isnative else f"byte-swapped {data.dtype.name}"
            _check(_NUMPY_NAMES.get(native, native), data.shape, dtype, shape)
        flat: ByteArray = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
        return flat
    buffer = memoryview(data)
    raw: ByteArray = np.frombuffer(buffer, dtype=np.uint8) if buffer.nbytes else np.empty(0, dtype=np.uint8)
    return raw


def _check(found: str, found_shape: tuple[int, ...], dtype: str, shape: tuple[int, ...] | None) -> None:
    if found != dtype or shape not in (None, found_shape):
        promised = dtype if shape is None else f"{dtype} {list(shape)}"
        raise FormatError(f"{found} {list(found_shape)} was given, the header says {promised}")
