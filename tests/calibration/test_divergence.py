"""Streamed KL, agreement and perplexity against logits held whole."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from moepress.calibration import divergence
from moepress.calibration.activations import Scratch
from moepress.calibration.divergence import compare_models
from moepress.calibration.streamed_model import StreamedModel
from moepress.errors import VerifyFailed

from .test_streamed_model import SETTINGS, tokens
from .tiny_models import TensorWeights, published, whole_model


def models(scratch: Scratch, changed: float) -> tuple[StreamedModel, StreamedModel, list[torch.Tensor]]:
    """A model, one with other experts, and both whole logits."""
    config, model = whole_model("deepseek_v3", num_nextn_predict_layers=0)
    logits, sources = [], []
    for _ in range(2):
        sources.append(published("deepseek_v3", model))
        with torch.no_grad():
            logits.append(model(input_ids=tokens(), use_cache=False).logits)
            for layer in model.model.layers[1:]:
                layer.mlp.experts.down_proj.mul_(1 + changed)
    ours, theirs = (StreamedModel(config, source, scratch, SETTINGS) for source in sources)
    return ours, theirs, logits


def test_equals_logits_held_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(divergence, "ROWS", 5)
    lengths = torch.tensor([24, 1, 13])
    with Scratch(tmp_path, memory_bytes=1 << 30) as scratch:
        ours, theirs, logits = models(scratch, changed=0.5)
        got = compare_models(ours, theirs, tokens(), lengths)
        assert scratch.in_memory == 0
    p, q = (part.double().log_softmax(-1) for part in logits)
    real = torch.arange(24)[None] < lengths[:, None]
    kl = (p.exp() * (p - q)).sum(-1)[real]
    predicted = real[:, 1:]
    losses = [-part[:, :-1].gather(2, tokens()[:, 1:, None])[..., 0][predicted].mean() for part in (p, q)]
    assert got.tokens == 38
    assert got.kl == pytest.approx(float(kl.mean()), rel=1e-3)
    assert got.kl_max == pytest.approx(float(kl.max()), rel=1e-3)
    assert got.kl_standard_error == pytest.approx(float(kl.std(correction=0)) / math.sqrt(38), rel=1e-3)
    assert got.top1_agreement == float((p.argmax(-1) == q.argmax(-1))[real].double().mean())
    assert got.source_perplexity == pytest.approx(math.exp(losses[0]), rel=1e-4)
    assert got.candidate_perplexity == pytest.approx(math.exp(losses[1]), rel=1e-4)


def test_a_model_agrees_with_itself(tmp_path: Path) -> None:
    with Scratch(tmp_path, memory_bytes=1 << 30) as scratch:
        ours, theirs, _ = models(scratch, changed=0.0)
        got = compare_models(ours, theirs, tokens())
    assert got.kl == 0
    assert got.top1_agreement == 1
    assert got.source_perplexity == got.candidate_perplexity


def test_logits_that_are_not_finite_fail(tmp_path: Path) -> None:
    with Scratch(tmp_path, memory_bytes=1 << 30) as scratch:
        ours, theirs, _ = models(scratch, changed=0.0)
        assert isinstance(theirs.source, TensorWeights)
        theirs.source.tensors["model.norm.weight"][0] = torch.nan
        with pytest.raises(VerifyFailed, match="not finite"):
            compare_models(ours, theirs, tokens())
