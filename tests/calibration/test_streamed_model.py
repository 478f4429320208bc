"""The streamed forward pass against transformers' whole model, for every family."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from moepress.calibration.activations import Scratch
from moepress.calibration.layer_runner import RunSettings
from moepress.calibration.streamed_model import StreamedModel

from .tiny_models import CONFIGS, published, whole_model

TOLERANCE = 1e-4  # relative to the largest logit; both sides compute in float32, in another order
SETTINGS = RunSettings(batch_size=2, expert_bytes=1)


def streamed_logits(model: StreamedModel, token_ids: torch.Tensor, lengths: torch.Tensor | None = None) -> torch.Tensor:
    stream = model.embed(token_ids, lengths)
    for index in range(model.num_layers):
        model.run_layer(index, stream)
    model.finish(stream)
    return torch.stack([logits for _, logits in model.logits(stream)])


def tokens(samples: int = 3, length: int = 24, vocabulary: int = 128) -> torch.Tensor:
    return torch.randint(3, vocabulary, (samples, length), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("key", sorted(CONFIGS))
def test_equals_the_whole_model(key: str, tmp_path: Path) -> None:
    config, model = whole_model(key)
    source = published(key, model)
    token_ids = tokens()
    with torch.no_grad():
        expected = model(input_ids=token_ids, use_cache=False).logits
    with Scratch(tmp_path, memory_bytes=1 << 30) as scratch:
        got = streamed_logits(StreamedModel(config, source, scratch, SETTINGS), token_ids)
    assert (got - expected).abs().max() <= TOLERANCE * expected.abs().max()
    assert set(source.loads.values()) == {1}, "every weight is read exactly once"
    assert source.loads.keys() == source.tensors.keys(), "every weight is used"
