"""What this was measured on: processor, memory, GPUs; and the versions of the server's environment."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moepress.errors import ServingError
from moepress.serving.sglang import ask_python

_PACKAGES = (
    *("sglang", "torch", "transformers", "compressed-tensors", "triton", "xgrammar"),
    *("sgl-kernel", "sglang-kernel", "flashinfer-python", "flash-attn", "deep-gemm", "nvidia-nccl-cu12"),
)


@dataclass(frozen=True)
class Gpu:
    """One GPU. `memory`: bytes."""

    name: str
    memory: int


@dataclass(frozen=True)
class Machine:
    """This machine. `driver`: NVIDIA's; None without a GPU."""

    system: str
    processor: str
    cores: int
    memory: int
    gpus: tuple[Gpu, ...]
    driver: str | None

    def as_json(self) -> dict[str, Any]:
        return {
            "system": self.system,
            "processor": self.processor,
            "cores": self.cores,
            "memory_gib": round(self.memory / 2**30, 1),
            "gpus": [{"name": gpu.name, "memory_gib": round(gpu.memory / 2**30, 1)} for gpu in self.gpus],
            "driver": self.driver,
        }


def this_machine() -> Machine:
    """Asks the kernel, and nvidia-smi where there is one.

    Raises:
        ServingError: nvidia-smi hangs, as it does when the driver is lost.
    """
    gpus, driver = _gpus()
    return Machine(
        system=f"{platform.system()} {platform.release()}",
        processor=_processor(),
        cores=len(os.sched_getaffinity(0)),
        memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        gpus=gpus,
        driver=driver,
    )


def packages(python: Path) -> dict[str, str]:
    """Versions of what matters in another environment; what is not installed there is left out.

    Raises:
        ServingError: the interpreter does not run.
    """
    code = (
        "import importlib.metadata as m, json, sys\n"
        f"names = {_PACKAGES!r}\n"
        "found = {}\n"
        "for name in names:\n"
        "    try: found[name] = m.version(name)\n"
        "    except m.PackageNotFoundError: pass\n"
        "print(json.dumps({'python': sys.version.split()[0], **found}))"
    )
    return dict(json.loads(ask_python(python, code)))


def _gpus() -> tuple[tuple[Gpu, ...], str | None]:
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader,nounits"]
    try:
        asked = subprocess.run(query, capture_output=True, text=True, timeout=60, check=False)
    except OSError:  # no such program
        return (), None
    except subprocess.TimeoutExpired as error:
        raise ServingError("nvidia-smi does not answer within a minute", hint="moepress doctor") from error
    if asked.returncode:
        return (), None
    rows = [[part.strip() for part in line.split(",")] for line in asked.stdout.splitlines() if line.strip()]
    return tuple(Gpu(name, int(mib) << 20) for name, mib, _ in rows), rows[0][2] if rows else None


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
