"""KV scales end to end: folded or written, exact without quantization, a smaller error with an FP8 cache, resumable."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.quantization import QuantizationConfig

from moepress.calibration.activations import Scratch
from moepress.calibration.checkpoint_weights import CheckpointWeights
from moepress.calibration.kv_cache import LayerCache, measure_cache
from moepress.calibration.run_settings import RunSettings
from moepress.calibration.streamed_model import StreamedModel
from moepress.errors import PlanRefused
from moepress.formats.checkpoint import open_checkpoint
from moepress.verify.run import verify
from tests.cases.rewritten import rewrite_tensors, tensors_of
from tests.pressing import StopAfter, press, shard_bytes
from tests.stretched import FACTORS, stretched
from tests.tiny_checkpoints import TinyCheckpoint, build

pytestmark = pytest.mark.slow

SMALL = ("calibration.samples=4", "calibration.length=48", "kv_cache.samples=2", "calibration.batch_size=2")
FOLDED = ("kv_cache.scales=folded", *SMALL)
VLLM = ("serving.server=vllm", "serving.version=0.32.0")
Made = Callable[[str], tuple[TinyCheckpoint, Path, Path]]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """family -> stretched source, its output without KV scales, its output with folded ones."""
    found: dict[str, tuple[TinyCheckpoint, Path, Path]] = {}

    def get(family: str) -> tuple[TinyCheckpoint, Path, Path]:
        if family not in found:
            folder = tmp_path_factory.mktemp(family)
            source = stretched(family, folder / "src")
            press(source.folder, folder / "plain", family, "kv_cache.scales=none")
            press(source.folder, folder / "folded", family, *FOLDED)
            found[family] = source, folder / "plain", folder / "folded"
        return found[family]

    return get


def run(folder: Path, scratch: Path) -> tuple[torch.Tensor, list[LayerCache]]:
    """Logits of a checkpoint for some tokens, float32, and what an FP8 cache at 1.0 does to each layer's attention."""
    token_ids = torch.randint(3, 500, (2, 40), generator=torch.Generator().manual_seed(1))
    checkpoint = open_checkpoint(folder)
    with CheckpointWeights(checkpoint) as weights, Scratch(scratch, memory_bytes=1 << 30) as memory:
        model = StreamedModel(checkpoint.config, weights, memory, RunSettings(batch_size=2))
        stream = model.embed(token_ids)
        layers = []
        for index in range(model.num_layers):
            with model.open_layer(index) as layer:
                layers.append(measure_cache(layer, stream))
                routed = layer.dense_part(stream)
                if routed is not None:
                    layer.experts(stream, routed)
        model.finish(stream)
        return torch.stack([logits for _, logits in model.logits(stream)]), layers


@pytest.mark.parametrize("family", ["glm4", "qwen3_moe", "kimi"])
def test_folding_changes_no_logit_and_lowers_the_error_of_an_fp8_cache(family: str, made: Made, tmp_path: Path) -> None:
    """The server's cache casts to e4m3 and knows no scale. GQA with bias and per-head norms, GQA by blocks, MLA's latent."""
    source, plain, folded = made(family)
    report = json.loads((folded / "moepress_report.json").read_text())["kv_cache"]
    before, at_one = run(plain, tmp_path)
    after, at_scale = run(folded, tmp_path)
    assert torch.equal(before, after), "powers of two change no bit of float32 arithmetic either"
    for layer, factor in FACTORS.items():
        figures = report["layers"][str(layer)]
        assert figures["emission"] == "folded"
        moved = [name for name, scale in figures["scale"].items() if scale != 1.0]
        assert moved == [name for name in figures["scale"] if name != "k_pe"]
        assert all((figures["scale"][name] > 1) == (factor > 1) for name in moved)
        share = 0.6 if family == "kimi" else 0.3  # MLA: what rounding the rotated key costs stays
        assert at_scale[layer].attention_error["unit"] < share * at_one[layer].attention_error["unit"], layer
        for name in moved:  # what is cached is the same value divided by the scale, and has room for twice as much
            assert at_scale[layer].amax[name] * figures["scale"][name] == pytest.approx(
                at_one[layer].amax[name], rel=1e-6
            )
            assert 2 * figures["amax"][name] / figures["scale"][name] <= 448
    if family != "qwen3_moe":  # its MTP layer was not stretched: 1.0 is as good, and nothing is changed
        assert report["layers"]["3"]["emission"] == "none"
    assert verify(folded, source.folder).problems == ()


def test_rotated_keys_of_mla_fold_where_attention_is_bf16(tmp_path: Path) -> None:
    """k_pe has outliers in real models; the query carries its scale whole, and K's rows of kv_b_proj take it out again."""
    source = build("kimi", tmp_path / "src")

    def edit(tensors: dict[str, torch.Tensor]) -> None:
        for layer in (0, 1):
            name = f"model.layers.{layer}.self_attn.kv_a_proj_with_mqa.weight_scale_inv"
            tensors[name][1:] *= 100.0  # rows from 128 on: the rotated key

    rewrite_tensors(source, edit)
    press(source.folder, tmp_path / "plain", "kimi", "rest.attention=bf16", "mtp.rest=bf16", "kv_cache.scales=none")
    folded = press(source.folder, tmp_path / "out", "kimi", "rest.attention=bf16", "mtp.rest=bf16", *FOLDED)
    assert folded.report["kv_cache"]["left"] == {}
    assert folded.report["kv_cache"]["layers"]["0"]["scale"]["k_pe"] > 1
    assert len(folded.report["kv_cache"]["layers"]["0"]["folds"]) == 3
    before, at_one = run(tmp_path / "plain", tmp_path)
    after, at_scale = run(tmp_path / "out", tmp_path)
    assert torch.equal(before, after)
    assert at_one[0].shares["unit"]["k_pe"].clipped > 0
    assert at_scale[0].shares["unit"]["k_pe"].clipped == 0
    assert verify(tmp_path / "out", source.folder).problems == ()
    kept = press(source.folder, tmp_path / "kept", "kimi", *FOLDED).report["kv_cache"]
    assert "--set rest.attention=bf16 would allow it" in kept["layers"]["0"]["reason"]["k_pe"]
    assert kept["layers"]["0"]["scale"]["k_pe"] == 1.0


@pytest.mark.parametrize("scale_dtype", ["F8_E8M0", "BF16"])
def test_folds_into_every_kind_of_fp8_scale(scale_dtype: str, tmp_path: Path) -> None:
    source = build("kimi", tmp_path / "src", scale_dtype=scale_dtype)

    def edit(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.1.self_attn.kv_a_layernorm.weight"] *= 1000

    rewrite_tensors(source, edit)
    press(source.folder, tmp_path / "plain", "kimi", "kv_cache.scales=none")
    press(source.folder, tmp_path / "out", "kimi", *FOLDED)
    assert verify(tmp_path / "out", source.folder).problems == ()
    assert torch.equal(run(tmp_path / "plain", tmp_path)[0], run(tmp_path / "out", tmp_path)[0])
    a, b = (tensors_of(tmp_path / part) for part in ("plain", "out"))
    name = "model.layers.1.self_attn.kv_b_proj.weight_scale_inv"
    scale = json.loads((tmp_path / "out" / "moepress_report.json").read_text())["kv_cache"]["layers"]["1"]["scale"]
    assert torch.equal(b[name].float(), a[name].float() * scale["latent"])
    assert torch.equal(
        a["model.layers.1.self_attn.kv_b_proj.weight"].view(torch.uint8),
        b["model.layers.1.self_attn.kv_b_proj.weight"].view(torch.uint8),
    ), "codes stay"


@pytest.mark.parametrize("algorithm", ["rtn", "gptq"])
def test_resumed_anywhere_the_bytes_are_those_of_one_run(algorithm: str, tmp_path: Path) -> None:
    """Stopped while measuring, after experts, after kept tensors: measured layers are not measured again."""
    source = stretched("kimi", tmp_path / "src")
    options = (*FOLDED, f"weights.algorithm={algorithm}", "output.shard_size=1MB")
    press(source.folder, tmp_path / "whole", "kimi", *options)

    class StopWhileMeasuring(StopAfter):
        def layer(self, index: int, work: str) -> None:
            if index == 2:
                raise KeyboardInterrupt

    for watcher in (StopWhileMeasuring(1000), StopAfter(1)):
        with pytest.raises(KeyboardInterrupt):
            press(source.folder, tmp_path / "out", "kimi", *options, watcher=watcher)
        if isinstance(watcher, StopWhileMeasuring):
            assert sorted(p.name for p in (tmp_path / "out" / ".moepress" / "kv").iterdir()) == [
                "layer-00000.json",
                "layer-00001.json",
            ]
    press(source.folder, tmp_path / "out", "kimi", *options)
    assert shard_bytes(tmp_path / "out") == shard_bytes(tmp_path / "whole")


def test_artifacts_for_prefill_and_decode_carry_the_same_scales(made: Made, tmp_path: Path) -> None:
    """Scales depend on source, text and the recipe's kv_cache, not on how experts are quantized: checked in the tensors."""
    source, plain, folded = made("glm4")
    other = tmp_path / "gptq"
    press(
        source.folder, other, "glm4", *FOLDED, "weights.algorithm=gptq", "weights.group_size=64", "rest.attention=bf16"
    )
    alike = verify(folded, same_kv_as=other)
    assert alike.problems == ()
    assert any("every layer holds what it holds in" in line for line in alike.checked)
    for neighbour in (plain, source.folder):
        problems = verify(folded, same_kv_as=neighbour).problems
        assert [p.partition(":")[0] for p in problems] == [f"layer {layer}" for layer in (0, 0, 1, 1, 2, 2)], problems
        assert all("KV scales folded into the weights differ" in problem for problem in problems)
    stranger = build("glm4", tmp_path / "stranger", seed=7)
    assert all("not of one model" in problem for problem in verify(folded, same_kv_as=stranger.folder).problems)


def test_written_scales_have_the_names_the_server_reads(tmp_path: Path) -> None:
    """KV-01, KV-03, KV-11: one float32 value each, no projection in the name, and the scheme that makes a server use them."""
    source = stretched("qwen3_moe", tmp_path / "src")
    result = press(source.folder, tmp_path / "out", "qwen3_moe", *VLLM, "kv_cache.scales=checkpoint", *SMALL)
    tensors = tensors_of(tmp_path / "out")
    layers = result.report["kv_cache"]["layers"]
    for layer, figures in layers.items():
        for cached in ("k", "v"):
            scale = tensors[f"model.layers.{layer}.self_attn.{cached}_scale"]
            assert scale.dtype == torch.float32
            assert scale.shape == (1,)
            assert scale.item() == pytest.approx(2 * figures["amax"][cached] / 448, rel=1e-6)
    assert sum(name.endswith(("k_scale", "v_scale")) for name in tensors) == 2 * len(layers)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    scheme = QuantizationConfig.model_validate(config["quantization_config"]).kv_cache_scheme
    assert (scheme.num_bits, scheme.type, scheme.strategy, scheme.symmetric, scheme.dynamic) == (
        8,
        "float",
        "tensor",
        True,
        False,
    )
    assert verify(tmp_path / "out", source.folder).problems == ()
    other = tmp_path / "other"
    press(source.folder, other, "qwen3_moe", *VLLM, "kv_cache.scales=checkpoint", "kv_cache.headroom=1", *SMALL)
    problems = verify(tmp_path / "out", same_kv_as=other).problems
    assert len(problems) == 2 * len(layers)
    assert all(f"{tmp_path / 'out'} and" in problem for problem in problems), problems


def test_auto_follows_the_contract_where_the_recipe_calibrates(tmp_path: Path) -> None:
    """Rounding runs no calibration by itself; sparse attention has scales of its own; GLM-4 drops written ones."""
    seen: dict[str, Any] = {}
    for family, algorithm in (("glm4", "gptq"), ("glm4", "rtn"), ("glm5", "gptq")):
        source = stretched(family, tmp_path / f"{family}-{algorithm}-src", experts=4)
        options = (*SMALL, f"weights.algorithm={algorithm}")
        result = press(source.folder, tmp_path / f"{family}-{algorithm}", family, *options)
        seen[f"{family} {algorithm}"] = result.report["kv_cache"]
        assert verify(result.out, source.folder).problems == ()
    assert seen["glm4 gptq"]["emission"] == "folded"
    assert "ignores" in seen["glm4 gptq"]["reason"]
    assert seen["glm4 rtn"]["emission"] == "none"
    assert "rounding needs no calibration" in seen["glm4 rtn"]["reason"]
    assert seen["glm5 gptq"]["emission"] == "none"
    assert "dynamic scale per tile" in seen["glm5 gptq"]["reason"]


@pytest.mark.parametrize(
    ("family", "options", "said"),
    [
        ("glm4", ("kv_cache.scales=checkpoint",), "are dropped, and 1.0 is used"),
        ("kimi", ("kv_cache.scales=checkpoint",), "make attention wrong unless they are 1.0"),
        ("glm5", ("kv_cache.scales=folded",), "scales of its own"),
        ("glm5", ("kv_cache.scales=checkpoint",), "scales of its own"),
        ("kimi", ("kv_cache.scales=checkpoint", *VLLM, "serving.layout=two_groups"), "nobody has verified"),
    ],
)
def test_what_is_inert_or_harmful_is_refused(family: str, options: tuple[str, ...], said: str, tmp_path: Path) -> None:
    """KV-02, KV-04, KV-05: before any work, with the emission that works."""
    source = build(family, tmp_path / "src")
    with pytest.raises(PlanRefused, match=said) as caught:
        press(source.folder, tmp_path / "out", family, *options)
    assert "kv_cache.scales=" in str(caught.value.hint)
    assert not (tmp_path / "out").exists()


def test_scales_that_the_source_brings_are_not_joined_by_new_ones(tmp_path: Path) -> None:
    source = build("qwen3_moe", tmp_path / "src", extras={"model.layers.0.self_attn.k_scale": torch.tensor([0.05])})
    with pytest.raises(PlanRefused, match="1 KV scales of its own"):
        press(source.folder, tmp_path / "out", "qwen3_moe", *VLLM, "kv_cache.scales=checkpoint", *SMALL)
