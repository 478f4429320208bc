"""The experts' forward pass and what the tap keeps."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Experts

from moepress.calibration.activations import Scratch
from moepress.calibration.expert_tap import (
    ExpertTap,
    TapInputs,
    experts_forward,
    experts_forward_plain,
    sort_by_expert,
)
from moepress.calibration.layer_fill import ExpertBlock
from moepress.calibration.streamed_model import StreamedModel

from .test_streamed_model import SETTINGS, tokens
from .tiny_models import published, randomize, whole_model

EXPERTS, HIDDEN, INNER, TOP_K = 8, 48, 32, 3


def routed_batch(count: int = 50) -> TapInputs:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(count, HIDDEN, generator=generator)
    expert = torch.stack([torch.randperm(EXPERTS - 1, generator=generator)[:TOP_K] for _ in range(count)])
    return x, expert.int(), torch.rand(count, TOP_K, generator=generator)


def all_experts() -> ExpertBlock:
    generator = torch.Generator().manual_seed(4)
    gate_up = torch.randn(EXPERTS, 2 * INNER, HIDDEN, generator=generator) / HIDDEN**0.5
    return ExpertBlock(0, gate_up, torch.randn(EXPERTS, HIDDEN, INNER, generator=generator) / INNER**0.5)


def part(block: ExpertBlock, experts: range) -> ExpertBlock:
    chosen = slice(experts.start, experts.stop)
    return ExpertBlock(experts.start, block.gate_up[chosen], block.down[chosen])


def run(inputs: TapInputs, *blocks: ExpertBlock) -> torch.Tensor:
    out = torch.zeros(inputs[0].shape)
    for block in blocks:
        experts_forward(inputs, sort_by_expert(inputs[1], EXPERTS), block, out)
    return out


def test_equals_its_plain_twin_and_transformers() -> None:
    inputs, block = routed_batch(), all_experts()
    _config, model = whole_model("deepseek_v3")
    theirs = DeepseekV3Experts(model.config)
    theirs.load_state_dict({"gate_up_proj": block.gate_up, "down_proj": block.down})
    x, expert, weight = inputs
    with torch.no_grad():
        expected = theirs(x, expert.long(), weight)
    got = run(inputs, block)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(experts_forward_plain(inputs, block), expected, rtol=1e-5, atol=1e-5)


def test_blocks_of_experts_do_not_change_a_byte() -> None:
    inputs, block = routed_batch(), all_experts()
    whole = run(inputs, block)
    for size in (1, 3, 5):
        blocks = [part(block, range(first, min(first + size, EXPERTS))) for first in range(0, EXPERTS, size)]
        assert torch.equal(run(inputs, *blocks), whole)


def test_order_lists_every_pair_once_by_expert_then_token() -> None:
    expert = torch.tensor([[2, 0], [0, 1], [2, 1]])
    order = sort_by_expert(expert, 4)
    assert [order.of(index)[0].tolist() for index in range(4)] == [[0, 1], [1, 2], [0, 2], []]
    assert [order.of(index)[1].tolist() for index in range(4)] == [[1, 0], [1, 1], [0, 0], []]


def test_tap_must_be_called() -> None:
    tap = ExpertTap()
    with pytest.raises(RuntimeError, match="did not call"):
        tap.take()
    assert torch.equal(tap(torch.ones(2, 3), torch.zeros(2, 1), torch.ones(2, 1)), torch.zeros(2, 3))
    tap.take()
    with pytest.raises(RuntimeError):
        tap.take()


def test_tapped_tokens_are_the_moe_inputs_without_padding(tmp_path: Path) -> None:
    config, model = whole_model("glm4_moe")
    token_ids, lengths = tokens(), torch.tensor([24, 7, 13])
    seen: list[torch.Tensor] = []
    handle = model.model.layers[1].mlp.experts.register_forward_pre_hook(
        lambda _module, arguments: seen.extend(arguments)
    )
    for sample, length in zip(token_ids, lengths, strict=True):  # each text alone: nothing to pad
        with torch.no_grad():
            model(input_ids=sample[None, :length], use_cache=False)
    handle.remove()
    x, expert, weight = (torch.cat(seen[part::3]) for part in range(3))
    with Scratch(tmp_path, memory_bytes=1 << 30) as scratch:
        streamed = StreamedModel(config, published("glm4_moe", model), scratch, SETTINGS)
        stream = streamed.embed(token_ids, lengths)
        streamed.run_layer(0, stream)
        with streamed.open_layer(1) as layer:
            routed = layer.dense_part(stream)
        assert routed is not None
        assert len(routed) == int(lengths.sum())
        got = [part.clone() for part in routed.read(0, len(routed))]
    torch.testing.assert_close(got[0], x, rtol=1e-4, atol=1e-5)
    assert torch.equal(got[1].sort(-1).values.long(), expert.sort(-1).values)
    torch.testing.assert_close(got[2].sum(-1), weight.sum(-1), rtol=1e-4, atol=1e-5)


def test_quantized_weights_can_stand_in_for_the_experts(tmp_path: Path) -> None:
    """The second half of a layer, run with other weights, equals transformers with those weights in place."""
    config, model = whole_model("deepseek_v3")
    source = published("deepseek_v3", model)
    token_ids = tokens()
    torch.manual_seed(9)
    randomize(model.model.layers[1].mlp.experts)
    outputs: list[torch.Tensor] = []
    handle = model.model.layers[1].register_forward_hook(lambda _module, _inputs, output: outputs.append(output))
    with torch.no_grad():
        model(input_ids=token_ids, use_cache=False)
    handle.remove()
    replaced = model.model.layers[1].mlp.experts

    def weights(experts: range) -> ExpertBlock:
        chosen = slice(experts.start, experts.stop)
        return ExpertBlock(experts.start, replaced.gate_up_proj[chosen], replaced.down_proj[chosen])

    with Scratch(tmp_path, memory_bytes=1 << 30) as scratch:
        streamed = StreamedModel(config, source, scratch, SETTINGS)
        stream = streamed.embed(token_ids)
        streamed.run_layer(0, stream)
        with streamed.open_layer(1) as layer:
            routed = layer.dense_part(stream)
            assert routed is not None
            layer.experts(stream, routed, weights)
        got = stream.hidden.read(0, 3)
        torch.testing.assert_close(got, outputs[0], rtol=1e-4, atol=1e-5)
