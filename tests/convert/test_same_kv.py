"""Prefill artifacts: experts as in the source, the KV scales of the decode side folded into the weights around the cache."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from moepress.convert.run import convert
from moepress.errors import PlanRefused, RecipeError
from moepress.recipe import load_recipe
from moepress.verify.run import verify
from tests.cases.rewritten import same_bits, tensors_of
from tests.pressing import press, shard_bytes
from tests.stretched import stretched
from tests.tiny_checkpoints import TinyCheckpoint
from tests.verify.test_verify import change

pytestmark = pytest.mark.slow

SMALL = ("calibration.samples=2", "calibration.length=32", "kv_cache.samples=2")
PREFILL = load_recipe("prefill", ["serving.tensor_parallel=1", *SMALL])


@pytest.fixture(scope="module")
def decode(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Path]]:
    """Family → source, and INT4 with folded scales."""
    made: dict[str, tuple[Path, Path]] = {}

    def get(family: str) -> tuple[Path, Path]:
        if family not in made:
            folder = tmp_path_factory.mktemp(family)
            source = stretched(family, folder / "src", experts=4).folder
            press(source, folder / "decode", family, "kv_cache.scales=folded", *SMALL)
            made[family] = source, folder / "decode"
        return made[family]

    return get


def with_report(out: Path, copy: Path, edit: Callable[[dict[str, Any]], object]) -> Path:
    """A copy of an output whose report says something else about KV scales."""
    shutil.copytree(out, copy)
    report = json.loads((copy / "moepress_report.json").read_text())
    edit(report["kv_cache"])
    (copy / "moepress_report.json").write_text(json.dumps(report))
    return copy


@pytest.mark.parametrize("family", ["kimi", "glm4"])
def test_a_prefill_artifact_is_the_source_but_for_powers_of_two_around_the_cache(
    family: str, decode: Callable[[str], tuple[Path, Path]], tmp_path: Path
) -> None:
    source, pressed = decode(family)
    out = tmp_path / "prefill"
    report = convert(source, out, PREFILL, same_kv_as=pressed).report
    theirs = json.loads((pressed / "moepress_report.json").read_text())
    assert report["quantized"]["weights"] == 0
    assert report["calibration_sha256"] is None, "no layer was run"
    assert report["kv_cache"]["taken_from"] == theirs["plan_key"]
    assert report["kv_cache"]["layers"] == theirs["kv_cache"]["layers"]
    before, after = tensors_of(source), tensors_of(out)
    changed = {name for name in before if not same_bits(before[name], after[name])}
    assert after.keys() == before.keys()
    assert changed
    for name in changed:
        assert ".self_attn." in name
        exponents = (after[name].float() / before[name].float()).nan_to_num(nan=1.0).log2()
        assert torch.equal(exponents, exponents.round()), name
    assert json.loads((out / "config.json").read_text()) == json.loads((source / "config.json").read_text())
    assert verify(out, source, same_kv_as=pressed).problems == ()
    assert verify(pressed, source, same_kv_as=out).problems == ()
    assert any("folded into the weights differ" in problem for problem in verify(pressed, same_kv_as=source).problems)


def test_measured_in_a_pass_of_its_own_the_scales_and_the_bytes_are_the_same(
    decode: Callable[[str], tuple[Path, Path]], tmp_path: Path
) -> None:
    source, pressed = decode("kimi")
    convert(source, tmp_path / "taken", PREFILL, same_kv_as=pressed)
    convert(source, tmp_path / "measured", PREFILL)
    taken, measured = shard_bytes(tmp_path / "taken"), shard_bytes(tmp_path / "measured")
    reports = [json.loads(files.pop("moepress_report.json")) for files in (taken, measured)]
    assert taken == measured
    assert reports[0]["kv_cache"]["layers"] == reports[1]["kv_cache"]["layers"]


def test_decode_can_follow_prefill_and_then_calibrates_nothing(
    decode: Callable[[str], tuple[Path, Path]], tmp_path: Path
) -> None:
    source, pressed = decode("glm4")
    convert(source, tmp_path / "prefill", PREFILL, same_kv_as=pressed)
    rounding = load_recipe("glm-4", ["serving.tensor_parallel=1"])
    report = convert(source, tmp_path / "decode", rounding, same_kv_as=tmp_path / "prefill").report
    assert report["calibration_sha256"] is None
    first, again = tensors_of(pressed), tensors_of(tmp_path / "decode")
    assert first.keys() == again.keys()
    assert all(same_bits(tensor, again[name]) for name, tensor in first.items())
    assert verify(tmp_path / "decode", source, same_kv_as=tmp_path / "prefill").problems == ()


def test_a_damaged_prefill_artifact_does_not_pass(decode: Callable[[str], tuple[Path, Path]], tmp_path: Path) -> None:
    source, pressed = decode("kimi")
    good, out = tmp_path / "good", tmp_path / "prefill"
    convert(source, good, PREFILL, same_kv_as=pressed)

    def problems(damage: Callable[[Path], None]) -> str:
        shutil.rmtree(out, ignore_errors=True)
        shutil.copytree(good, out)
        damage(out)
        return "\n".join(verify(out, source, same_kv_as=pressed).problems)

    expert = "model.layers.1.mlp.experts.2.up_proj.weight_scale_inv"
    norm = "model.layers.1.self_attn.kv_a_layernorm.weight"
    assert "differs from the source's scale" in problems(
        lambda folder: change(folder, expert, lambda state: state[expert].mul_(2.0))
    )
    found = problems(lambda folder: change(folder, norm, lambda state: state[norm].mul_(2.0)))
    assert f"{norm}: is not the source's times the powers of two" in found
    assert "layer 1: latent is cached × 2^1 by" in found

    def described_otherwise(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        config["quantization_config"]["weight_block_size"] = [64, 64]
        (folder / "config.json").write_text(json.dumps(config))

    found = problems(described_otherwise)
    assert "config.json: does not describe the tensors" in found
    assert "the quantization_config is another" in found


def test_another_decode_side_is_another_conversion(decode: Callable[[str], tuple[Path, Path]], tmp_path: Path) -> None:
    """What was begun with one side's scales does not go on with those of another."""
    source, pressed = decode("kimi")
    convert(source, tmp_path / "prefill", PREFILL, same_kv_as=pressed)
    assert convert(source, tmp_path / "prefill", PREFILL, same_kv_as=pressed).resumed > 0
    other = with_report(pressed, tmp_path / "other", lambda kv: kv["layers"]["1"]["scale"].update(latent=64.0))
    with pytest.raises(PlanRefused, match="plan"):
        convert(source, tmp_path / "prefill", PREFILL, same_kv_as=other)


def test_what_would_be_a_copy_or_another_cache_is_refused_before_any_work(
    decode: Callable[[str], tuple[Path, Path]], tiny: Callable[[str], TinyCheckpoint], tmp_path: Path
) -> None:
    source, pressed = decode("kimi")
    out = tmp_path / "prefill"

    def refused(said: str, where: Path, *, other: Path | None = None) -> str:
        with pytest.raises(PlanRefused, match=said) as error:
            convert(where, out, PREFILL, same_kv_as=other)
        assert not list(out.glob("*.safetensors"))
        return str(error.value)

    hint = "moepress serve --prefill SRC --decode OUT"
    assert hint in refused("the output would be the source", tiny("glm5").folder)
    assert hint in refused("holds its values as well at a scale of 1.0", tiny("kimi").folder)
    shutil.rmtree(out)
    press(source, tmp_path / "plain", "kimi")
    assert hint in refused("plain folds none", source, other=tmp_path / "plain")
    refused("is no finished output of moepress", source, other=source)
    refused(r"(?s)is another model than .*config\.json: architectures", decode("glm4")[0], other=pressed)

    # with BF16 attention there is room for a factor on the rotated key, which these FP8 blocks do not have
    roomy = with_report(pressed, tmp_path / "roomy", lambda kv: kv["layers"]["0"]["scale"].update(k_pe=4.0))
    refused("folds k_pe in layer 0, which these weights cannot: an FP8 scale of", source, other=roomy)
    short = with_report(pressed, tmp_path / "short", lambda kv: kv["layers"].pop("3"))
    refused(r"layers \[3\] have attention in one of the two alone", source, other=short)


def test_keeping_experts_and_widening_the_rest_is_a_recipe_that_cannot_be_described() -> None:
    with pytest.raises(RecipeError, match=r"rest\.shared_experts, mtp\.rest must be source"):
        load_recipe("prefill", ["rest.shared_experts=bf16", "mtp.rest=bf16"])
