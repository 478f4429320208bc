"""The CPU lab's stand-ins and arithmetic, as far as they can be seen without a server."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

from moepress.formats.fp8 import decode_fp8
from moepress.serving.launch import CPU_LAB, CPU_LAB_VERSION


def run_in_lab(code: str, python: str | Path = sys.executable) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [python, "-c", code], env={"PYTHONPATH": str(CPU_LAB)}, capture_output=True, text=True, timeout=300, check=False
    )


def test_the_stand_ins_can_be_imported_and_not_used() -> None:
    run = run_in_lab("""
import sgl_kernel, torchvision
from sgl_kernel import silu_and_mul, rotary_embedding
from torchvision.io import decode_image
from torchvision.transforms import InterpolationMode, functional
from torchvision.transforms.v2 import functional as v2
assert InterpolationMode.BICUBIC.value == "bicubic"
assert torchvision.io.decode_image is decode_image
for call in (silu_and_mul, functional.resize, decode_image):
    try: call()
    except NotImplementedError as error: print(error)
try: import sgl_kernel.scalar_type
except ImportError: print("no scalar_type")
""")
    assert run.returncode == 0, run.stderr
    said = run.stdout.splitlines()
    assert said[0] == "sgl_kernel.silu_and_mul: not in moepress's CPU lab"
    assert said[1].startswith("torchvision.transforms.functional.resize: ")
    assert said[-1] == "no scalar_type"


@pytest.fixture
def dequantize(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(CPU_LAB))
    yield import_module("moepress_sglang_cpu.dequantize")
    for name in [name for name in sys.modules if name.startswith("moepress_sglang_cpu")]:
        del sys.modules[name]


def test_int4_experts_as_compressed_tensors_packs_them(dequantize: ModuleType) -> None:
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(-8, 8, (3, 16, 64), generator=generator, dtype=torch.int8)
    scales = torch.rand(3, 16, 2, generator=generator).to(torch.bfloat16)
    packed = torch.stack([pack_to_int32(one, 4) for one in codes])
    dense = dequantize.int4_transposed(packed.transpose(1, 2).contiguous(), scales.transpose(1, 2).contiguous())
    expected = (codes.float() * scales.float().repeat_interleave(32, -1)).to(torch.bfloat16)
    assert torch.equal(dense, expected)


@pytest.mark.parametrize("shape", [(128, 128), (192, 256), (320, 130)], ids=str)
def test_fp8_blocks_as_moepress_decodes_them(shape: tuple[int, int], dequantize: ModuleType) -> None:
    generator = torch.Generator().manual_seed(1)
    codes = torch.randn(shape, generator=generator).to(torch.float8_e4m3fn)
    scales = torch.rand(-(-shape[0] // 128), -(-shape[1] // 128), generator=generator) + 0.1
    expected = decode_fp8(codes, scales, block=(128, 128)).to(torch.bfloat16)
    assert torch.equal(dequantize.fp8(codes, scales, [128, 128]), expected)


@pytest.mark.slow
@pytest.mark.oracle
def test_another_sglang_is_refused(sglang_python: Path) -> None:
    run = run_in_lab(
        "import sglang; sglang.__version__ = '0.6.0'; import moepress_sglang_cpu as lab; lab.register()", sglang_python
    )
    assert run.returncode == 1
    assert f"made for sglang {CPU_LAB_VERSION}, this is 0.6.0" in run.stderr
