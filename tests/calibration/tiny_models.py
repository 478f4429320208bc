"""Tiny untrained models of every family, in the published names, with transformers' whole model as the judge.

Every parameter is random (norms and biases too), so that a swapped or forgotten weight changes the output.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from moepress.calibration.decoder import decoder_config
from moepress.errors import CheckpointError
from moepress.formats.families import identify_family

_MOE: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_experts_per_tok": 3,
    "vocab_size": 128,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_DEEPSEEK: dict[str, Any] = {
    **_MOE,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
}
_MLA: dict[str, Any] = {
    **_DEEPSEEK,
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "rope_theta": 10000.0,
}
_YARN = {
    "type": "yarn",
    "factor": 4.0,
    "beta_fast": 1.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 64,
}
_INDEXER = {"index_n_heads": 4, "index_head_dim": 16, "index_topk": 6}

CONFIGS: dict[str, dict[str, Any]] = {
    "deepseek_v3": {
        **_MLA,
        "model_type": "deepseek_v3",
        "architectures": ["DeepseekV3ForCausalLM"],
        "n_group": 2,
        "rope_scaling": _YARN,
        "num_nextn_predict_layers": 1,
    },
    "kimi_k2": {
        **_MLA,
        "model_type": "kimi_k2",
        "architectures": ["DeepseekV3ForCausalLM"],
        "auto_map": {"AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM"},
        "rope_scaling": _YARN,
        "torch_dtype": "bfloat16",
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
        "num_nextn_predict_layers": 0,
    },
    "deepseek_v32": {
        **_MLA,
        **_INDEXER,
        "model_type": "deepseek_v32",
        "architectures": ["DeepseekV32ForCausalLM"],
        "rope_scaling": _YARN,
        "num_nextn_predict_layers": 1,
    },
    "glm_moe_dsa": {
        **_MLA,
        **_INDEXER,
        "model_type": "glm_moe_dsa",
        "architectures": ["GlmMoeDsaForCausalLM"],
        "num_hidden_layers": 5,
        "index_topk_freq": 2,
        "index_skip_topk_offset": 2,
        "num_nextn_predict_layers": 1,
    },
    "glm4_moe": {
        **_DEEPSEEK,
        "model_type": "glm4_moe",
        "architectures": ["Glm4MoeForCausalLM"],
        "num_key_value_heads": 2,
        "head_dim": 16,
        "attention_bias": True,
        "use_qk_norm": True,
        "partial_rotary_factor": 0.5,
        "rope_theta": 1000000.0,
        "num_nextn_predict_layers": 1,
    },
    "qwen3_moe": {
        **_MOE,
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_experts": 8,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [0],
        "rope_theta": 1000000.0,
    },
    "minimax_m2": {
        **_MOE,
        "model_type": "minimax_m2",
        "architectures": ["MiniMaxM2ForCausalLM"],
        "intermediate_size": 32,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_local_experts": 8,
        "use_qk_norm": True,
        "use_routing_bias": True,
        "rotary_dim": 8,
        "rope_theta": 5000000.0,
    },
}
CONFIGS["kimi_k25"] = {
    "model_type": "kimi_k25",
    "architectures": ["KimiK25ForConditionalGeneration"],
    "text_config": {key: value for key, value in CONFIGS["kimi_k2"].items() if key != "quantization_config"},
}


class TensorWeights:
    """A `WeightSource` over tensors in memory."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.tensors = tensors
        self.loads: dict[str, int] = {}

    def names(self) -> Collection[str]:
        return self.tensors.keys()

    def load(self, name: str, rows: slice | None = None, *, device: str = "cpu") -> torch.Tensor:
        if name not in self.tensors:
            raise CheckpointError(f"no weight named {name}")
        self.loads[name] = self.loads.get(name, 0) + 1
        return self.tensors[name][rows or slice(None)].float().clone().to(device)

    def expect(self, names: Collection[str], rows: slice | None = None) -> None:
        del names, rows


def whole_model(key: str, seed: int = 0, **changes: Any) -> tuple[dict[str, Any], PreTrainedModel]:
    """(config.json, transformers' whole model) of a family, float32, randomly filled."""
    config = {**CONFIGS[key], **changes}
    made = decoder_config(identify_family(config), config)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(made, dtype=torch.float32).eval()
    randomize(model)
    return config, model


def randomize(module: torch.nn.Module) -> None:
    """Fill every parameter and saved buffer: matrices like 1/√columns, norms around 1, biases small."""
    with torch.no_grad():
        for key, tensor in module.state_dict().items():
            if tensor.dim() > 1:
                tensor.normal_(0, tensor.shape[-1] ** -0.5)
            else:
                tensor.normal_(1.0 if "norm" in key and "bias" not in key else 0.0, 0.1)


def published(key: str, model: torch.nn.Module) -> TensorWeights:
    """The model's weights under the names that publishers use: one tensor per expert and projection."""
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in model.state_dict().items():
        tensors.update(publish_one(key, name, tensor))
    return TensorWeights(tensors)


def publish_one(key: str, name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """One entry of transformers' state_dict, in published names."""
    gate, up, down = ("w1", "w3", "w2") if key == "minimax_m2" else ("gate_proj", "up_proj", "down_proj")
    if key == "minimax_m2":
        name = name.replace(".mlp.", ".block_sparse_moe.")
    if key == "kimi_k25":
        name = f"language_model.{name}"
    stem, _, leaf = name.rpartition(".")
    out: dict[str, torch.Tensor] = {}
    if leaf == "gate_up_proj":
        for expert, weight in enumerate(tensor):
            out[f"{stem}.{expert}.{gate}.weight"], out[f"{stem}.{expert}.{up}.weight"] = weight.chunk(2)
    elif leaf == "down_proj":
        for expert, weight in enumerate(tensor):
            out[f"{stem}.{expert}.{down}.weight"] = weight
    else:
        out[name] = tensor
    return {name: weight.detach().clone() for name, weight in out.items()}
