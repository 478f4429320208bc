"""Tensors of every kind that an output has, each with what can be wrong with it; every checksum agrees with the mistake."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from fuzz.small import Tensor
from tests.verify.corruptions.numbers import (
    bf16_first,
    bytes_reversed,
    codes_shifted,
    doubled,
    lowest_bit,
    nan,
    negated,
    nibbles_reversed,
    one_code,
    relabelled,
    row_missing,
    row_more,
    rows_swapped,
    scale_one_step,
    scales_finer,
    scales_transposed,
    shape_reversed,
    sign,
    swapped,
    true_shape,
    twos_complement,
    widened,
    zeros,
)
from tests.verify.corruptions.written import Corrupt, tensors

EXPERT = "model.layers.1.mlp.experts.1.up_proj"


def on(name: str, edit: Callable[[Tensor], None]) -> Corrupt:
    return tensors(lambda held: edit(held[name]), name)


def extra(name: str, tensor: Tensor, beside: str) -> Corrupt:
    return tensors(lambda held: held.update({name: tensor}), beside)


KEPT = {
    "kimi": {
        "embedding": "model.embed_tokens.weight",
        "head": "lm_head.weight",
        "final norm": "model.norm.weight",
        "norm": "model.layers.1.input_layernorm.weight",
        "latent norm": "model.layers.0.self_attn.kv_a_layernorm.weight",
        "query codes": "model.layers.1.self_attn.q_b_proj.weight",
        "ragged codes": "model.layers.0.self_attn.kv_a_proj_with_mqa.weight",
        "ragged scale": "model.layers.0.self_attn.kv_a_proj_with_mqa.weight_scale_inv",
        "absorbed codes": "model.layers.1.self_attn.kv_b_proj.weight",
        "output scale": "model.layers.1.self_attn.o_proj.weight_scale_inv",
        "dense codes": "model.layers.0.mlp.down_proj.weight",
        "dense scale": "model.layers.0.mlp.gate_proj.weight_scale_inv",
        "router": "model.layers.1.mlp.gate.weight",
        "router bias": "model.layers.1.mlp.gate.e_score_correction_bias",
        "shared codes": "model.layers.1.mlp.shared_experts.up_proj.weight",
        "shared scale": "model.layers.1.mlp.shared_experts.down_proj.weight_scale_inv",
        "MTP projection": "model.layers.2.eh_proj.weight",
        "MTP norm": "model.layers.2.enorm.weight",
        "MTP attention codes": "model.layers.2.self_attn.q_a_proj.weight",
    },
    "glm4": {
        "key norm": "model.layers.1.self_attn.k_norm.weight",
        "query norm": "model.layers.1.self_attn.q_norm.weight",
        "value bias": "model.layers.0.self_attn.v_proj.bias",
        "channel codes": "model.layers.0.self_attn.v_proj.weight",
        "channel scale": "model.layers.0.self_attn.v_proj.weight_scale",
        "MTP embedding": "model.layers.2.embed_tokens.weight",
        "MTP head": "model.layers.2.shared_head.head.weight",
    },
    "qwen3": {
        "block codes": "model.layers.0.self_attn.k_proj.weight",
        "block scale": "model.layers.0.self_attn.o_proj.weight_scale",
        "router": "model.layers.0.mlp.gate.weight",
    },
    "packed": {
        "carried words": f"{EXPERT}.weight_packed",
        "carried scale": f"{EXPERT}.weight_scale",
        "carried shape": f"{EXPERT}.weight_shape",
        "attention": "model.layers.0.self_attn.o_proj.weight",
    },
}
"""A tensor of every kind that a conversion keeps, by family."""

ANY = (lowest_bit, sign, rows_swapped, row_missing, shape_reversed, relabelled)
PROJECTIONS = {
    "gate": "model.layers.1.mlp.experts.0.gate_proj",
    "up": EXPERT,
    "down": "model.layers.1.mlp.experts.0.down_proj",
    "MTP": "model.layers.2.mlp.experts.1.down_proj",
}
WORDS = (
    one_code,
    sign,
    zeros,
    nibbles_reversed,
    bytes_reversed,
    twos_complement,
    negated,
    codes_shifted,
    rows_swapped,
    relabelled,
)
SCALES = {
    "negative": bf16_first(0xBC00),
    "zero": bf16_first(0),
    "NaN": bf16_first(0x7FC0),
    "infinite": bf16_first(0x7F80),
    "one step larger": scale_one_step,
    "doubled": doubled,
    "zeros": zeros,
    "transposed": scales_transposed,
    "finer groups": scales_finer,
    "in F32": widened,
    "rows swapped": rows_swapped,
    "a row missing": row_missing,
}


def tensor_corruptions() -> Iterator[tuple[str, str, Corrupt]]:
    for family, kinds in KEPT.items():
        for kind, name in kinds.items():
            for edit in ANY:
                yield f"{kind}: {edit.__name__}", family, on(name, edit)
    for kind in ("embedding", "norm", "router bias", "ragged scale", "head"):
        name = KEPT["kimi"][kind]
        for edit in (zeros, nan, widened, doubled, row_more):
            yield f"{kind}: {edit.__name__}", "kimi", on(name, edit)
        yield f"{kind}: dropped", "kimi", tensors(lambda held, n=name: held.pop(n) and None, name)
        yield f"{kind}: renamed", "kimi", tensors(lambda held, n=name: held.update({f"{n}_old": held.pop(n)}), name)
    for which, module in PROJECTIONS.items():
        for edit in WORDS:
            yield f"{which} words: {edit.__name__}", "kimi", on(f"{module}.weight_packed", edit)
        for said, change in SCALES.items():
            if said == "transposed" and module.endswith("down_proj"):
                continue  # one column
            yield f"{which} scales: {said}", "kimi", on(f"{module}.weight_scale", change)
        rows, columns = (64, 32) if module.endswith("down_proj") else (32, 64)
        for said, values in {"transposed": [columns, rows], "too wide": [rows, columns + 8], "zero": [0, 0]}.items():
            yield f"{which} shape: {said}", "kimi", on(f"{module}.weight_shape", true_shape(values))
        for part in ("weight_packed", "weight_scale", "weight_shape"):
            name = f"{module}.{part}"
            yield f"{which} {part}: dropped", "kimi", tensors(lambda held, n=name: held.pop(n) and None, name)
    gate, up, other = (f"model.layers.1.mlp.experts.{e}" for e in ("1.gate_proj", "1.up_proj", "0.up_proj"))
    packed = f"{up}.weight_packed"
    yield "gate and up swapped", "kimi", tensors(swapped(gate, up), packed)
    yield "two experts swapped", "kimi", tensors(swapped(up, other), packed)
    yield (
        "weight_g_idx added",
        "kimi",
        extra(f"{up}.weight_g_idx", Tensor("I32", [64], np.arange(64, dtype=np.int32).tobytes()), packed),
    )
    yield "weight_zero_point added", "kimi", extra(f"{up}.weight_zero_point", Tensor("I32", [4, 2], bytes(32)), packed)
    yield "input_scale added", "kimi", extra(f"{up}.input_scale", Tensor("F32", [1], b"\x00\x00\x80\x3f"), packed)
    yield (
        "the unpacked weight beside the packed one",
        "kimi",
        extra(f"{up}.weight", Tensor("BF16", [32, 64], bytes(4096)), packed),
    )
    yield (
        "an expert too many",
        "kimi",
        extra("model.layers.1.mlp.experts.2.up_proj.weight", Tensor("BF16", [32, 64], bytes(4096)), packed),
    )
    yield (
        "k_scale added",
        "kimi",
        extra("model.layers.1.self_attn.k_scale", Tensor("F32", [1], b"\x00\x00\x00\x3f"), packed),
    )
    yield (
        "v_scale added",
        "glm4",
        extra("model.layers.0.self_attn.v_scale", Tensor("F32", [1], b"\x00\x00\x00\x40"), packed),
    )
    yield "a KV factor on one side: k_norm", "glm4", on("model.layers.1.self_attn.k_norm.weight", doubled)
    yield "a KV factor on one side: v_proj", "glm4", on("model.layers.1.self_attn.v_proj.weight_scale", doubled)
    yield "a KV factor on one side: latent", "kimi", on("model.layers.1.self_attn.kv_a_layernorm.weight", doubled)
    yield "a KV factor on one side: kv_b", "kimi", on("model.layers.1.self_attn.kv_b_proj.weight_scale_inv", doubled)
