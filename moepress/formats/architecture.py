"""All weights of a model, from its configuration alone: names, shapes, and how the publisher stores them.

    expected_weights(config)  ->  [WeightSpec(name, shape, published, identity), …]

The list is what a complete checkpoint must hold. It answers, before a byte of weights is read: how many parameters, how
many bytes (`sizes`), which experts must exist (an expert missing from the files is filled at random by some loaders),
which layers have an indexer.

How it is made: every slot of the family's table (`family_tables`) whose condition the configuration meets, once per
layer, expert and vision block; named dimensions are resolved by `dimensions`:

    MLA   q_rows = heads · (nope + rope)     kv_a_rows = kv_rank + rope
          kv_b_rows = heads · (nope + v)     o_cols = heads · v
    GQA   q_rows = o_cols = heads · head_dim kv_rows = kv_heads · head_dim

The trade-off: `published` is what the configuration announces, by the rules its publishers follow. The files decide; a
reader looks at each tensor and its siblings (`storage`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from moepress.errors import CheckpointError
from moepress.formats.families import (
    Component,
    Config,
    Family,
    Identity,
    expert_count,
    identify_family,
    mtp_layers,
    text_config,
)
from moepress.formats.family_tables import Slot
from moepress.formats.module_patterns import module_pattern
from moepress.formats.source_quantization import WeightGroup, parse_source_quantization

Kind = Literal["bf16", "f32", "fp8_block", "fp8_channel", "fp8_tensor", "int4"]


@dataclass(frozen=True, slots=True)
class StoredAs:
    """How a weight is stored. ``group_size``: columns per scale, for ``int4`` only (-1 = the whole row)."""

    kind: Kind
    group_size: int | None = None


BF16, F32 = StoredAs("bf16"), StoredAs("f32")


@dataclass(frozen=True, slots=True)
class WeightSpec:
    """One logical weight that the configuration implies.

    Attributes:
        name: logical name as published, wrapper prefix included (``….down_proj.weight``, for packed weights too).
        shape: logical shape.
        published: how the publisher stores it, as the configuration announces it.
        identity: component, layer, expert, projection.
        copy_of: the weight that this one repeats (the MTP layer's embedding and head). A checkpoint may leave copies
            out, and they are not counted as parameters.
    """

    name: str
    shape: tuple[int, ...]
    published: StoredAs
    identity: Identity
    copy_of: str | None = None

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


def expected_weights(config: Config) -> list[WeightSpec]:
    """Every logical weight of a complete checkpoint, layer by layer.

    Args:
        config: the parsed ``config.json``. Its ``quantization_config`` decides `WeightSpec.published`.

    Raises:
        CheckpointError: unknown family; a field of the configuration that a shape needs is missing; an unknown
            quantization method.
    """
    family = identify_family(config)
    sizes = dimensions(family, config)
    stored = _published(config)
    prefix = next(published for published, canonical in family.prefixes if not canonical)

    @cache
    def shape_of(axes: tuple[str, ...]) -> tuple[int, ...]:
        return tuple(int(axis) if axis.isdigit() else _size(sizes, axis) for axis in axes)

    specs = []
    for path, slot, identity in _walk(family, config):
        name = path if slot.component in (Component.VISION, Component.PROJECTOR) else prefix + path
        copy_of = slot.copy_of and prefix + slot.copy_of
        specs.append(WeightSpec(name, shape_of(slot.shape), stored(name, slot), identity, copy_of))
    return specs


def parameter_count(specs: Iterable[WeightSpec]) -> int:
    """Number of parameters; copies of other weights are not counted."""
    return sum(spec.numel for spec in specs if spec.copy_of is None)


def sparse_layers(text: Config) -> list[bool]:
    """For each main layer: True when its MLP is a mixture of experts.

    Args:
        text: the text model's configuration. Read are ``mlp_layer_types`` (transformers 5), else ``mlp_only_layers``
            and ``decoder_sparse_step`` (Qwen), ``first_k_dense_replace`` and ``moe_layer_freq`` (DeepSeek, GLM).
    """
    layers = int(_field(text, "num_hidden_layers"))
    if text.get("mlp_layer_types"):
        return [kind == "sparse" for kind in text["mlp_layer_types"]]
    dense = text.get("mlp_only_layers") or ()
    step = int(text.get("decoder_sparse_step") or 1)
    first, frequency = int(text.get("first_k_dense_replace") or 0), int(text.get("moe_layer_freq") or 1)
    return [i not in dense and (i + 1) % step == 0 and i >= first and i % frequency == 0 for i in range(layers)]


def full_indexer_layers(text: Config) -> list[bool]:
    """For each main layer of a sparse-attention model: True when it has indexer weights of its own ('full').

    GLM-5.2 lets most layers share the selection of the last full layer. Read in this order: ``indexer_types``,
    ``index_topk_pattern`` (``F`` and ``S``), ``index_topk_freq`` with ``index_skip_topk_offset``; none of them means
    all layers. An MTP layer always has its own.

    Args:
        text: the text model's configuration.
    """
    layers = int(_field(text, "num_hidden_layers"))
    if not text.get("index_topk"):
        return [False] * layers
    types = text.get("indexer_types") or text.get("index_topk_pattern")
    if types:
        return [str(each) in ("full", "F") for each in types]
    frequency = max(int(text.get("index_topk_freq") or 1), 1)
    offset = int(text.get("index_skip_topk_offset", 2))
    return [max(i - offset + 1, 0) % frequency == 0 for i in range(layers)]


def dimensions(family: Family, config: Config) -> Mapping[str, int]:
    """The named dimensions of the family's table.

    Raises:
        CheckpointError: a field is missing.
    """
    text = text_config(family, config)
    hidden = int(_field(text, "hidden_size"))
    heads = int(_field(text, "num_attention_heads"))
    moe = int(text.get("moe_intermediate_size") or _field(text, "intermediate_size"))
    sizes = {
        "hidden": hidden,
        "two_hidden": 2 * hidden,
        "vocab": int(_field(text, "vocab_size")),
        "dense": int(_field(text, "intermediate_size")),
        "moe": moe,
        "two_moe": 2 * moe,
        "shared": int(text.get("n_shared_experts") or 0) * moe,
        "experts": expert_count(text),
    }
    if family.attention == "mla":
        nope, rope = int(_field(text, "qk_nope_head_dim")), int(_field(text, "qk_rope_head_dim"))
        v, rank = int(_field(text, "v_head_dim")), int(_field(text, "kv_lora_rank"))
        sizes |= {
            "q_rank": int(text.get("q_lora_rank") or 0),
            "q_rows": heads * (nope + rope),
            "kv_rank": rank,
            "kv_a_rows": rank + rope,
            "kv_b_rows": heads * (nope + v),
            "o_cols": heads * v,
        }
    else:
        head_dim = int(text.get("head_dim") or hidden // heads)
        kv_heads = int(_field(text, "num_key_value_heads"))
        sizes |= {
            "head_dim": head_dim,
            "q_rows": heads * head_dim,
            "kv_rows": kv_heads * head_dim,
            "o_cols": heads * head_dim,
        }
    if text.get("index_topk"):
        width, index_heads = int(_field(text, "index_head_dim")), int(_field(text, "index_n_heads"))
        sizes |= {"index_dim": width, "index_heads": index_heads, "index_rows": index_heads * width}
    if config.get("vision_config") is not None:
        sizes |= _vision_dimensions(config["vision_config"])
    return sizes


def _vision_dimensions(vision: Config) -> dict[str, int]:
    """MoonViT's sizes; publishers write ``vt_hidden_size``, transformers ``hidden_size``."""
    width = int(_field(vision, "vt_hidden_size", "hidden_size"))
    merge_height, merge_width = vision.get("merge_kernel_size", (2, 2))
    return {
        "vt_hidden": width,
        "vt_qkv": 3 * width,
        "vt_mlp": int(_field(vision, "vt_intermediate_size", "intermediate_size")),
        "vt_blocks": int(_field(vision, "vt_num_hidden_layers", "num_hidden_layers")),
        "vt_merged": width * int(merge_height) * int(merge_width),
        "patch": int(_field(vision, "patch_size")),
        "pos_height": int(_field(vision, "init_pos_emb_height", "pos_emb_height")),
        "pos_width": int(_field(vision, "init_pos_emb_width", "pos_emb_width")),
    }


def _walk(family: Family, config: Config) -> Iterator[tuple[str, Slot, Identity]]:
    """(canonical path, slot, identity) of every weight."""
    text = text_config(family, config)
    experts = expert_count(text)
    sparse, full = sparse_layers(text), full_indexer_layers(text)
    for layer in [*range(len(sparse)), *mtp_layers(family, config)]:
        is_mtp = layer >= len(sparse)
        met = _conditions(text, indexer=is_mtp or full[layer])
        mlp = family.sparse if is_mtp or sparse[layer] else family.dense
        for slot in (*family.layer, *mlp, *(family.mtp if is_mtp else ())):
            if slot.optional or not met.issuperset(filter(None, slot.needs.split("+"))):
                continue
            for expert in range(experts) if "{expert}" in slot.name else (None,):
                path = f"model.layers.{layer}.{slot.name.replace('{expert}', str(expert))}"
                yield path, slot, Identity(slot.component, layer, expert, slot.projection_name, is_mtp)
    met = _conditions(text, indexer=False)
    blocks = _vision_dimensions(config["vision_config"])["vt_blocks"] if config.get("vision_config") is not None else 0
    for slot in family.top:
        if slot.needs and slot.needs not in met:
            continue
        for block in range(blocks) if "{block}" in slot.name else (0,):
            path = slot.name.replace("{block}", str(block))
            yield path, slot, Identity(slot.component, None, None, slot.projection_name, False)


def _conditions(text: Config, *, indexer: bool) -> frozenset[str]:
    """The conditions (`Slot.needs`) that hold in one layer."""
    met = {
        "q_lora": bool(text.get("q_lora_rank")),
        "no_q_lora": not text.get("q_lora_rank"),
        "attention_bias": bool(text.get("attention_bias")),
        "use_qk_norm": bool(text.get("use_qk_norm")),
        "shared": bool(text.get("n_shared_experts")),
        "untied": not text.get("tie_word_embeddings"),
        "indexer": indexer,
    }
    return frozenset(name for name, holds in met.items() if holds)


def _published(config: Config) -> Callable[[str, Slot], StoredAs]:
    """How the configuration says that a weight is stored: a function of its name and slot."""
    declared = parse_source_quantization(config)
    ignored = _Names.of(declared.ignore)
    groups = [(group.targets, _stored_as(group)) for group in declared.groups]
    rules = [(_Names.of(target for target in targets if target != "Linear"), stored) for targets, stored in groups]
    by_class = next((stored for targets, stored in groups if "Linear" in targets), BF16)

    def stored(name: str, slot: Slot) -> StoredAs:
        if slot.role == "float32":
            return F32
        module = name.removesuffix(".weight")
        if slot.role == "plain" or ignored.matches(module):
            return BF16
        return next((how for targets, how in rules if targets.matches(module)), by_class)  # a name wins over a class

    return stored


def _stored_as(group: WeightGroup) -> StoredAs:
    if group.type == "int":
        return StoredAs("int4", group.group_size or -1)
    kinds: Mapping[str, Kind] = {"block": "fp8_block", "channel": "fp8_channel", "tensor": "fp8_tensor"}
    return StoredAs(kinds[group.strategy])


@dataclass(frozen=True, slots=True)
class _Names:
    """Module names as compressed-tensors reads them: ``re:`` entries match from the start of a name, others are the
    whole name or a dotted ending of it. Published lists run to a thousand entries: look-ups, not a loop over them.
    """

    plain: frozenset[str]
    last_parts: frozenset[str]
    patterns: tuple[re.Pattern[str], ...]

    @classmethod
    def of(cls, entries: Iterable[str]) -> _Names:
        entries = tuple(entries)
        plain = frozenset(entry for entry in entries if not entry.startswith("re:"))
        patterns = tuple(module_pattern(entry) for entry in entries if entry.startswith("re:"))
        return cls(plain, frozenset(entry.rpartition(".")[2] for entry in plain), patterns)

    def matches(self, module: str) -> bool:
        parts = module.split(".")
        if parts[-1] in self.last_parts:
            endings = (".".join(parts[start:]) for start in range(len(parts)))
            if not self.plain.isdisjoint(endings):
                return True
        return any(pattern.match(module) for pattern in self.patterns)


def _size(sizes: Mapping[str, int], axis: str) -> int:
    if not sizes.get(axis):
        raise CheckpointError(f"the configuration does not give the size of {axis!r}", where="config.json")
    return sizes[axis]


def _field(config: Config, *names: str) -> Any:
    for name in names:
        if config.get(name) is not None:
            return config[name]
    raise CheckpointError(
        f"the configuration has no {' or '.join(names)}", where="config.json", hint="download config.json again"
    )
