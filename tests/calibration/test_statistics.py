"""Second moments against sums written out in float64, and what they must not depend on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from moepress.calibration import statistics
from moepress.calibration.activations import Scratch
from moepress.calibration.expert_tap import RoutedTokens, expert_inner
from moepress.calibration.layer_fill import ExpertBlock
from moepress.calibration.run_settings import RunSettings
from moepress.calibration.statistics import InputMoments, down_moments, gate_up_moments, pooled_moments
from moepress.calibration.streamed_model import StreamedModel
from moepress.errors import QuantizeError

from .test_expert_tap import EXPERTS, HIDDEN, all_experts, part, routed_batch
from .tiny_models import published, whole_model

ALL = range(EXPERTS)


@pytest.fixture
def scratch(tmp_path: Path) -> Iterator[Scratch]:
    with Scratch(tmp_path, memory_bytes=1 << 30) as made:
        yield made


def routed_tokens(scratch: Scratch, *, noise: float = 0.0) -> RoutedTokens:
    x, expert, weight = routed_batch()
    x = x + noise * torch.randn(x.shape, generator=torch.Generator().manual_seed(5))
    routed = RoutedTokens.allocate(
        scratch, tokens=len(x), hidden=HIDDEN, top_k=expert.shape[1], num_experts=EXPERTS, dtype=torch.float32
    )
    routed.write(0, (x, expert, weight))
    return routed


def written_out(
    inputs: list[torch.Tensor], targets: list[torch.Tensor], weights: list[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Σ ω x̃ x̃ᵀ and Σ ω (x − x̃) x̃ᵀ token by token in float64; one list entry per expert."""
    gram, cross = [], []
    for ours, theirs, weight in zip(inputs, targets, weights, strict=True):
        ours, theirs, weight = ours.double(), theirs.double(), weight.double()
        gram.append(sum((w * torch.outer(a, a) for a, w in zip(ours, weight, strict=True)), torch.zeros(1).double()))
        pairs = zip(ours, theirs, weight, strict=True)
        cross.append(sum((w * torch.outer(b - a, a) for a, b, w in pairs), torch.zeros(1).double()))
    width = inputs[0].shape[1]
    return (torch.stack([total.expand(width, width) for total in sums]) for sums in (gram, cross))  # type: ignore[return-value]


def by_expert(routed: RoutedTokens, values: torch.Tensor) -> list[torch.Tensor]:
    expert = routed.read(0, len(routed))[1]
    return [values[(expert == index).any(-1)] for index in ALL]


def router_weights(routed: RoutedTokens) -> list[torch.Tensor]:
    _, expert, weight = routed.read(0, len(routed))
    return [(weight * (expert == index)).sum(-1)[(expert == index).any(-1)] for index in ALL]


@pytest.mark.parametrize("router_weighted", [False, True])
def test_gate_and_up(scratch: Scratch, router_weighted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statistics, "TOKENS_PER_CHUNK", 16)  # 50 tokens: three whole chunks and a rest
    ours, theirs = routed_tokens(scratch), routed_tokens(scratch, noise=0.1)
    inputs, targets = (by_expert(ours, routed.x.read(0, len(routed))) for routed in (ours, theirs))
    weights = [w.square() if router_weighted else torch.ones(len(w)) for w in router_weights(ours)]
    gram, cross = written_out(inputs, targets, weights)
    got = gate_up_moments(ours, ALL, source=theirs, router_weighted=router_weighted)
    assert got.tokens.tolist() == [len(rows) for rows in inputs]
    assert got.tokens[-1] == 0
    assert not got.gram[-1].any(), "an expert that saw nothing has a zero sum, not a missing one"
    torch.testing.assert_close(got.gram.double(), gram, rtol=1e-5, atol=1e-5)
    assert got.cross is not None
    torch.testing.assert_close(got.cross.double(), cross, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(got.mass, torch.stack([w.double().sum() for w in weights]))


@pytest.mark.parametrize("with_source_run", [False, True])
def test_down_reads_what_quantized_gate_and_up_give(scratch: Scratch, with_source_run: bool) -> None:
    ours, theirs = routed_tokens(scratch), routed_tokens(scratch, noise=0.1)
    block = all_experts()
    quantized = ExpertBlock(0, (block.gate_up * 4).round() / 4, block.down)
    inputs = [expert_inner(x, quantized.gate_up[e]) for e, x in enumerate(by_expert(ours, ours.x.read(0, 50)))]
    source_x = theirs if with_source_run else ours
    targets = [expert_inner(x, block.gate_up[e]) for e, x in enumerate(by_expert(ours, source_x.x.read(0, 50)))]
    gram, cross = written_out(inputs, targets, [torch.ones(len(rows)) for rows in inputs])
    got = down_moments(ours, quantized, source=theirs if with_source_run else None, source_block=block)
    torch.testing.assert_close(got.gram.double(), gram, rtol=1e-4, atol=1e-4)
    assert got.cross is not None
    torch.testing.assert_close(got.cross.double(), cross, rtol=1e-4, atol=1e-4)
    assert down_moments(ours, quantized).cross is None


def test_pooled(scratch: Scratch) -> None:
    routed = routed_tokens(scratch)
    x = routed.x.read(0, 50).double()
    pooled = pooled_moments(routed)
    assert pooled.tokens == 50
    torch.testing.assert_close(pooled.gram.double(), x.T @ x, rtol=1e-5, atol=1e-5)


def same_bytes(a: InputMoments, b: InputMoments, at: slice) -> bool:
    return torch.equal(a.gram[at], b.gram) and torch.equal(a.tokens[at], b.tokens) and torch.equal(a.mass[at], b.mass)


def test_blocks_and_workers_do_not_change_a_byte(scratch: Scratch) -> None:
    routed, block = routed_tokens(scratch), all_experts()
    whole, whole_down = gate_up_moments(routed, ALL), down_moments(routed, block)
    for size in (1, 3):
        for first in range(0, EXPERTS, size):
            some = range(first, min(first + size, EXPERTS))
            at = slice(some.start, some.stop)
            assert same_bytes(whole, gate_up_moments(routed, some), at)
            assert same_bytes(whole_down, down_moments(routed, part(block, some)), at)


def test_inputs_that_are_not_finite_are_named(scratch: Scratch) -> None:
    routed = routed_tokens(scratch)
    x, expert, weight = routed.read(0, 1)
    routed.write(0, (torch.full_like(x, torch.inf), expert, weight))
    with pytest.raises(QuantizeError, match=rf"expert {int(expert.min())}: the inputs of gate and up"):
        gate_up_moments(routed, ALL)
    with pytest.raises(QuantizeError, match="not finite"):
        pooled_moments(routed)


@pytest.mark.parametrize("key", ["deepseek_v3", "glm_moe_dsa"])
def test_padding_changes_nothing(scratch: Scratch, key: str) -> None:
    """GQ-08: one 7-token text alone, and padded to 64: the same moments."""
    config, model = whole_model(key)
    source = published(key, model)
    text = torch.randint(3, 128, (1, 7), generator=torch.Generator().manual_seed(1))
    padded = torch.zeros(1, 64, dtype=torch.int64)
    padded[:, :7] = text
    moments = []
    for token_ids, lengths in ((text, None), (padded, torch.tensor([7]))):
        streamed = StreamedModel(config, source, scratch, RunSettings())
        stream = streamed.embed(token_ids, lengths)
        streamed.run_layer(0, stream)
        with streamed.open_layer(1) as layer:
            routed = layer.dense_part(stream)
            assert routed is not None
            moments.append((gate_up_moments(routed, ALL), down_moments(routed, layer.load_experts(ALL))))
    for alone, with_padding in zip(*moments, strict=True):
        assert torch.equal(alone.tokens, with_padding.tokens)
        assert int(alone.tokens.sum()) == 7 * 3
        torch.testing.assert_close(alone.gram, with_padding.gram, rtol=1e-4, atol=1e-5)
