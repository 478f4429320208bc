"""The streamed forward pass against transformers' whole model, for every family."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from moepress.calibration.activations import Scratch
from moepress.calibration.run_settings import RunSettings
from moepress.calibration.streamed_model import StreamedModel
from moepress.errors import CheckpointError

from .tiny_models import CONFIGS, TensorWeights, published, whole_model

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


@pytest.mark.parametrize("key", ["deepseek_v3", "glm_moe_dsa", "glm4_moe"])
def test_padding_on_the_right_changes_nothing(key: str, tmp_path: Path) -> None:
    config, model = whole_model(key)
    token_ids, lengths = tokens(), torch.tensor([24, 7, 13])
    with Scratch(tmp_path, memory_bytes=1 << 30) as scratch:
        got = streamed_logits(StreamedModel(config, published(key, model), scratch, SETTINGS), token_ids, lengths)
    for sample, length in enumerate(lengths):
        with torch.no_grad():
            expected = model(input_ids=token_ids[sample : sample + 1, :length], use_cache=False).logits[0]
        assert (got[sample, :length] - expected).abs().max() <= TOLERANCE * expected.abs().max()


def test_files_and_blocks_of_experts_do_not_change_a_byte(tmp_path: Path) -> None:
    config, model = whole_model("glm_moe_dsa")
    source = published("glm_moe_dsa", model)
    results = []
    for memory_bytes, expert_bytes in ((1 << 30, 1 << 30), (0, 1), (0, 5 * 3 * 48 * 32 * 4)):
        with Scratch(tmp_path / "scratch", memory_bytes=memory_bytes) as scratch:
            settings = RunSettings(batch_size=2, expert_bytes=expert_bytes)
            results.append(streamed_logits(StreamedModel(config, source, scratch, settings), tokens()))
            assert (scratch.in_files > 0) == (memory_bytes == 0)
        assert not list((tmp_path / "scratch").glob("*")), "scratch files are deleted"
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_experts_fused_on_disk(tmp_path: Path) -> None:
    config, model = whole_model("glm4_moe")
    source = TensorWeights({name: tensor.clone() for name, tensor in model.state_dict().items()})
    with Scratch(tmp_path, memory_bytes=1 << 30) as scratch:
        fused = streamed_logits(StreamedModel(config, source, scratch, SETTINGS), tokens())
        split = streamed_logits(StreamedModel(config, published("glm4_moe", model), scratch, SETTINGS), tokens())
    assert torch.equal(fused, split)


def test_tied_embedding(tmp_path: Path) -> None:
    config, model = whole_model("qwen3_moe", tie_word_embeddings=True)
    source = published("qwen3_moe", model)
    del source.tensors["lm_head.weight"]
    with torch.no_grad():
        expected = model(input_ids=tokens(), use_cache=False).logits
    with Scratch(tmp_path, memory_bytes=1 << 30) as scratch:
        got = streamed_logits(StreamedModel(config, source, scratch, SETTINGS), tokens())
    assert (got - expected).abs().max() <= TOLERANCE * expected.abs().max()


def test_bfloat16_keeps_the_router_bias_in_float32(tmp_path: Path) -> None:
    config, model = whole_model("deepseek_v3")
    settings = RunSettings(batch_size=2, dtype=torch.bfloat16)
    with Scratch(tmp_path, memory_bytes=1 << 30) as scratch:
        streamed = StreamedModel(config, published("deepseek_v3", model), scratch, settings)
        with streamed.open_layer(1) as layer:
            kept = {name for name, tensor in layer.module.state_dict().items() if tensor.dtype == torch.float32}
        got = streamed_logits(streamed, tokens())
    with torch.no_grad():
        expected = model(input_ids=tokens(), use_cache=False).logits
    assert kept == {"mlp.gate.e_score_correction_bias"}
    close = (got - expected).abs().amax(-1) < 0.1 * expected.abs().max()
    assert close.float().mean() > 0.5, "routing differs for some tokens, the rest is near"


def broken(key: str, tmp_path: Path, *, drop: str = "", add: str = "", reshape: str = "") -> None:
    """Run layer 1 of a model with one weight removed, added or of another shape."""
    config, model = whole_model(key)
    source = published(key, model)
    if drop:
        del source.tensors[drop]
    if add:
        source.tensors[add] = torch.zeros(1)
    if reshape:
        source.tensors[reshape] = source.tensors[reshape][:-1]
    with Scratch(tmp_path, memory_bytes=1 << 30) as scratch:
        streamed = StreamedModel(config, source, scratch, SETTINGS)
        stream = streamed.embed(tokens())
        streamed.run_layer(1, stream)


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.1.self_attn.kv_a_layernorm.weight",
        "model.layers.1.mlp.experts.5.up_proj.weight",
        "model.layers.1.mlp.gate.e_score_correction_bias",
    ],
)
def test_missing_weight_is_an_error_never_random(name: str, tmp_path: Path) -> None:
    inner = name.removeprefix("model.layers.1.").replace(".", r"\.")
    with pytest.raises(CheckpointError, match=rf"layer 1: weights missing \(1\): {inner}"):
        broken("deepseek_v3", tmp_path, drop=name)


def test_unused_weight_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"does not use \(1\): mlp\.experts\.8\.up_proj\.weight"):
        broken("deepseek_v3", tmp_path, add="model.layers.1.mlp.experts.8.up_proj.weight")
    with pytest.raises(CheckpointError, match=r"does not use \(1\): mlp\.experts\.down_proj"):
        broken("deepseek_v3", tmp_path, add="model.layers.1.mlp.experts.down_proj")
    broken("deepseek_v3", tmp_path, add="model.layers.1.self_attn.k_proj.k_scale")  # known, and no part of the model


@pytest.mark.parametrize("name", ["self_attn.o_proj.weight", "mlp.experts.3.down_proj.weight"])
def test_wrong_shape_is_an_error(name: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"shape \[47, .*\] where the configuration asks for \[48, "):
        broken("deepseek_v3", tmp_path, reshape=f"model.layers.1.{name}")


def test_token_beyond_the_embedding(tmp_path: Path) -> None:
    config, model = whole_model("qwen3_moe")
    with Scratch(tmp_path, memory_bytes=1 << 30) as scratch:
        streamed = StreamedModel(config, published("qwen3_moe", model), scratch, SETTINGS)
        with pytest.raises(CheckpointError, match=r"token ids 5\.\.128 where the embedding has 128 rows"):
            streamed.embed(torch.tensor([[5, 128]]))


def test_experts_with_another_activation_are_refused(tmp_path: Path) -> None:
    config = {**CONFIGS["qwen3_moe"], "hidden_act": "gelu"}
    with Scratch(tmp_path, memory_bytes=0) as scratch, pytest.raises(CheckpointError, match="hidden_act 'gelu'"):
        StreamedModel(config, TensorWeights({}), scratch)
