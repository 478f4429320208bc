"""A checkpoint of a few tensors in one file, written by the safetensors library."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from moepress.formats.checkpoint import Checkpoint, open_checkpoint

FP8_BLOCK = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


def int4_config(group_size: int = 32, *, symmetric: bool = True) -> dict[str, Any]:
    """Kimi K2.5's quantization_config, with a group size (-1: one scale per row)."""
    weights = {"num_bits": 4, "type": "int", "symmetric": symmetric, "strategy": "group", "group_size": group_size}
    if group_size == -1:
        weights |= {"strategy": "channel", "group_size": None}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    return {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"group_0": group}}


def one_shard(
    folder: Path, tensors: dict[str, torch.Tensor], quantization: dict[str, Any] | None = None, **config: Any
) -> Checkpoint:
    """Write and open it. ``config``: more keys of config.json."""
    folder.mkdir(exist_ok=True, parents=True)
    if quantization is not None:
        config["quantization_config"] = quantization
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return open_checkpoint(folder)
