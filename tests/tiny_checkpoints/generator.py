"""`build`: one call makes a checkpoint folder and the truth about it."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.tiny_checkpoints import safetensors_file, storage
from tests.tiny_checkpoints.models import FAMILIES, Model, Weight
from tests.tiny_checkpoints.side_files import write_side_files

TILE = 128
TILE_MAGNITUDES = (1.0, 30.0, 0.1)
STD = 0.02


@dataclass(frozen=True)
class TinyCheckpoint:
    """A checkpoint on disk and what it holds.

    Attributes:
        folder: where it is.
        config: the parsed config.json.
        tensors: every tensor of the files, as stored (float8 codes, scales, packed words, …), by name.
        truth: float32 value of every logical weight, by the weight's name (``….down_proj.weight``, also when packed).
        weight_map: tensor name -> file name.
    """

    folder: Path
    config: dict[str, Any]
    tensors: dict[str, torch.Tensor]
    truth: dict[str, torch.Tensor]
    weight_map: dict[str, str]


CALMING = {"gate.weight": 0.05, "lm_head.weight": 0.1}
"""Factors of `build`'s ``calm``, by the end of a name."""


def build(
    family: str,
    folder: Path,
    *,
    seed: int = 0,
    layers: int | None = None,
    experts: int = 8,
    shards: int = 2,
    mtp: int | None = None,
    published: str | None = None,
    scale_dtype: str | None = None,
    prefix: str | None = None,
    fused_experts: bool = False,
    scales_apart: bool = False,
    extras: Mapping[str, torch.Tensor] | None = None,
    changes: Mapping[str, Any] | None = None,
    calm: bool = False,
) -> TinyCheckpoint:
    """Write one tiny checkpoint; the same arguments give the same bytes.

    Args:
        family: a key of `FAMILIES`.
        folder: created when missing.
        seed: of the weights. A weight's values depend on the seed and its name alone, not on the other options.
        layers, experts, mtp: decoder layers (the first is dense where the family has dense layers), experts per layer,
            MTP layers; None = the family's usual.
        shards: number of files; 1 writes ``model.safetensors`` without an index.
        published: ``bf16``, ``fp8_block``, ``fp8_channel`` or ``int4`` (routed experts only); None = as the real one.
        scale_dtype: of FP8 scales: ``F32``, ``BF16``, or powers of two as ``UE8M0_F32``, ``F8_E8M0``, ``U8``.
        prefix: of the text model's names; ``model.language_model.`` replaces ``model.`` as some wrappers do.
        fused_experts: BF16 ``mlp.experts.gate_up_proj`` [E, 2·I, H] and ``down_proj`` [E, H, I], as transformers 5 has.
        scales_apart: put every scale into the last file, so that a weight and its scale are in different ones.
        extras: more tensors, by name.
        changes: fields of the text model's configuration that are to be other than the family's.
        calm: a router that does not saturate and logits of a few nats, so that two implementations can be compared by
            their log-probabilities: otherwise one last bit sends a token to another expert.
    """
    model = FAMILIES[family]
    published = published or model.published
    scale_dtype = scale_dtype or model.scale_dtype
    prefix = model.prefix if prefix is None else prefix
    config = model.config(layers or model.layers, experts, model.mtp if mtp is None else mtp)
    config.get("text_config", config).update(changes or {})
    quantization = quantization_config(model, config, published, scale_dtype, prefix)
    if quantization is not None:
        text = config.get("text_config", config)  # Kimi K2.5 publishes it in the text part, and only there
        text["quantization_config"] = quantization

    tensors: dict[str, torch.Tensor] = {}
    truth: dict[str, torch.Tensor] = {}
    with one_thread():
        for weight in model.weights(config, fused_experts):
            name = prefixed(weight.name, prefix)
            values = fill(weight, seed) * (CALMING.get(weight.name.rpartition("mlp.")[2], 1.0) if calm else 1.0)
            suffixed, truth[name] = store(weight, values, published, scale_dtype)
            module = name.removesuffix(".weight")
            tensors.update({f"{module}.{suffix}" if suffix else name: tensor for suffix, tensor in suffixed.items()})
    tensors.update(extras or {})

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    weight_map = write_shards(folder, tensors, shards, model.shard_digits, scales_apart)
    write_side_files(folder)
    return TinyCheckpoint(folder, config, tensors, truth, weight_map)


@contextmanager
def one_thread() -> Iterator[None]:
    """Hundreds of small operations: on a busy machine, handing them to a pool costs ten times what they do."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def prefixed(name: str, prefix: str) -> str:
    """The text model's names under a wrapper: ``language_model.`` goes in front, ``model.language_model.`` inside."""
    if name.startswith(("vision_tower.", "mm_projector.")):
        return name
    if prefix == "model.language_model.":
        return name if name.startswith("lm_head") else prefix + name.removeprefix("model.")
    return prefix + name


def fill(weight: Weight, seed: int) -> torch.Tensor:
    """Float32 values for one weight."""
    if weight.fill.startswith("copy of "):
        return fill(Weight(weight.fill.removeprefix("copy of "), weight.shape, fill="embedding"), seed)
    random = torch.Generator().manual_seed(zlib.crc32(f"{seed}/{weight.name}".encode()))
    noise = torch.randn(weight.shape, generator=random)
    match weight.fill:
        case "norm":
            return 1 + 0.1 * noise
        case "bias":
            return 0.1 * noise
        case "embedding":
            return noise
        case "router":
            return 0.2 * noise
        case "router_bias":
            return 8.5 + 0.01 * noise  # as trained ones are: far apart from zero, close together
        case "fused":
            experts, rows, columns = weight.shape
            return STD * noise * torch.stack([tile_magnitudes(rows, columns, expert) for expert in range(experts)])
        case "gate":
            noise = 3 * (noise - 0.5)
        case "up":
            noise = 0.5 * (noise + 0.5)
    rows, columns = weight.shape
    return STD * noise * tile_magnitudes(rows, columns, zlib.crc32(weight.name.encode()))


def tile_magnitudes(rows: int, columns: int, phase: int) -> torch.Tensor:
    """[rows, columns]: one magnitude per 128 × 128 tile; neighbours always differ."""
    tile_rows, tile_columns = torch.arange(rows) // TILE, torch.arange(columns) // TILE
    index = (tile_rows[:, None] + 2 * tile_columns[None, :] + phase) % len(TILE_MAGNITUDES)
    return torch.tensor(TILE_MAGNITUDES)[index]


def store(weight: Weight, value: torch.Tensor, published: str, scale_dtype: str) -> tuple[storage.Stored, torch.Tensor]:
    """(tensors by suffix, float32 value of what they store). A parameter that is no ``.weight`` has the suffix ""."""
    suffix = "weight" if weight.name.endswith(".weight") else ""
    if weight.stored == "F32":
        return {suffix: value}, value
    if weight.stored == "QUANTIZED":
        if published == "fp8_block":
            return storage.fp8_block(value, scale_dtype)
        if published == "fp8_channel":
            return storage.fp8_channel(value, scale_dtype)
        if published == "int4" and ".experts." in weight.name:
            return storage.int4(value, torch.int32)  # the real Kimi K2.5 has int32 shapes, not int64
    rounded = value.to(torch.bfloat16)
    return {suffix: rounded}, rounded.float()


def quantization_config(
    model: Model, config: dict[str, Any], published: str, scale_dtype: str, prefix: str
) -> dict[str, Any] | None:
    """The publisher's quantization_config for the way the linears are stored."""
    if published == "bf16":
        return None
    text = config.get("text_config", config)
    layers = text["num_hidden_layers"] + text.get("num_nextn_predict_layers", 0)
    if published == "fp8_block":
        block = {
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "quant_method": "fp8",
            "weight_block_size": [storage.BLOCK, storage.BLOCK],
        }
        if scale_dtype in ("UE8M0_F32", "F8_E8M0", "U8"):
            block["scale_fmt"] = "ue8m0"
        if model.not_converted:
            modules = [f"model.layers.{layer}.{module}" for layer in range(layers) for module in model.not_converted]
            block["modules_to_not_convert"] = [prefixed(module, prefix) for module in ("lm_head", *modules)]
        return block
    weights: dict[str, Any] = {
        "actorder": None,
        "block_structure": None,
        "dynamic": False,
        "group_size": None,
        "num_bits": 8,
        "observer": "minmax",
        "observer_kwargs": {},
        "strategy": "channel",
        "symmetric": True,
        "type": "float",
    }
    activations: dict[str, Any] | None = {"dynamic": True, "num_bits": 8, "strategy": "token", "symmetric": True}
    ignore = ["lm_head", *(f"model.layers.{layer}.mlp.gate" for layer in range(layers))]
    if published == "int4":
        weights |= {"num_bits": 4, "type": "int", "strategy": "group", "group_size": storage.GROUP}
        activations = None
        ignore = [
            "lm_head",
            "re:.*self_attn.*",
            "re:.*shared_experts.*",
            "re:.*mlp\\.(gate|up|gate_up|down)_proj.*",
            "re:vision_tower.*",
            "re:mm_projector.*",
        ]
    elif activations is not None:
        activations["type"] = "float"
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations, "output_activations": None}
    return {
        "config_groups": {"group_0": group},
        "format": "pack-quantized" if published == "int4" else "float-quantized",
        "ignore": ignore,
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
    }


def write_shards(
    folder: Path, tensors: Mapping[str, torch.Tensor], shards: int, digits: int, scales_apart: bool
) -> dict[str, str]:
    """Cut the tensors into files of about equal size, in order; returns tensor name -> file name."""
    if shards == 1:
        safetensors_file.write(folder / "model.safetensors", tensors)
        return dict.fromkeys(tensors, "model.safetensors")
    sizes = {name: tensor.numel() * tensor.element_size() for name, tensor in tensors.items()}
    total = sum(sizes.values())
    files: list[dict[str, torch.Tensor]] = [{} for _ in range(shards)]
    written = 0
    for name, tensor in tensors.items():
        last = scales_apart and name.endswith(("weight_scale", "weight_scale_inv"))
        files[-1 if last else min(shards - 1, written * shards // total)][name] = tensor
        written += sizes[name]
    weight_map: dict[str, str] = {}
    for number, content in enumerate(files, start=1):
        file_name = f"model-{number:05d}-of-{shards:0{digits}d}.safetensors"
        safetensors_file.write(folder / file_name, content)
        weight_map.update(dict.fromkeys(content, file_name))
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    return weight_map
