"""The tiny models' config.json: every field that transformers, SGLang and vLLM need to build the real one, small.

Functions of the options of `build`: (layers, experts, mtp) -> the text model's configuration.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.tiny_checkpoints.side_files import BOS, EOS, PAD

HIDDEN, VOCAB = 256, 512


def common(layers: int) -> dict[str, Any]:
    return {
        "attention_dropout": 0.0,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "pad_token_id": PAD,
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "initializer_range": 0.02,
        "max_position_embeddings": 4096,
        "norm_topk_prob": True,
        "num_attention_heads": 4,
        "num_experts_per_tok": 2,
        "num_hidden_layers": layers,
        "rms_norm_eps": 1e-05,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": VOCAB,
    }


def sigmoid_router(experts: int, mtp: int) -> dict[str, Any]:
    return {
        "first_k_dense_replace": 1,
        "intermediate_size": 384,
        "moe_intermediate_size": 256,
        "moe_layer_freq": 1,
        "n_group": 1,
        "n_routed_experts": experts,
        "n_shared_experts": 1,
        "num_nextn_predict_layers": mtp,
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
        "topk_group": 1,
        "topk_method": "noaux_tc",
    }


def deepseek_text(architecture: str, model_type: str) -> Callable[[int, int, int], dict[str, Any]]:
    def config(layers: int, experts: int, mtp: int) -> dict[str, Any]:
        yarn = {
            "type": "yarn",
            "factor": 32.0,
            "original_max_position_embeddings": 128,
            "beta_fast": 1.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        }
        return {
            "architectures": [architecture],
            "model_type": model_type,
            **common(layers),
            **sigmoid_router(experts, mtp),
            "attention_bias": False,
            "num_key_value_heads": 4,
            "q_lora_rank": 128,
            "kv_lora_rank": 128,
            "qk_nope_head_dim": 32,
            "qk_rope_head_dim": 64,
            "v_head_dim": 32,
            "rope_theta": 50000.0,
            "rope_scaling": yarn,
        }

    return config


def with_indexer(base: Callable[[int, int, int], dict[str, Any]]) -> Callable[[int, int, int], dict[str, Any]]:
    def config(layers: int, experts: int, mtp: int) -> dict[str, Any]:
        return {**base(layers, experts, mtp), "index_head_dim": 128, "index_n_heads": 4, "index_topk": 64}

    return config


def glm5_text(layers: int, experts: int, mtp: int) -> dict[str, Any]:
    frequency, offset = 2, 2
    full = [max(layer - offset + 1, 0) % frequency == 0 for layer in range(layers)]
    return {
        "architectures": ["GlmMoeDsaForCausalLM"],
        "model_type": "glm_moe_dsa",
        **common(layers),
        **sigmoid_router(experts, mtp),
        "attention_bias": False,
        "head_dim": 64,
        "index_head_dim": 128,
        "index_n_heads": 4,
        "index_share_for_mtp_iteration": True,
        "index_skip_topk_offset": offset,
        "index_topk": 64,
        "index_topk_freq": frequency,
        "indexer_rope_interleave": True,
        "indexer_types": ["full" if each else "shared" for each in full],
        "kv_lora_rank": 128,
        "mlp_layer_types": ["dense"] + ["sparse"] * (layers - 1),
        "num_key_value_heads": 4,
        "q_lora_rank": 128,
        "qk_head_dim": 96,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 64,
        "rope_interleave": True,
        "rope_parameters": {"rope_theta": 8000000, "rope_type": "default"},
        "v_head_dim": 64,
    }


def glm4_text(layers: int, experts: int, mtp: int) -> dict[str, Any]:
    return {
        "architectures": ["Glm4MoeForCausalLM"],
        "model_type": "glm4_moe",
        **common(layers),
        **sigmoid_router(experts, mtp),
        "attention_bias": True,
        "head_dim": 64,
        "num_key_value_heads": 2,
        "partial_rotary_factor": 0.5,
        "rope_theta": 1000000,
        "use_qk_norm": True,
    }


def qwen3_text(layers: int, experts: int, mtp: int) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        **common(layers),
        "attention_bias": False,
        "decoder_sparse_step": 1,
        "head_dim": 64,
        "intermediate_size": 384,
        "mlp_only_layers": [],
        "moe_intermediate_size": 256,
        "num_experts": experts,
        "num_key_value_heads": 2,
        "rope_theta": 1000000.0,
        "router_aux_loss_coef": 0.001,
    }


def minimax_text(layers: int, experts: int, mtp: int) -> dict[str, Any]:
    return {
        "architectures": ["MiniMaxM2ForCausalLM"],
        "model_type": "minimax_m2",
        **common(layers),
        "head_dim": 64,
        "intermediate_size": 256,
        "num_key_value_heads": 2,
        "num_local_experts": experts,
        "num_mtp_modules": 3,
        "qk_norm_type": "per_layer",
        "rope_theta": 5000000,
        "rotary_dim": 32,
        "scoring_func": "sigmoid",
        "shared_intermediate_size": 0,
        "use_mtp": True,
        "use_qk_norm": True,
        "use_routing_bias": True,
    }


def kimi_k25_wrapper(text: dict[str, Any]) -> dict[str, Any]:
    width, inner, blocks, heads, grid = 64, 152, 2, 4, 8
    return {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "model_type": "kimi_k25",
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "pad_token_id": PAD,
        "media_placeholder_token_id": 300,
        "projection_hidden_size": width,
        "text_config": text,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "vision_config": {
            # the publisher's field names …
            "init_pos_emb_height": grid,
            "init_pos_emb_time": 4,
            "init_pos_emb_width": grid,
            "merge_kernel_size": [2, 2],
            "merge_type": "sd2_tpool",
            "mm_hidden_size": width,
            "mm_projector_type": "patchmerger",
            "patch_size": 14,
            "pos_emb_type": "divided_fixed",
            "projector_ln_eps": 1e-05,
            "text_hidden_size": HIDDEN,
            "vt_hidden_size": width,
            "vt_intermediate_size": inner,
            "vt_num_attention_heads": heads,
            "vt_num_hidden_layers": blocks,
            # … and the same sizes under the names that transformers reads (it ignores the ones above)
            "hidden_size": width,
            "intermediate_size": inner,
            "num_attention_heads": heads,
            "num_hidden_layers": blocks,
            "pos_emb_height": grid,
            "pos_emb_width": grid,
        },
    }
