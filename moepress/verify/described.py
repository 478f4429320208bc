"""What a quantization_config says beside names: symmetric, static, which blocks; and what servers make of every name.

compressed-tensors' schema takes any value that is one. Here each is held against the files:

    INT4 group            symmetric, static, no activation order, no quantized activations: nothing else is stored
    FP8 block size        the one that every FP8 scale's shape gives
    FP8 scale format      exponents only if the source declared them, or every scale is a power of two
    every linear module   read as it is stored under each name that servers ask for (`formats.quantization_config`)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from moepress.errors import CheckpointError
from moepress.formats.checkpoint import Checkpoint
from moepress.formats.families import Component, Family, classify, text_config
from moepress.formats.quantization_config import Stored, check_quantization_config
from moepress.formats.runtime_contract import contract_for
from moepress.formats.scale_layout import fp8_layout
from moepress.formats.source_quantization import SourceQuantization, parse_source_quantization
from moepress.verify.files import SCALE_NAMES, OutputFiles
from moepress.verify.findings import Findings


def check_described(
    output: OutputFiles, source: Checkpoint | None, quantization: Mapping[str, Any], family: Family, findings: Findings
) -> None:
    """Holds a description that moepress wrote against the files; problems are named by field or module."""
    for problem in _integer_groups(quantization):
        findings.problem("config.json", problem)
    with findings.examining("config.json: quantization_config"):
        declared = parse_source_quantization({"quantization_config": quantization})
        _fp8_blocks(output, declared, findings)
        if declared.scale_fmt and source is not None and parse_source_quantization(source.config).scale_fmt is None:
            findings.problem("config.json", f"says that FP8 scales are {declared.scale_fmt}, which the source does not")
    serving = (output.report.get("recipe") or {}).get("serving") or {}
    try:
        contract = contract_for(str(serving.get("server")), str(serving.get("version")), family.key)
        check_quantization_config(
            quantization,
            _stored(output, family),
            num_layers=int(text_config(family, output.config)["num_hidden_layers"]),
            built_dense=contract.built_dense,
        )
    except CheckpointError as error:
        findings.problem("config.json", error.what)


def _integer_groups(quantization: Mapping[str, Any]) -> Iterator[str]:
    for name, group in (quantization.get("config_groups") or {}).items():
        weights = group.get("weights") or {}
        if weights.get("type") != "int":
            continue
        for field, value in {"symmetric": True, "dynamic": False, "actorder": None}.items():
            if weights.get(field, value) != value:
                yield f"{name}.weights.{field} is {weights[field]!r}; the packed experts are written with {value!r}"
        for field in ("input_activations", "output_activations"):
            if group.get(field) is not None:
                yield f"{name}.{field} is set; the experts' activations are not quantized"


def _fp8_blocks(output: OutputFiles, declared: SourceQuantization, findings: Findings) -> None:
    for name, (_, dtype, shape) in output.tensors.items():
        module = name.removesuffix(".weight")
        if not dtype.startswith("F8") or module == name:
            continue
        scale = next(
            (output.tensors[f"{module}.{end}"] for end in SCALE_NAMES if f"{module}.{end}" in output.tensors), None
        )
        if scale is not None and fp8_layout(shape, scale[2], declared.blocks, declared.fp8_layouts) is None:
            asked = [f"blocks of {high}×{wide}" for high, wide in declared.blocks]
            asked += [f"one scale per {layout[4:]}" for layout in declared.fp8_layouts if layout != "fp8_block"]
            findings.problem(
                module, f"FP8 {list(shape)} with scales {list(scale[2])}; config.json declares {' or '.join(asked)}"
            )


def _stored(output: OutputFiles, family: Family) -> dict[str, Stored]:
    """Every linear module and how it is stored, by the tensors' names and dtypes."""
    modules: dict[str, Stored] = {}
    for name, (_, dtype, shape) in output.tensors.items():
        module, _, part = name.rpartition(".")
        if part not in ("weight", "weight_packed") or len(shape) != 2:
            continue
        identity = classify(family, output.config, name)
        if identity.projection is not None and identity.component is not Component.EMBEDDING:
            modules[module] = "int4" if part == "weight_packed" else "fp8" if dtype.startswith("F8") else "dense"
    return modules
