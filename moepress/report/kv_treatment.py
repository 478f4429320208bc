"""What became of the KV cache's scales, and what the server makes of them.

    convert     how scales are handed over (folded, in the files, not at all), why, and per layer what it changed
    headers     which scale tensors the output really carries, and whether config.json declares a scheme
    contract    what a scale in the files would do in this server version, with its evidence
    validate    which type the booted server's cache had

Four sources, one sentence each, so that a disagreement shows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from moepress.formats.kv_contract import SCALE_ENDINGS
from moepress.report.output import PressedOutput


@dataclass(frozen=True)
class CachedLayer:
    """One cached tensor of one layer: what was measured in the source model, and the scale that was chosen.

    Attributes:
        amax: largest magnitude.
        clipped_at_one, clipped: share of values beyond e4m3's largest, at a scale of 1.0 and at `scale`.
        error_at_one, error: relative error of the whole layer's attention output.
    """

    layer: int
    cached: str
    amax: float
    scale: float
    clipped_at_one: float
    clipped: float
    error_at_one: float
    error: float
    reason: str


@dataclass(frozen=True)
class KvTreatment:
    """The facts.

    Attributes:
        emission: how convert handed scales over: ``checkpoint``, ``folded``, ``none``.
        reason: why that.
        layers: what was measured; empty where nothing was.
        folded: layers with a scale in their weights.
        suspicious: what looks wrong about the measurement.
        effect: what a scale in the file does: ``used``, ``inert``, ``wrong unless 1.0``, ``not verified``.
        evidence: of `effect`.
        dynamic: the server's cache scales tiles by itself.
        scales: names of scale tensors in the output.
        scheme: the config declares a ``kv_cache_scheme``.
        fp8_flags: what has to stand on the command line for an FP8 cache.
        resolved: type of the booted server's cache, from its log; None without a validation.
    """

    emission: str
    reason: str
    layers: tuple[CachedLayer, ...]
    folded: int
    suspicious: tuple[str, ...]
    effect: str
    evidence: str
    dynamic: bool
    scales: tuple[str, ...]
    scheme: bool
    fp8_flags: tuple[str, ...]
    resolved: str | None

    @property
    def sentences(self) -> list[str]:
        """The facts in words."""
        measured = len({row.layer for row in self.layers})
        how = {
            "folded": f"Scales are folded into the weights around the cache in {self.folded} of {measured} measured layers"
            if self.folded
            else f"{measured} layers were measured, and no scale was folded: every one stays at 1.0",
            "checkpoint": f"Scales for {measured} layers are written to the files",
        }.get(self.emission, "No scales were made: an FP8 cache stores values at a scale of 1.0")
        if self.dynamic:
            how = "No scales were made: the server's FP8 cache computes its own for every tile"
        scheme = "a kv_cache_scheme, so that `auto` gives an FP8 cache" if self.scheme else "no kv_cache_scheme"
        found = [
            f"{how} ({self.reason.rstrip('.')})." if self.reason else f"{how}.",
            f"The files hold {len(self.scales):,} scale tensors; config.json declares {scheme}.",
            f"What this server does with a scale in the files: {self.effect} ({self.evidence}).",
        ]
        found += [f"Suspicious: {what}." for what in self.suspicious]
        if self.resolved:
            found.append(f"The validated server's cache was {self.resolved}.")
        return [sentence.strip() for sentence in found]


def kv_treatment(output: PressedOutput) -> KvTreatment:
    """Of one output."""
    contract = output.contract.kv_scales
    made: Mapping[str, Any] = output.report.get("kv_cache") or {}
    layers = made.get("layers")
    measured: Mapping[str, Any] = layers if isinstance(layers, Mapping) else {}
    declared = output.checkpoint.config.get("quantization_config") or {}
    validated = output.found("validate") or {}
    server = (validated.get("servers") or {}).get("candidate") or {}
    return KvTreatment(
        emission=str(made.get("emission", "none")),
        reason=str(made.get("reason", "")),
        layers=tuple(row for layer, of in measured.items() for row in _rows(int(layer), of)),
        folded=sum(of.get("emission") == "folded" for of in measured.values()),
        suspicious=tuple(made.get("suspicious") or ()),
        effect=contract.effect,
        evidence=contract.evidence,
        dynamic=contract.dynamic,
        scales=tuple(name for name in sorted(output.checkpoint.tensors) if name.endswith(SCALE_ENDINGS)),
        scheme=bool(declared.get("kv_cache_scheme")),
        fp8_flags=output.contract.launch_arguments(fp8_kv=True),
        resolved=server.get("kv_dtype"),
    )


def _rows(layer: int, of: Mapping[str, Any]) -> list[CachedLayer]:
    return [
        CachedLayer(
            layer=layer,
            cached=cached,
            amax=of["amax"][cached],
            scale=scale,
            clipped_at_one=of["clipped_at_one"][cached],
            clipped=of["clipped"][cached],
            error_at_one=of["attention_error_at_one"],
            error=of["attention_error"],
            reason=of["reason"][cached],
        )
        for cached, scale in of["scale"].items()
    ]
