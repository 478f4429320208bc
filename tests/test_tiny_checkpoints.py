"""The fixtures themselves, judged by other people's code: safetensors, transformers, compressed-tensors, tokenizers."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tiny_checkpoints import FAMILIES, TinyCheckpoint, build

Tiny = Callable[[str], TinyCheckpoint]

MAX_BYTES = 10_000_000


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("family", FAMILIES)
def test_small_deterministic_and_independent_of_the_options(family: str, tiny: Tiny, tmp_path: Path) -> None:
    first = tiny(family)
    second = build(family, tmp_path / "b")
    assert files_of(first.folder) == files_of(second.folder)
    assert sum(map(len, files_of(first.folder).values())) < MAX_BYTES
    other = build(family, tmp_path / "c", shards=3, experts=2, layers=2)
    name = next(name for name in other.truth if name.endswith("o_proj.weight"))
    assert torch.equal(first.truth[name], other.truth[name])
    assert len(set(other.weight_map.values())) == 3
    reseeded = build(family, tmp_path / "d", seed=1, experts=2, layers=2)
    assert not torch.equal(reseeded.truth[name], first.truth[name])


@pytest.mark.parametrize("family", FAMILIES)
def test_the_safetensors_library_reads_the_same_bits(family: str, tiny: Tiny) -> None:
    safetensors_torch = pytest.importorskip("safetensors.torch")
    checkpoint = tiny(family)
    read: dict[str, torch.Tensor] = {}
    for file_name in sorted(set(checkpoint.weight_map.values())):
        read |= safetensors_torch.load_file(checkpoint.folder / file_name)
    assert read.keys() == checkpoint.tensors.keys()
    for name, tensor in checkpoint.tensors.items():
        assert (read[name].dtype, read[name].shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(read[name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)), name
    index = json.loads((checkpoint.folder / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == checkpoint.weight_map
    assert index["metadata"]["total_size"] == sum(t.numel() * t.element_size() for t in read.values())


@pytest.mark.oracle
@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_loads_every_weight(family: str, tmp_path: Path) -> None:
    """In BF16: no key is missing, and the unexpected ones are exactly the MTP layer, which transformers drops."""
    transformers = pytest.importorskip("transformers")
    tiny = build(family, tmp_path / "model", published="bf16")
    if tiny.config["model_type"] == "kimi_k2":  # transformers knows it as DeepSeek V3
        (tiny.folder / "config.json").write_text(json.dumps({**tiny.config, "model_type": "deepseek_v3"}))
    auto = transformers.AutoModelForImageTextToText if family == "kimi_k25" else transformers.AutoModelForCausalLM
    model, info = auto.from_pretrained(tiny.folder, dtype=torch.bfloat16, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["mismatched_keys"]
    text = tiny.config.get("text_config", tiny.config)
    mtp = re.compile(rf"model\.layers\.{text['num_hidden_layers']}\.")
    fused = re.compile(r"experts\.\d+\.(gate|up|down)_proj\.weight")
    in_file = {fused.sub(_fused_name, name) for name in tiny.truth if mtp.match(name)}
    assert info["unexpected_keys"] == in_file
    assert_experts_are_in_order(model, tiny)


def _fused_name(match: re.Match[str]) -> str:
    return "experts.down_proj" if match[1] == "down" else "experts.gate_up_proj"


def assert_experts_are_in_order(model: Any, tiny: TinyCheckpoint) -> None:
    """transformers' fused tensors are ours, stacked: gate above up."""
    state = model.state_dict()
    name = next(name for name in state if name.endswith("layers.2.mlp.experts.gate_up_proj"))
    prefix = next(name for name in tiny.truth if ".layers.2." in name and ".experts.0." in name).split(".experts.")[0]
    gate, up = ("w1", "w3") if "block_sparse_moe" in prefix else ("gate_proj", "up_proj")
    for expert in range(8):
        stacked = torch.cat([tiny.truth[f"{prefix}.experts.{expert}.{each}.weight"] for each in (gate, up)])
        assert torch.equal(state[name][expert].float(), stacked)


@pytest.mark.oracle
@pytest.mark.parametrize("family", ["kimi", "glm5"])
def test_transformers_meta_model_has_the_same_shapes(family: str, tiny: Tiny) -> None:
    transformers = pytest.importorskip("transformers")
    checkpoint = tiny(family)
    config = {**checkpoint.config}
    config.pop("quantization_config")
    model_type = config.pop("model_type")
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(
            transformers.AutoConfig.for_model({"kimi_k2": "deepseek_v3"}.get(model_type, model_type), **config)
        )
    for name, tensor in model.state_dict().items():
        if "experts.gate_up_proj" not in name and "experts.down_proj" not in name:
            assert checkpoint.truth[name].shape == tensor.shape, name


@pytest.mark.oracle
def test_compressed_tensors_unpacks_to_the_truth(tiny: Tiny) -> None:
    pack = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
    checkpoint = tiny("kimi_k25")
    packed = [name for name in checkpoint.tensors if name.endswith("weight_packed")]
    assert len(packed) == 2 * 8 * 3
    for name in packed[::7]:
        module = name.removesuffix(".weight_packed")
        shape = torch.Size(checkpoint.tensors[f"{module}.weight_shape"].tolist())
        codes = pack.unpack_from_int32(checkpoint.tensors[name], 4, shape).float()
        scales = checkpoint.tensors[f"{module}.weight_scale"].float().repeat_interleave(32, 1)
        assert torch.equal(codes * scales, checkpoint.truth[f"{module}.weight"])
        assert codes.min() >= -7


@pytest.mark.parametrize("family", ["kimi", "qwen3_moe", "deepseek_v32"])
def test_block_fp8_truth_element_by_element(family: str, tiny: Tiny) -> None:
    """value[i, j] = code[i, j] · scale[i // 128, j // 128], also in the ragged last block."""
    checkpoint = tiny(family)
    name = next(n for n in checkpoint.truth if n.endswith(("kv_a_proj_with_mqa.weight", "q_proj.weight")))
    codes = checkpoint.tensors[name].double().tolist()
    scale = checkpoint.tensors[f"{name}_scale_inv"].double().tolist()
    expected = [[code * scale[i // 128][j // 128] for j, code in enumerate(row)] for i, row in enumerate(codes)]
    assert torch.equal(checkpoint.truth[name], torch.tensor(expected, dtype=torch.float64).float())
    if family == "kimi":
        assert (len(codes), len(scale)) == (192, 2)


@pytest.mark.parametrize("dtype", ["UE8M0_F32", "F8_E8M0", "U8"])
def test_power_of_two_scales_in_three_dtypes_mean_the_same(dtype: str, tmp_path: Path) -> None:
    plain = build("deepseek_v32", tmp_path / "plain")
    other = build("deepseek_v32", tmp_path / "other", scale_dtype=dtype)
    assert other.config["quantization_config"]["scale_fmt"] == "ue8m0"
    name = "model.layers.1.mlp.experts.0.gate_proj.weight"
    assert torch.equal(plain.truth[name], other.truth[name])
    scale = other.tensors[f"{name}_scale_inv"]
    value = torch.exp2(scale.float() - 127) if dtype == "U8" else scale.float()
    assert torch.equal(value, plain.tensors[f"{name}_scale_inv"])
    assert torch.equal(torch.frexp(value)[0], torch.full_like(value, 0.5))


@pytest.mark.parametrize("family", FAMILIES)
def test_mistakes_would_show(family: str, tiny: Tiny) -> None:
    """Neighbouring tiles differ ten times or more; gate and up differ; the router's bias would collapse in BF16."""
    checkpoint = tiny(family)
    for name in [name for name in checkpoint.truth if name.endswith("o_proj.weight")]:
        first, second = checkpoint.truth[name][:128, :128], checkpoint.truth[name][128:256, :128]
        ratio = float(first.abs().mean() / second.abs().mean())
        assert max(ratio, 1 / ratio) > 9, name
    gate = next(name for name in checkpoint.truth if re.search(r"experts\.0\.(gate_proj|w1)\.", name))
    up = gate.replace("gate_proj", "up_proj").replace("w1", "w3")
    assert checkpoint.truth[gate].mean() < 0 < checkpoint.truth[up].mean()
    biases = [name for name in checkpoint.truth if name.endswith("e_score_correction_bias")]
    for name in biases:
        assert checkpoint.tensors[name].dtype == torch.float32
        assert len(set(checkpoint.tensors[name].tolist())) == 8
        assert len(set(checkpoint.tensors[name].to(torch.bfloat16).tolist())) < 4


def test_side_files(tiny: Tiny) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    checkpoint = tiny("kimi")
    tokenizer = tokenizers.Tokenizer.from_file(str(checkpoint.folder / "tokenizer.json"))
    text = "<|user|>Grüße, 世界!\n<|eos|>"
    encoded = tokenizer.encode(text)
    assert encoded.ids[0] == 260
    assert max(encoded.ids) < checkpoint.config["vocab_size"]
    assert tokenizer.decode(encoded.ids, skip_special_tokens=False) == text
    assert {"tiktoken.model", "tokenization_tiny.py", "encoding_tiny.py", "docs/deploy_guidance.md"} <= set(
        files_of(checkpoint.folder)
    )


@pytest.mark.oracle
def test_chat_template_renders(tiny: Tiny) -> None:
    transformers = pytest.importorskip("transformers")
    checkpoint = tiny("kimi")
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(checkpoint.folder)
    conversation = [{"role": "user", "content": "hi"}]
    assert tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True) == (
        "<|bos|><|user|>hi<|eos|><|assistant|>"
    )


def test_options(tmp_path: Path) -> None:
    one_file = build("kimi", tmp_path / "one", shards=1, mtp=0, layers=2)
    assert set(one_file.weight_map.values()) == {"model.safetensors"}
    assert not (one_file.folder / "model.safetensors.index.json").exists()
    assert not [name for name in one_file.truth if ".layers.2." in name]

    apart = build("kimi", tmp_path / "apart", scales_apart=True)
    scales = [name for name in apart.tensors if name.endswith("weight_scale_inv")]
    assert {apart.weight_map[name] for name in scales} == {"model-00002-of-00002.safetensors"}
    assert [n for n in scales if apart.weight_map[n] != apart.weight_map[n.removesuffix("_scale_inv")]]

    fused = build("qwen3_moe", tmp_path / "fused", fused_experts=True)
    assert fused.tensors["model.layers.0.mlp.experts.gate_up_proj"].shape == (8, 512, 256)
    assert fused.tensors["model.layers.0.mlp.experts.down_proj"].shape == (8, 256, 256)

    extra = build("kimi", tmp_path / "extra", extras={"model.layers.1.dummy": torch.zeros(0, 16)})
    assert extra.tensors["model.layers.1.dummy"].shape == (0, 16)

    six_digits = build("deepseek_v32", tmp_path / "digits")
    assert "model-00001-of-000002.safetensors" in six_digits.weight_map.values()

    wrapped = build("kimi_k25", tmp_path / "wrapped", prefix="model.language_model.", mtp=1, published="fp8_block")
    assert "model.language_model.layers.3.eh_proj.weight" in wrapped.truth
    assert "lm_head.weight" in wrapped.truth
    assert wrapped.tensors["model.language_model.layers.1.mlp.experts.0.up_proj.weight"].dtype == torch.float8_e4m3fn


def test_quantization_config_stands_where_the_publisher_puts_it(tiny: Tiny) -> None:
    """Kimi K2.5: in text_config only. A reader that looks at the top level alone takes packed experts for BF16."""
    wrapper = tiny("kimi_k25").config
    assert "quantization_config" not in wrapper
    assert wrapper["text_config"]["quantization_config"]["format"] == "pack-quantized"
    assert tiny("glm4").config["quantization_config"]["format"] == "float-quantized"
