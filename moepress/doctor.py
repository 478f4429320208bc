"""What this machine can do for a conversion, and what to mend: one value for each thing that is looked at.

Everything is measured or asked, nothing assumed: the disk is written to and read from (past the page cache where the kernel
allows), the rounding loop rounds, the SGLang environment is run for its version, the Hub is asked who we are. A thing that is
not there is not an error, unless a conversion cannot do without it.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

Status = Literal["good", "note", "bad"]

PROBE_BYTES = 256 << 20
"""Written, flushed and read back to measure the disk."""

LITTLE_MEMORY = 2 << 30
"""Below this a conversion may not have room for its pieces, its threads and the page cache."""

PACKAGES = (
    "torch",
    "transformers",
    "compressed-tensors",
    "safetensors",
    "numba",
    "huggingface_hub",
    "llmcompressor",
)

SLOW_DISK = 200e6
"""Bytes a second; a 704 GiB model is then read in an hour."""


@dataclass(frozen=True)
class Check:
    """One thing that was looked at.

    Attributes:
        name: what.
        status: good; note: something cannot be done here, or slowly; bad: conversions cannot work.
        found: what is there, with numbers.
        mend: the next command or step; "" when there is nothing to mend.
    """

    name: str
    status: Status
    found: str
    mend: str = ""


@dataclass(frozen=True)
class Diagnosis:
    """All checks."""

    checks: tuple[Check, ...]

    @property
    def can_convert(self) -> bool:
        """Nothing is bad."""
        return all(check.status != "bad" for check in self.checks)

    def as_json(self) -> dict[str, Any]:
        return {"can_convert": self.can_convert, "checks": [asdict(check) for check in self.checks]}


def diagnose(folder: Path, *, online: bool = True) -> Iterator[Check]:
    """Looks at the machine, one check after the other.

    Args:
        folder: where outputs are to go; its disk is measured with a file that is removed again.
        online: ask the Hub who is logged in.
    """
    looks: tuple[Callable[[], Check], ...] = (
        check_python,
        check_processors,
        check_memory,
        lambda: check_disk(folder),
        check_rounding,
        check_gpus,
        check_sglang,
        check_ray,
        check_tokenizers,
        *((check_hub,) if online else ()),
    )
    for look in looks:
        yield look()


def check_python() -> Check:
    """The interpreter, and the packages that other people's judgements come from."""
    versions = package_versions()
    missing = [name for name, found in versions.items() if found is None]
    if missing:
        return Check("packages", "bad", f"missing: {', '.join(missing)}", "pip install --constraint constraints.txt .")
    python = f"Python {platform.python_version()}"
    return Check("packages", "good", ", ".join([python, *(f"{name} {found}" for name, found in versions.items())]))


def check_processors() -> Check:
    """Processors this process may use, and the instructions that the compiled loops live on."""
    usable = len(os.sched_getaffinity(0))
    flags = _cpu_flags()
    wide = [name for name in ("avx512f", "avx2") if name in flags]
    text = f"{usable} processors, {wide[0] if wide else 'no AVX2'}"
    if not wide and platform.machine() == "x86_64":
        return Check("processors", "note", text, "rounding will be several times slower than on a processor with AVX2")
    return Check("processors", "good", text)


def check_memory() -> Check:
    """Free memory; a rounding conversion needs about half a GB whatever the model's size."""
    from moepress.calibration.memory import available_memory

    free = available_memory()
    text = f"{free / 2**30:.1f} GiB free"
    if free < LITTLE_MEMORY:
        return Check(
            "memory",
            "bad",
            text,
            f"at least {LITTLE_MEMORY >> 30} GiB, and more for calibration: see moepress plan",
        )
    return Check("memory", "good", f"{text}; what calibration takes: moepress plan SRC --recipe R")


def check_disk(folder: Path) -> Check:
    """Room and speed of the disk that outputs go to."""
    place = folder.absolute()
    while not place.exists():
        place = place.parent
    name = f"disk of {place}"
    free = shutil.disk_usage(place).free
    if free < 2 * PROBE_BYTES:
        return Check(name, "bad", f"{free / 2**30:.2f} GiB free", "free some space, or give another --folder")
    try:
        write, read = _disk_rates(place)
    except OSError as error:
        return Check(
            name, "bad", f"cannot be written: {error.strerror or error}", "give a --folder that you may write to"
        )
    text = f"{free / 2**30:,.0f} GiB free, writes {write / 1e9:.2f} GB/s, reads {read / 1e9:.2f} GB/s"
    if min(write, read) < SLOW_DISK:
        return Check(
            name, "note", text, "use a local NVMe disk if you can: with this one, conversions wait for the disk"
        )
    return Check(name, "good", text)


def check_rounding() -> Check:
    """The compiled loop, on one thread, after it was compiled or loaded."""
    import numpy as np

    from moepress.quantize.grid import Grid
    from moepress.quantize.rtn import rtn_band

    rows, columns, grid = 512, 2048, Grid(4, 32)
    values = np.random.default_rng(0).standard_normal((rows, columns), np.float32)
    codes, scales = np.empty((rows, columns), np.int8), np.empty((rows, columns // 32), np.uint16)
    started = time.perf_counter()
    rtn_band(values, codes, scales, grid, "max")
    first = time.perf_counter() - started
    best = min(_timed(lambda: rtn_band(values, codes, scales, grid, "max")) for _ in range(5))
    text = f"{rows * columns / best / 1e9:.2f} billion weights a second on one thread (compiled or loaded in {first:.1f} s)"
    return Check("rounding", "good", text)


def check_gpus() -> Check:
    """GPUs that torch sees."""
    import torch

    if not torch.cuda.is_available():
        text = "none that torch sees: calibration runs on the processors, and the server's speed cannot be judged here"
        if not Path("/proc/driver/nvidia/version").exists():
            return Check(
                "GPUs", "note", text, "rounding needs none; for GPTQ on a large model, use a machine with a GPU"
            )
        if torch.version.cuda is None:
            return Check("GPUs", "note", f"{text}; an NVIDIA driver is here", "pip install a CUDA build of torch")
        return Check("GPUs", "note", f"{text}; a driver is here", "nvidia-smi, CUDA_VISIBLE_DEVICES")
    devices = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    names = ", ".join(f"{d.name} ({d.total_memory / 2**30:.0f} GiB)" for d in devices)
    triton = "with Triton" if importlib.util.find_spec("triton") else "without Triton: pip install triton"
    return Check("GPUs", "good", f"{len(devices)}: {names}, {triton}")


def check_sglang() -> Check:
    """The environment that validate, evaluate and serve boot."""
    from moepress.environments import command
    from moepress.errors import ServingError
    from moepress.serving.sglang import find_environment

    try:
        environment = find_environment(None)
    except ServingError as error:
        return Check("SGLang", "note", error.what, error.hint or command("sglang-cpu"))
    return Check("SGLang", "good", f"{environment.version} in {environment.python}")


def check_ray() -> Check:
    """Ray, for --workers."""
    from importlib.metadata import version

    if importlib.util.find_spec("ray") is None:
        return Check("Ray", "note", "not installed: no --workers", "pip install 'moepress[ray]'")
    return Check("Ray", "good", version("ray"))


def check_tokenizers() -> Check:
    """Tokenizers that calibration of Kimi and DeepSeek needs beside transformers."""
    missing = [name for name in ("tiktoken", "sentencepiece") if importlib.util.find_spec(name) is None]
    if missing:
        text = f"{', '.join(missing)} not installed: a checkpoint whose tokenizer needs one cannot be calibrated"
        return Check("tokenizers", "note", text, f"pip install {' '.join(missing)}")
    return Check("tokenizers", "good", "tiktoken and sentencepiece are there")


def check_hub() -> Check:
    """Who the Hub says we are; the token is never shown."""
    from huggingface_hub import HfApi, get_token

    if get_token() is None:
        return Check("Hub", "note", "not logged in: gated models and publishing need it", "hf auth login")
    try:
        who = HfApi().whoami()
    except Exception as error:  # noqa: BLE001 (whatever the network does, the diagnosis goes on)
        return Check("Hub", "note", f"does not answer: {type(error).__name__}", "look at the network, or HF_ENDPOINT")
    role = ((who.get("auth") or {}).get("accessToken") or {}).get("role", "unknown")
    return Check("Hub", "good", f"logged in as {who.get('name')}, token may {role}")


def package_versions() -> dict[str, str | None]:
    """Versions of the packages that a result depends on, from their metadata, without importing them; None: not installed."""
    from importlib.metadata import PackageNotFoundError, version

    def installed(name: str) -> str | None:
        try:
            return version(name)
        except PackageNotFoundError:
            return None

    return {name: installed(name) for name in PACKAGES}


def environment_line() -> str:
    """Version and environment in one line, for bug reports."""
    from moepress import __version__

    system = f"{platform.system()} {platform.release()} {platform.machine()}"
    return f"moepress {__version__} (Python {platform.python_version()} in {sys.prefix}, {system})"


def _disk_rates(folder: Path) -> tuple[float, float]:
    """Bytes a second of writing with a flush, and of reading what was dropped from the page cache."""
    block = os.urandom(1 << 20) * 16
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".moepress-doctor-") as file:
        started = time.perf_counter()
        for _ in range(PROBE_BYTES // len(block)):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        write = PROBE_BYTES / (time.perf_counter() - started)
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        started = time.perf_counter()
        buffer = bytearray(16 << 20)
        position = 0
        while count := os.preadv(file.fileno(), [buffer], position):
            position += count
        read = PROBE_BYTES / (time.perf_counter() - started)
    return write, read


def _cpu_flags() -> set[str]:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return set()
    return set(next((line.partition(":")[2].split() for line in text.splitlines() if line.startswith("flags")), []))


def _timed(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started
