"""Scales of either sign: smaller errors in files as large, read by others as written, and refused where nobody asked for them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32

from moepress.convert.plan import make_plan
from moepress.convert.run import convert
from moepress.errors import RecipeError
from moepress.formats.checkpoint import open_checkpoint
from moepress.recipe import load_recipe
from moepress.verify.run import verify
from tests.cases.rewritten import rewrite_json, tensors_of
from tests.pressing import press, recipe_for
from tests.tiny_checkpoints import build

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
sys.path[:0] = [str(EXAMPLES), str(EXAMPLES / "tiny_kimi")]

SIGNED = "weights.signed_scales=true"


def dequantized(out: Path) -> dict[str, torch.Tensor]:
    """Experts by compressed-tensors' own unpacker."""
    tensors = tensors_of(out)
    found = {}
    for name, packed in tensors.items():
        if name.endswith("weight_packed"):
            stem = name.removesuffix("_packed")
            scale = tensors[f"{stem}_scale"].float()
            codes = unpack_from_int32(packed, 4, torch.Size(tensors[f"{stem}_shape"].tolist())).float()
            found[stem] = codes * scale.repeat_interleave(codes.shape[1] // scale.shape[1], 1)
    return found


@pytest.mark.parametrize("algorithm", ["rtn", "gptq"])
def test_less_is_lost_and_verify_takes_what_the_recipe_asked_for(algorithm: str, tmp_path: Path) -> None:
    source = build("kimi", tmp_path / "src", mtp=0)
    options = (f"weights.algorithm={algorithm}", "calibration.samples=4", "calibration.length=48")
    plain = press(source.folder, tmp_path / "plain", "kimi", *options)
    signed = press(source.folder, tmp_path / "signed", "kimi", SIGNED, *options)
    assert verify(tmp_path / "signed", source.folder).problems == ()
    scales = [t for name, t in tensors_of(tmp_path / "signed").items() if name.endswith("weight_scale")]
    negative = torch.cat([(scale < 0).flatten() for scale in scales]).float().mean()
    assert 0.3 < float(negative) < 0.7, "largest weights are as often positive as negative"
    assert not any((t < 0).any() for n, t in tensors_of(tmp_path / "plain").items() if n.endswith("weight_scale"))
    if algorithm == "rtn":  # GPTQ minimises another loss
        errors = [result.report["quantized"]["relative_error_mean"] for result in (plain, signed)]
        assert errors[1] < 0.97 * errors[0]
    assert signed.plan.warnings == plain.plan.warnings == (), "SGLang's kernels take them"


def test_a_negative_scale_that_nobody_asked_for_is_refused(tmp_path: Path) -> None:
    source = build("kimi", tmp_path / "src", mtp=0)
    press(source.folder, tmp_path / "out", "kimi", SIGNED, "weights.algorithm=rtn")
    rewrite_json(tmp_path / "out" / "moepress_report.json", lambda r: r["recipe"]["weights"].pop("signed_scales"))
    problems = verify(tmp_path / "out", source.folder).problems
    assert any("scales that are not positive numbers" in str(problem) for problem in problems)


def test_a_server_that_may_take_another_kernel_is_warned_of(tmp_path: Path) -> None:
    """vLLM on a Blackwell GPU takes compiled kernels for groups of 32; for wider groups it takes Marlin there too."""
    source = open_checkpoint(build("kimi", tmp_path / "src", mtp=0).folder)
    vllm = ("serving.server=vllm", "serving.version=0.32.0", "weights.algorithm=rtn", "rest.attention=bf16")
    narrow = make_plan(source, recipe_for("kimi", SIGNED, *vllm)).warnings
    assert len(narrow) == 1
    assert "vllm 0.32.0's kernel flashinfer_trtllm (on Blackwell GPUs) is not known to take them" in narrow[0]
    assert make_plan(source, recipe_for("kimi", SIGNED, *vllm, "weights.group_size=128")).warnings == ()
    assert make_plan(source, recipe_for("kimi", *vllm)).warnings == ()


def test_they_need_the_search_that_finds_the_sign() -> None:
    with pytest.raises(RecipeError, match="signed_scales needs scale: mse"):
        recipe_for("kimi", SIGNED, "weights.scale=max")


@pytest.mark.slow
@pytest.mark.oracle
def test_transformers_computes_with_them_and_the_model_is_nearer_to_its_source(tmp_path: Path) -> None:
    """The trained tiny Kimi, rounded: loaded by transformers through compressed-tensors; KL at least 3 % lower."""
    import export
    import judge

    export.export(tmp_path / "source")
    source, windows = judge.load_source(), judge.heldout_windows(4096)

    def kl(name: str, *overrides: str) -> float:
        recipe = load_recipe("kimi-k2-bf16", ["serving.tensor_parallel=1", "weights.algorithm=rtn", *overrides])
        convert(tmp_path / "source", tmp_path / name, recipe)
        model = judge.load_pressed(tmp_path / name)
        if overrides:
            ours = dequantized(tmp_path / name)
            stem = next(iter(ours))
            layer, expert = stem.split(".")[2], stem.split(".")[5]
            held = dict(model.named_parameters())[f"model.layers.{layer}.mlp.experts.down_proj"][int(expert)]
            wanted = ours[f"model.layers.{layer}.mlp.experts.{expert}.down_proj.weight"]
            assert torch.equal(held.float(), wanted.to(held.dtype).float())  # transformers decompresses into BF16
        return judge.judge(source, model, windows).kl

    assert kl("signed", SIGNED) < 0.97 * kl("plain")
