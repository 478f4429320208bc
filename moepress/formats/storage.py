"""Which tensors make up which weight: every tensor of a checkpoint ends in exactly one `StoredWeight`.

    layers.3.mlp.experts.7.down_proj.weight            F8_E4M3 [6144, 2048]   ┐ one weight, kind fp8_block,
    layers.3.mlp.experts.7.down_proj.weight_scale_inv  F32     [48, 16]       ┘ perhaps in two shards
    layers.3.mlp.experts.7.down_proj.weight_packed     I32     [7168, 256]    ┐
    layers.3.mlp.experts.7.down_proj.weight_scale      BF16    [7168, 64]     │ one weight, kind int4_packed
    layers.3.mlp.experts.7.down_proj.weight_shape      I64     [2]            ┘
    layers.3.mlp.gate.e_score_correction_bias          F32     [256]            a weight by itself, kind dense

The kind is decided from the tensor's dtype and its siblings' names and shapes, never from a list of modules in the
configuration: those lists are wrong in published checkpoints. The configuration is asked for what bytes cannot say, the
size of a block or group (`source_quantization`), and the scale's shape must then be the one that this size gives.

A tensor whose meaning is not certain stops everything, with all its fellows counted: FP8 without a scale (read as plain
numbers it would be thousands of times too large), a scale without its weight, bytes of an unknown packing. Only headers
are read here, except 16 bytes for an INT4 weight whose true width its header cannot give.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from moepress.errors import CheckpointError
from moepress.formats.checkpoint import Checkpoint, TensorRef
from moepress.formats.fused_experts import is_fused_experts, is_transposed, neighbour
from moepress.formats.scale_layout import Fp8Layout, fp8_layout, grouped_columns, packed_words
from moepress.formats.source_quantization import SourceQuantization, parse_source_quantization

StorageKind = Literal["dense", "fp8_block", "fp8_channel", "fp8_tensor", "int4_packed", "fused_experts"]

SCALE_SUFFIXES = ("weight_scale_inv", "weight_scale", "scale")
"""What may stand in a scale's name where its FP8 weight has ``weight``, as published so far."""

_FLOATS = ("F64", "F32", "F16", "BF16")
_SCALE_DTYPES = ("F32", "BF16", "F16")
_PLAIN_INTEGERS = ("I64", "I32", "I16", "BOOL")
_PACKED_PARTS = {
    "weight_scale": "scale",
    "weight_shape": "shape",
    "weight_zero_point": "zero_point",
    "weight_g_idx": "g_idx",
}
_ONLY_BESIDE_A_WEIGHT = re.compile(
    r"(?:^|[._])(?:weight_)?(?:scale_inv|weight_scale|weight_scale_2|weight_packed|weight_shape|weight_zero_point"
    r"|weight_g_idx|packed|blocks|scales|qweight|qzeros|g_idx|input_scale|input_global_scale|weight_global_scale)$"
)
"""Names that mean nothing without the weight they belong to. KV scales (``k_scale``) stand for themselves."""


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """One logical weight and the tensors that hold it.

    Attributes:
        name: the logical name, ``….down_proj.weight``, also where the file has only ``….down_proj.weight_packed``.
        shape: logical: ``[out, in]`` of the numbers, not of their packing; ``[experts, out, in]`` for fused experts.
        parts: tensors by role: ``weight`` or ``packed``, then ``scale``, ``shape``, ``zero_point``, ``g_idx``,
            ``input_scale`` (static activations; read by nobody here, and so named that it can be dropped knowingly).
        block: rows and columns per scale of ``fp8_block``, as declared.
        group_size: columns per scale of ``int4_packed``; -1 for one scale per row.
        scale_encoding: ``e8m0`` when scales are exponent bytes; None without a scale.
        transposed: fused experts that lie in the file as ``[experts, in, out]``.
    """

    name: str
    kind: StorageKind
    shape: tuple[int, ...]
    parts: dict[str, TensorRef]
    block: tuple[int, int] | None = None
    group_size: int | None = None
    scale_encoding: Literal["float", "e8m0"] | None = None
    transposed: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of all parts in the file."""
        return sum(part.nbytes for part in self.parts.values())

    @property
    def dtype(self) -> str:
        """The header's dtype of the part that holds the numbers."""
        return self.parts["packed" if "packed" in self.parts else "weight"].dtype

    @property
    def module(self) -> str:
        """The name without its last component: what quantization configurations call a module."""
        return self.name.rpartition(".")[0]


def resolve_storage(checkpoint: Checkpoint) -> dict[str, StoredWeight]:
    """Assign every tensor of a checkpoint to one weight.

    Args:
        checkpoint: opened; its folder is needed only for INT4 weights with one scale per row, whose width is read from
            ``weight_shape`` (without a folder it is taken to be a multiple of 8, and `load_weight` checks it).

    Returns:
        Weights by logical name, in the order of the checkpoint's tensors.

    Raises:
        CheckpointError: tensors that cannot be assigned, of all kinds at once, each with a count and five examples; or
            a quantization block in config.json that is not understood.
    """
    return _Resolver(checkpoint, parse_source_quantization(checkpoint.config)).run()


@dataclass(slots=True)
class _Resolver:
    checkpoint: Checkpoint
    declared: SourceQuantization
    claimed: set[str] = field(default_factory=set)
    problems: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))

    def run(self) -> dict[str, StoredWeight]:
        tensors = self.checkpoint.tensors
        weights: dict[str, StoredWeight] = {}
        deferred: list[TensorRef] = []
        for ref in tensors.values():  # first those that claim siblings
            if ref.name.endswith(".weight_packed"):
                self._add(weights, self._packed(ref))
            elif ref.dtype.startswith("F8_E4M3") and not _is_scale_name(ref.name):
                self._add(weights, self._fp8(ref))
            else:
                deferred.append(ref)
        for ref in deferred:
            if ref.name not in self.claimed:
                self._add(weights, self._alone(ref))
        self._check_act_order(weights)
        if self.problems:
            raise self._error()
        place = {name: i for i, name in enumerate(tensors)}
        return dict(sorted(weights.items(), key=lambda item: min(place[part.name] for part in item[1].parts.values())))

    def _add(self, weights: dict[str, StoredWeight], weight: StoredWeight | None) -> None:
        if weight is None:
            return
        self.claimed.update(part.name for part in weight.parts.values())
        if weight.name in weights:
            self.problems["stored twice, in two forms"].append(weight.name)
        weights[weight.name] = weight

    def _take(self, roles: Mapping[str, str]) -> dict[str, TensorRef]:
        """Siblings that exist, by role; marked as claimed even when the weight is then refused."""
        found = {role: self.checkpoint.tensors[name] for name, role in roles.items() if name in self.checkpoint.tensors}
        self.claimed.update(ref.name for ref in found.values())
        return found

    # FP8

    def _fp8(self, ref: TensorRef) -> StoredWeight | None:
        stem = ref.name.removesuffix("weight")
        named_weight = stem != ref.name
        names = (
            [stem + suffix for suffix in SCALE_SUFFIXES]
            if named_weight
            else [f"{ref.name}_scale_inv", f"{ref.name}_scale"]
        )
        scales = [name for name in names if name in self.checkpoint.tensors]
        extra = self._take({f"{stem}input_scale" if named_weight else f"{ref.name}_input_scale": "input_scale"})
        self.claimed.update(scales)
        if ref.dtype != "F8_E4M3":
            self.problems[f"{ref.dtype}, which no server of these models reads"].append(ref.name)
            return None
        if not scales:
            tried = ", ".join(f".{suffix}" for suffix in SCALE_SUFFIXES) if named_weight else "_scale_inv, _scale"
            self.problems[f"FP8 without a scale (tried {tried})"].append(ref.name)
            return None
        if len(scales) > 1:
            self.problems["FP8 with more than one scale"].append(f"{ref.name} ({', '.join(scales)})")
            return None
        scale = self.checkpoint.tensors[scales[0]]
        encoding = self._scale_encoding(ref, scale)
        if encoding is None:
            return None
        fused = is_fused_experts(ref.name, ref.shape)
        if len(ref.shape) != 2 and not fused:
            self.problems["FP8 that is not a matrix"].append(f"{ref.name} {list(ref.shape)}")
            return None
        layout = self._fp8_layout(ref, scale)
        if layout is None:
            return None
        kind, block = layout
        shape, transposed = self._fused_shape(ref) if fused else (ref.shape, False)
        return StoredWeight(
            name=ref.name,
            kind="fused_experts" if fused else kind,
            shape=shape,
            parts={"weight": ref, "scale": scale, **extra},
            block=block,
            scale_encoding=encoding,
            transposed=transposed,
        )

    def _scale_encoding(self, ref: TensorRef, scale: TensorRef) -> Literal["float", "e8m0"] | None:
        if scale.dtype in _SCALE_DTYPES:
            return "float"
        if scale.dtype == "F8_E8M0" or (scale.dtype == "U8" and self.declared.scale_fmt == "ue8m0"):
            return "e8m0"
        why = "bytes, and config.json declares no scale_fmt" if scale.dtype == "U8" else f"of dtype {scale.dtype}"
        self.problems[f"FP8 whose scale is {why}"].append(ref.name)
        return None

    def _fp8_layout(self, ref: TensorRef, scale: TensorRef) -> tuple[Fp8Layout, tuple[int, int] | None] | None:
        layouts = self.declared.fp8_layouts
        layout = fp8_layout(ref.shape, scale.shape, self.declared.blocks, layouts)
        if layout is None:
            if self.declared.blocks:
                asked = " or ".join(f"{block[0]}×{block[1]}" for block in self.declared.blocks)
                problem = f"FP8 whose scale has the wrong shape for the declared blocks of {asked}"
            elif len(layouts) == 1:
                asked = "row" if layouts == ("fp8_channel",) else "tensor"
                problem = f"FP8 whose scale has the wrong shape for the declared one scale per {asked}"
            else:
                problem = "FP8 with block scales, and config.json declares no weight_block_size"
            self.problems[problem].append(f"{ref.name} {list(ref.shape)} with {list(scale.shape)}")
        return layout

    # packed INT4

    def _packed(self, ref: TensorRef) -> StoredWeight | None:
        stem = ref.name.removesuffix("weight_packed")
        parts = {"packed": ref, **self._take({stem + suffix: role for suffix, role in _PACKED_PARTS.items()})}
        parts |= self._take({f"{stem}input_scale": "input_scale"})
        for role in ("scale", "shape"):
            if role not in parts:
                self.problems[f"packed INT4 without its weight_{role}"].append(ref.name)
                return None
        scale = parts["scale"]
        if ref.dtype != "I32" or len(ref.shape) != 2 or len(scale.shape) != 2 or scale.dtype not in _SCALE_DTYPES:
            found = f"{ref.name} {ref.dtype} {list(ref.shape)} with scale {scale.dtype} {list(scale.shape)}"
            self.problems["packed weights that are not an I32 matrix with a float scale matrix"].append(found)
            return None
        if parts["shape"].dtype not in ("I64", "I32") or parts["shape"].shape != (2,):
            self.problems["packed INT4 whose weight_shape is not two integers"].append(ref.name)
            return None
        if not self.declared.group_sizes:
            self.problems["packed INT4, and config.json declares no 4-bit group"].append(ref.name)
            return None
        width = self._packed_width(parts)
        if width is None:
            return None
        columns, group_size = width
        rows, groups = scale.shape
        wrong = [
            f"{role} {list(parts[role].shape)}"
            for role, shape in {"zero_point": (-(-rows // 8), groups), "g_idx": (columns,)}.items()
            if role in parts and (parts[role].shape != shape or parts[role].dtype != "I32")
        ]
        if wrong:
            self.problems["packed INT4 with a part of the wrong shape"].append(f"{ref.name}: {', '.join(wrong)}")
            return None
        return StoredWeight(
            name=f"{stem}weight",
            kind="int4_packed",
            shape=(rows, columns),
            parts=parts,
            group_size=group_size,
            scale_encoding="float",
        )

    def _packed_width(self, parts: Mapping[str, TensorRef]) -> tuple[int, int] | None:
        """True columns and group size. Groups are whole, so with a group size the headers settle the width."""
        packed, scale = parts["packed"], parts["scale"]
        (rows, words), (scale_rows, groups) = packed.shape, scale.shape
        if rows == scale_rows:
            if grouped := grouped_columns(words, groups, self.declared.group_sizes):
                return grouped
            if groups == 1 and -1 in self.declared.group_sizes:
                columns = self._stated_columns(parts["shape"], words * 8)
                if packed_words(columns) == words:
                    return columns, -1
        sizes = ", ".join(str(size) for size in self.declared.group_sizes)
        self.problems[f"packed INT4 whose scale or weight_shape does not fit (declared group size: {sizes})"].append(
            f"{packed.name} {list(packed.shape)} with {list(scale.shape)}"
        )
        return None

    def _stated_columns(self, ref: TensorRef, otherwise: int) -> int:
        if self.checkpoint.folder is None:
            return otherwise
        with self.checkpoint.path(ref.shard).open("rb") as shard:
            shard.seek(ref.start)
            raw = shard.read(ref.nbytes)
        return int.from_bytes(raw[ref.nbytes // 2 :], "little", signed=True)

    # the rest

    def _alone(self, ref: TensorRef) -> StoredWeight | None:
        if _is_scale_name(ref.name) or (
            ref.name.endswith(".scale") and (len(ref.shape) == 2 or ref.dtype == "F8_E8M0")
        ):
            self.problems["scales or parts that belong to no weight"].append(ref.name)
            return None
        if ref.dtype not in _FLOATS and ref.dtype not in _PLAIN_INTEGERS:
            self.problems[f"{ref.dtype} of an encoding that is not known here"].append(ref.name)
            return None
        if ref.dtype in _FLOATS and is_fused_experts(ref.name, ref.shape):
            shape, transposed = self._fused_shape(ref)
            return StoredWeight(ref.name, "fused_experts", shape, {"weight": ref}, transposed=transposed)
        return StoredWeight(ref.name, "dense", ref.shape, {"weight": ref})

    def _fused_shape(self, ref: TensorRef) -> tuple[tuple[int, ...], bool]:
        """``[experts, out, in]`` of fused experts, and whether the file has the last two the other way round."""
        hidden = _text_config(self.checkpoint.config).get("hidden_size")
        experts, first, second = ref.shape
        if hidden not in (first, second):
            problem = f"fused experts without a dimension of hidden_size {hidden}"
            self.problems[problem].append(f"{ref.name} {list(ref.shape)}")
            return ref.shape, False
        transposed = is_transposed(ref.name, ref.shape, hidden)
        other = self.checkpoint.tensors.get(neighbour(ref.name))
        if transposed is None and other is not None and len(other.shape) == 3:
            transposed = is_transposed(other.name, other.shape, hidden)
        return ((experts, second, first), True) if transposed else (ref.shape, False)

    def _check_act_order(self, weights: Mapping[str, StoredWeight]) -> None:
        """A server takes the activation order of all experts of a projection from one of them."""
        ordered: dict[str, dict[bool, list[str]]] = defaultdict(lambda: defaultdict(list))
        for name, weight in weights.items():
            if weight.kind == "int4_packed":
                ordered[re.sub(r"\.experts\.\d+\.", ".experts.*.", name)]["g_idx" in weight.parts].append(name)
        for both in ordered.values():
            if len(both) == 2:
                self.problems["experts without weight_g_idx whose neighbours have it"] += both[False]

    def _error(self) -> CheckpointError:
        total = sum(len(names) for names in self.problems.values())
        lines = [f"{total} of {len(self.checkpoint.tensors)} tensors cannot be read for certain"]
        for kind, names in self.problems.items():
            more = f", and {len(names) - 5} more" if len(names) > 5 else ""
            lines.append(f"  {len(names)} × {kind}: {', '.join(names[:5])}{more}")
        return CheckpointError(
            "\n".join(lines),
            where=self.checkpoint.location,
            hint="compare config.json and the shards with the publisher's; a half-converted checkpoint looks like this",
        )


def _is_scale_name(name: str) -> bool:
    return _ONLY_BESIDE_A_WEIGHT.search(name) is not None


def _text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    nested = config.get("text_config")
    return nested if isinstance(nested, Mapping) else config
