"""What ``moepress plan`` says: bytes, memory per GPU, KV tokens, disk and time, before any work.

Two kinds of source: a checkpoint folder (everything, exact to the byte, with disk and time), or a ``config.json`` alone
(sizes and memory from arithmetic, for a model that is not here).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moepress.calibration.memory import available_memory
from moepress.convert.forecast.calibration_cost import CalibrationCost, calibration_cost, timed
from moepress.convert.forecast.estimate import DiskNeed, TimeEstimate, about, disk_need, estimate_time
from moepress.convert.forecast.machines import PaperTime, paper_time
from moepress.convert.plan import ConversionPlan, check_parallel, pressed_specs
from moepress.convert.prepare import prepare
from moepress.errors import CheckpointError, PlanRefused
from moepress.formats.architecture import expected_weights
from moepress.formats.families import identify_family
from moepress.formats.sizes import (
    GIB,
    bytes_per_gpu,
    checkpoint_bytes,
    kv_bytes_per_token,
    kv_pool_bytes,
    kv_tokens,
)
from moepress.hub.address import hub_address
from moepress.hub.opening import open_source
from moepress.recipe import Recipe


@dataclass(frozen=True)
class Side:
    """One checkpoint's figures, in bytes; ``kv_tokens`` is what fits beside the weights on each GPU."""

    bytes: int
    weights_per_gpu: int
    kv_tokens: int


@dataclass(frozen=True)
class Outlook:
    """Everything ``plan`` prints."""

    title: str
    recipe_name: str
    source: Side
    pressed: Side
    tensor_parallel: int
    gpu_bytes: int
    memory_fraction: float
    kv_dtype: str
    kv_bytes_per_token: int
    plan: ConversionPlan | None
    disk: DiskNeed | None
    time: TimeEstimate | None
    calibration: CalibrationCost | None
    warnings: tuple[str, ...]
    paper: tuple[PaperTime, ...] = ()
    finished: int = 0
    """Shards that an earlier run of the same conversion left in the output folder."""

    def rows(self) -> list[tuple[str, int, int, bool]]:
        """Label, source, pressed, and whether these are bytes."""
        a, b = self.source, self.pressed
        return [
            ("checkpoint", a.bytes, b.bytes, True),
            (f"weights per GPU at TP{self.tensor_parallel}", a.weights_per_gpu, b.weights_per_gpu, True),
            (f"KV tokens that fit ({self.kv_dtype})", a.kv_tokens, b.kv_tokens, False),
        ]

    def lines(self) -> list[str]:
        """What does not fit a table."""
        text = [
            f"KV cache: {self.kv_bytes_per_token:,} bytes a token on each GPU of {self.gpu_bytes / GIB:,.1f} GiB, "
            f"{self.memory_fraction:.0%} of it for weights and cache"
        ]
        if not self.source.kv_tokens and not self.pressed.kv_tokens:
            text.append("neither fits: use more GPUs or smaller weights")
        if self.plan is not None:
            text.append(f"output: {len(self.plan.shards)} shards, layout {self.plan.layout}")
            if self.finished:
                text.append(f"{self.finished} of them are finished there: convert goes on from there")
            text += self.plan.kv.lines(own_pass=not self.plan.recipe.calibrated)
        if self.disk is not None:
            text.append(
                f"disk: {self.disk.needed / GIB:,.2f} GiB needed, {self.disk.free / GIB:,.2f} GiB free in {self.disk.folder}"
            )
        if self.time is not None:
            what = "time here without the calibration" if self.calibration is not None else "time here"
            text.append(
                f"{what}: {about(self.time.seconds)} on {self.time.threads} threads (measured: pressing "
                f"{self.time.press_rate / 1e9:.2f} GB/s, writing {self.time.write_rate / 1e9:.2f} GB/s; "
                f"limited by {self.time.bound_by})"
            )
        if self.calibration is not None:
            text += self.calibration.lines()
        return text

    def as_json(self) -> dict[str, Any]:
        data: dict[str, Any] = {
            "recipe": self.recipe_name,
            "source": self.source.__dict__,
            "pressed": self.pressed.__dict__,
            "tensor_parallel": self.tensor_parallel,
            "gpu_bytes": self.gpu_bytes,
            "memory_fraction": self.memory_fraction,
            "kv_dtype": self.kv_dtype,
            "kv_bytes_per_token": self.kv_bytes_per_token,
            "warnings": list(self.warnings),
            "on_paper": [each.as_json() for each in self.paper],
        }
        if self.plan is not None:
            data["plan"] = self.plan.as_json()
            data["finished_shards"] = self.finished
        if self.disk is not None:
            data["disk"] = {"needed": self.disk.needed, "free": self.disk.free, "folder": str(self.disk.folder)}
        if self.time is not None:
            data["time"] = {**self.time.__dict__, "bound_by": self.time.bound_by}
        if self.calibration is not None:
            data["calibration"] = self.calibration.as_json()
        return data


def outlook(
    source: str,
    recipe: Recipe,
    out: Path | None,
    *,
    gpu_bytes: int,
    memory_fraction: float,
    kv_dtype: str,
    threads: int | None = None,
    trust_remote_code: bool = False,
    machines: Sequence[str] = (),
    same_kv_as: str | Path | None = None,
) -> Outlook:
    """Everything a conversion would need and give.

    Args:
        source: a checkpoint folder, or a config.json.
        out: where the output would go; checked, not created. The current folder's disk without it.
        gpu_bytes: memory of one GPU.
        memory_fraction: share of it for weights and KV cache.
        kv_dtype: ``bf16`` or ``fp8``.
        trust_remote_code: as in `convert`.
        same_kv_as: as in `convert`; needs the checkpoint.
        machines: names of `machines.MACHINES` to estimate the time for, on paper.

    Raises:
        CheckpointError, FormatError, PlanRefused: whatever would stop the conversion.
    """
    if kv_dtype not in ("bf16", "fp8"):
        raise PlanRefused(f"{kv_dtype!r} is not one of bf16, fp8", where="--kv-dtype")
    plan, disk, time, checkpoint, finished = None, None, None, None, set[str]()
    path = Path(source)
    if path.is_file():
        if same_kv_as is not None:
            raise PlanRefused("KV scales of another output need the checkpoint, not its config.json", where=source)
        config = _config(path)
        check_parallel(config, recipe)
        warnings: tuple[str, ...] = ("sizes from config.json alone; disk and time need the checkpoint",)
        specs = expected_weights(config)
        source_bytes, pressed_bytes = checkpoint_bytes(specs), checkpoint_bytes(pressed_specs(config, recipe))
    else:
        on_hub = hub_address(source) is not None
        checkpoint = open_source(source, side_files=on_hub)
        config = checkpoint.config
        target = out or Path("moepress-output")
        prepared = prepare(checkpoint, target, recipe, same_kv_as=same_kv_as, trust_remote_code=trust_remote_code)
        plan, finished = prepared.plan, set(prepared.done)
        disk = disk_need(plan, target, finished=finished)
        warnings = plan.warnings
        if on_hub:  # no tensors are here to measure with
            warnings += ("the source is on the Hub: time is not estimated, and the download comes on top",)
        else:
            time = estimate_time(plan, target, threads=threads)
        specs = expected_weights(config)
        source_bytes, pressed_bytes = plan.source_bytes, plan.output_bytes
    cost = None
    if recipe.calibrated and recipe.engine == "moepress":
        cost = calibration_cost(config, recipe, available=available_memory())
        if checkpoint is not None and plan is not None and time is not None:
            cost = timed(cost, checkpoint, plan)
    ranks = recipe.serving.tensor_parallel
    per_token = kv_bytes_per_token(config, kv_dtype, tp=ranks)  # type: ignore[arg-type]

    def side(size: int, weights: Any) -> Side:
        per_gpu = bytes_per_gpu(config, weights, tp=ranks).total
        return Side(size, per_gpu, kv_tokens(kv_pool_bytes(gpu_bytes, memory_fraction, per_gpu), per_token))

    return Outlook(
        title=identify_family(config).title,
        recipe_name=recipe.name,
        source=side(source_bytes, specs),
        pressed=side(pressed_bytes, pressed_specs(config, recipe)),
        tensor_parallel=ranks,
        gpu_bytes=gpu_bytes,
        memory_fraction=memory_fraction,
        kv_dtype=kv_dtype,
        kv_bytes_per_token=per_token,
        plan=plan,
        disk=disk,
        time=time,
        calibration=cost,
        warnings=warnings,
        paper=tuple(paper_time(config, recipe, name) for name in machines),
        finished=len(finished),
    )


_SOURCES = "name a checkpoint's folder, org/name on the Hub, or a config.json alone"


def _config(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"the file is no configuration: {error}", where=str(path), hint=_SOURCES) from error
    if not isinstance(data, dict):
        raise CheckpointError("the file is no configuration: it is not a JSON object", where=str(path), hint=_SOURCES)
    return data
