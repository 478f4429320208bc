"""transformers as the judge: it loads what we press with no key missing, generates, and gives the numbers the files hold."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32
from safetensors.torch import load_file

from tests.pressing import press
from tests.tiny_checkpoints import build

pytestmark = [pytest.mark.oracle, pytest.mark.slow]

ALL_BF16 = (
    "rest.attention=bf16",
    "rest.indexer=bf16",
    "rest.shared_experts=bf16",
    "rest.dense_mlp=bf16",
    "mtp.rest=bf16",
)
CLASSES = {
    "kimi": "DeepseekV3ForCausalLM",
    "glm4": "Glm4MoeForCausalLM",
    "glm5": "GlmMoeDsaForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}


def load(family: str, folder: Path) -> tuple[torch.nn.Module, dict[str, set[str]]]:
    """transformers' model and what it says about keys. It knows Kimi K2's architecture under the name deepseek_v3."""
    import transformers

    model_class = getattr(transformers, CLASSES[family])
    published = json.loads((folder / "config.json").read_text())
    if published["model_type"] == "kimi_k2":
        published["model_type"] = "deepseek_v3"
    config = model_class.config_class.from_dict(published)
    model, info = model_class.from_pretrained(folder, config=config, output_loading_info=True)
    return model, info


@pytest.mark.parametrize("mtp", [0, 1])
@pytest.mark.parametrize("family", sorted(CLASSES))
def test_loads_without_missing_or_unexpected_keys_and_generates(family: str, mtp: int, tmp_path: Path) -> None:
    """T5-01, T5-03: absent experts would be filled at random and the load would still succeed.

    An MTP layer, which transformers' model classes do not have, is the only thing it may not know.
    """
    if mtp and family == "qwen3_moe":
        pytest.skip("Qwen3-MoE has no MTP layer")
    source = build(family, tmp_path / "src", mtp=mtp)
    press(source.folder, tmp_path / "out", family, *ALL_BF16)
    model, info = load(family, tmp_path / "out")
    assert not info["missing_keys"]
    assert not info["mismatched_keys"]
    layers = source.config["num_hidden_layers"]
    strangers = {key for key in info["unexpected_keys"] if not (mtp and key.startswith(f"model.layers.{layers}."))}
    assert not strangers
    out = model.generate(torch.arange(1, 9)[None], max_new_tokens=4, do_sample=False, pad_token_id=0)
    assert out.shape == (1, 12)

    fused = next((n, p) for n, p in model.named_parameters() if n.endswith("experts.down_proj"))
    files: dict[str, torch.Tensor] = {}
    for shard in (tmp_path / "out").glob("*.safetensors"):
        files |= load_file(shard)
    module = f"{fused[0].removesuffix('down_proj')}3.down_proj"
    shape = torch.Size(files[f"{module}.weight_shape"].tolist())
    scale = files[f"{module}.weight_scale"].float()
    ours = unpack_from_int32(files[f"{module}.weight_packed"], 4, shape).float() * scale.repeat_interleave(
        shape[1] // scale.shape[1], 1
    )
    assert torch.equal(fused[1][3].float(), ours.to(fused[1].dtype).float())
