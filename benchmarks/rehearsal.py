"""Dress rehearsal at full size: a GLM-5.2 of headers and holes, through everything that is not arithmetic.

    python -m benchmarks.rehearsal FOLDER [--model glm-5.2|kimi-k2] [--json FILE]

Every tensor has its true name, dtype, shape and place; the files are sparse, so 700 GB of checkpoint take a few hundred
MB of disk. What is measured is bookkeeping: does inspecting, planning, resuming and checking stay in seconds and below
1 GB with 120,000 source tensors and 59,000 quantized matrices? Each step runs in a process of its own, and its peak
memory is the operating system's. In one layer some experts get real weights, and the shards they go to are really pressed
and read back by compressed-tensors.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.synthetic import CONFIGS
from moepress.formats.architecture import expected_weights
from moepress.formats.atomic import atomic_write_json
from moepress.formats.dtypes import nbytes
from moepress.formats.header import encode_header
from moepress.formats.writer import write_index

MODELS = {"glm-5.2": ("glm_5.2_fp8.json", "glm-5"), "kimi-k2": ("kimi_k2_instruct.json", "kimi-k2")}
SHARD_BYTES = 5_360_000_000
"""As the publishers cut them: GLM-5.2 then has 141 shards."""
REAL_EXPERTS = 4
"""Experts of the last layer that get real weights."""

Tensor = tuple[str, str, tuple[int, ...]]


def stored_tensors(config: dict[str, Any]) -> list[Tensor]:
    """Name, dtype and shape of every tensor, as block-FP8 publishers store them."""
    tensors: list[Tensor] = []
    for spec in expected_weights(config):
        if spec.published.kind == "fp8_block":
            rows, columns = spec.shape
            tensors.append((spec.name, "F8_E4M3", spec.shape))
            tensors.append((f"{spec.name}_scale_inv", "F32", (-(-rows // 128), -(-columns // 128))))
        else:
            tensors.append((spec.name, {"bf16": "BF16", "f32": "F32"}[spec.published.kind], spec.shape))
    return tensors


def sparse_shards(folder: Path, groups: Sequence[Sequence[Tensor]]) -> dict[str, str]:
    """Writes files of a header and a hole; returns the weight map."""
    weight_map = {}
    for number, tensors in enumerate(groups, start=1):
        name = f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        sparse_file(folder / name, tensors)
        weight_map |= {tensor[0]: name for tensor in tensors}
    return weight_map


def sparse_file(path: Path, tensors: Sequence[Tensor]) -> int:
    """One shard; returns its length in bytes."""
    header = encode_header(tensors, {"format": "pt"})
    length = len(header) + sum(nbytes(dtype, shape) for _, dtype, shape in tensors)
    with path.open("wb") as file:
        file.write(header)
        file.truncate(length)
    return length


def cut(tensors: Iterable[Tensor], limit: int) -> list[list[Tensor]]:
    """Consecutive groups of at most `limit` bytes, tensors of 4 and 2 bytes an element before FP8, as alignment wants."""
    groups: list[list[Tensor]] = [[]]
    filled = 0
    for tensor in tensors:
        size = nbytes(tensor[1], tensor[2])
        if filled + size > limit and groups[-1]:
            groups.append([])
            filled = 0
        groups[-1].append(tensor)
        filled += size
    widths = {"F32": 0, "BF16": 1, "F8_E4M3": 2}
    return [sorted(group, key=lambda t: widths[t[1]]) for group in groups]


def build_source(folder: Path, config: dict[str, Any]) -> dict[str, int]:
    """The sparse source, with real weights in a few experts of the last layer."""
    folder.mkdir(parents=True)
    tensors = stored_tensors(config)
    groups = cut(tensors, SHARD_BYTES)
    weight_map = sparse_shards(folder, groups)
    total = sum(nbytes(dtype, shape) for _, dtype, shape in tensors)
    (folder / "config.json").write_text(json.dumps(config))
    write_index(folder / "model.safetensors.index.json", weight_map, total_size=total, total_parameters=total)
    return {"source_tensors": len(tensors), "source_shards": len(groups), "source_bytes": total}


def fill_experts(folder: Path, layer: int) -> None:
    """Real, random FP8 weights for the first experts of one layer, written into the holes."""
    import torch

    from moepress.formats.checkpoint import open_checkpoint
    from moepress.formats.fp8 import encode_fp8_block

    checkpoint = open_checkpoint(folder)
    generator = torch.Generator().manual_seed(0)
    for expert in range(REAL_EXPERTS):
        for projection in ("gate_proj", "up_proj", "down_proj"):
            name = f"model.layers.{layer}.mlp.experts.{expert}.{projection}.weight"
            shape = checkpoint.tensors[name].shape
            codes, scale = encode_fp8_block(torch.randn(shape, generator=generator) * shape[1] ** -0.5)
            for part, value in ((name, codes.view(torch.uint8)), (f"{name}_scale_inv", scale)):
                ref = checkpoint.tensors[part]
                with checkpoint.path(ref.shard).open("r+b") as file:
                    file.seek(ref.start)
                    file.write(value.contiguous().numpy().tobytes())


def step_inspect(source: Path, _: Path, __: str) -> dict[str, Any]:
    from moepress.formats.checkpoint import open_checkpoint
    from moepress.formats.inspection import inspect_checkpoint

    found = inspect_checkpoint(open_checkpoint(source))
    return {"tensors": sum(row.weights for row in found.rows), "bytes": found.bytes, "parameters": found.parameters}


def step_plan(source: Path, _: Path, recipe: str) -> dict[str, Any]:
    plan = _plan(source, recipe)
    return {
        "output_bytes": plan.output_bytes,
        "output_shards": len(plan.shards),
        "quantized": sum(d.action == "quantize" for d in plan.decisions.values()),
    }


def step_journal(source: Path, out: Path, recipe: str) -> dict[str, Any]:
    """Every shard as a hole with its receipt, then what a resumed run does first and a finished one does last."""
    from moepress.convert.finish import finish
    from moepress.convert.journal import Journal
    from moepress.convert.plan import PRESS_VERSION
    from moepress.formats.checkpoint import open_checkpoint

    plan = _plan(source, recipe)
    journal = Journal(out, plan)
    figures = {"sqnr_db": 20.0, "relative_error": 0.1, "method": "rtn-max"}
    with journal.open():
        for shard in plan.shards:
            size = sparse_file(out / shard.name, [(t.name, t.dtype, t.shape) for t in shard.tensors])
            weights = {
                w.name: {
                    "action": plan.decisions[w.name].action,
                    "decision": "quantized" if w.action == "quantize" else "kept",
                    "reason": plan.decisions[w.name].reason,
                    **(figures if w.action == "quantize" else {}),
                }
                for w in shard.weights
            }
            journal.write_receipt(
                shard.name,
                {
                    "unit": shard.name,
                    "label": shard.label,
                    "plan_key": plan.key,
                    "press_version": PRESS_VERSION,
                    "sha256": "0" * 64,
                    "file_bytes": size,
                    "tensors": len(shard.tensors),
                    "weights": weights,
                    "seconds": 0.0,
                },
            )
    again = Journal(out, _plan(source, recipe))
    started = time.monotonic()
    with again.open():
        done = sum(again.receipt(shard.name) is not None for shard in plan.shards)
        resumed = time.monotonic() - started
        finish(open_checkpoint(source), plan, again)
    return {"receipts": done, "seconds_to_resume": round(resumed, 3)}


def step_verify(source: Path, out: Path, _: str) -> dict[str, Any]:
    """All of verify that reads no weight: files, index, receipts, configuration, census, names."""
    from moepress.formats.checkpoint import open_checkpoint
    from moepress.formats.families import classify, identify_family
    from moepress.formats.storage import resolve_storage
    from moepress.verify.census import check_census, check_uniform_experts
    from moepress.verify.configuration import check_configuration
    from moepress.verify.files import read_output
    from moepress.verify.findings import Findings

    findings = Findings()
    output = read_output(out, findings)
    if output is None:
        raise SystemExit("the rehearsal's output cannot be read: " + "; ".join(findings.sentences()))
    family = identify_family(output.config)
    for name in output.tensors:
        classify(family, output.config, name)
    checkpoint = open_checkpoint(source)
    check_configuration(output, checkpoint, family, findings)
    check_census(output, findings)
    check_uniform_experts(output, family, findings)
    storage = resolve_storage(checkpoint)
    problems = list(findings.sentences())
    if problems:
        raise SystemExit("the rehearsal's output has problems: " + "; ".join(problems[:5]))
    return {"output_tensors": len(output.tensors), "source_weights": len(storage)}


def step_press(source: Path, out: Path, recipe: str) -> dict[str, Any]:
    """The shard with the real experts, really pressed, and compared through compressed-tensors' unpacker."""
    import torch
    from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32
    from safetensors import safe_open

    from moepress.convert.units import Pool, run_unit
    from moepress.formats.checkpoint import open_checkpoint
    from moepress.formats.load import load_weight
    from moepress.formats.reader import TensorReader

    plan = _plan(source, recipe, "output.shard_size=600MB")
    layer = max(s.layer for s in plan.shards if s.layer is not None)
    shard = next(s for s in plan.shards if s.layer == layer)
    target = out.with_name("pressed")
    target.mkdir(exist_ok=True)
    checkpoint = open_checkpoint(source)
    worst = 0.0
    with TensorReader(checkpoint) as reader, Pool(2) as pool:
        started = time.monotonic()
        run_unit(shard, plan, reader, target, pool, lambda _: None)
        seconds = time.monotonic() - started
        with safe_open(target / shard.name, framework="pt") as file:
            for weight in shard.weights[: 3 * REAL_EXPERTS]:
                stored = plan.decisions[weight.name].stored
                module = weight.name.removesuffix(".weight")
                shape = torch.Size(file.get_tensor(f"{module}.weight_shape").tolist())
                codes = unpack_from_int32(file.get_tensor(f"{module}.weight_packed"), 4, shape).float()
                scale = file.get_tensor(f"{module}.weight_scale").float()
                ours = (codes.view(shape[0], scale.shape[1], -1) * scale[..., None]).view(shape)
                theirs = load_weight(reader, stored)
                worst = max(worst, float((ours - theirs).norm() / theirs.norm()))
    shutil.rmtree(target)
    if not 0 < worst < 0.2:
        raise SystemExit(f"the pressed experts differ by {worst:.3f} from their source")
    return {
        "pressed_source_bytes": sum(plan.decisions[w.name].stored.nbytes for w in shard.weights),
        "press_seconds": round(seconds, 2),
        "worst_relative_error": round(worst, 4),
    }


STEPS: dict[str, Callable[[Path, Path, str], dict[str, Any]]] = {
    "inspect": step_inspect,
    "plan": step_plan,
    "journal and index": step_journal,
    "verify": step_verify,
    "press": step_press,
}


def _plan(source: Path, recipe: str, *overrides: str) -> Any:
    from moepress.convert.plan import make_plan
    from moepress.formats.checkpoint import open_checkpoint
    from moepress.recipe import load_recipe

    words = ["weights.algorithm=rtn", "weights.scale=max", *overrides]
    return make_plan(open_checkpoint(source), load_recipe(recipe, words))


def run_step(name: str, source: Path, recipe: str) -> dict[str, Any]:
    """One step in a process of its own, with its wall time and peak memory.

    Raises:
        RuntimeError: it failed.
    """
    words = [sys.executable, "-m", "benchmarks.rehearsal", str(source.parent), "--step", name, "--recipe", recipe]
    started = time.monotonic()
    done = subprocess.run(words, capture_output=True, text=True, cwd=Path(__file__).resolve().parent.parent)
    if done.returncode:
        raise RuntimeError(f"{name} failed:\n{done.stderr[-3000:]}")
    return {"step": name, "seconds": round(time.monotonic() - started, 2), **json.loads(done.stdout)}


def peak_bytes() -> int:
    """Largest resident set of this process. Not getrusage: that begins with what the parent had when it forked."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


def rehearse(folder: Path, model: str = "glm-5.2", steps: Sequence[str] = tuple(STEPS)) -> dict[str, Any]:
    """The whole rehearsal; the folder's `source` and `out` are made and removed again."""
    name, recipe = MODELS[model]
    config = json.loads((CONFIGS / name).read_text())
    source, out = folder / "source", folder / "out"
    try:
        facts = build_source(source, config)
        layers = config["num_hidden_layers"] + config.get("num_nextn_predict_layers", 0)
        fill_experts(source, layers - 1)
        done = [run_step(step, source, recipe) for step in steps]
        on_disk = sum(f.stat().st_blocks * 512 for f in folder.rglob("*") if f.is_file())
    finally:
        for each in (source, out, folder / "pressed"):
            shutil.rmtree(each, ignore_errors=True)
    return {"model": model, **facts, "bytes_on_disk": on_disk, "steps": done}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", choices=sorted(MODELS), default="glm-5.2")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--step", choices=sorted(STEPS), help=argparse.SUPPRESS)
    parser.add_argument("--recipe", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.step:
        result = STEPS[arguments.step](arguments.folder / "source", arguments.folder / "out", arguments.recipe)
        print(json.dumps({**result, "peak_bytes": peak_bytes()}))
        return
    report = rehearse(arguments.folder, arguments.model)
    if arguments.json:
        atomic_write_json(arguments.json, report)
    print(f"{model_line(report)}\n")
    for step in report["steps"]:
        rest = {k: v for k, v in step.items() if k not in ("step", "seconds", "peak_bytes")}
        print(f"{step['step']:18} {step['seconds']:7.1f} s {step['peak_bytes'] / 1e9:6.2f} GB   {rest}")


def model_line(report: dict[str, Any]) -> str:
    gib = math.floor(report["source_bytes"] / 2**30)
    return (
        f"{report['model']}: {report['source_tensors']:,} tensors in {report['source_shards']} shards, {gib} GiB, "
        f"{report['bytes_on_disk'] / 1e6:,.0f} MB of it on this disk"
    )


if __name__ == "__main__":
    main()
