"""What became of the KV cache's scales, and what the server will make of them.

The contract says what this server version reads and what a scale then does; the headers say what the output carries; a
validation says what dtype the pool really had. Three sources, one paragraph each, so that a disagreement shows.
"""

from __future__ import annotations

from dataclasses import dataclass

from moepress.convert.carried import KV_SCALES
from moepress.report.output import PressedOutput


@dataclass(frozen=True)
class KvTreatment:
    """The facts.

    Attributes:
        emission: how scales reach this server: ``checkpoint``, ``folded``, ``none``.
        effect: what a scale in the file does: ``used``, ``inert``, ``wrong unless 1.0``, ``not verified``.
        evidence: of `effect`.
        scales: names of scale tensors in the output.
        scheme: the config declares a ``kv_cache_scheme``.
        fp8_flags: what has to stand on the command line for an FP8 cache.
        resolved: dtype of the booted server's pool, from its log; None without a validation.
    """

    emission: str
    effect: str
    evidence: str
    scales: tuple[str, ...]
    scheme: bool
    fp8_flags: tuple[str, ...]
    resolved: str | None

    @property
    def sentences(self) -> list[str]:
        """The facts in words."""
        if self.scales:
            text = f"The checkpoint carries {len(self.scales):,} KV scales, and this server's effect is: {self.effect}."
        else:
            text = "The checkpoint carries no KV scales: an FP8 cache holds values at a scale of 1.0"
            text += " (or folded into the weights)." if self.emission == "folded" else "."
        scheme = "a kv_cache_scheme, so that `auto` gives an FP8 cache." if self.scheme else "no kv_cache_scheme."
        found = [
            text,
            f"config.json declares {scheme}",
            f"A scale in the file would be: {self.effect} ({self.evidence}).",
        ]
        if self.resolved:
            found.append(f"The validated server's cache was {self.resolved}.")
        return found


def kv_treatment(output: PressedOutput) -> KvTreatment:
    """Of one output."""
    kv = output.contract.kv_scales
    declared = output.checkpoint.config.get("quantization_config") or {}
    validated = output.found("validate") or {}
    server = (validated.get("servers") or {}).get("candidate") or {}
    return KvTreatment(
        emission=kv.emission,
        effect=kv.effect,
        evidence=kv.evidence,
        scales=tuple(name for name in sorted(output.checkpoint.tensors) if name.endswith(KV_SCALES)),
        scheme=bool(declared.get("kv_cache_scheme")),
        fp8_flags=output.contract.launch_arguments(fp8_kv=True),
        resolved=server.get("kv_dtype"),
    )
