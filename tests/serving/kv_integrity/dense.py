"""A tiny checkpoint without any quantization, so that a server can compute with it in float32.

Greedy tokens of a request depend on who else is in its batch, by rounding: in bfloat16 a near-tie falls the other way now
and then. In float32 it practically never does, and "the same tokens as in a clean run" can be asked for exactly.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file

from tests.tiny_checkpoints import TinyCheckpoint


def unquantized(tiny: TinyCheckpoint, folder: Path) -> Path:
    """The values that the checkpoint's weights stand for, as float32, in one file. Returns `folder`."""
    folder.mkdir(parents=True)
    config = {name: value for name, value in tiny.config.items() if name != "quantization_config"}
    config["dtype"] = config["torch_dtype"] = "float32"
    (folder / "config.json").write_text(json.dumps(config))
    for file in tiny.folder.iterdir():
        if file.is_file() and file.suffix in (".json", ".py") and not file.name.startswith(("config.", "model.")):
            shutil.copyfile(file, folder / file.name)
    layers = int(config["num_hidden_layers"])
    weights = {
        name: torch.as_tensor(value, dtype=torch.float32).clone()
        for name, value in tiny.truth.items()
        if f".layers.{layers}." not in name  # the MTP layer is not served here
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
