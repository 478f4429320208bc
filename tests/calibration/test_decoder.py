"""transformers' decoder layers for the published configurations, on the meta device: names, shapes, configuration."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from moepress.calibration.attention import equal_widths_attention
from moepress.calibration.decoder import DECODERS, decoder_classes, decoder_config, mtp_config
from moepress.calibration.layer_fill import on_meta, settle_names
from moepress.calibration.streamed_model import MTP_WEIGHTS
from moepress.formats.architecture import WeightSpec, expected_weights
from moepress.formats.families import FAMILIES, expert_count, identify_family, mtp_layers, text_config
from tests.tiny_checkpoints import TinyCheckpoint

CONFIGS = sorted((Path(__file__).parents[1] / "configs").glob("*.json"))


def published(path: Path) -> dict[str, Any]:
    """A published configuration; fewer layers where all of them follow one rule."""
    config: dict[str, Any] = json.loads(path.read_text())
    text = config.get("text_config", config)
    if "indexer_types" not in text:
        text["num_hidden_layers"] = 6
    return config


def by_layer(config: dict[str, Any]) -> dict[int, dict[str, WeightSpec]]:
    """Layer -> name inside the layer -> what the family's own table expects."""
    layers: dict[int, dict[str, WeightSpec]] = {}
    for spec in expected_weights(config):
        if spec.identity.layer is not None and "layers." in spec.name:
            inner = spec.name.split("layers.", 1)[1].split(".", 1)[1]
            layers.setdefault(spec.identity.layer, {})[inner] = spec
    return layers


def test_every_family_has_a_decoder() -> None:
    assert {family.key for family in FAMILIES} == set(DECODERS)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_layers_of_published_models_take_the_published_weights(path: Path) -> None:
    """Layer by layer, MTP too: nothing missing or left over, and shapes agree; the experts once."""
    config = published(path)
    family = identify_family(config)
    classes, made = decoder_classes(family), decoder_config(family, config)
    num_mtp = len(mtp_layers(family, config))
    longer = mtp_config(made, num_mtp)
    expected = by_layer(config)
    assert len(expected) == made.num_hidden_layers + num_mtp
    for index, specs in expected.items():
        is_mtp = index >= made.num_hidden_layers
        layer = on_meta(partial(classes.layer, longer if is_mtp else made, index))
        is_last = index == max(expected)
        names = settle_names(
            layer,
            family=family,
            classes=classes,
            present={inner: inner for inner in specs if is_last or ".experts." not in inner},
            num_experts=expert_count(text_config(family, config)) if is_last else 0,
            extra=MTP_WEIGHTS if is_mtp else (),
            where=f"layer {index}",
        )
        state = layer.state_dict()
        assert {inner: specs[inner].shape for inner in names.dense.values()} == {
            inner: tuple(state[key].shape) for key, inner in names.dense.items()
        }
        if is_last:
            gate, _, down = names.experts[-1]
            assert specs[gate].shape == names.expert_shape
            assert specs[down].shape == names.expert_shape[::-1]


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_rotary_embeddings_can_be_made(path: Path) -> None:
    config = published(path)
    family = identify_family(config)
    made = decoder_config(family, config)
    cos, sin = decoder_classes(family).rotary(made)(torch.zeros(1, 4, 8), torch.arange(4)[None])
    assert cos.shape == sin.shape
    assert torch.isfinite(cos).all()
    assert not torch.equal(cos[0, 0], cos[0, 3])


def test_the_published_configuration_is_left_as_it_was(tiny: Callable[[str], TinyCheckpoint]) -> None:
    """transformers completes rope_scaling in place; the converted checkpoint's config.json must not carry that."""
    for family in ("kimi", "glm4", "glm5", "qwen3_moe", "kimi_k25"):
        config = copy.deepcopy(tiny(family).config)
        decoder_config(identify_family(config), config)
        assert config == tiny(family).config


def test_values_narrower_than_keys_attend_as_they_do_alone() -> None:
    """Causal, with a mask, and with fewer key heads: the padded call gives what plain products give."""
    g = torch.Generator().manual_seed(0)
    module = torch.nn.Module()
    module.is_causal, module.num_key_value_groups = True, 2
    query = torch.randn(2, 4, 33, 24, generator=g)
    key, value = torch.randn(2, 2, 33, 24, generator=g), torch.randn(2, 2, 33, 16, generator=g)
    causal = torch.ones(33, 33, dtype=torch.bool).tril()
    scores = (query @ key.repeat_interleave(2, 1).mT * 0.3).masked_fill(~causal, -torch.inf)
    exact = (scores.softmax(-1) @ value.repeat_interleave(2, 1)).transpose(1, 2)
    for mask in (None, causal[None, None]):
        out, _ = equal_widths_attention(module, query, key, value, mask, scaling=0.3)
        torch.testing.assert_close(out, exact, rtol=1e-4, atol=1e-5)
