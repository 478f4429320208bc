"""The tiny models: one `Model` per family, with the real one's names, dtypes and proportions, at hidden size 256.

Kept apart from moepress' own tables on purpose: written down a second time, so that a slip in one of the two shows.

kimi           Kimi K2 / DeepSeek V3: MLA, one dense layer, shared expert, MTP layer, block FP8 with F32 scales
glm4           GLM-4.5 to 4.7: GQA with bias and q/k norm, MTP with its own embedding and head, per-channel FP8
glm5           GLM-5.2: MLA with an indexer on 'full' layers only, MTP, block FP8
kimi_k25       Kimi K2.5: vision tower, projector, names under `language_model.`, experts packed INT4
deepseek_v32   DeepSeek V3.2: indexer on every layer, power-of-two scales, norms in F32
qwen3_moe      Qwen3-MoE: GQA, no shared expert, block FP8 with BF16 scales
minimax_m2     MiniMax-M2: experts w1/w2/w3, router in F32, q/k norm over all heads, block FP8
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from tests.tiny_checkpoints.configurations import (
    HIDDEN,
    VOCAB,
    deepseek_text,
    glm4_text,
    glm5_text,
    kimi_k25_wrapper,
    minimax_text,
    qwen3_text,
    with_indexer,
)


@dataclass(frozen=True)
class Weight:
    """One logical weight: ``stored`` is QUANTIZED (as the publisher does), BF16 or F32; ``fill`` says what it holds."""

    name: str
    shape: tuple[int, ...]
    stored: str = "BF16"
    fill: str = "matrix"


@dataclass(frozen=True)
class Model:
    """One family: its configuration and its weights, both as functions of the options of `build`."""

    layers: int
    mtp: int
    published: str
    scale_dtype: str
    prefix: str
    shard_digits: int
    text_config: Callable[[int, int, int], dict[str, Any]]
    attention: Callable[[dict[str, Any], int], Iterator[Weight]]
    wrap: Callable[[dict[str, Any]], dict[str, Any]] = lambda text: text
    mtp_copies: bool = False
    experts_module: str = "mlp"
    expert_names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    router_dtype: str = "BF16"
    norm_dtype: str = "BF16"
    router_bias: str | None = "mlp.gate.e_score_correction_bias"
    extra_weights: Callable[[dict[str, Any]], Iterator[Weight]] = lambda config: iter(())
    not_converted: tuple[str, ...] = field(default=())

    def config(self, layers: int, experts: int, mtp: int) -> dict[str, Any]:
        return self.wrap(self.text_config(layers, experts, mtp))

    def weights(self, config: dict[str, Any], fused_experts: bool) -> Iterator[Weight]:
        """Every logical weight, in the publisher's order, without the wrapper's prefix on text-model names."""
        text = config.get("text_config", config)
        layers, dense = text["num_hidden_layers"], text.get("first_k_dense_replace", 0)
        yield Weight("model.embed_tokens.weight", (VOCAB, HIDDEN), fill="embedding")
        for layer in range(layers + text.get("num_nextn_predict_layers", 0)):
            prefix = f"model.layers.{layer}."
            for weight in self._layer(text, layer, layer < dense, fused_experts):
                yield Weight(prefix + weight.name, weight.shape, weight.stored, weight.fill)
            if layer >= layers:
                for weight in self._mtp():
                    yield Weight(prefix + weight.name, weight.shape, weight.stored, weight.fill)
        yield Weight("model.norm.weight", (HIDDEN,), self.norm_dtype, "norm")
        yield Weight("lm_head.weight", (VOCAB, HIDDEN), fill="embedding")
        yield from self.extra_weights(config)

    def _layer(self, text: dict[str, Any], layer: int, dense: bool, fused_experts: bool) -> Iterator[Weight]:
        yield Weight("input_layernorm.weight", (HIDDEN,), self.norm_dtype, "norm")
        yield from self.attention(text, layer)
        yield Weight("post_attention_layernorm.weight", (HIDDEN,), self.norm_dtype, "norm")
        if dense:
            yield from mlp("mlp", text["intermediate_size"])
            return
        module = self.experts_module
        experts = text.get("n_routed_experts") or text.get("num_experts") or text["num_local_experts"]
        intermediate = text.get("moe_intermediate_size") or text["intermediate_size"]
        yield Weight(f"{module}.gate.weight", (experts, HIDDEN), self.router_dtype, "router")
        if self.router_bias:
            yield Weight(self.router_bias, (experts,), "F32", "router_bias")
        if text.get("n_shared_experts"):
            yield from mlp(f"{module}.shared_experts", text["n_shared_experts"] * intermediate)
        if fused_experts:
            yield Weight(f"{module}.experts.gate_up_proj", (experts, 2 * intermediate, HIDDEN), fill="fused")
            yield Weight(f"{module}.experts.down_proj", (experts, HIDDEN, intermediate), fill="fused")
            return
        for expert in range(experts):
            yield from mlp(f"{module}.experts.{expert}", intermediate, self.expert_names)

    def _mtp(self) -> Iterator[Weight]:
        yield Weight("enorm.weight", (HIDDEN,), self.norm_dtype, "norm")
        yield Weight("hnorm.weight", (HIDDEN,), self.norm_dtype, "norm")
        yield Weight("eh_proj.weight", (HIDDEN, 2 * HIDDEN))
        yield Weight("shared_head.norm.weight", (HIDDEN,), self.norm_dtype, "norm")
        if self.mtp_copies:
            yield Weight("embed_tokens.weight", (VOCAB, HIDDEN), fill="copy of model.embed_tokens.weight")
            yield Weight("shared_head.head.weight", (VOCAB, HIDDEN), fill="copy of lm_head.weight")


def mlp(
    module: str, intermediate: int, names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
) -> Iterator[Weight]:
    gate, up, down = names
    yield Weight(f"{module}.{gate}.weight", (intermediate, HIDDEN), "QUANTIZED", "gate")
    yield Weight(f"{module}.{up}.weight", (intermediate, HIDDEN), "QUANTIZED", "up")
    yield Weight(f"{module}.{down}.weight", (HIDDEN, intermediate), "QUANTIZED")


def mla(text: dict[str, Any], layer: int, norm_dtype: str = "BF16") -> Iterator[Weight]:
    heads, q_rank, kv_rank = text["num_attention_heads"], text["q_lora_rank"], text["kv_lora_rank"]
    nope, rope, v = text["qk_nope_head_dim"], text["qk_rope_head_dim"], text["v_head_dim"]
    yield Weight("self_attn.q_a_proj.weight", (q_rank, HIDDEN), "QUANTIZED")
    yield Weight("self_attn.q_a_layernorm.weight", (q_rank,), norm_dtype, "norm")
    yield Weight("self_attn.q_b_proj.weight", (heads * (nope + rope), q_rank), "QUANTIZED")
    yield Weight("self_attn.kv_a_proj_with_mqa.weight", (kv_rank + rope, HIDDEN), "QUANTIZED")
    yield Weight("self_attn.kv_a_layernorm.weight", (kv_rank,), norm_dtype, "norm")
    yield Weight("self_attn.kv_b_proj.weight", (heads * (nope + v), kv_rank), "QUANTIZED")
    yield Weight("self_attn.o_proj.weight", (HIDDEN, heads * v), "QUANTIZED")


def mla_with_indexer(text: dict[str, Any], layer: int, norm_dtype: str = "BF16") -> Iterator[Weight]:
    yield from mla(text, layer, norm_dtype)
    types = text.get("indexer_types")
    if types and layer < len(types) and types[layer] == "shared":  # the MTP layer always has its own
        return
    heads, width = text["index_n_heads"], text["index_head_dim"]
    yield Weight("self_attn.indexer.wq_b.weight", (heads * width, text["q_lora_rank"]), "QUANTIZED")
    yield Weight("self_attn.indexer.wk.weight", (width, HIDDEN), "QUANTIZED")
    yield Weight("self_attn.indexer.weights_proj.weight", (heads, HIDDEN))
    yield Weight("self_attn.indexer.k_norm.weight", (width,), norm_dtype, "norm")
    yield Weight("self_attn.indexer.k_norm.bias", (width,), norm_dtype, "bias")


def gqa(text: dict[str, Any], layer: int) -> Iterator[Weight]:
    width = text["head_dim"]
    rows = {"q": text["num_attention_heads"] * width, "k": text["num_key_value_heads"] * width}
    rows["v"] = rows["k"]
    for name, size in rows.items():
        yield Weight(f"self_attn.{name}_proj.weight", (size, HIDDEN), "QUANTIZED")
        if text.get("attention_bias"):
            yield Weight(f"self_attn.{name}_proj.bias", (size,), fill="bias")
    yield Weight("self_attn.o_proj.weight", (HIDDEN, rows["q"]), "QUANTIZED")
    over_all_heads = text["model_type"] == "minimax_m2"
    for name in ("q", "k"):
        yield Weight(f"self_attn.{name}_norm.weight", (rows[name] if over_all_heads else width,), fill="norm")


def vision(config: dict[str, Any]) -> Iterator[Weight]:
    tower = config["vision_config"]
    width, inner = tower["vt_hidden_size"], tower["vt_intermediate_size"]
    merged = width * tower["merge_kernel_size"][0] * tower["merge_kernel_size"][1]

    def linear(name: str, rows: int, columns: int) -> Iterator[Weight]:
        yield Weight(f"{name}.weight", (rows, columns))
        yield Weight(f"{name}.bias", (rows,), fill="bias")

    def norm(name: str) -> Iterator[Weight]:
        yield Weight(f"{name}.weight", (width,), fill="norm")
        yield Weight(f"{name}.bias", (width,), fill="bias")

    yield from norm("mm_projector.pre_norm")
    yield from linear("mm_projector.proj.0", merged, merged)
    yield from linear("mm_projector.proj.2", HIDDEN, merged)
    patch = tower["patch_size"]
    yield Weight("vision_tower.patch_embed.proj.weight", (width, 3, patch, patch), fill="embedding")
    yield Weight("vision_tower.patch_embed.proj.bias", (width,), fill="bias")
    grid = (tower["init_pos_emb_height"], tower["init_pos_emb_width"], width)
    yield Weight("vision_tower.patch_embed.pos_emb.weight", grid, fill="embedding")
    for block in range(tower["vt_num_hidden_layers"]):
        prefix = f"vision_tower.encoder.blocks.{block}"
        yield from norm(f"{prefix}.norm0")
        yield from linear(f"{prefix}.wqkv", 3 * width, width)
        yield from linear(f"{prefix}.wo", width, width)
        yield from norm(f"{prefix}.norm1")
        yield from linear(f"{prefix}.mlp.fc0", inner, width)
        yield from linear(f"{prefix}.mlp.fc1", width, inner)
    yield from norm("vision_tower.encoder.final_layernorm")


def float32_norms(text: dict[str, Any], layer: int) -> Iterator[Weight]:
    return mla_with_indexer(text, layer, "F32")


FAMILIES: dict[str, Model] = {
    "kimi": Model(
        layers=3,
        mtp=1,
        published="fp8_block",
        scale_dtype="F32",
        prefix="",
        shard_digits=5,
        text_config=deepseek_text("DeepseekV3ForCausalLM", "kimi_k2"),
        attention=mla,
    ),
    "glm4": Model(
        layers=3,
        mtp=1,
        published="fp8_channel",
        scale_dtype="BF16",
        prefix="",
        shard_digits=5,
        text_config=glm4_text,
        attention=gqa,
        mtp_copies=True,
    ),
    "glm5": Model(
        layers=4,
        mtp=1,
        published="fp8_block",
        scale_dtype="F32",
        prefix="",
        shard_digits=5,
        text_config=glm5_text,
        attention=mla_with_indexer,
        not_converted=(
            "input_layernorm",
            "post_attention_layernorm",
            "self_attn.q_a_layernorm",
            "self_attn.kv_a_layernorm",
            "self_attn.indexer.k_norm",
            "self_attn.indexers_proj",  # the tensor is self_attn.indexer.weights_proj: so it is published
            "mlp.gate",
        ),
    ),
    "kimi_k25": Model(
        layers=3,
        mtp=0,
        published="int4",
        scale_dtype="F32",
        prefix="language_model.",
        shard_digits=6,
        text_config=deepseek_text("DeepseekV3ForCausalLM", "kimi_k2"),
        attention=mla,
        wrap=kimi_k25_wrapper,
        extra_weights=vision,
    ),
    "deepseek_v32": Model(
        layers=3,
        mtp=1,
        published="fp8_block",
        scale_dtype="UE8M0_F32",
        prefix="",
        shard_digits=6,
        text_config=with_indexer(deepseek_text("DeepseekV32ForCausalLM", "deepseek_v32")),
        attention=float32_norms,
        mtp_copies=True,
        norm_dtype="F32",
    ),
    "qwen3_moe": Model(
        layers=3,
        mtp=0,
        published="fp8_block",
        scale_dtype="BF16",
        prefix="",
        shard_digits=5,
        text_config=qwen3_text,
        attention=gqa,
        router_bias=None,
        not_converted=("input_layernorm", "post_attention_layernorm", "mlp.gate"),
    ),
    "minimax_m2": Model(
        layers=3,
        mtp=0,
        published="fp8_block",
        scale_dtype="F32",
        prefix="",
        shard_digits=5,
        text_config=minimax_text,
        attention=gqa,
        experts_module="block_sparse_moe",
        expert_names=("w1", "w3", "w2"),
        router_dtype="F32",
        router_bias="block_sparse_moe.e_score_correction_bias",
    ),
}
