"""The ``quantization_config`` of what we write: compressed-tensors, in one of three layouts.

    layout               routed experts     everything else            who reads it
    bf16_rest            INT4 group         dense, all in ``ignore``   SGLang, vLLM, transformers
    linear_fp8_config    INT4 group         block FP8 as in the source SGLang alone
    two_groups           INT4 group         second group: FP8          SGLang, vLLM; scales are called ``weight_scale``

Which of them a server takes for a family is in `runtime_contract`. Each line below answers a way in which files failed:

- ``bf16_rest`` targets both ``Linear`` (older loaders look that key up and stop without it) and the experts' pattern
  (transformers finds the experts' group by it). ``Linear`` claims every linear module: ``ignore`` must be complete.
- ``ignore`` lines are anchored at both ends and escaped, since ``mlp.gate`` is the beginning of ``mlp.gate_proj``; they
  carry split and fused names; leaves stand in ``(?:…)``, or a server's name mapping would replace ``.q_proj`` in them.
- the top-level ``format`` is ``pack-quantized`` also with two groups: SGLang's MoE code refuses ``mixed-precision``.
- ``actorder`` is null even when columns were swept in activation order: groups are those of the original order, so no
  reader needs to know, and SGLang would load unsplit scales for ``weight`` and refuse its Triton runner for either.

A config is only good if every module is read as it is stored. `check_quantization_config` proves that before anything
is published, with the servers' own rules and under the names they ask for.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from moepress.errors import CheckpointError
from moepress.formats.family_tables import Family
from moepress.formats.module_matching import (
    FUSED_PROJECTIONS,
    Lines,
    Schemes,
    fused_modules,
    match_counts,
    server_names,
    split_layer,
)
from moepress.formats.source_quantization import SourceQuantization, WeightGroup, parse_source_quantization

__all__ = [
    "EXPERT_TARGET",
    "Layout",
    "Linears",
    "SourceQuantization",
    "Stored",
    "WeightGroup",
    "build_quantization_config",
    "check_quantization_config",
    "ignore_list",
    "linear_modules",
    "match_counts",
    "parse_source_quantization",
]

Layout = Literal["bf16_rest", "linear_fp8_config", "two_groups"]
Stored = Literal["int4", "fp8", "dense"]

EXPERT_TARGET = f"re:{Family.expert_pattern}"
"""The routed experts of most families, under every prefix and in MTP layers; a family with other names says so."""

SCHEMA_VERSION = "0.18.0"
"""Release of compressed-tensors whose schema is written."""


@dataclass(frozen=True, slots=True)
class Linears:
    """How FP8 linears beside the experts are stored: as the source has them.

    Attributes:
        block: rows and columns per scale; None for one scale per output channel.
        scale_fmt: ``ue8m0`` when the scales are powers of two.
    """

    block: tuple[int, int] | None
    scale_fmt: str | None = None


def build_quantization_config(
    *,
    layout: Layout,
    group_size: int,
    ignore: Sequence[str],
    linears: Linears | None = None,
    kv_cache_scales: bool = False,
    expert_target: str = EXPERT_TARGET,
) -> dict[str, Any]:
    """Write the config.

    Args:
        layout: see the module's table.
        group_size: columns that share an INT4 scale; -1 for a whole row.
        ignore: from `ignore_list`.
        linears: the FP8 linears; needed for the two layouts that have them, refused for ``bf16_rest``.
        kv_cache_scales: the checkpoint carries static per-tensor FP8 scales for the KV cache.
        expert_target: pattern of the INT4 modules.

    Raises:
        CheckpointError: a layout that cannot hold these linears.
    """
    if (linears is None) != (layout == "bf16_rest"):
        raise CheckpointError(f"layout {layout} {'needs' if linears is None else 'has no'} FP8 linears")
    experts = _experts_group([expert_target], group_size)
    config: dict[str, Any] = {
        "quant_method": "compressed-tensors",
        "version": SCHEMA_VERSION,
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "global_compression_ratio": None,
        "config_groups": {"group_0": experts},
        "ignore": list(ignore),
        "kv_cache_scheme": _kv_cache_scheme() if kv_cache_scales else None,
    }
    if layout == "bf16_rest":
        experts["targets"] = ["Linear", expert_target]
    elif linears is not None and layout == "linear_fp8_config":
        if linears.block is None:
            raise CheckpointError(
                "layout linear_fp8_config reads block scales, and these linears have one scale per channel",
                hint="use layout two_groups or bf16_rest",
            )
        config["linear_fp8_config"] = {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": list(linears.block),
        }
        if linears.scale_fmt:
            config["linear_fp8_config"]["scale_fmt"] = linears.scale_fmt
    elif linears is not None:
        experts["format"] = "pack-quantized"
        config["config_groups"]["group_1"] = _fp8_group(linears)
    return config


def _experts_group(targets: list[str], group_size: int) -> dict[str, Any]:
    whole_row = group_size == -1
    return {
        "targets": targets,
        "weights": _arguments(
            4, "int", "channel" if whole_row else "group", group_size=None if whole_row else group_size
        ),
        "input_activations": None,
        "output_activations": None,
    }


def _fp8_group(linears: Linears) -> dict[str, Any]:
    if linears.block is None:
        weights = _arguments(8, "float", "channel")
        inputs = _arguments(8, "float", "token", dynamic=True)
    else:
        weights = _arguments(8, "float", "block", block=list(linears.block))
        inputs = _arguments(8, "float", "group", group_size=linears.block[1], dynamic=True)
    return {
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": inputs,
        "output_activations": None,
        "format": "float-quantized",
    }


def _arguments(
    num_bits: int,
    kind: str,
    strategy: str,
    *,
    group_size: int | None = None,
    block: list[int] | None = None,
    dynamic: bool = False,
) -> dict[str, Any]:
    return {
        "num_bits": num_bits,
        "type": kind,
        "symmetric": True,
        "strategy": strategy,
        "group_size": group_size,
        "block_structure": block,
        "dynamic": dynamic,
        "actorder": None,
        "observer": None if dynamic else "minmax",
        "observer_kwargs": {},
    }


def _kv_cache_scheme() -> dict[str, Any]:
    """Static, symmetric, per tensor: the one form that SGLang takes (compressed_tensors.py, is_supported_scheme)."""
    return _arguments(8, "float", "tensor")


def linear_modules(shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
    """Modules that a quantization config speaks about: those with a matrix called ``weight``, but no embedding.

    Args:
        shapes: logical shape by weight name.
    """
    modules = (
        name.removesuffix(".weight") for name, shape in shapes.items() if name.endswith(".weight") and len(shape) == 2
    )
    return [module for module in modules if module.rpartition(".")[2] != "embed_tokens"]


def ignore_list(dense: Collection[str], quantized: Collection[str], *, num_layers: int) -> list[str]:
    """Lines that make servers leave the dense linear modules alone, and nothing else.

    Args:
        dense: linear modules stored in 16 or 32 bits, by the checkpoint's names.
        quantized: linear modules stored in FP8 or INT4.
        num_layers: ``num_hidden_layers``.

    Returns:
        Few lines, sorted, each for one parent module: in all layers where its children are dense everywhere, else with
        the layers named. Vision and projector modules stand with their full names, which name mappings understand, and
        once as a whole component, since servers rename their children.

    Raises:
        CheckpointError: projections that servers fuse are stored in different ways.
    """
    _check_fused(dense, quantized)
    layers_of: dict[str, set[int]] = defaultdict(set)
    outside: list[str] = []
    for name in dense:
        if found := split_layer(name):
            layers_of[_any_expert(found[1])].add(found[0])
        else:
            outside.append(name)
    quantized_paths = {_any_expert(found[1]) for name in quantized if (found := split_layer(name))}

    leaves_of: dict[tuple[str, tuple[int, ...]], set[str]] = defaultdict(set)
    for path, layers in layers_of.items():
        parent, _, leaf = path.rpartition(".")
        scope = tuple(sorted(layers)) if path in quantized_paths else ()
        leaves_of[parent, scope].add(leaf)
    lines = []
    for (parent, scope), leaves in leaves_of.items():
        fused = {name for name, parts in FUSED_PROJECTIONS.items() if leaves.issuperset(parts)}
        if ".experts." in f".{parent}.":
            fused = set()
        steps = [_layer_pattern(scope, num_layers)] if scope else []
        steps += [re.escape(step).replace(r"\*", r"\d+") for step in parent.split(".") if step]
        steps.append(f"(?:{'|'.join(sorted(leaves | fused))})")
        lines.append(r"re:.*\." + r"\.".join(steps) + "$")
    return sorted(lines) + _outside_lines(outside, quantized)


def _outside_lines(names: Iterable[str], quantized: Collection[str]) -> list[str]:
    plain, components = set(), set()
    for name in names:
        leaf = name.rpartition(".")[2]
        if leaf == "lm_head":
            plain.add("lm_head")
            if name != leaf:
                plain.add(r"re:(?:.*\.)?lm_head$")
            continue
        plain.add(name)
        parts = name.removeprefix("model.").split(".")
        if len(parts) > 1:
            components.add(parts[0])
    for component in sorted(components):
        line = rf"re:(?:.*\.)?{re.escape(component)}\..+$"
        if not any(Lines([line]).match_exactly(name) for name in quantized):
            plain.add(line)
    return sorted(plain)


def _any_expert(path: str) -> str:
    return re.sub(r"(?<=\bexperts\.)\d+(?=\.)", "*", path)


def _layer_pattern(layers: Sequence[int], num_layers: int) -> str:
    body = [f"layers\\.{layer}" for layer in layers if layer < num_layers]
    mtp = [f"layers\\.{layer}(?:\\.mtp_block)?" for layer in layers if layer >= num_layers]
    return f"(?:{'|'.join([*body, *mtp, *(['decoder'] if mtp else [])])})"


def _check_fused(dense: Collection[str], quantized: Collection[str]) -> None:
    everything = {*dense, *quantized}
    for fused, parts in fused_modules(everything).items():
        kept = [part for part in parts if part in dense]
        if kept and len(kept) < len(parts):
            others = [part for part in parts if part not in kept]
            raise CheckpointError(
                f"servers build {fused} from {len(parts)} modules, of which {', '.join(kept)} would be dense "
                f"and {', '.join(others)} quantized",
                hint="quantize all of them, or none",
            )


def check_quantization_config(
    config: Mapping[str, Any],
    stored: Mapping[str, Stored],
    *,
    num_layers: int,
    built_dense: Iterable[str] = (),
) -> dict[str, int]:
    """Prove that every module is read the way it is stored, under each name that servers use.

    Args:
        config: a ``quantization_config`` of ours.
        stored: every linear module of the checkpoint, by its name there, and how it is stored.
        num_layers: ``num_hidden_layers``.
        built_dense: ``re:`` lines of modules that the server builds dense whatever the config says (the contract's
            ``built_dense``); they need no place in it.

    Returns:
        `match_counts` of the config: what to print.

    Raises:
        CheckpointError: modules that would be read otherwise than they are stored, and lines that hit nothing; all
            kinds at once, each with a count and five examples.
    """
    always_dense = Lines(built_dense, where="built_dense")
    schemes = Schemes(config)
    group_kind: dict[str, Stored] = {"ignored": "dense", "linear_fp8_config": "fp8"}
    for group, content in config["config_groups"].items():
        group_kind[group] = "int4" if content["weights"]["type"] == "int" else "fp8"
    kinds: dict[str, Stored] = dict(stored)
    kinds |= {fused: stored[parts[0]] for fused, parts in fused_modules(stored).items()}

    wrong: dict[str, list[str]] = defaultdict(list)
    for module, kind in kinds.items():
        for name in server_names(module, num_layers=num_layers):
            if kind == "dense" and always_dense.match_exactly(name):
                continue
            scheme = schemes.of(name)
            if group_kind.get(scheme) != kind:
                wrong[f"stored as {kind} and read as {group_kind.get(scheme, scheme)}"].append(name)
                break
    counts = match_counts(config, stored, num_layers=num_layers)
    for line, count in counts.items():
        if count == 0 and line != "Linear":
            wrong["lines that hit no module"].append(line)
    if wrong:
        problems = [f"  {len(names)} × {problem}: {', '.join(names[:5])}" for problem, names in wrong.items()]
        raise CheckpointError(
            "\n".join(["the quantization config does not say what the files hold", *problems]),
            where="config.json: quantization_config",
        )
    return counts
