"""A pressed checkpoint with fewer bits than its files say: codes rounded to a coarser grid, everything else untouched.

code in −8 … 7  →  step · round(code / step)          step 2: what 3 bits would hold, step 4: 2 bits, 16: all of it gone
"""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from moepress.results import REPORT_NAME


def damage(pressed: Path, out: Path, step: int) -> Path:
    """Copies an output of moepress with every packed weight's codes rounded to multiples of `step`.

    The report is brought in line, as it would be if a converter with this fault had written the files.
    """
    shutil.copytree(pressed, out, ignore=shutil.ignore_patterns("results", "evaluate"))
    report = json.loads((out / REPORT_NAME).read_text())
    for shard in out.glob("*.safetensors"):
        with safe_open(shard, "pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (a safe_open is no mapping)
            metadata = file.metadata()
        for name, tensor in tensors.items():
            if name.endswith("weight_packed"):
                tensors[name] = coarser(tensor, step)
        save_file(tensors, shard, metadata)
        report["shards"][shard.name] = hashlib.sha256(shard.read_bytes()).hexdigest()
    (out / REPORT_NAME).write_text(json.dumps(report))
    return out


def coarser(packed: torch.Tensor, step: int) -> torch.Tensor:
    """packed [rows, words] int32, eight codes a word, offset 8 -> the same with coarser codes."""
    shifts = torch.arange(0, 32, 4)
    codes = ((packed[..., None].long() >> shifts) & 15) - 8
    rounded = (codes.double() / step).round().mul(step).long().clamp(-8, 7) + 8
    words = (rounded << shifts).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)
