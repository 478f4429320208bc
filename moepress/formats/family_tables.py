"""The model families, as tables: every weight a family publishes, its shape, and which part of the model it is.

A weight is one `Slot`: name template, component, shape in named dimensions, and whether the publisher quantizes it.

    Slot("self_attn.q_b_proj.weight", ATTENTION, ("q_rows", "q_rank"), LINEAR, needs="q_lora")
         name inside the layer        component   named dimensions      role    only when the config says so

A `Family` is a few slots put together: attention + norms + dense MLP + experts + MTP + top level. One table is read in
both directions: `families.classify` turns a tensor name into its slot, `architecture.expected_weights` turns a
configuration into the list of all names and shapes. So a family that classifies is a family whose size is known.

Names are matched whole, never as patterns: after the layer, expert and vision-block numbers are taken out, what is left
must be a key of the table. `mlp.gate.weight` (the router) therefore can never catch `mlp.gate_proj.weight`.

The trade-off: a checkpoint with one name that is not listed here is refused, by name. That is wanted: a tensor nobody
decided on would otherwise be copied, dropped or quantized by accident.

Sources: the published checkpoints' names and shapes (DeepSeek V3, R1 and V3.2, Kimi K2 and K2.5, GLM-4.5 to 5.2,
Qwen3-MoE, MiniMax-M2) and transformers' modeling code for the same families.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from types import MappingProxyType
from typing import Literal


class Component(StrEnum):
    """The part of a model that a weight belongs to. Recipes, plans and reports speak in these words."""

    ROUTED_EXPERT = "routed_expert"
    SHARED_EXPERT = "shared_expert"
    DENSE_MLP = "dense_mlp"
    ATTENTION = "attention"
    INDEXER = "indexer"
    ROUTER = "router"
    NORM = "norm"
    EMBEDDING = "embedding"
    LM_HEAD = "lm_head"
    MTP_PROJECTION = "mtp_projection"
    VISION = "vision"
    PROJECTOR = "projector"


Role = Literal["linear", "plain", "float32"]
"""How publishers store it: ``linear`` in the checkpoint's quantized format, ``plain`` in BF16, ``float32`` in F32."""


@dataclass(frozen=True, slots=True)
class Slot:
    """One weight of a family.

    Attributes:
        name: parameter name inside its scope; ``{expert}`` and ``{block}`` stand for a number.
        component: the part of the model.
        shape: named dimensions, resolved by ``architecture.dimensions``; plain digits stand for themselves.
        role: see `Role`.
        needs: a condition of the configuration ("" = always): see ``architecture.conditions``.
        optional: may be met in a checkpoint, is never expected (KV scales, fused experts, rotary buffers).
        copy_of: this weight repeats another one (the MTP layer's own embedding and head); some publishers leave it out.
        projection: the field's name of the projection, where the published one differs (``w1`` is ``gate_proj``).
    """

    name: str
    component: Component
    shape: tuple[str, ...]
    role: Role = "plain"
    needs: str = ""
    optional: bool = False
    copy_of: str | None = None
    projection: str | None = None

    @property
    def projection_name(self) -> str | None:
        """`Identity.projection`: the module's own name for a matrix, None for vectors and norms."""
        if self.projection is not None or len(self.shape) < 2:
            return self.projection
        return self.name.removesuffix(".weight").rpartition(".")[2]


@dataclass(frozen=True)
class Family:
    """One model family: how to recognize it and all its weights.

    Attributes:
        key: the name used in recipes and reports.
        title: the name for people.
        architectures: values of ``architectures[0]``; the first is what publishers write.
        model_types: values of ``model_type``.
        attention: ``mla`` or ``gqa``.
        layer: slots that every decoder layer has.
        dense, sparse: slots of a dense and of a mixture-of-experts layer.
        mtp: slots that an MTP (next-token prediction) layer has on top of a sparse layer; () = none is published.
        top: slots outside the layers.
        prefixes: (published, canonical) beginnings of text-model names; the first is what publishers write.
        text_field: the field that holds the text model's configuration; None = the configuration itself.
        expert_pattern: regular expression for the modules of the routed experts, anchored at its end and usable with
            ``re.match`` against a full module name. This is the ``re:`` target of a compressed-tensors group; leaves
            stand in ``(?:…)``, or a server's name mapping would replace ``.gate_proj`` in it.
    """

    key: str
    title: str
    architectures: tuple[str, ...]
    model_types: tuple[str, ...]
    attention: Literal["mla", "gqa"]
    layer: tuple[Slot, ...]
    dense: tuple[Slot, ...]
    sparse: tuple[Slot, ...]
    mtp: tuple[Slot, ...]
    top: tuple[Slot, ...]
    prefixes: tuple[tuple[str, str], ...] = (("", ""),)
    text_field: str | None = None
    expert_pattern: str = r".*\.mlp\.experts\.\d+\.(?:gate_proj|up_proj|down_proj)$"

    @cached_property
    def layer_slots(self) -> MappingProxyType[str, Slot]:
        """Slots by name inside a main decoder layer."""
        return MappingProxyType({slot.name: slot for slot in (*self.layer, *self.dense, *self.sparse)})

    @cached_property
    def mtp_slots(self) -> MappingProxyType[str, Slot]:
        """Slots by name inside an MTP layer: those of any layer, and the MTP's own."""
        return MappingProxyType({**self.layer_slots, **{slot.name: slot for slot in self.mtp}})

    @cached_property
    def top_slots(self) -> MappingProxyType[str, Slot]:
        """Slots by full (canonical) name outside the layers."""
        return MappingProxyType({slot.name: slot for slot in self.top})


_C = Component


def _mlp(prefix: str, component: Component, rows: str) -> tuple[Slot, ...]:
    return (
        Slot(f"{prefix}.gate_proj.weight", component, (rows, "hidden"), "linear"),
        Slot(f"{prefix}.up_proj.weight", component, (rows, "hidden"), "linear"),
        Slot(f"{prefix}.down_proj.weight", component, ("hidden", rows), "linear"),
    )


def _as_float32(slots: tuple[Slot, ...], *endings: str) -> tuple[Slot, ...]:
    return tuple(replace(slot, role="float32") if slot.name.endswith(endings) else slot for slot in slots)


_LAYER_NORMS = (
    Slot("input_layernorm.weight", _C.NORM, ("hidden",)),
    Slot("post_attention_layernorm.weight", _C.NORM, ("hidden",)),
)

_MLA = (
    Slot("self_attn.q_proj.weight", _C.ATTENTION, ("q_rows", "hidden"), "linear", needs="no_q_lora"),
    Slot("self_attn.q_a_proj.weight", _C.ATTENTION, ("q_rank", "hidden"), "linear", needs="q_lora"),
    Slot("self_attn.q_a_proj.bias", _C.ATTENTION, ("q_rank",), needs="q_lora+attention_bias"),
    Slot("self_attn.q_a_layernorm.weight", _C.NORM, ("q_rank",), needs="q_lora"),
    Slot("self_attn.q_b_proj.weight", _C.ATTENTION, ("q_rows", "q_rank"), "linear", needs="q_lora"),
    Slot("self_attn.kv_a_proj_with_mqa.weight", _C.ATTENTION, ("kv_a_rows", "hidden"), "linear"),
    Slot("self_attn.kv_a_proj_with_mqa.bias", _C.ATTENTION, ("kv_a_rows",), needs="attention_bias"),
    Slot("self_attn.kv_a_layernorm.weight", _C.NORM, ("kv_rank",)),
    Slot("self_attn.kv_b_proj.weight", _C.ATTENTION, ("kv_b_rows", "kv_rank"), "linear"),
    Slot("self_attn.o_proj.weight", _C.ATTENTION, ("hidden", "o_cols"), "linear"),
    Slot("self_attn.o_proj.bias", _C.ATTENTION, ("hidden",), needs="attention_bias"),
)

_GQA = (
    Slot("self_attn.q_proj.weight", _C.ATTENTION, ("q_rows", "hidden"), "linear"),
    Slot("self_attn.k_proj.weight", _C.ATTENTION, ("kv_rows", "hidden"), "linear"),
    Slot("self_attn.v_proj.weight", _C.ATTENTION, ("kv_rows", "hidden"), "linear"),
    Slot("self_attn.o_proj.weight", _C.ATTENTION, ("hidden", "o_cols"), "linear"),
    Slot("self_attn.q_proj.bias", _C.ATTENTION, ("q_rows",), needs="attention_bias"),
    Slot("self_attn.k_proj.bias", _C.ATTENTION, ("kv_rows",), needs="attention_bias"),
    Slot("self_attn.v_proj.bias", _C.ATTENTION, ("kv_rows",), needs="attention_bias"),
)

_HEAD_NORMS = (  # one norm, shared by all heads
    Slot("self_attn.q_norm.weight", _C.NORM, ("head_dim",)),
    Slot("self_attn.k_norm.weight", _C.NORM, ("head_dim",)),
)

_INDEXER = (  # DeepSeek sparse attention: picks the top 2048 keys; weights only on 'full' layers
    Slot("self_attn.indexer.wq_b.weight", _C.INDEXER, ("index_rows", "q_rank"), "linear", needs="indexer"),
    Slot("self_attn.indexer.wk.weight", _C.INDEXER, ("index_dim", "hidden"), "linear", needs="indexer"),
    Slot("self_attn.indexer.weights_proj.weight", _C.INDEXER, ("index_heads", "hidden"), needs="indexer"),
    Slot("self_attn.indexer.k_norm.weight", _C.INDEXER, ("index_dim",), needs="indexer"),
    Slot("self_attn.indexer.k_norm.bias", _C.INDEXER, ("index_dim",), needs="indexer"),
)

_NOT_EXPECTED = (  # met in checkpoints made by other tools: calibrated KV scales, and a buffer of old exporters
    *(
        Slot(f"self_attn.{module}{scale}", _C.ATTENTION, (), "float32", optional=True, projection=scale)
        for module in ("", "attn.", "qkv_proj.", "k_proj.", "v_proj.", "q_proj.", "kv_b_proj.", "kv_a_proj_with_mqa.")
        for scale in ("k_scale", "v_scale", "q_scale", "kv_scale")
    ),
    Slot("self_attn.rotary_emb.inv_freq", _C.ATTENTION, (), "float32", optional=True),
)

_DENSE = _mlp("mlp", _C.DENSE_MLP, "dense")

_EXPERTS = (
    *_mlp("mlp.experts.{expert}", _C.ROUTED_EXPERT, "moe"),
    # transformers 5 may save the experts of a layer as two fused parameters, without `.weight`
    Slot("mlp.experts.gate_up_proj", _C.ROUTED_EXPERT, ("experts", "two_moe", "hidden"), "linear", optional=True),
    Slot("mlp.experts.down_proj", _C.ROUTED_EXPERT, ("experts", "hidden", "moe"), "linear", optional=True),
)

_SHARED = tuple(replace(slot, needs="shared") for slot in _mlp("mlp.shared_experts", _C.SHARED_EXPERT, "shared"))

_ROUTER = (Slot("mlp.gate.weight", _C.ROUTER, ("experts", "hidden")),)

# Stays F32 for ever: as BF16 its hundreds of values collapse to about nine.
_ROUTER_BIAS = (Slot("mlp.gate.e_score_correction_bias", _C.ROUTER, ("experts",), "float32"),)

_MTP = (
    Slot("eh_proj.weight", _C.MTP_PROJECTION, ("hidden", "two_hidden")),
    Slot("enorm.weight", _C.NORM, ("hidden",)),
    Slot("hnorm.weight", _C.NORM, ("hidden",)),
    Slot("shared_head.norm.weight", _C.NORM, ("hidden",)),
    Slot("embed_tokens.weight", _C.EMBEDDING, ("vocab", "hidden"), copy_of="model.embed_tokens.weight"),
    Slot("shared_head.head.weight", _C.LM_HEAD, ("vocab", "hidden"), copy_of="lm_head.weight"),
)

_MTP_WITHOUT_COPIES = tuple(replace(slot, optional=slot.copy_of is not None) for slot in _MTP)

_TOP = (
    Slot("model.embed_tokens.weight", _C.EMBEDDING, ("vocab", "hidden")),
    Slot("model.norm.weight", _C.NORM, ("hidden",)),
    Slot("lm_head.weight", _C.LM_HEAD, ("vocab", "hidden"), needs="untied"),
)

_BLOCK = "vision_tower.encoder.blocks.{block}"
_MOONVIT = (
    Slot("vision_tower.patch_embed.proj.weight", _C.VISION, ("vt_hidden", "3", "patch", "patch")),
    Slot("vision_tower.patch_embed.proj.bias", _C.VISION, ("vt_hidden",)),
    Slot("vision_tower.patch_embed.pos_emb.weight", _C.VISION, ("pos_height", "pos_width", "vt_hidden")),
    Slot(f"{_BLOCK}.norm0.weight", _C.VISION, ("vt_hidden",)),
    Slot(f"{_BLOCK}.norm0.bias", _C.VISION, ("vt_hidden",)),
    Slot(f"{_BLOCK}.wqkv.weight", _C.VISION, ("vt_qkv", "vt_hidden")),
    Slot(f"{_BLOCK}.wqkv.bias", _C.VISION, ("vt_qkv",)),
    Slot(f"{_BLOCK}.wo.weight", _C.VISION, ("vt_hidden", "vt_hidden")),
    Slot(f"{_BLOCK}.wo.bias", _C.VISION, ("vt_hidden",)),
    Slot(f"{_BLOCK}.norm1.weight", _C.VISION, ("vt_hidden",)),
    Slot(f"{_BLOCK}.norm1.bias", _C.VISION, ("vt_hidden",)),
    Slot(f"{_BLOCK}.mlp.fc0.weight", _C.VISION, ("vt_mlp", "vt_hidden")),
    Slot(f"{_BLOCK}.mlp.fc0.bias", _C.VISION, ("vt_mlp",)),
    Slot(f"{_BLOCK}.mlp.fc1.weight", _C.VISION, ("vt_hidden", "vt_mlp")),
    Slot(f"{_BLOCK}.mlp.fc1.bias", _C.VISION, ("vt_hidden",)),
    Slot("vision_tower.encoder.final_layernorm.weight", _C.VISION, ("vt_hidden",)),
    Slot("vision_tower.encoder.final_layernorm.bias", _C.VISION, ("vt_hidden",)),
    Slot("mm_projector.pre_norm.weight", _C.PROJECTOR, ("vt_hidden",)),
    Slot("mm_projector.pre_norm.bias", _C.PROJECTOR, ("vt_hidden",)),
    Slot("mm_projector.proj.0.weight", _C.PROJECTOR, ("vt_merged", "vt_merged")),
    Slot("mm_projector.proj.0.bias", _C.PROJECTOR, ("vt_merged",)),
    Slot("mm_projector.proj.2.weight", _C.PROJECTOR, ("hidden", "vt_merged")),
    Slot("mm_projector.proj.2.bias", _C.PROJECTOR, ("hidden",)),
)

DEEPSEEK_V3 = Family(
    key="deepseek_v3",
    title="DeepSeek V3 / Kimi K2 (MLA)",
    architectures=("DeepseekV3ForCausalLM",),
    model_types=("deepseek_v3", "kimi_k2"),
    attention="mla",
    layer=(*_LAYER_NORMS, *_MLA, *_NOT_EXPECTED),
    dense=_DENSE,
    sparse=(*_EXPERTS, *_SHARED, *_ROUTER, *_ROUTER_BIAS),
    mtp=_MTP,
    top=_TOP,
)

_V32_FLOAT32 = ("norm.weight", "norm.bias")  # V3.2 publishes every norm in F32

DEEPSEEK_V32 = replace(
    DEEPSEEK_V3,
    key="deepseek_v32",
    title="DeepSeek V3.2 (MLA, sparse indexer on every layer)",
    architectures=("DeepseekV32ForCausalLM",),
    model_types=("deepseek_v32",),
    layer=_as_float32((*_LAYER_NORMS, *_MLA, *_INDEXER, *_NOT_EXPECTED), *_V32_FLOAT32),
    mtp=_as_float32(_MTP, *_V32_FLOAT32),
    top=_as_float32(_TOP, *_V32_FLOAT32),
)

KIMI_K25 = replace(
    DEEPSEEK_V3,
    key="kimi_k25",
    title="Kimi K2.5 / K2.6 (DeepSeek V3 text model, MoonViT vision tower)",
    architectures=("KimiK25ForConditionalGeneration", "Kimi_K25ForConditionalGeneration"),
    model_types=("kimi_k25",),
    top=(*_TOP, *_MOONVIT),
    prefixes=(("language_model.", ""), ("model.language_model.", "model."), ("", "")),
    text_field="text_config",
)

GLM4_MOE = Family(
    key="glm4_moe",
    title="GLM-4.5 to 4.7 (GQA)",
    architectures=("Glm4MoeForCausalLM",),
    model_types=("glm4_moe",),
    attention="gqa",
    layer=(
        *_LAYER_NORMS,
        *_GQA,
        *(replace(slot, needs="use_qk_norm") for slot in _HEAD_NORMS),
        *_NOT_EXPECTED,
    ),
    dense=_DENSE,
    sparse=(*_EXPERTS, *_SHARED, *_ROUTER, *_ROUTER_BIAS),
    mtp=_MTP,
    top=_TOP,
)

GLM_MOE_DSA = replace(
    DEEPSEEK_V3,
    key="glm_moe_dsa",
    title="GLM-5 to 5.2 (MLA, sparse indexer)",
    architectures=("GlmMoeDsaForCausalLM",),
    model_types=("glm_moe_dsa",),
    layer=(*_LAYER_NORMS, *_MLA, *_INDEXER, *_NOT_EXPECTED),
    mtp=_MTP_WITHOUT_COPIES,
)

QWEN3_MOE = Family(
    key="qwen3_moe",
    title="Qwen3-MoE (GQA, no shared expert)",
    architectures=("Qwen3MoeForCausalLM",),
    model_types=("qwen3_moe",),
    attention="gqa",
    layer=(*_LAYER_NORMS, *_GQA, *_HEAD_NORMS, *_NOT_EXPECTED),
    dense=_DENSE,
    sparse=(*_EXPERTS, *_ROUTER),
    mtp=(),
    top=_TOP,
)

_W_NAMES = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}

MINIMAX_M2 = Family(
    key="minimax_m2",
    title="MiniMax-M2 (GQA, no shared expert, experts w1/w2/w3)",
    architectures=("MiniMaxM2ForCausalLM",),
    model_types=("minimax_m2",),
    attention="gqa",
    layer=(
        *_LAYER_NORMS,
        *_GQA,
        Slot("self_attn.q_norm.weight", _C.NORM, ("q_rows",)),  # over all heads together
        Slot("self_attn.k_norm.weight", _C.NORM, ("kv_rows",)),
        *_NOT_EXPECTED,
    ),
    dense=(),
    sparse=(
        *(
            Slot(
                f"block_sparse_moe.experts.{{expert}}.{published}.weight",
                _C.ROUTED_EXPERT,
                ("hidden", "moe") if published == "w2" else ("moe", "hidden"),
                "linear",
                projection=projection,
            )
            for published, projection in _W_NAMES.items()
        ),
        Slot("block_sparse_moe.gate.weight", _C.ROUTER, ("experts", "hidden"), "float32"),
        Slot("block_sparse_moe.e_score_correction_bias", _C.ROUTER, ("experts",), "float32"),
    ),
    mtp=(),
    top=_TOP,
    # SGLang 0.5.23 asks for the experts of every family by the usual names (ct/compressed_tensors.py, get_moe_scheme)
    expert_pattern=r".*\.block_sparse_moe\.experts\.\d+\.(?:w1|w2|w3|gate_proj|up_proj|down_proj)$",
)

FAMILIES: tuple[Family, ...] = (
    DEEPSEEK_V3,
    DEEPSEEK_V32,
    KIMI_K25,
    GLM4_MOE,
    GLM_MOE_DSA,
    QWEN3_MOE,
    MINIMAX_M2,
)
"""Every family moepress knows. To add one: docs/guides/add-a-family.md."""
