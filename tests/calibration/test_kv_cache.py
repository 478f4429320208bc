"""What the probe sees against transformers' own KV cache, and the arithmetic of FP8 storage."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import DynamicCache

from moepress.calibration.activations import Scratch
from moepress.calibration.kv_cache import (
    E4M3_MAX,
    CacheProbe,
    LayerCache,
    candidate_scales,
    measure_cache,
    store_e4m3,
    suspicious,
)
from moepress.calibration.streamed_model import StreamedModel
from moepress.errors import QuantizeError

from .test_streamed_model import SETTINGS, tokens
from .tiny_models import published, whole_model


def measured(key: str, tmp_path: Path, lengths: torch.Tensor | None = None) -> tuple[list[LayerCache], DynamicCache]:
    """Every layer's measurements, and the cache of transformers' whole model for the same text."""
    config, model = whole_model(key)
    token_ids = tokens()
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(input_ids=token_ids, past_key_values=cache, use_cache=True)
    layers = []
    with Scratch(tmp_path, memory_bytes=1 << 30) as scratch:
        streamed = StreamedModel(config, published(key, model), scratch, SETTINGS)
        stream = streamed.embed(token_ids, lengths)
        for index in range(streamed.num_layers):
            with streamed.open_layer(index) as layer:
                layers.append(measure_cache(layer, stream))
                routed = layer.dense_part(stream)
                if routed is not None:
                    layer.experts(stream, routed)
    return layers, cache


@pytest.mark.parametrize(
    ("key", "names"), [("glm4_moe", ("k", "v")), ("qwen3_moe", ("k", "v")), ("deepseek_v3", ("latent", "k_pe"))]
)
def test_sees_what_transformers_caches(key: str, names: tuple[str, str], tmp_path: Path) -> None:
    layers, cache = measured(key, tmp_path)
    for layer, cached in zip(layers, cache.layers, strict=True):
        for name, values in zip(names, (cached.keys, cached.values), strict=True):
            assert layer.amax[name] == pytest.approx(float(values.abs().max()), rel=1e-4)
            scale = layer.shares["calibrated"][name].scale
            below = (values.abs() / scale < 2**-6) & (values != 0)
            assert layer.shares["calibrated"][name].below_normal == pytest.approx(
                float(below.float().mean()), abs=2 / values.numel()
            )
    assert suspicious([layer.amax for layer in layers]) == []


@pytest.mark.parametrize("key", ["deepseek_v32", "glm_moe_dsa"])
def test_sparse_attention_is_seen_as_latent_too(key: str, tmp_path: Path) -> None:
    """Its transformers class caches expanded keys; the rotated part is in them, the latent only before them."""
    layers, cache = measured(key, tmp_path)
    _, model = whole_model(key)
    latents: list[torch.Tensor] = []
    handles = [
        layer.self_attn.kv_a_layernorm.register_forward_hook(lambda _m, _i, output: latents.append(output))
        for layer in model.model.layers
    ]
    with torch.no_grad():
        model(input_ids=tokens(), use_cache=False)
    for handle in handles:
        handle.remove()
    for layer, cached, latent in zip(layers, cache.layers, latents, strict=True):
        rotated = cached.keys[:, 0, :, -model.config.qk_rope_head_dim :]
        assert layer.amax["k_pe"] == pytest.approx(float(rotated.abs().max()), rel=1e-4)
        assert layer.amax["latent"] == pytest.approx(float(latent.abs().max()), rel=1e-4)
        assert layer.attention_error["calibrated"] > 0


def test_errors_and_shares_follow_the_scale(tmp_path: Path) -> None:
    layers, _ = measured("deepseek_v3", tmp_path)
    for layer in layers:
        assert layer.scales("calibrated") == {name: value / E4M3_MAX for name, value in layer.amax.items()}
        assert layer.scales("one_scale") == dict.fromkeys(layer.amax, max(layer.amax.values()) / E4M3_MAX)
        for name, scale in layer.scales("power_of_two").items():
            assert math.log2(scale).is_integer()
            assert layer.amax[name] / E4M3_MAX <= scale < 2 * layer.amax[name] / E4M3_MAX
        for candidate, shares in layer.shares.items():
            assert all(share.clipped == 0 for share in shares.values()), candidate
            assert 0 < layer.attention_error[candidate] < 0.1


@pytest.mark.parametrize("key", ["glm4_moe", "deepseek_v3", "glm_moe_dsa"])
def test_few_samples_see_the_same_largest_value_and_clips(key: str, tmp_path: Path) -> None:
    """Errors are of the first samples; amax, and shares at 1.0, of all, though those calls end when their cache is full."""
    config, model = whole_model(key)
    with Scratch(tmp_path, memory_bytes=1 << 30) as scratch:
        settings = replace(SETTINGS, batch_size=1)
        streamed = StreamedModel(config, published(key, model), scratch, settings)
        stream = streamed.embed(tokens())
        with streamed.open_layer(0) as layer:
            everything = measure_cache(layer, stream)
            few = measure_cache(layer, stream, samples=1, candidates=["unit"])
            again = measure_cache(layer, stream)
    assert few.amax == everything.amax
    assert set(few.shares) == {"unit"}
    for name, share in few.shares["unit"].items():
        assert (share.clipped, share.below_normal) == (
            everything.shares["unit"][name].clipped,
            everything.shares["unit"][name].below_normal,
        )
    assert few.attention_error["unit"] != everything.attention_error["unit"]
    assert again == everything


def test_padding_is_not_measured(tmp_path: Path) -> None:
    lengths = torch.tensor([24, 7, 13])
    padded, _ = measured("glm4_moe", tmp_path, lengths)
    _config, model = whole_model("glm4_moe")
    largest = 0.0
    for sample, length in zip(tokens(), lengths, strict=True):
        cache = DynamicCache(config=model.config)
        with torch.no_grad():
            model(input_ids=sample[None, :length], past_key_values=cache, use_cache=True)
        largest = max(largest, float(cache.layers[1].keys.abs().max()))
    assert padded[1].amax["k"] == pytest.approx(largest, rel=1e-4)


def test_stores_as_e4m3_does() -> None:
    values = torch.tensor([0.0, 1.0, 1.06, -500.0, 2.0**-9, 2.0**-11, 448.0])
    assert store_e4m3(values, 1.0).tolist() == [0.0, 1.0, 1.0, -448.0, 2.0**-9, 0.0, 448.0]
    assert store_e4m3(values, 2.0)[3] == -512.0, "500 / 2 = 250 rounds to 256"
    assert store_e4m3(values.bfloat16(), 1.0).dtype == torch.bfloat16


def test_a_small_scale_clips_and_is_counted(tmp_path: Path) -> None:
    config, model = whole_model("glm4_moe")
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.v_proj.weight.mul_(1000)
    with Scratch(tmp_path, memory_bytes=1 << 30) as scratch:
        streamed = StreamedModel(config, published("glm4_moe", model), scratch, SETTINGS)
        stream = streamed.embed(tokens())
        with streamed.open_layer(0) as layer:
            cache = measure_cache(layer, stream)
    assert cache.shares["unit"]["v"].clipped > 0.1
    assert cache.attention_error["unit"] > 3 * cache.attention_error["calibrated"]
    assert set(candidate_scales(cache.amax)) == {"unit", "calibrated", "power_of_two"}


def test_equal_scales_everywhere_are_suspicious() -> None:
    """KV-08: calibration that saw a constant, or a default never replaced."""
    constant = [{"k": 1.0, "v": 2.0 + index} for index in range(3)]
    assert suspicious(constant) == ["k: the same largest value 1 in all 3 layers"]
    assert suspicious(constant[:1]) == []


def test_a_cache_of_zeros_is_refused(tmp_path: Path) -> None:
    config, model = whole_model("glm4_moe")
    with torch.no_grad():
        model.model.layers[0].self_attn.v_proj.weight.zero_()
        model.model.layers[0].self_attn.v_proj.bias.zero_()
    with Scratch(tmp_path, memory_bytes=1 << 30) as scratch:
        streamed = StreamedModel(config, published("glm4_moe", model), scratch, SETTINGS)
        stream = streamed.embed(tokens())
        with streamed.open_layer(0) as layer, pytest.raises(QuantizeError, match="largest cached value of v is 0"):
            measure_cache(layer, stream)


def test_probe_leaves_the_layer_as_it_was(tmp_path: Path) -> None:
    config, model = whole_model("deepseek_v3")
    with Scratch(tmp_path, memory_bytes=1 << 30) as scratch:
        streamed = StreamedModel(config, published("deepseek_v3", model), scratch, SETTINGS)
        stream = streamed.embed(tokens())
        with streamed.open_layer(0) as layer:
            before = layer.attention(stream, 0, 2)
            measure_cache(layer, stream)
            assert torch.equal(layer.attention(stream, 0, 2), before)
            probe = CacheProbe(layer.module, layer.cache_view, layer.rope_dim)
            with pytest.raises(RuntimeError, match="watching"):
                layer.attention(stream, 0, 2, probe)
