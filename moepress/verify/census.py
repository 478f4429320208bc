"""Is everything there that config.json announces, in its shape, and is it stored alike? Headers alone; no tensor is read."""

from __future__ import annotations

from moepress.formats.architecture import expected_weights
from moepress.formats.families import Component, Family, classify
from moepress.verify.files import PACKED, SCALE_NAMES, OutputFiles
from moepress.verify.findings import Findings


def check_census(output: OutputFiles, findings: Findings) -> None:
    """Every weight that config.json announces is there, whole: servers fill what is missing with random numbers."""
    tensors = output.tensors
    missing, misshapen = [], []
    for spec in expected_weights(output.config):
        module = spec.name.removesuffix(".weight")
        packed = [f"{module}.{part}" for part in PACKED]
        stored = {spec.name: spec.shape}
        if len(spec.shape) == 2:
            stored |= {packed[0]: (spec.shape[0], -(-spec.shape[1] // 8)), packed[2]: (2,)}
        misshapen += [
            f"{name} is {list(tensors[name][2])}, config.json makes it {list(shape)}"
            for name, shape in stored.items()
            if name in tensors and tensors[name][2] != shape
        ]
        if packed[0] in tensors or packed[2] in tensors:  # FP8 too has a weight_scale
            missing += [part for part in packed if part not in tensors]
        elif spec.name not in tensors:
            missing += [spec.name] if spec.copy_of is None else []
        elif tensors[spec.name][1].startswith("F8") and not any(f"{module}.{end}" in tensors for end in SCALE_NAMES):
            missing.append(f"{module}.{SCALE_NAMES[0]}")
    for problem in misshapen[:5]:
        findings.problem(*problem.split(" ", 1))
    if len(misshapen) > 5:
        findings.problem("config.json", f"gives {len(misshapen):,} tensors another shape than the shards")
    for name in missing[:5]:
        findings.problem(name, "config.json announces it, no shard holds it")
    if len(missing) > 5:
        findings.problem("config.json", f"announces {len(missing):,} tensors that no shard holds")


def check_uniform_experts(output: OutputFiles, family: Family, findings: Findings) -> None:
    """All experts of a layer are stored alike and all are there: servers look at expert 0 alone."""
    layers: dict[int | None, dict[str, set[int]]] = {}
    for name in output.tensors:
        identity = classify(family, output.config, name)
        if identity.component is Component.ROUTED_EXPERT and identity.expert is not None:
            kind = f"{identity.projection}.{name.rpartition('.')[2]}"
            layers.setdefault(identity.layer, {}).setdefault(kind, set()).add(identity.expert)
    for layer, kinds in layers.items():
        everyone = set().union(*kinds.values())
        for kind, experts in sorted(kinds.items()):
            if experts != everyone:
                missing = sorted(everyone - experts)
                findings.problem(
                    f"layer {layer}", f"{len(missing)} of {len(everyone)} experts have no {kind}, first {missing[0]}"
                )
