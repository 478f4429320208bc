"""What the weights take on a GPU, and how many tokens fit beside them: measured, predicted, and the difference explained.

    weights        "mem usage" of the server's log: everything that is there after loading
    parameters     bytes of the parameters that the load recorder saw filled, by component of the tensors they came from
    predicted      `formats.sizes`, the arithmetic of `plan`, for the same checkpoint and number of GPUs
    KV pool        from the log, with the type that was resolved (/server_info repeats what was asked for)

Three numbers for one thing, so that a difference has a place: a component that is larger than predicted was loaded
otherwise than `plan` thinks; memory beside the parameters is the server's own (the second, absorbed copy of kv_b_proj,
workspaces, repacked weights). With several ranks the fullest one counts. On a CPU the log's figure is a difference of
free memory, good to tens of MiB; the parameters' bytes are exact anywhere.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from moepress.errors import CheckpointError, ServingError
from moepress.formats.architecture import expected_weights
from moepress.formats.checkpoint import Checkpoint
from moepress.formats.families import classify, identify_family
from moepress.formats.sizes import GIB, bytes_per_gpu, kv_bytes_per_token, kv_pool_bytes, kv_tokens
from moepress.serving.client import SGLangClient
from moepress.serving.load_proof import read_reports
from moepress.serving.validation.figures import Figure, gib, json_or_none
from moepress.serving.validation.sides import Side

_OTHER = "the server's own parameters"
_NOTABLE = 0.01


@dataclass(frozen=True)
class SideMemory:
    """One side, per GPU. None where the server does not say.

    Attributes:
        weights: memory after loading, GiB.
        parameters: bytes by component, of the fullest rank; empty without the recorder.
        kv_pool: GiB. kv_tokens: per replica. free: GiB left over.
        kv_dtype: resolved; None without a log.
        predicted: bytes by component.
        predicted_absorbed: bytes of the second copy of kv_b_proj, part of the predicted sum.
        predicted_token: bytes a token.
        predicted_tokens: None when the pool was limited by a flag or the GPU is unknown.
    """

    weights: Figure | None
    parameters: dict[str, int]
    kv_pool: Figure | None
    kv_tokens: Figure | None
    free: Figure | None
    kv_dtype: str | None
    predicted: dict[str, int]
    predicted_absorbed: int
    predicted_token: int
    predicted_tokens: int | None

    @property
    def predicted_weights(self) -> int:
        """Bytes."""
        return sum(self.predicted.values()) + self.predicted_absorbed

    @property
    def token_bytes(self) -> Figure | None:
        """KV bytes of one token, as measured."""
        if self.kv_pool is None or self.kv_tokens is None or not self.kv_tokens.value:
            return None
        return Figure(self.kv_pool.value * GIB / self.kv_tokens.value, "B")

    def as_json(self) -> dict[str, Any]:
        tokens = None if self.predicted_tokens is None else Figure(self.predicted_tokens, "tokens")
        return {
            "weights": json_or_none(self.weights),
            "parameters": gib(sum(self.parameters.values())).as_json() if self.parameters else None,
            "kv_pool": json_or_none(self.kv_pool),
            "free": json_or_none(self.free),
            "kv_tokens": json_or_none(self.kv_tokens),
            "kv_dtype": self.kv_dtype,
            "kv_bytes_per_token": json_or_none(self.token_bytes),
            "predicted": {
                "weights": gib(self.predicted_weights).as_json(),
                "kv_tokens": json_or_none(tokens),
                "kv_bytes_per_token": Figure(self.predicted_token, "B").as_json(),
            },
        }


@dataclass(frozen=True)
class Headroom:
    """Both sides. `planned_parallel`: GPUs that the recipe's bounds are for."""

    tensor_parallel: int
    planned_parallel: int
    candidate: SideMemory
    baseline: SideMemory | None

    def rows(self) -> list[tuple[str, int, int | None, int]]:
        """Component, bytes of the candidate's parameters, the baseline's, and the candidate's predicted bytes."""
        mine, theirs = self.candidate, self.baseline
        names = sorted(mine.predicted.keys() | mine.parameters.keys(), key=lambda name: -mine.predicted.get(name, 0))
        return [
            (
                name,
                mine.parameters.get(name, 0),
                theirs.parameters.get(name, 0) if theirs is not None and theirs.parameters else None,
                mine.predicted.get(name, 0),
            )
            for name in names
        ]

    def explained(self) -> list[str]:
        """Where measured and predicted differ, and why, in words."""
        mine, lines = self.candidate, []
        if mine.parameters:
            for name, held, _, wanted in self.rows():
                if abs(held - wanted) > max(_NOTABLE * wanted, 2**16):
                    lines.append(f"{name}: {_mib(held)} loaded, {_mib(wanted)} predicted")
            if not lines:
                lines.append(f"every component is within {_NOTABLE:.0%} of what plan predicts")
            if mine.weights is not None:
                own = mine.weights.value * GIB - sum(mine.parameters.values())
                absorbed = f", of which kv_b_proj's absorbed copy {_mib(mine.predicted_absorbed)}"
                lines.append(
                    f"beside the parameters the server holds {_mib(own)}{absorbed if mine.predicted_absorbed else ''}"
                )
        if (measured := mine.token_bytes) is not None:
            lines.append(f"a token takes {measured.value:,.0f} B of KV cache, {mine.predicted_token:,} B predicted")
        if mine.kv_tokens is not None and mine.predicted_tokens is not None:
            lines.append(f"{mine.kv_tokens.value:,.0f} tokens fit, {mine.predicted_tokens:,} predicted")
        elif mine.kv_tokens is not None:
            lines.append(f"{mine.kv_tokens.value:,.0f} tokens fit, limited by --max-total-tokens")
        return lines

    def as_json(self) -> dict[str, Any]:
        return {
            "kv_dtype": self.candidate.kv_dtype,
            "tensor_parallel": self.tensor_parallel,
            "candidate": self.candidate.as_json(),
            "baseline": json_or_none(self.baseline),
            "rows": [
                {
                    "component": name,
                    "candidate": gib(held).as_json() if self.candidate.parameters else None,
                    "baseline": None if theirs is None else gib(theirs).as_json(),
                    "predicted": gib(wanted).as_json(),
                }
                for name, held, theirs, wanted in self.rows()
            ],
            "explained": self.explained(),
        }


def measure_memory(side: Side, client: SGLangClient, checkpoint: Checkpoint, gpu_bytes: int | None) -> SideMemory:
    """One side's memory, from its log where it was booted here, from /server_info where not.

    Args:
        side: up.
        checkpoint: what it serves.
        gpu_bytes: memory of one GPU; None = unknown, or none.
    """
    log = side.log
    if log is not None:
        # on a processor a server takes the change of the machine's free memory for what its weights take
        weights, free = (None, None) if log.cpu_lab else (_figure(log.weights_gib), _figure(log.free_gib))
        pool = _figure(_finer(side, "kvcache") or log.kv_gib)
        tokens, kv_dtype = log.kv_tokens, log.kv_dtype
    else:
        held = client.memory()
        weights, pool, tokens = Figure(held.weights_gib, "GiB"), Figure(held.kv_gib, "GiB"), held.kv_tokens
        free, kv_dtype = None, None
    ranks = int(side.info.get("tp_size") or side.options.tensor_parallel)
    predicted, absorbed = _predicted(checkpoint, ranks, mtp=side.options.mtp)
    in_fp8 = (kv_dtype or str(side.info.get("kv_cache_dtype"))).startswith(("float8", "fp8"))
    per_token = kv_bytes_per_token(checkpoint.config, "fp8" if in_fp8 else "bf16", tp=ranks)
    fitting = None
    fraction = side.info.get("mem_fraction_static")
    if gpu_bytes is not None and fraction and not side.info.get("max_total_tokens"):
        total = sum(predicted.values()) + absorbed
        fitting = kv_tokens(kv_pool_bytes(gpu_bytes, float(fraction), total), per_token)
    return SideMemory(
        weights=weights,
        parameters=_parameters(side, checkpoint),
        kv_pool=pool,
        kv_tokens=None if tokens is None else Figure(tokens, "tokens"),
        free=free,
        kv_dtype=kv_dtype,
        predicted=predicted,
        predicted_absorbed=absorbed,
        predicted_token=per_token,
        predicted_tokens=fitting,
    )


def _predicted(checkpoint: Checkpoint, ranks: int, *, mtp: bool) -> tuple[dict[str, int], int]:
    by_component: dict[str, list[Any]] = {}
    for spec in expected_weights(checkpoint.config):
        by_component.setdefault(spec.identity.component.value, []).append(spec)
    found, absorbed = {}, 0
    for name, specs in by_component.items():
        share = bytes_per_gpu(checkpoint.config, specs, tp=ranks, mtp=mtp)
        absorbed += share.absorbed
        if share.split + share.replicated:
            found[name] = share.split + share.replicated
    return found, absorbed


def _parameters(side: Side, checkpoint: Checkpoint) -> dict[str, int]:
    """Bytes by component on the fullest rank; a rank is a process, and the draft model's report is of the same one."""
    if not side.boots:
        return {}
    try:
        reports = read_reports(side.boots[0].reports)
    except ServingError:  # no recorder in a container that does not mount it: the proof says so
        return {}
    ranks: dict[object, dict[str, int]] = {}
    for report in reports:
        sums = ranks.setdefault(report.get("process"), {})
        for held in report["parameters"].values():
            name = _component(checkpoint, held["sources"])
            sums[name] = sums.get(name, 0) + math.prod(held["shape"]) * getattr(torch, held["dtype"]).itemsize
    return max(ranks.values(), key=lambda sums: sum(sums.values()))


def _component(checkpoint: Checkpoint, sources: Sequence[str]) -> str:
    family = identify_family(checkpoint.config)
    for source in sources:
        try:
            return classify(family, checkpoint.config, source).component.value
        except CheckpointError:  # a name that the family has no weight for; the load proof reports it
            continue
    return _OTHER


def _finer(side: Side, name: str) -> float | None:
    """/server_info has three decimals of a GiB where the log has two."""
    states = side.info.get("internal_states") or [{}]
    value = (states[0].get("memory_usage") or {}).get(name)
    return None if value is None else float(value)


def _figure(value: float | None) -> Figure | None:
    return None if value is None else Figure(value, "GiB")


def _mib(count: float) -> str:
    return f"{count / GIB:,.2f} GiB" if abs(count) >= GIB else f"{count / 2**20:,.2f} MiB"
