"""What must come out of a source that can be converted, computed from its bytes with numpy and nothing of moepress.

    routed experts, FP8 or BF16     w = code · scale of its block;  s = bf16(max|w| / 7.5) of each 32 columns, 2⁻⁷ where
                                    that is no normal number;  q = clamp(round(w / s), −8, 7);  words low nibble first, +8
    everything else                 its bytes; an FP8 scale under the name that the layout gives it

So a flipped bit of a mantissa must give the rounding of the flipped value, and a flipped bit of a kept tensor must arrive.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from fuzz.bounded import Wrong
from fuzz.small import GROUP, INDEX, bf16

SCALES = ("weight_scale_inv", "weight_scale", "scale")
Tensors = dict[str, tuple[str, tuple[int, ...], bytes]]

_E4M3 = np.array(
    [
        (
            np.nan
            if (c & 0x7F) == 0x7F
            else (1 + (c & 7) / 8) * 2.0 ** (((c >> 3) & 15) - 7)
            if (c >> 3) & 15
            else (c & 7) / 8 * 2.0**-6
        )
        * (-1 if c & 0x80 else 1)
        for c in range(256)
    ],
    np.float32,
)


def read(folder: Path) -> Tensors:
    """Every tensor of a folder's shards, by hand: dtype, shape, bytes. The last of equal names wins, as in most readers."""
    found: Tensors = {}
    index = folder / INDEX
    listed = json.loads(index.read_text("utf-8-sig"))["weight_map"].values() if index.is_file() else ()
    for path in sorted(folder / name for name in set(listed)) or sorted(folder.glob("*.safetensors")):
        raw = path.read_bytes()
        start = 8 + int.from_bytes(raw[:8], "little")
        for name, entry in json.loads(raw[8:start]).items():
            if name != "__metadata__":
                first, last = entry["data_offsets"]
                found[name] = (entry["dtype"], tuple(entry["shape"]), raw[start + first : start + last])
    return found


def expected(source: Tensors, layout: str, config: dict[str, Any]) -> Tensors:
    """The output's tensors. ``config``: the source's, for the size of an FP8 block."""
    declared = config.get("quantization_config")
    block = declared.get("weight_block_size") if isinstance(declared, dict) else None
    out: Tensors = {}
    for name, (dtype, shape, data) in source.items():
        module, _, last = name.rpartition(".")
        if last in SCALES and f"{module}.weight" in source:
            continue
        if last == "input_scale" and ".experts." in name and f"{module}.weight" in source:
            continue  # of static activations, which a packed weight does not have
        if last == "weight" and ".experts." in name:
            out |= _pressed(module, _values(source, name, block), shape)
        elif dtype == "F8_E4M3":
            scale = _scale(source, module)
            out[name] = (dtype, shape, data)
            suffix = "weight_scale_inv" if layout == "linear_fp8_config" else "weight_scale"
            scale_shape = (scale[1][0], 1) if len(scale[1]) == 1 and shape[0] == scale[1][0] else scale[1]
            out[f"{module}.{suffix}"] = (scale[0], scale_shape, scale[2])
        else:
            out[name] = (dtype, shape, data)
    return out


def _scale(source: Tensors, module: str) -> tuple[str, tuple[int, ...], bytes]:
    return next(source[f"{module}.{suffix}"] for suffix in SCALES if f"{module}.{suffix}" in source)


def numbers(dtype: str, data: bytes) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Float32 values of a tensor's bytes."""
    if dtype == "BF16":
        return (np.frombuffer(data, np.uint16).astype(np.uint32) << 16).view(np.float32)
    if dtype == "F8_E4M3":
        return _E4M3[np.frombuffer(data, np.uint8)]
    kinds: dict[str, Any] = {"F32": np.float32, "F16": np.float16, "F64": np.float64}
    return np.frombuffer(data, kinds[dtype]).astype(np.float32)


def _values(source: Tensors, name: str, block: list[int] | None) -> np.ndarray[Any, np.dtype[np.float32]]:
    dtype, shape, data = source[name]
    values = numbers(dtype, data).reshape(shape)
    if dtype != "F8_E4M3":
        return values
    scale_dtype, scale_shape, scale_data = _scale(source, name.removesuffix(".weight"))
    scale = numbers(scale_dtype, scale_data)
    rows, columns = shape
    if block is None:
        return values * scale.reshape(-1, 1)  # by row, or one for all
    if scale_shape != (-(-rows // block[0]), -(-columns // block[1])):
        raise Wrong(f"{name} {list(shape)} was read with scales {list(scale_shape)} under blocks of {block}")
    return values * scale.reshape(scale_shape).repeat(block[0], 0)[:rows].repeat(block[1], 1)[:, :columns]


def _pressed(module: str, w: np.ndarray[Any, np.dtype[np.float32]], shape: tuple[int, ...]) -> Tensors:
    rows, columns = shape
    groups = w.reshape(rows, columns // GROUP, GROUP)
    with np.errstate(all="ignore"):
        peaks = np.abs(groups).max(2) / np.float32(7.5)
        scale = np.frombuffer(bf16(peaks), np.uint16).reshape(rows, columns // GROUP)
        values = (scale.astype(np.uint32) << 16).view(np.float32)
        unusable = values < 2.0**-126
        values = np.where(unusable, np.float32(2.0**-7), values)
        scale = np.where(unusable, np.uint16(0x3C00), scale)
        codes = np.clip(groups / values[:, :, None], -8, 7).round().astype(np.int64).reshape(rows, columns)
    words = ((codes + 8).reshape(rows, columns // 8, 8) << (4 * np.arange(8))).sum(2).astype(np.uint32)
    return {
        f"{module}.weight_packed": ("I32", (rows, columns // 8), words.tobytes()),
        f"{module}.weight_scale": ("BF16", (rows, columns // GROUP), scale.astype(np.uint16).tobytes()),
        f"{module}.weight_shape": ("I64", (2,), np.array(shape, np.int64).tobytes()),
    }
