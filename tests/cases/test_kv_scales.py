"""KV: scales that a source brings along are not carried to a server that drops them or reads them wrongly."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from moepress.errors import PlanRefused
from moepress.formats.runtime_contract import contract_for
from tests.cases.rewritten import rewrite_json, rewrite_tensors
from tests.pressing import press
from tests.tiny_checkpoints import build

SCHEME = {"num_bits": 8, "type": "float", "dynamic": False, "symmetric": True, "strategy": "tensor"}


@pytest.mark.parametrize(
    ("family", "scales"),
    [
        ("glm4", {"self_attn.k_scale": [0.06]}),
        ("glm4", {"self_attn.attn.k_scale": [0.06]}),
        ("glm4", {"self_attn.k_proj.k_scale": [0.06], "self_attn.v_proj.v_scale": [0.05]}),
        ("glm4", {"self_attn.qkv_proj.k_scale": [0.06]}),
        ("glm4", {"self_attn.k_scale": [0.06, 0.07]}),
        ("kimi", {"self_attn.k_proj.k_scale": [0.05], "self_attn.v_proj.v_scale": [0.07]}),
        ("kimi", {"self_attn.attn.k_scale": [0.05]}),
        ("kimi", {"self_attn.k_proj.k_scale": [-1.0]}),
        ("glm5", {"self_attn.k_scale": [0.05]}),
    ],
    ids=str,
)
def test_kv_scales_the_server_does_not_use_as_meant_are_refused(
    family: str, scales: dict[str, list[float]], tmp_path: Path
) -> None:
    """KV-01, KV-02, KV-03, KV-04, KV-05, KV-11: under every name and shape; named, with what they would do."""
    source = build(family, tmp_path / "src")
    named = {f"model.layers.1.{name}": torch.tensor(value) for name, value in scales.items()}
    rewrite_tensors(source, lambda tensors: tensors.update(named))
    with pytest.raises(PlanRefused, match=f"{len(named)} KV scales, whose effect in this server is") as error:
        press(source.folder, tmp_path / "out", family)
    assert all(name in str(error.value) for name in named)
    assert not (tmp_path / "out").exists()


def test_a_scheme_without_scales_does_not_reach_the_output(tmp_path: Path) -> None:
    """KV-13: kv_cache_scheme in the source's config, no scale in its files: ours does not turn the FP8 cache on."""
    source = build("glm4", tmp_path / "src")
    rewrite_json(
        source.folder / "config.json", lambda config: config["quantization_config"].update({"kv_cache_scheme": SCHEME})
    )
    press(source.folder, tmp_path / "out", "glm4")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["quantization_config"].get("kv_cache_scheme") is None


def test_a_list_of_scales_beside_the_weights_is_warned_about_and_named_to_no_server(tmp_path: Path) -> None:
    """KV-09: a JSON file of scales with a layer missing is neither read nor dropped; ours are in the files or nowhere."""
    source = build("glm4", tmp_path / "src")
    listed = {"kv_cache": {"dtype": "float8_e4m3fn", "scaling_factor": {"0": {"0": 0.1, "2": 0.2}}}}
    (source.folder / "kv_cache_scales.json").write_text(json.dumps(listed))
    result = press(source.folder, tmp_path / "out", "glm4")
    assert any("kv_cache_scales.json" in warning and "legacy" in warning for warning in result.plan.warnings)
    assert json.loads((tmp_path / "out" / "kv_cache_scales.json").read_text()) == listed
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert not [name for name in index["weight_map"] if name.endswith(("k_scale", "v_scale"))]
    for fp8 in (False, True):
        arguments = contract_for("sglang", "0.5.23", "glm4_moe").launch_arguments(fp8_kv=fp8)
        assert not any("param-path" in argument for argument in arguments)


def test_a_scheme_in_a_description_that_is_carried_whole_is_refused(tmp_path: Path) -> None:
    """KV-13: INT4 experts carried with their publisher's config; its scheme would mean FP8 at a scale of 1.0."""
    source = build("kimi_k25", tmp_path / "src")
    rewrite_json(
        source.folder / "config.json",
        lambda config: config["text_config"]["quantization_config"].update({"kv_cache_scheme": SCHEME}),
    )
    with pytest.raises(PlanRefused, match=r"kv_cache_scheme in config\.json"):
        press(source.folder, tmp_path / "out", "kimi_k25")
