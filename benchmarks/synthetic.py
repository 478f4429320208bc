"""Checkpoints with a real model's expert shapes and as few layers as wanted, to measure on: true names, random weights.

    python benchmarks/synthetic.py OUT --model kimi-k2 --layers 1 --experts 40        about 2 GB

Attention, router, shared expert and the routed experts have the published shapes (Kimi K2: 7168 × 2048, GLM-5.2: 6144 × 2048);
only the number of layers and experts and the vocabulary are cut. Weights are Gaussian, each 128 × 128 block with a magnitude
of its own, stored as block FP8 exactly as published.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import torch

from moepress.formats.architecture import expected_weights, parameter_count
from moepress.formats.fp8 import encode_fp8_block
from moepress.formats.writer import ShardWriter, write_index

CONFIGS = Path(__file__).resolve().parent.parent / "tests" / "configs"
MODELS = {"kimi-k2": "kimi_k2_instruct.json", "glm-5.2": "glm_5.2_fp8.json"}
SHARD_BYTES = 5_000_000_000
VOCABULARY = 1024


def config_for(model: str, *, layers: int, experts: int) -> dict[str, object]:
    """The published configuration, cut down: ``layers`` mixture-of-experts layers of ``experts`` experts, no dense ones, no MTP."""
    config = json.loads((CONFIGS / MODELS[model]).read_text())
    config |= {
        "num_hidden_layers": layers,
        "n_routed_experts": experts,
        "first_k_dense_replace": 0,
        "vocab_size": VOCABULARY,
    }
    config["num_nextn_predict_layers"] = 0
    for per_layer in ("mlp_layer_types", "indexer_types"):
        if per_layer in config:
            config[per_layer] = (["sparse"] if per_layer == "mlp_layer_types" else ["full"]) * layers
    return config


def build(out: Path, model: str, *, layers: int, experts: int, seed: int = 0) -> int:
    """Writes the checkpoint and returns the bytes of its tensors."""
    out.mkdir(parents=True, exist_ok=True)
    config = config_for(model, layers=layers, experts=experts)
    generator = torch.Generator().manual_seed(seed)
    pools: dict[tuple[int, ...], tuple[torch.Tensor, torch.Tensor]] = {}
    tensors: list[tuple[str, str, tuple[int, ...]]] = []
    specs = expected_weights(config)
    for spec in specs:
        if spec.published.kind == "fp8_block":
            rows, columns = spec.shape
            tensors.append((spec.name, "F8_E4M3", spec.shape))
            tensors.append((spec.name + "_scale_inv", "F32", (-(-rows // 128), -(-columns // 128))))
        else:
            tensors.append((spec.name, {"bf16": "BF16", "f32": "F32"}[spec.published.kind], spec.shape))
    size = {"F8_E4M3": 1, "F32": 4, "BF16": 2}
    shards: list[list[tuple[str, str, tuple[int, ...]]]] = [[]]
    filled = 0
    for tensor in tensors:
        count = size[tensor[1]] * int(np.prod(tensor[2]))
        if filled + count > SHARD_BYTES:
            shards.append([])
            filled = 0
        shards[-1].append(tensor)
        filled += count
    weight_map: dict[str, str] = {}
    total = 0
    turn = 0
    for number, members in enumerate(shards, start=1):
        name = f"model-{number:05d}-of-{len(shards):06d}.safetensors"
        with ShardWriter(out / name, members, {"format": "pt"}) as writer:
            shapes = {n: (d, s) for n, d, s in members}
            for tensor_name in writer.order:
                dtype, shape = shapes[tensor_name]
                turn += 1
                writer.write(tensor_name, _values(dtype, shape, tensor_name, pools, generator, turn))
                weight_map[tensor_name] = name
                total += size[dtype] * int(np.prod(shape))
    (out / "config.json").write_text(json.dumps(config, indent=1))
    write_index(
        out / "model.safetensors.index.json", weight_map, total_size=total, total_parameters=parameter_count(specs)
    )
    return total


def _values(
    dtype: str, shape: tuple[int, ...], name: str, pools: dict, generator: torch.Generator, turn: int
) -> torch.Tensor:  # type: ignore[type-arg]
    """Random values; matrices of one shape share a pool and are rolled by ``turn`` rows, which is fast and still differs."""
    if dtype == "F8_E4M3" or name.endswith("_scale_inv"):
        key = shape if dtype == "F8_E4M3" else tuple(128 * n for n in shape)
        if dtype == "F8_E4M3":
            if key not in pools:
                weight = torch.randn(shape, generator=generator) * shape[1] ** -0.5
                pools[key] = encode_fp8_block(weight)
            return pools[key][0].view(torch.uint8).roll(turn, 0).view(torch.float8_e4m3fn)
        return 0.5 + torch.rand(shape, generator=generator)
    if dtype == "F32":
        return torch.rand(shape, generator=generator) * 0.1
    return (torch.randn(shape, generator=generator) * 0.02).to(torch.bfloat16)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", choices=sorted(MODELS), default="kimi-k2")
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--experts", type=int, default=40)
    arguments = parser.parse_args()
    total = build(arguments.out, arguments.model, layers=arguments.layers, experts=arguments.experts)
    print(f"{arguments.out}: {total / 1e9:.2f} GB")


if __name__ == "__main__":
    main()
