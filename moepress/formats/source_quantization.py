"""What a checkpoint's config.json says about how its weights are stored.

Three answers are understood, wherever they stand (top level or a section such as ``text_config``, also under the older
name ``compression_config``):

- ``quant_method: fp8``: e4m3 codes, one scale per block (DeepSeek V3, Kimi K2, GLM-5, Qwen3 FP8) or per tensor;
- ``quant_method: compressed-tensors``: groups of modules, each float 8-bit (GLM-4.x FP8: one scale per channel) or
  integer 4-bit packed (Kimi K2.5: groups of 32);
- nothing: the weights are dense.

Everything else is an error that names what was found. A reader that lets an unknown ``format`` fall to a default reads
FP8 bytes as 4-bit ones; and a checkpoint with two different quantization blocks (the old FP8 one in ``text_config``, a
new one at the top) is read differently by every server, so it is refused too.

This says what is *declared*. What a tensor *is* gets decided from the tensor and its siblings (`storage`); of the
declaration only the block size, the group size and the scale format are needed for that, since they cannot be told from
the bytes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from moepress.errors import CheckpointError
from moepress.formats.scale_layout import FP8_LAYOUTS, Fp8Layout

Strategy = Literal["tensor", "channel", "block", "group"]

_E4M3_NAMES = ("e4m3", "float8_e4m3fn")
_KEYS = ("quantization_config", "compression_config")
_GROUP_FORMATS = ("float-quantized", "naive-quantized", "pack-quantized")
_TOP_FORMATS = (*_GROUP_FORMATS, "mixed-precision", "dense")


@dataclass(frozen=True, slots=True)
class WeightGroup:
    """One way in which a set of modules is quantized.

    Attributes:
        targets: module names, ``re:`` patterns, or class names such as ``Linear``.
        type: ``float`` is e4m3, ``int`` is packed two's complement plus 8.
        strategy: what shares a scale: ``tensor``, ``channel`` (an output row), ``block``, or ``group`` (neighbouring
            columns of a row).
        block: rows and columns of a block; None unless the strategy is ``block``.
        group_size: columns of a group; None unless the strategy is ``group``.
        activations: ``dynamic``, ``static``, or None when they stay in 16 bits.
    """

    targets: tuple[str, ...]
    num_bits: int
    type: Literal["float", "int"]
    strategy: Strategy
    symmetric: bool = True
    block: tuple[int, int] | None = None
    group_size: int | None = None
    actorder: str | None = None
    activations: Literal["dynamic", "static"] | None = None


@dataclass(frozen=True, slots=True)
class SourceQuantization:
    """The declaration, in one shape for all methods.

    Attributes:
        method: ``fp8``, ``compressed-tensors`` or ``none``.
        place: where in config.json it stands, ``""`` for ``none``.
        scale_fmt: ``ue8m0`` when scales are powers of two (stored as floats or as exponent bytes), else None.
        ignore: modules that are left as they are, as written there. Often wrong (GLM-5 lists ``indexers_proj`` where
            the tensor is ``indexer.weights_proj``): never decide a tensor's format from it.
        kv_cache_scheme: as written there, or None.
    """

    method: Literal["fp8", "compressed-tensors", "none"]
    place: str = ""
    groups: tuple[WeightGroup, ...] = ()
    scale_fmt: Literal["ue8m0"] | None = None
    ignore: tuple[str, ...] = ()
    kv_cache_scheme: Mapping[str, Any] | None = None

    @property
    def blocks(self) -> tuple[tuple[int, int], ...]:
        """Every block size declared for FP8 weights."""
        return tuple(dict.fromkeys(group.block for group in self.groups if group.block is not None))

    @property
    def fp8_layouts(self) -> tuple[Fp8Layout, ...]:
        """How FP8 weights may be scaled: as some group declares.

        Where no group does, and under ``quant_method: fp8`` without a block size, that is one scale per row or per
        tensor: their shapes tell them apart, and neither needs a size from here.
        """
        declared = {group.strategy for group in self.groups if group.type == "float"}
        if not declared or (self.method == "fp8" and "block" not in declared):
            declared = {"channel", "tensor"}
        return tuple(layout for layout in FP8_LAYOUTS if layout.removeprefix("fp8_") in declared)

    @property
    def group_sizes(self) -> tuple[int, ...]:
        """Every group size declared for packed integers; -1 stands for one scale per whole row."""
        sizes = (group.group_size or -1 for group in self.groups if group.type == "int")
        return tuple(dict.fromkeys(sizes))


def parse_source_quantization(config: Mapping[str, Any]) -> SourceQuantization:
    """Read the quantization that a config.json declares.

    Args:
        config: the whole config.json.

    Raises:
        CheckpointError: two different declarations, or a method, format, type or strategy that is not known here.
    """
    found = _declarations(config)
    if not found:
        return SourceQuantization("none")
    place, declared = found[0]
    for other_place, other in found[1:]:
        if other != declared:
            raise CheckpointError(
                f"two different quantization blocks: {_title(declared)} in {place}, {_title(other)} in {other_place}",
                where="config.json",
                hint="one of them is left over from another version of the checkpoint; remove it",
            )
    method = declared.get("quant_method")
    if method == "fp8":
        return _parse_fp8(declared, place)
    if method == "compressed-tensors":
        return _parse_compressed_tensors(declared, place)
    raise CheckpointError(
        f"unknown quant_method {method!r}; known are fp8 and compressed-tensors",
        where=f"config.json: {place}",
        hint="start from the publisher's FP8, BF16 or compressed-tensors checkpoint instead",
    )


def _declarations(config: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    """Every quantization block, the top level's first, with the place where it stands."""
    sections = [("", config)]
    sections += [(f"{name}.", section) for name, section in config.items() if isinstance(section, Mapping)]
    found = [(prefix + key, section[key]) for prefix, section in sections for key in _KEYS if section.get(key)]
    for place, declared in found:
        if not isinstance(declared, Mapping):
            raise CheckpointError(f"{place} is not an object but {type(declared).__name__}", where="config.json")
    return found


def _title(declared: Mapping[str, Any]) -> str:
    return " ".join(str(declared[key]) for key in ("quant_method", "format", "fmt") if key in declared) or "nothing"


def _parse_fp8(declared: Mapping[str, Any], place: str) -> SourceQuantization:
    where = f"config.json: {place}"
    fmt = declared.get("fmt", "e4m3")
    if fmt not in _E4M3_NAMES:
        raise CheckpointError(f"unknown FP8 fmt {fmt!r}; known are {', '.join(_E4M3_NAMES)}", where=where)
    scheme = declared.get("activation_scheme", "dynamic")
    if scheme not in ("dynamic", "static"):
        raise CheckpointError(f"unknown activation_scheme {scheme!r}; known are dynamic and static", where=where)
    block = _block(declared.get("weight_block_size"), f"{where}.weight_block_size")
    group = WeightGroup(
        targets=("Linear",),
        num_bits=8,
        type="float",
        strategy="block" if block else "tensor",
        block=block,
        activations=scheme,
    )
    ignore = declared.get("modules_to_not_convert") or declared.get("ignored_layers")
    return SourceQuantization(
        method="fp8",
        place=place,
        groups=(group,),
        scale_fmt=_scale_fmt(declared.get("scale_fmt"), where),
        ignore=_strings(ignore, f"{where}.modules_to_not_convert"),
        kv_cache_scheme=_scheme(declared.get("kv_cache_scheme"), where),
    )


def _parse_compressed_tensors(declared: Mapping[str, Any], place: str) -> SourceQuantization:
    where = f"config.json: {place}"
    top_format = declared.get("format")
    if top_format not in _TOP_FORMATS:
        raise CheckpointError(
            f"unknown compressed-tensors format {top_format!r}; known are {', '.join(_TOP_FORMATS)}", where=where
        )
    config_groups = declared.get("config_groups")
    if not isinstance(config_groups, Mapping):
        raise CheckpointError("compressed-tensors without config_groups", where=where)
    groups = [_parse_group(group, top_format, f"{where}.config_groups.{name}") for name, group in config_groups.items()]
    scale_fmt = declared.get("scale_fmt")
    if beside := declared.get("linear_fp8_config"):  # INT4 experts beside block-FP8 linears, as SGLang reads it
        if not isinstance(beside, Mapping):
            raise CheckpointError("linear_fp8_config is not an object", where=where)
        fp8 = _parse_fp8(beside, f"{place}.linear_fp8_config")
        groups += fp8.groups
        scale_fmt = scale_fmt or fp8.scale_fmt
    return SourceQuantization(
        method="compressed-tensors",
        place=place,
        groups=tuple(groups),
        scale_fmt=_scale_fmt(scale_fmt, where),
        ignore=_strings(declared.get("ignore"), f"{where}.ignore"),
        kv_cache_scheme=_scheme(declared.get("kv_cache_scheme"), where),
    )


def _parse_group(group: Any, top_format: str, where: str) -> WeightGroup:
    if not isinstance(group, Mapping) or not isinstance(group.get("weights"), Mapping):
        raise CheckpointError("a config group without a weights section", where=where)
    own_format = group.get("format") or top_format
    if own_format not in _TOP_FORMATS:
        raise CheckpointError(f"unknown format {own_format!r}; known are {', '.join(_TOP_FORMATS)}", where=where)
    weights = group["weights"]
    kind, bits = weights.get("type"), weights.get("num_bits")
    packed = kind == "int" and bits == 4
    if not packed and not (kind == "float" and bits == 8):
        raise CheckpointError(
            f"weights of {bits} bits, type {kind!r}; known are 8-bit float and 4-bit int", where=where
        )
    if own_format in _GROUP_FORMATS and packed != (own_format == "pack-quantized"):
        raise CheckpointError(f"format {own_format!r} contradicts {bits}-bit {kind} weights", where=where)

    group_size = weights.get("group_size")
    group_size = None if group_size in (None, -1) else group_size
    strategy: Strategy = weights.get("strategy") or ("group" if group_size else "channel" if packed else "tensor")
    allowed = ("group", "channel") if packed else ("tensor", "channel", "block")
    if strategy not in allowed:
        raise CheckpointError(f"strategy {strategy!r} for {bits}-bit {kind} weights; known are {allowed}", where=where)
    if (strategy == "group") != (type(group_size) is int and group_size > 0):
        raise CheckpointError(f"strategy {strategy!r} with group_size {group_size!r}", where=where)
    block = _block(weights.get("block_structure"), f"{where}.weights.block_structure")
    if (strategy == "block") != (block is not None):
        raise CheckpointError(f"strategy {strategy!r} with block_structure {block!r}", where=where)
    inputs = group.get("input_activations")
    if inputs is not None and not isinstance(inputs, Mapping):
        raise CheckpointError("input_activations is not an object", where=where)
    return WeightGroup(
        targets=_strings(group.get("targets"), f"{where}.targets"),
        num_bits=bits,
        type=kind,
        strategy=strategy,
        symmetric=bool(weights.get("symmetric", True)),
        block=block,
        group_size=group_size,
        actorder=weights.get("actorder") or None,
        activations=None if not inputs else "dynamic" if inputs.get("dynamic") else "static",
    )


def _block(value: Any, where: str) -> tuple[int, int] | None:
    if value is None:
        return None
    if isinstance(value, str):  # compressed-tensors once wrote "128x128"
        value = [int(part) if re.fullmatch("[0-9]{1,9}", part) else part for part in value.split("x", 2)]
    if isinstance(value, list | tuple) and len(value) == 2 and all(type(side) is int and side > 0 for side in value):
        return (value[0], value[1])
    raise CheckpointError(f"a block size is two positive integers, not {value!r}", where=where)


def _scale_fmt(value: Any, where: str) -> Literal["ue8m0"] | None:
    if value in (None, "float", "fp32"):
        return None
    if value == "ue8m0":
        return "ue8m0"
    raise CheckpointError(f"unknown scale_fmt {value!r}; known is ue8m0", where=where)


def _scheme(value: Any, where: str) -> Mapping[str, Any] | None:
    if value is None or isinstance(value, Mapping):
        return value
    raise CheckpointError("kv_cache_scheme is not an object", where=where)


def _strings(value: Any, where: str) -> tuple[str, ...]:
    if value is None:
        return ()
    if isinstance(value, list | tuple) and all(isinstance(entry, str) for entry in value):
        return tuple(value)
    raise CheckpointError(f"expected a list of strings, not {type(value).__name__} {str(value)[:60]!r}", where=where)
