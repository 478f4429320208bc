"""Does config.json say what the files hold? Asked with compressed-tensors' own schema and matcher, module by module."""

from __future__ import annotations

import copy
from typing import Any

import torch
from compressed_tensors.quantization import QuantizationConfig
from compressed_tensors.utils.match import is_match

from moepress.errors import CheckpointError
from moepress.formats.checkpoint import Checkpoint, open_checkpoint
from moepress.formats.families import Component, Family, classify, mtp_layers, text_config
from moepress.formats.module_patterns import module_pattern
from moepress.formats.storage import resolve_storage
from moepress.verify.described import check_described
from moepress.verify.files import OutputFiles
from moepress.verify.findings import Findings

QUANTIZATION_FIELDS = ("quantization_config", "compression_config")


def check_configuration(output: OutputFiles, source: Checkpoint | None, family: Family, findings: Findings) -> None:
    """Schema, targets and ignore lines, leftovers of the source's quantization, and everything else unchanged."""
    text = text_config(family, output.config)
    quantization = output.config.get("quantization_config") or text.get("quantization_config")
    # where nothing was quantized, weights keep the description their publishers gave them, where they gave it, whatever
    # this matcher makes of it; a source in BF16 has none
    carried = output.report.get("layout") == "source"
    _check_mtp(output, family, findings)
    if source is not None:
        if _without_quantization(output.config, family) != _without_quantization(source.config, family):
            findings.problem("config.json", f"differs from the source's in {_differing(output.config, source.config)}")
        if carried and quantization != _described(source.config, family):
            findings.problem("config.json", "weights are stored as in the source, the quantization_config is another")
    if not carried and text is not output.config and "quantization_config" in text:
        findings.problem("config.json", "has a second quantization_config in its text part")
    packed = any(name.endswith(".weight_packed") for name in output.tensors)
    if carried and not packed:
        try:
            resolve_storage(open_checkpoint(output.folder))
        except CheckpointError as error:
            findings.problem("config.json", f"does not describe the tensors: {error.what}")
        return
    if not isinstance(quantization, dict):
        findings.problem("config.json", "has no quantization_config")
        return
    if quantization.get("quant_method") != "compressed-tensors" or quantization.get("format") != "pack-quantized":
        findings.problem(
            "config.json",
            f"quant_method {quantization.get('quant_method')!r}, format {quantization.get('format')!r}:"
            " servers read 'compressed-tensors' and 'pack-quantized'",
        )
    try:
        schema = QuantizationConfig.model_validate(quantization)
    except ValueError as error:
        findings.problem(
            "config.json", f"compressed-tensors refuses the quantization_config: {' '.join(str(error).split())}"
        )
        return
    if not carried:
        _check_modules(output, schema, quantization, family, findings)
        check_described(output, source, quantization, family, findings)


def _check_modules(
    output: OutputFiles, schema: QuantizationConfig, quantization: dict[str, Any], family: Family, findings: Findings
) -> None:
    """Each linear module is described as what it is: packed, FP8, or dense and ignored."""
    linear = torch.nn.Linear(1, 1)
    groups = {
        name: (list(group.targets), group.weights.num_bits if group.weights else None)
        for name, group in schema.config_groups.items()
    }
    fp8_everywhere = "linear_fp8_config" in quantization
    ignore = list(schema.ignore or [])
    for line in {*ignore, *(target for targets, _ in groups.values() for target in targets)}:
        if line.startswith("re:"):
            module_pattern(line)  # before the matcher meets one that takes for ever
    for name, (_, dtype, shape) in output.tensors.items():
        module, _, part = name.rpartition(".")
        if part not in ("weight", "weight_packed") or len(shape) != 2:
            continue
        component = classify(family, output.config, name).component
        if component in (Component.EMBEDDING, Component.ROUTER, Component.NORM):
            continue
        bits = {"weight_packed": 4}.get(part, 8 if dtype.startswith("F8") else 16)
        # the more specific group wins: servers match names before classes
        matched = [
            g
            for targets, g in groups.values()
            if is_match(module, linear, [t for t in targets if t.startswith("re:")], ignore)
        ]
        matched = matched or [g for targets, g in groups.values() if is_match(module, linear, targets, ignore)]
        described = matched[0] if matched else 16
        if fp8_everywhere and component is not Component.ROUTED_EXPERT and component is not Component.LM_HEAD:
            described = 8 if described == 16 and bits == 8 else described
        if described != bits:
            findings.problem(module, f"stored with {bits} bits, config.json describes it with {described}")


def _check_mtp(output: OutputFiles, family: Family, findings: Findings) -> None:
    announced = set(mtp_layers(family, output.config))
    present = {i.layer for name in output.tensors if (i := classify(family, output.config, name)).is_mtp}
    if announced != present:
        findings.problem(
            "config.json", f"announces MTP layers {sorted(announced)}, the shards hold {sorted(map(str, present))}"
        )


def _described(config: dict[str, Any], family: Family) -> Any:
    """A quantization_config, wherever it stands."""
    return config.get("quantization_config") or text_config(family, config).get("quantization_config")


def _without_quantization(config: dict[str, Any], family: Family) -> dict[str, Any]:
    plain = copy.deepcopy(config)
    for part in (plain, text_config(family, plain)):
        for field in QUANTIZATION_FIELDS:
            part.pop(field, None)  # type: ignore[attr-defined]
    return plain


def _differing(a: dict[str, Any], b: dict[str, Any]) -> str:
    fields = sorted(key for key in {*a, *b} if a.get(key) != b.get(key) and key not in QUANTIZATION_FIELDS)
    return ", ".join(fields) or "its text part"
