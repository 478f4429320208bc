"""Do two checkpoints put the same values into the KV cache? One writes it (prefill), the other reads it (decode).

A cached value is x / s. The s of a layer can stand in three places, and each moves the meaning of the bytes:

    in the files     k_scale, v_scale tensors, read by servers that use them
    in the weights   2^a folded around the cache by moepress; moepress_report.json says where
    nowhere          s = 1

Bytes written with one s and read with another are wrong by their ratio, and no server compares them. So the scales are
compared by what was done, layer by layer; whether a server reads a tensor of scales is the contract's to say.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moepress.errors import CheckpointError
from moepress.formats.checkpoint import Checkpoint, TensorRef
from moepress.formats.kv_contract import SCALE_ENDINGS, KvScales
from moepress.results import REPORT_NAME

_LAYER = re.compile(r"\.layers\.(\d+)\.")


@dataclass(frozen=True)
class KvScale:
    """One scale: of a layer's cached tensor (``folded k``) or of a tensor in the files (``k_proj.k_scale``)."""

    layer: int
    what: str
    value: float


def carried_kv_scales(checkpoint: Checkpoint, contract: KvScales) -> dict[tuple[int, str], KvScale]:
    """Every scale other than 1.0 that moves what the cache holds, by layer and place.

    Args:
        checkpoint: opened; scale tensors are read, nothing else.
        contract: of the server: scales in the files count only where it uses them (or gets them wrong).

    Raises:
        CheckpointError: a scale that is no single number.
    """
    found = {}
    for name, ref in checkpoint.tensors.items():
        layer, suffix = _LAYER.search(name), name.partition(".self_attn.")[2]
        read = suffix in contract.names if contract.effect != "not verified" else True
        if layer is not None and name.endswith(SCALE_ENDINGS) and read and contract.effect != "inert":
            found[int(layer[1]), suffix] = KvScale(int(layer[1]), suffix, _read_scale(checkpoint, ref))
    for scale in _folded(checkpoint):
        found[scale.layer, scale.what] = scale
    return {place: scale for place, scale in found.items() if scale.value != 1.0}


def kv_scale_differences(
    writer: Checkpoint, reader: Checkpoint, contract: KvScales, *, names: tuple[str, str] = ("prefill", "decode")
) -> list[str]:
    """What differs between the scales of the checkpoint that fills the cache and of the one that reads it.

    Args:
        names: what to call the two.

    Returns:
        One sentence a layer and place; empty when every byte means the same to both.
    """
    first, second = carried_kv_scales(writer, contract), carried_kv_scales(reader, contract)
    problems = []
    for layer, what in sorted({*first, *second}):
        one, other = first.get((layer, what)), second.get((layer, what))
        values = [scale.value if scale is not None else 1.0 for scale in (one, other)]
        if values[0] != values[1]:
            problems.append(f"layer {layer}, {what}: {values[0]:g} in {names[0]}, {values[1]:g} in {names[1]}")
    return problems


def _folded(checkpoint: Checkpoint) -> list[KvScale]:
    report = _report(checkpoint)
    layers: Mapping[str, Any] = (report.get("kv_cache") or {}).get("layers") or {}
    return [
        KvScale(int(layer), f"folded {cached}", float(scale))
        for layer, of in (layers.items() if isinstance(layers, Mapping) else ())
        if of.get("emission") == "folded"
        for cached, scale in of["scale"].items()
    ]


def _report(checkpoint: Checkpoint) -> dict[str, Any]:
    """The report of an output of ours; empty for anybody else's checkpoint."""
    path = Path(checkpoint.folder or "") / REPORT_NAME
    if checkpoint.folder is None or not path.exists():
        return {}
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot be read: {error}", where=str(path)) from error
    return dict(data)


def _read_scale(checkpoint: Checkpoint, ref: TensorRef) -> float:
    with checkpoint.path(ref.shard).open("rb") as file:
        file.seek(ref.start)
        data = file.read(ref.nbytes)
    if ref.dtype == "F32" and len(data) == 4:
        return float(struct.unpack("<f", data)[0])
    if ref.dtype == "BF16" and len(data) == 2:
        return float(struct.unpack("<f", b"\0\0" + data)[0])
    raise CheckpointError(
        f"a KV scale is {ref.dtype} {list(ref.shape)}; servers read one F32 or BF16 number", where=ref.name
    )
