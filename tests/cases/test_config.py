"""CF: one description, of what the files hold, for every prefix, with nothing lost and nothing of the source's left."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from moepress.errors import CheckpointError
from moepress.verify.run import verify
from tests.cases.rewritten import LINEARS_AS_BF16, rewrite_json, same_bits, tensors_of
from tests.pressing import press
from tests.tiny_checkpoints import TinyCheckpoint, build


def test_a_wrapper_with_an_mtp_layer_of_another_scheme(tmp_path: Path) -> None:
    """CF-05, CF-09, CF-10: FP8 under language_model., MTP left in BF16, vision tower beside it, old config in text_config.

    compressed-tensors' own matcher reads every module as it is stored, and one quantization_config is left.
    """
    source = build("kimi_k25", tmp_path / "src", published="fp8_block", mtp=1)
    assert "quantization_config" in source.config["text_config"]
    press(source.folder, tmp_path / "out", "kimi_k25", *LINEARS_AS_BF16, "mtp.experts=bf16")
    assert verify(tmp_path / "out", source.folder).problems == ()
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert "quantization_config" not in config["text_config"]
    assert config["quantization_config"]["quant_method"] == "compressed-tensors"
    output = tensors_of(tmp_path / "out")
    assert output["language_model.model.layers.3.mlp.experts.0.up_proj.weight"].dtype == torch.bfloat16
    assert "language_model.model.layers.2.mlp.experts.0.up_proj.weight_packed" in output
    seen = [name for name in output if name.startswith(("vision_tower.", "mm_projector."))]
    assert seen
    assert all(same_bits(output[name], source.tensors[name]) for name in seen)


def test_names_under_a_prefix_the_architecture_does_not_have_are_refused(tmp_path: Path) -> None:
    """CF-05: 'model.language_model.layers' where config.json's class has 'model.layers': not passed over, not guessed."""
    source = build("kimi", tmp_path / "src", prefix="model.language_model.")
    with pytest.raises(CheckpointError, match=r"are missing: model\.layers.*not announced.*model\.language_model\."):
        press(source.folder, tmp_path / "out", "kimi")


def test_an_mtp_layer_that_config_does_not_announce_is_refused(tmp_path: Path) -> None:
    """CF-07: num_nextn_predict_layers 0 and the layer is there: neither dropped nor carried in silence."""
    source = build("kimi", tmp_path / "src")
    rewrite_json(source.folder / "config.json", lambda config: config.update(num_nextn_predict_layers=0))
    with pytest.raises(CheckpointError, match=r"42 weights are not announced by config\.json: model\.layers\.3\."):
        press(source.folder, tmp_path / "out", "kimi")


@pytest.mark.parametrize("family", ["kimi", "glm4", "glm5", "deepseek_v32"])
def test_every_mtp_tensor_arrives_and_config_announces_the_layer(
    family: str, tiny: Callable[[str], TinyCheckpoint], tmp_path: Path
) -> None:
    """CF-07: file-to-file census of the layer that other tools lose: kept, or converted, and still announced."""
    source = tiny(family)
    press(source.folder, tmp_path / "out", family)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["num_nextn_predict_layers"] == source.config["num_nextn_predict_layers"] == 1
    mtp = f"model.layers.{config['num_hidden_layers']}."
    output = tensors_of(tmp_path / "out")
    logical = {name.replace(".weight_packed", ".weight") for name in output}
    expected = {name for name in source.truth if name.startswith(mtp)}
    assert len(expected) > 30
    assert expected <= logical


@pytest.mark.parametrize("family", ["glm5", "deepseek_v32"])
def test_the_sparse_indexer_is_carried_with_its_scales(
    family: str, tiny: Callable[[str], TinyCheckpoint], tmp_path: Path
) -> None:
    """CF-12: wk and wq_b as FP8 with the same codes and scales, the rest of the indexer bit for bit; the MTP layer's too."""
    source = tiny(family)
    press(source.folder, tmp_path / "out", family, "mtp.rest=source")
    output = tensors_of(tmp_path / "out")
    indexer = [name for name in source.tensors if ".self_attn.indexer." in name]
    assert any(name.endswith("wk.weight_scale_inv") for name in indexer)
    for name in indexer:
        here = name if name in output else name.removesuffix("_inv")  # layouts name scales differently
        assert same_bits(output[here], source.tensors[name]), name
    assert verify(tmp_path / "out", source.folder).problems == ()
