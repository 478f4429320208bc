"""Streamed from a checkpoint on disk, in the publisher's format, against transformers on the float32 truth."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from moepress.calibration.activations import Scratch
from moepress.calibration.checkpoint_weights import CheckpointWeights
from moepress.calibration.decoder import decoder_classes, decoder_config
from moepress.calibration.streamed_model import StreamedModel
from moepress.calibration.text import load_tokenizer, make_samples, read_documents
from moepress.errors import CheckpointError
from moepress.formats.checkpoint import open_checkpoint
from moepress.formats.families import canonical_name, identify_family
from tests.tiny_checkpoints import FAMILIES, TinyCheckpoint, build

from .test_streamed_model import SETTINGS, TOLERANCE, streamed_logits, tokens


def whole_model_of_truth(checkpoint: TinyCheckpoint) -> torch.nn.Module:
    """transformers' whole model, every parameter taken from the checkpoint's float32 truth."""
    family = identify_family(checkpoint.config)
    truth = {canonical_name(family, name): tensor for name, tensor in checkpoint.truth.items()}
    model = AutoModelForCausalLM.from_config(decoder_config(family, checkpoint.config), dtype=torch.float32).eval()
    renamed = decoder_classes(family).renamed
    names = ("w1", "w3", "w2") if family.key == "minimax_m2" else ("gate_proj", "up_proj", "down_proj")
    state = {}
    for key, tensor in model.state_dict().items():
        name = key
        for ours, theirs in renamed:
            if f".{ours}" in name:
                name = name.replace(f".{ours}", f".{theirs}")
                break
        stem = name.rpartition(".")[0]
        experts = range(len(tensor))
        if name in truth:
            state[key] = truth[name]
        elif name.endswith("gate_up_proj"):
            pairs = [[truth[f"{stem}.{expert}.{part}.weight"] for part in names[:2]] for expert in experts]
            state[key] = torch.stack([torch.cat(pair) for pair in pairs])
        else:
            state[key] = torch.stack([truth[f"{stem}.{expert}.{names[2]}.weight"] for expert in experts])
    model.load_state_dict(state, strict=True)
    return model


@pytest.mark.parametrize("family", [*sorted(FAMILIES), "glm4 with fused experts"])
def test_equals_transformers_on_the_truth(family: str, tmp_path: Path) -> None:
    if family in FAMILIES:
        made = build(family, tmp_path / "model")
    else:
        made = build("glm4", tmp_path / "model", published="bf16", fused_experts=True)
    checkpoint = open_checkpoint(made.folder)
    token_ids = tokens(vocabulary=512)
    with torch.no_grad():
        expected = whole_model_of_truth(made)(input_ids=token_ids, use_cache=False).logits
    with CheckpointWeights(checkpoint) as source, Scratch(tmp_path, memory_bytes=1 << 30) as scratch:
        got = streamed_logits(StreamedModel(checkpoint.config, source, scratch, SETTINGS), token_ids)
        with pytest.raises(CheckpointError, match="no weight named nothing"):
            source.load("nothing")
    assert (got - expected).abs().max() <= TOLERANCE * expected.abs().max()


TINY_KIMI = Path(__file__).parents[2] / "examples" / "tiny_kimi" / "master"


@pytest.mark.skipif(not (TINY_KIMI / "model.safetensors").is_file(), reason="the example's weights are not here")
def test_the_trained_example(tmp_path: Path) -> None:
    """A model that has learned something, tokenized by its own tokenizer, against transformers' own loading."""
    documents = read_documents(TINY_KIMI.parent / "heldout" / "stdlib-py.txt")
    checkpoint = open_checkpoint(TINY_KIMI)
    vocab_size = checkpoint.config["vocab_size"]
    held_out = make_samples(documents, load_tokenizer(TINY_KIMI), samples=2, length=128, seed=0, vocab_size=vocab_size)
    model = AutoModelForCausalLM.from_pretrained(TINY_KIMI, dtype=torch.float32)
    with torch.no_grad():
        expected = model(input_ids=held_out.token_ids, use_cache=False).logits
    with CheckpointWeights(checkpoint) as source, Scratch(tmp_path, memory_bytes=1 << 30) as scratch:
        got = streamed_logits(StreamedModel(checkpoint.config, source, scratch, SETTINGS), held_out.token_ids)
    assert (got - expected).abs().max() <= TOLERANCE * expected.abs().max()
    loss = torch.nn.functional.cross_entropy(got[:, :-1].flatten(0, 1), held_out.token_ids[:, 1:].flatten())
    assert loss < 5, "a uniform guess among 2,048 tokens is 7.6"
