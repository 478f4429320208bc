"""llm-compressor's `model_free_ptq` as the judge of round-to-nearest: the same experts, code for code.

It decodes FP8 to BF16 and divides in BF16; we decode and divide in float32. That is the whole difference: its scales and
codes are, to the last one, what our rule gives with those two roundings put in.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32
from safetensors.torch import load_file

from tests.pressing import press
from tests.tiny_checkpoints import build

pytestmark = [pytest.mark.oracle, pytest.mark.slow]

ROOT = Path(__file__).resolve().parents[2]


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    out: dict[str, torch.Tensor] = {}
    for shard in folder.glob("*.safetensors"):
        out |= load_file(shard)
    return out


def codes(state: dict[str, torch.Tensor], module: str) -> torch.Tensor:
    return unpack_from_int32(state[f"{module}.weight_packed"], 4, torch.Size(state[f"{module}.weight_shape"].tolist()))


def test_codes_agree_with_model_free_ptq(tmp_path: Path) -> None:
    source = build("kimi", tmp_path / "src", mtp=0)
    press(source.folder, tmp_path / "ours", "kimi", "weights.scale=max")
    script = ROOT / "benchmarks" / "peers" / "model_free_ptq.py"
    done = subprocess.run(
        [sys.executable, script, source.folder, tmp_path / "theirs"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    ours, theirs = tensors(tmp_path / "ours"), tensors(tmp_path / "theirs")
    modules = sorted(name.removesuffix(".weight_packed") for name in ours if name.endswith(".weight_packed"))
    assert modules == sorted(name.removesuffix(".weight_packed") for name in theirs if name.endswith(".weight_packed"))
    for module in modules:
        a, b = codes(ours, module), codes(theirs, module)
        s, t = ours[f"{module}.weight_scale"], theirs[f"{module}.weight_scale"]
        truth = source.truth[f"{module}.weight"]
        wide = truth.shape[1] // s.shape[1]

        in_bf16 = truth.bfloat16().unflatten(-1, (-1, wide))
        assert torch.equal((in_bf16.abs().amax(-1).float() / 7.5).bfloat16(), t), module
        assert torch.equal((in_bf16 / t[..., None]).round().clamp(-8, 7).flatten(-2).to(torch.int8), b), module

        grouped = truth.unflatten(-1, (-1, wide))
        assert torch.equal((grouped.abs().amax(-1) / 7.5).bfloat16(), s), module
        assert torch.equal((grouped / s.float()[..., None]).round().clamp(-8, 7).flatten(-2).to(torch.int8), a), module

        assert int((a - b).abs().max()) <= 1, module
        error = ((truth - a * s.float().repeat_interleave(wide, 1)).norm() / truth.norm()).item()
        peer = ((truth - b * t.float().repeat_interleave(wide, 1)).norm() / truth.norm()).item()
        assert error <= peer * 1.01, f"{module}: {error} against the peer's {peer}"
