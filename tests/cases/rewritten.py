"""Changes to a tiny checkpoint's tensors and configuration, with shards and index written again to match."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from moepress.formats.sealed_json import sealed
from tests.tiny_checkpoints import TinyCheckpoint
from tests.tiny_checkpoints.generator import write_shards

INDEX = "model.safetensors.index.json"
LINEARS_AS_BF16 = ("rest.attention=bf16", "rest.shared_experts=bf16", "rest.dense_mlp=bf16", "mtp.rest=bf16")
"""Overrides that leave no FP8 in the output."""


def rewrite_tensors(tiny: TinyCheckpoint, edit: Callable[[dict[str, torch.Tensor]], None]) -> None:
    """Edits a copy of the checkpoint's tensors and writes it in place of the old ones."""
    tensors = dict(tiny.tensors)
    edit(tensors)
    for path in tiny.folder.glob("*.safetensors*"):
        path.unlink()
    write_shards(tiny.folder, tensors, 2, 5, False)


def rewrite_json(path: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    """Edits a JSON file; a digest it may carry of itself stays that of the old content."""
    data = json.loads(path.read_text())
    edit(data)
    path.write_text(json.dumps(data))


def rewrite_sealed(path: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    """Edits a JSON file with a digest of itself, as whoever wrote it would have written it."""
    data = json.loads(path.read_text())
    edit(data)
    path.write_text(json.dumps(sealed(data)))


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a folder, as the safetensors library reads it."""
    tensors: dict[str, torch.Tensor] = {}
    for shard in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(shard)
    return tensors


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal in dtype, shape and every bit."""
    raw = [t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b)]
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*raw)
