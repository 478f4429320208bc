"""The smallest checkpoints that have every kind of part, as files in memory: damage, write, convert, all in milliseconds.

    kimi     latent attention, block FP8 with F32 scales, dense layer, shared expert, MTP layer
    qwen3    grouped queries, block FP8 with BF16 scales, norms per head
    glm4     grouped queries with bias, FP8 per channel with BF16 scales, MTP layer with its own embedding and head
    packed   latent attention, experts already INT4 in groups of 32, everything else BF16

Blocks are 32 × 32 instead of 128 × 128, so that matrices of 64 have edges, and rows of 40 have a ragged one. Written
with numpy alone; nothing here imports moepress.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np

HIDDEN, MOE, DENSE, VOCAB, EXPERTS, BLOCK, GROUP = 64, 32, 96, 48, 2, 32, 32
KINDS = ("kimi", "qwen3", "glm4", "packed")
INDEX = "model.safetensors.index.json"


@dataclass
class Tensor:
    """dtype and shape as a header spells them, and the bytes."""

    dtype: str
    shape: list[int]
    data: bytes


@dataclass
class Files:
    """A checkpoint before it is written. ``shards``: file name → tensors in order; ``side``: everything else's bytes."""

    kind: str
    config: dict[str, Any]
    shards: dict[str, dict[str, Tensor]]
    side: dict[str, bytes] = field(default_factory=dict)

    def index(self) -> dict[str, Any]:
        weight_map = {name: shard for shard, tensors in self.shards.items() for name in tensors}
        total = sum(len(t.data) for tensors in self.shards.values() for t in tensors.values())
        return {"metadata": {"total_size": total}, "weight_map": weight_map}

    def whole(self) -> dict[str, bytes]:
        """Every file's bytes by name."""
        files = {name: shard_bytes(tensors) for name, tensors in self.shards.items()}
        files["config.json"] = json.dumps(self.config).encode()
        files[INDEX] = json.dumps(self.index()).encode()
        return files | self.side


def shard_bytes(tensors: dict[str, Tensor]) -> bytes:
    """A safetensors file."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name, tensor in tensors.items():
        end = position + len(tensor.data)
        header[name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [position, end]}
        position = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + b"".join(tensor.data for tensor in tensors.values())


@cache
def _files(kind: str) -> Files:
    rng = np.random.default_rng(20261129)
    tensors: dict[str, Tensor] = {}
    for name, shape, stored in _weights(kind):
        tensors.update(_stored(rng, kind, name, shape, stored))
    names = list(tensors)
    half = len(names) // 2
    first, second = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    shards = {first: {n: tensors[n] for n in names[:half]}, second: {n: tensors[n] for n in names[half:]}}
    side = {
        "tokenizer.json": b'{"version": "1.0", "model": {"type": "BPE", "vocab": {}, "merges": []}}',
        "tokenizer_config.json": b'{"tokenizer_class": "PreTrainedTokenizerFast"}',
        "generation_config.json": b'{"eos_token_id": 1, "temperature": 0.6}',
        "chat_template.jinja": b"{% for m in messages %}{{ m['content'] }}{% endfor %}",
        "tiktoken.model": bytes(range(256)),
        "tokenization_small.py": b"from .encoding_small import ROLES\n",
        "docs/deploy.md": b"# Deploy\n",
    }
    return Files(kind, _config(kind), shards, side)


def build(kind: str) -> Files:
    """A checkpoint of one of `KINDS`; its dictionaries are the caller's to change, its tensors are shared."""
    made = _files(kind)
    return Files(
        kind,
        json.loads(json.dumps(made.config)),
        {
            name: {n: Tensor(t.dtype, list(t.shape), t.data) for n, t in tensors.items()}
            for name, tensors in made.shards.items()
        },
        dict(made.side),
    )


def _config(kind: str) -> dict[str, Any]:
    common = {
        "hidden_size": HIDDEN,
        "intermediate_size": DENSE,
        "moe_intermediate_size": MOE,
        "num_attention_heads": 2,
        "num_hidden_layers": 2,
        "num_experts_per_tok": 1,
        "rms_norm_eps": 1e-5,
        "vocab_size": VOCAB,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }
    sigmoid = {"first_k_dense_replace": 1, "moe_layer_freq": 1, "n_routed_experts": EXPERTS, "n_shared_experts": 1}
    if kind in ("kimi", "packed"):
        config = {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "kimi_k2", **common, **sigmoid}
        config |= {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8}
        config |= {"v_head_dim": 16, "num_key_value_heads": 2, "num_nextn_predict_layers": int(kind == "kimi")}
        config |= {"rope_scaling": {"type": "yarn", "factor": 32.0}, "scoring_func": "sigmoid"}
    elif kind == "glm4":
        config = {"architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe", **common, **sigmoid}
        config |= {"head_dim": 16, "num_key_value_heads": 1, "attention_bias": True, "use_qk_norm": True}
        config |= {"num_nextn_predict_layers": 1}
    else:
        config = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", **common}
        config |= {"head_dim": 16, "num_key_value_heads": 1, "num_experts": EXPERTS, "decoder_sparse_step": 1}
        config |= {"mlp_only_layers": [], "attention_bias": False}
    return config | {"quantization_config": _quantization(kind)}


def _quantization(kind: str) -> dict[str, Any]:
    if kind in ("kimi", "qwen3"):
        block = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
        return block | {"weight_block_size": [BLOCK, BLOCK], "modules_to_not_convert": ["lm_head"]}
    channel = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False}
    group = {
        "num_bits": 4,
        "type": "int",
        "strategy": "group",
        "group_size": GROUP,
        "symmetric": True,
        "dynamic": False,
    }
    activations = {"num_bits": 8, "type": "float", "strategy": "token", "symmetric": True, "dynamic": True}
    packed = kind == "packed"
    one = {
        "targets": ["Linear"],
        "weights": group if packed else channel,
        "input_activations": None if packed else activations,
    }
    ignore = ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\.(gate|up|gate_up|down)_proj.*"]
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized" if packed else "float-quantized",
        "config_groups": {"group_0": one},
        "ignore": ignore if packed else ["lm_head", "re:.*mlp\\.gate$"],
        "kv_cache_scheme": None,
        "quantization_status": "compressed",
    }


def _weights(kind: str) -> Iterator[tuple[str, tuple[int, ...], str]]:
    """(name, shape, how: linear, expert, BF16 or F32)."""
    yield "model.embed_tokens.weight", (VOCAB, HIDDEN), "BF16"
    mtp = kind in ("kimi", "glm4")
    for layer in range(2 + mtp):
        at = f"model.layers.{layer}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield f"{at}{norm}.weight", (HIDDEN,), "BF16"
        yield from _attention(kind, f"{at}self_attn.")
        if layer == 0 and kind != "qwen3":
            yield from _mlp(f"{at}mlp", DENSE, "linear")
        else:
            yield f"{at}mlp.gate.weight", (EXPERTS, HIDDEN), "BF16"
            if kind != "qwen3":
                yield f"{at}mlp.gate.e_score_correction_bias", (EXPERTS,), "F32"
                yield from _mlp(f"{at}mlp.shared_experts", MOE, "linear")
            for expert in range(EXPERTS):
                yield from _mlp(f"{at}mlp.experts.{expert}", MOE, "expert")
        if layer == 2:
            for norm in ("enorm", "hnorm", "shared_head.norm"):
                yield f"{at}{norm}.weight", (HIDDEN,), "BF16"
            yield f"{at}eh_proj.weight", (HIDDEN, 2 * HIDDEN), "BF16"
            if kind == "glm4":
                yield f"{at}embed_tokens.weight", (VOCAB, HIDDEN), "BF16"
                yield f"{at}shared_head.head.weight", (VOCAB, HIDDEN), "BF16"
    yield "model.norm.weight", (HIDDEN,), "BF16"
    yield "lm_head.weight", (VOCAB, HIDDEN), "BF16"


def _attention(kind: str, at: str) -> Iterator[tuple[str, tuple[int, ...], str]]:
    if kind in ("kimi", "packed"):
        yield f"{at}q_a_proj.weight", (32, HIDDEN), "linear"
        yield f"{at}q_a_layernorm.weight", (32,), "BF16"
        yield f"{at}q_b_proj.weight", (48, 32), "linear"
        yield f"{at}kv_a_proj_with_mqa.weight", (40, HIDDEN), "linear"
        yield f"{at}kv_a_layernorm.weight", (32,), "BF16"
        yield f"{at}kv_b_proj.weight", (64, 32), "linear"
        yield f"{at}o_proj.weight", (HIDDEN, 32), "linear"
        return
    for name, rows in (("q", 32), ("k", 16), ("v", 16)):
        yield f"{at}{name}_proj.weight", (rows, HIDDEN), "linear"
        if kind == "glm4":
            yield f"{at}{name}_proj.bias", (rows,), "BF16"
    yield f"{at}o_proj.weight", (HIDDEN, 32), "linear"
    for name in ("q", "k"):
        yield f"{at}{name}_norm.weight", (16,), "BF16"


def _mlp(at: str, rows: int, how: str) -> Iterator[tuple[str, tuple[int, ...], str]]:
    yield f"{at}.gate_proj.weight", (rows, HIDDEN), how
    yield f"{at}.up_proj.weight", (rows, HIDDEN), how
    yield f"{at}.down_proj.weight", (HIDDEN, rows), how


def _stored(rng: np.random.Generator, kind: str, name: str, shape: tuple[int, ...], how: str) -> dict[str, Tensor]:
    values = rng.standard_normal(shape).astype(np.float32)
    module = name.removesuffix(".weight")
    if how == "F32":
        return {name: Tensor("F32", list(shape), values.tobytes())}
    if kind == "packed" and how == "expert":
        rows, columns = shape
        words = rng.integers(0, 2**32, (rows, columns // 8), dtype=np.uint32) | 0x11111111  # no code of -8
        scale = bf16(rng.uniform(0.01, 0.1, (rows, columns // GROUP)))
        return {
            f"{module}.weight_packed": Tensor("I32", [rows, columns // 8], words.tobytes()),
            f"{module}.weight_scale": Tensor("BF16", [rows, columns // GROUP], scale),
            f"{module}.weight_shape": Tensor("I64", [2], np.array(shape, np.int64).tobytes()),
        }
    if how == "BF16" or kind == "packed":
        return {name: Tensor("BF16", list(shape), bf16(values))}
    codes = (rng.integers(0, 0x7F, shape, dtype=np.uint8)) | (rng.integers(0, 2, shape, dtype=np.uint8) << 7)
    rows, columns = shape
    scale_shape = [rows, 1] if kind == "glm4" else [-(-rows // BLOCK), -(-columns // BLOCK)]
    scale = rng.uniform(1e-4, 1e-3, scale_shape).astype(np.float32)
    stored = Tensor("F32", scale_shape, scale.tobytes()) if kind == "kimi" else Tensor("BF16", scale_shape, bf16(scale))
    suffix = "weight_scale" if kind == "glm4" else "weight_scale_inv"
    return {name: Tensor("F8_E4M3", list(shape), codes.tobytes()), f"{module}.{suffix}": stored}


def bf16(values: Any) -> bytes:
    """BF16 bytes of numbers, rounded half to even."""
    bits = np.asarray(values, np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16).tobytes()
