"""The MTP layer against transformers' own MTP module."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel
from transformers.masking_utils import create_causal_mask
from transformers.modeling_layers import MtpLayer

from moepress.calibration.activations import Scratch
from moepress.calibration.decoder import DECODERS, mtp_config
from moepress.calibration.mtp import finish_mtp, mtp_stream
from moepress.calibration.streamed_model import StreamedModel

from .test_streamed_model import SETTINGS, TOLERANCE, tokens
from .tiny_models import TensorWeights, publish_one, published, randomize, whole_model

FAMILIES = ["deepseek_v3", "deepseek_v32", "glm4_moe", "glm_moe_dsa"]
LAYER = {"mtp_block.": "", "post_norm.": "shared_head.norm."}


def mtp_layer(key: str, model: PreTrainedModel) -> MtpLayer:
    """transformers' MTP layer of a family, randomly filled. Its index is what the checkpoint calls it."""
    config = mtp_config(model.config, 1)
    classes = DECODERS[key]
    layer = MtpLayer(config, classes.layer, classes.norm, config.num_hidden_layers).eval()
    randomize(layer)
    return layer


def with_mtp(key: str, model: PreTrainedModel, layer: MtpLayer) -> TensorWeights:
    source = published(key, model)
    for name, tensor in layer.state_dict().items():
        for ours, theirs in LAYER.items():
            name = theirs + name.removeprefix(ours) if name.startswith(ours) else name
        source.tensors.update(publish_one(key, f"model.layers.{model.config.num_hidden_layers}.{name}", tensor))
    return source


@torch.no_grad()
def expected_logits(key: str, model: PreTrainedModel, layer: MtpLayer, token_ids: torch.Tensor) -> torch.Tensor:
    """As transformers' MtpModel.forward calls its layer: shifted tokens, positions from 1, states after the norm."""
    hidden = model.model(input_ids=token_ids, use_cache=False).last_hidden_state[:, :-1]
    embedded = model.get_input_embeddings()(token_ids[:, 1:])
    positions = torch.arange(1, token_ids.shape[1])[None]
    mask = create_causal_mask(
        config=model.config,
        inputs_embeds=embedded,
        attention_mask=None,
        past_key_values=None,
        allow_is_causal_skip=not DECODERS[key].always_mask,
    )
    rotary = model.model.rotary_emb(embedded, position_ids=positions)
    arguments: dict[str, Any] = {"position_embeddings": rotary, "attention_mask": mask, "position_ids": positions}
    if not DECODERS[key].carries_topk:
        return model.lm_head(layer(embedded, hidden, **arguments, past_key_values=None))
    projected = layer.eh_proj(torch.cat([layer.enorm(embedded), layer.hnorm(hidden)], dim=-1))
    return model.lm_head(layer.post_norm(layer.mtp_block(projected, **arguments)[0]))


@pytest.mark.parametrize("key", FAMILIES)
def test_equals_transformers_mtp_layer(key: str, tmp_path: Path) -> None:
    config, whole = whole_model(key)
    layer = mtp_layer(key, whole)
    source = with_mtp(key, whole, layer)
    token_ids = tokens()
    with Scratch(tmp_path, memory_bytes=1 << 30) as scratch:
        model = StreamedModel(config, source, scratch, SETTINGS)
        assert list(model.mtp_layers) == [model.num_layers]
        main = model.embed(token_ids)
        for index in range(model.num_layers):
            model.run_layer(index, main)
        model.finish(main)
        index = model.mtp_layers[0]
        stream = mtp_stream(model, index, token_ids, main)
        with model.open_layer(index) as opened:
            routed = opened.dense_part(stream)
            assert routed is not None
            assert len(routed) == token_ids.shape[0] * (token_ids.shape[1] - 1)
            opened.experts(stream, routed)
        finish_mtp(model, index, stream)
        got = torch.stack([logits for _, logits in model.logits(stream)])
    expected = expected_logits(key, whole, layer, token_ids)
    assert (got - expected).abs().max() <= TOLERANCE * expected.abs().max()
    assert source.loads.keys() == source.tensors.keys(), "every weight is used"
