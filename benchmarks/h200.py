"""Everything that is to be seen on a GPU, in one command and under five minutes:

    python -m benchmarks.h200 --json h200.json          needs torch, triton, transformers, safetensors and this repository
    python -m benchmarks.h200 --smoke                   tiny sizes, on a processor where there is no GPU

    ceilings    BF16 and float32 products, memory copies, PCIe both ways: what the others are held to
    kernels     every kernel against its plain twin, with its tolerance
    rtn         FP8 to packed INT4, from the device's memory and from the host's
    glm blend   GPTQ of a GLM-5.2 layer: 256 experts of 6144 × 2048, one Hessian each over 32,768 tokens
    glm layer   the same with one Hessian for all experts' gate and up
    glm polish  a block of the first with three polishing passes, which is the recipe's default
    kimi block  a block of Kimi K2's experts, 7168 × 2048

Each part is a process of its own with a time limit: one that fails, hangs or breaks the device loses its own figures only. Data
are made on the device. What the figures should replace in ``moepress/convert/forecast/machines.py`` is printed at the end.

Exit code 1 when a kernel disagrees with its twin, or a part gave nothing.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
import time
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Figures = dict[str, Any]


@dataclass(frozen=True)
class Part:
    """``limit``: seconds after which its process is killed; ``run``: (device, smoke) → figures."""

    limit: float
    run: Callable[[str, bool], Figures]


def _layer(shape: str, **settings: Any) -> Callable[[str, bool], Figures]:
    def run(device: str, smoke: bool) -> Figures:
        from benchmarks import h200_parts

        return h200_parts.layer(device, smoke, getattr(h200_parts, shape), **settings)

    return run


def _named(name: str) -> Callable[[str, bool], Figures]:
    def run(device: str, smoke: bool) -> Figures:
        from benchmarks import h200_parts

        found: Figures = getattr(h200_parts, name)(device, smoke)
        return found

    return run


PARTS: Mapping[str, Part] = {
    "ceilings": Part(30, _named("ceilings")),
    "kernels": Part(60, _named("kernels")),
    "rtn": Part(25, _named("rtn")),
    "glm blend": Part(60, _layer("GLM_5_2", hessian="blend", passes=0, experts=256, seconds=30)),
    "glm layer": Part(45, _layer("GLM_5_2", hessian="layer", passes=0, experts=256, seconds=20)),
    "glm polish": Part(40, _layer("GLM_5_2", hessian="blend", passes=3, experts=32, seconds=15)),
    "kimi block": Part(35, _layer("KIMI_K2", hessian="blend", passes=0, experts=32, seconds=15)),
}


def run_part(name: str, *, smoke: bool) -> Figures:
    """One part in a process of its own: its figures, or {"failed": why}."""
    part, started = PARTS[name], time.monotonic()
    command = [sys.executable, "-m", "benchmarks.h200", "--part", name, *(["--smoke"] if smoke else [])]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=part.limit * (4 if smoke else 1),
            cwd=Path(__file__).parent.parent,
        )
    except subprocess.TimeoutExpired:
        return {"failed": f"not done after {part.limit:.0f} s"}
    if done.returncode != 0:
        return {"failed": " ".join(done.stderr.strip().splitlines()[-1:])[:500], "log": done.stderr[-4000:]}
    figures: Figures = json.loads(done.stdout.strip().splitlines()[-1])
    return {**figures, "wall_seconds": round(time.monotonic() - started, 2)}


def table(found: Mapping[str, Figures]) -> list[str]:
    """The figures for people, each beside its ceiling."""
    ceiling = found.get("ceilings", {})
    name = ceiling.get("name", ceiling.get("device", "unknown device"))
    lines = [f"{name}, torch {ceiling.get('torch')}, triton {ceiling.get('triton')}", ""]

    def row(part: str, what: str, value: float, unit: str, limit: float | None = None) -> None:
        share = f"{value / limit:6.1%} of {limit:,.0f}" if limit else ""
        lines.append(f"{part:<12}{what:<44}{value:>12,.2f} {unit:<9}{share}")

    for part, figures in found.items():
        if "failed" in figures:
            lines.append(f"{part:<12}FAILED: {figures['failed']}")
        elif part == "ceilings":
            for key, unit in (
                ("bfloat16_tflops", "TFLOP/s"),
                ("float32_tflops", "TFLOP/s"),
                ("memory_copy_gbps", "GB/s"),
            ):
                row(part, key.rsplit("_", 1)[0].replace("_", " "), figures[key], unit)
            row(part, "host to device, pinned", figures["to_device_gbps"], "GB/s")
            row(part, "device to host, pinned", figures["from_device_gbps"], "GB/s")
        elif part == "kernels":
            for name, check in figures["checks"].items():
                verdict = "agrees" if check["ok"] else "DISAGREES"
                lines.append(
                    f"{part:<12}{name:<44}{verdict:>12} worst {check['worst']:.1e}, allowed {check['tolerance']:.0e}"
                )
            if "skipped" in figures:
                lines.append(f"{part:<12}{figures['skipped']}")
        elif part == "rtn":
            limit = ceiling.get("memory_copy_gbps")
            row(part, "source bytes a second, on the device", figures["gbps"], "GB/s")
            moved = figures["gbps"] * figures["bytes_moved_per_weight"]
            row(part, "bytes moved by it", moved, "GB/s", limit)
            row(
                part,
                "source bytes a second, from the host",
                figures["from_host_gbps"],
                "GB/s",
                ceiling.get("to_device_gbps"),
            )
        else:
            row(part, f"{figures['experts']} of {figures['experts_of_layer']} experts", figures["seconds"], "s")
            row(part, "a whole layer at this rate", figures["seconds_a_layer"], "s")
            for stage, seconds in figures["stages"].items():
                row(part, f"  {stage}", seconds, "s")
            row(
                part,
                "  moments, useful operations",
                figures["moments_tflops"],
                "TFLOP/s",
                ceiling.get("bfloat16_tflops"),
            )
            row(part, "  gptq, useful operations", figures["gptq_tflops"], "TFLOP/s", ceiling.get("float32_tflops"))
    return lines


def rates_for_machines(found: Mapping[str, Figures]) -> dict[str, float]:
    """What ``MACHINES`` of moepress/convert/forecast/machines.py should hold for this device, in operations and bytes a second."""
    rates = {}
    if "to_device_gbps" in found.get("ceilings", {}):
        rates["link"] = found["ceilings"]["to_device_gbps"] * 1e9
    if "moments_tflops" in found.get("glm blend", {}):
        rates["product"] = found["glm blend"]["moments_tflops"] * 1e12
    polished = found.get("glm polish", {})
    if "gptq_tflops" in polished:
        rates["plain"] = polished["gptq_tflops"] * 1e12
    return rates


def wrong(found: Mapping[str, Figures]) -> list[str]:
    """What nobody should overlook."""
    problems = [f"{part}: {figures['failed']}" for part, figures in found.items() if "failed" in figures]
    for name, check in found.get("kernels", {}).get("checks", {}).items():
        if not check["ok"]:
            problems.append(f"{name} disagrees with its twin: {check['worst']:.2e}, allowed {check['tolerance']:.0e}")
    problems += [f"{part}: {f['fallbacks']} fallbacks" for part, f in found.items() if f.get("fallbacks")]
    return problems


def _without_numba() -> None:
    """The loops for the CPU need numba, which a GPU machine may lack: they then say so when one is called."""
    if importlib.util.find_spec("numba") is not None:
        return

    def refuse(*_: Any) -> Any:
        raise RuntimeError("a compiled loop for the CPU was called, and numba is not installed")

    def njit(*_: Any, **__: Any) -> Any:
        return lambda _function: refuse

    for name, members in (
        ("numba", {"njit": njit, "config": types.SimpleNamespace(CPU_FEATURES="")}),
        ("numba.core", {}),
        ("numba.core.codegen", {"get_host_cpu_features": refuse}),
    ):
        sys.modules[name] = types.ModuleType(name)
        vars(sys.modules[name]).update(members)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="where the figures go; written after every part")
    parser.add_argument("--only", nargs="+", choices=list(PARTS), help="these parts alone")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes: shows that it runs, measures nothing")
    parser.add_argument("--part", choices=list(PARTS), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.part:
        _without_numba()
        import torch

        device = "cuda" if torch.cuda.is_available() else "cpu"
        with torch.no_grad():
            print(json.dumps(PARTS[arguments.part].run(device, arguments.smoke)))
        return
    found: dict[str, Figures] = {}
    for name in arguments.only or PARTS:
        print(f"{name} …", file=sys.stderr, flush=True)
        found[name] = run_part(name, smoke=arguments.smoke)
        report = {
            "parts": found,
            "machines": rates_for_machines(found),
            "wrong": wrong(found),
            "smoke": arguments.smoke,
        }
        if arguments.json:
            arguments.json.write_text(json.dumps(report, indent=1))
    print("\n".join(table(found)))
    if not arguments.smoke:
        print("\nmoepress/convert/forecast/machines.py, in operations and bytes a second:")
        print("\n".join(f"    {name:<8} {rate:.3g}" for name, rate in rates_for_machines(found).items()))
    for problem in wrong(found):
        print(f"WRONG: {problem}")
    sys.exit(1 if wrong(found) else 0)


if __name__ == "__main__":
    main()
