"""ST: shards that cannot be right stop a conversion before it begins, and ours stay far from the format's limits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from moepress.convert.decide import Decision
from moepress.convert.layout import assign_shards, plan_outputs
from moepress.errors import CheckpointError, FormatError
from moepress.formats.checkpoint import TensorRef
from moepress.formats.header import encode_header
from moepress.formats.storage import StoredWeight
from moepress.verify.run import verify
from tests.cases.rewritten import rewrite_tensors, same_bits, tensors_of
from tests.formats.published import weights_of
from tests.pressing import press, recipe_for
from tests.tiny_checkpoints import build


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda raw: raw[:-100], "100 bytes"),
        (lambda raw: b"", "empty"),
        (lambda raw: bytes(4096), "zero"),
    ],
    ids=["cut", "empty", "zero-filled"],
)
def test_a_damaged_shard_stops_the_conversion_before_any_work(damage, says: str, tmp_path: Path) -> None:
    """ST-02: named, with what it looks like, and to be downloaded again; nothing is begun."""
    source = build("kimi", tmp_path / "src")
    shard = source.folder / "model-00002-of-00002.safetensors"
    shard.write_bytes(damage(shard.read_bytes()))
    with pytest.raises(FormatError, match=says) as error:
        press(source.folder, tmp_path / "out", "kimi")
    assert shard.name in str(error.value)
    assert "download" in str(error.value)
    assert not (tmp_path / "out").exists()


def test_headers_of_a_published_model_stay_far_below_the_cap() -> None:
    """ST-13, HB-06: Kimi K2 with the largest shards a recipe may ask for: no header near 100 MB, no shard of 50 GB.

    A layer's experts have shards of their own, so one layer of them stands for all.
    """
    recipe = recipe_for("kimi", "output.shard_size=49GB")
    plans = []
    for spec in weights_of("kimi_k2_instruct"):
        if spec.identity.expert is not None and spec.identity.layer != 1:
            continue
        fp8 = spec.published.kind == "fp8_block"
        parts = {"weight": TensorRef(spec.name, "F8_E4M3" if fp8 else "BF16", spec.shape, "s", 0, 0)}
        if fp8:
            scale = tuple(-(-size // 128) for size in spec.shape)
            parts["scale"] = TensorRef(f"{spec.name}_scale_inv", "F32", scale, "s", 0, 0)
        stored = StoredWeight(spec.name, "fp8_block" if fp8 else "dense", spec.shape, parts)
        action = "quantize" if spec.identity.expert is not None else "keep"
        decision = Decision(stored, spec.identity, action, "")
        plans.append((decision, plan_outputs(decision, recipe, fp8_scale_suffix="weight_scale_inv")))
    shards = assign_shards(plans, shard_size=recipe.output.shard_size)
    assert [len(shard.tensors) for shard in shards if shard.layer == 1] == [384 * 3 * 3]
    largest = max(shards, key=lambda shard: len(shard.tensors))
    header = encode_header([(t.name, t.dtype, t.shape) for t in largest.tensors], {"format": "pt"})
    assert len(header) < 5_000_000
    assert max(shard.nbytes for shard in shards) + len(header) < 50_000_000_000


def test_a_head_equal_to_the_embedding_is_written_with_its_own_bytes(tmp_path: Path) -> None:
    """ST-14: not tied, byte-equal: both names go in and both come out; no writer takes one for the other."""
    source = build("kimi", tmp_path / "src")

    def equal(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]

    rewrite_tensors(source, equal)
    press(source.folder, tmp_path / "out", "kimi")
    output = tensors_of(tmp_path / "out")
    for name in ("lm_head.weight", "model.embed_tokens.weight"):
        assert same_bits(output[name], source.tensors["model.embed_tokens.weight"])
    assert verify(tmp_path / "out", source.folder).problems == ()


@pytest.mark.parametrize("name", ["model.layers.1.dummy", "model.layers.1.second.dummy"])
def test_empty_tensors_are_refused_by_name_and_never_dropped(name: str, tmp_path: Path) -> None:
    """ST-04, ST-05: two tensors of no bytes in one shard are two tensors, and both are named."""
    empty = {n: torch.empty(0, dtype=torch.bfloat16) for n in ("model.layers.1.dummy", "model.layers.1.second.dummy")}
    source = build("kimi", tmp_path / "src", extras=empty)
    with pytest.raises(CheckpointError) as error:
        press(source.folder, tmp_path / "out", "kimi")
    assert name in str(error.value)
