"""verify and KV scales: a wrong fold never passes, whoever made it; names, values and scheme are what the server reads."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from moepress.verify.run import verify
from tests.pressing import press
from tests.stretched import stretched
from tests.verify.test_verify import change

pytestmark = pytest.mark.slow

SMALL = ("calibration.samples=2", "calibration.length=32", "kv_cache.samples=2")
PREFIX = "model.layers.1.self_attn."
Pair = tuple[Path, Path]


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Pair]:
    made: dict[str, Pair] = {}

    def get(family: str) -> Pair:
        if family not in made:
            folder = tmp_path_factory.mktemp(family)
            source = stretched(family, folder / "src", experts=4)
            options = ("kv_cache.scales=folded",)
            if family == "qwen3_moe":
                options = ("kv_cache.scales=checkpoint", "serving.server=vllm", "serving.version=0.32.0")
            press(source.folder, folder / "out", family, *options, *SMALL)
            made[family] = folder / "src", folder / "out"
        return made[family]

    return get


def copy(good: Pair, tmp_path: Path) -> Pair:
    shutil.copytree(good[1], tmp_path / "out")
    return good[0], tmp_path / "out"


def edit_report(out: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    """Changes the report's KV part, and receipts with it where they say the same, so that nothing but sense is against it."""
    path = out / "moepress_report.json"
    report = json.loads(path.read_text())
    edit(report["kv_cache"])
    path.write_text(json.dumps(report))
    folds = {name: bands for layer in report["kv_cache"]["layers"].values() for name, bands in layer["folds"].items()}
    for receipt in (out / ".moepress" / "receipts").glob("*.json"):
        data = json.loads(receipt.read_text())
        for name, record in data["weights"].items():
            record.pop("fold", None)
            record |= {"fold": folds[name]} if name in folds else {}
        receipt.write_text(json.dumps(data))


def times(name: str, factor: float, report: Callable[[dict[str, Any]], None] | None = None) -> Callable[[Path], None]:
    """A weight's stored numbers × factor, checksums made to agree, and the report changed to fit where asked."""

    def damage(out: Path) -> None:
        def edit(state: dict[str, torch.Tensor]) -> None:
            state[name] = (state[name].float() * factor).to(state[name].dtype)

        change(out, name, edit)
        if report is not None:
            edit_report(out, report)

    return damage


def refold(inner: str, by: int) -> Callable[[dict[str, Any]], None]:
    """The report's fold of one weight, every band moved."""

    def edit(kv: dict[str, Any]) -> None:
        folds = kv["layers"]["1"]["folds"]
        folds[PREFIX + inner] = [[rows, exponent + by] for rows, exponent in folds[PREFIX + inner]]

    return edit


def drop(inner: str) -> Callable[[dict[str, Any]], None]:
    def edit(kv: dict[str, Any]) -> None:
        del kv["layers"]["1"]["folds"][PREFIX + inner]

    return edit


def test_good_outputs_have_no_problems(good: Callable[[str], Pair]) -> None:
    for family, said in (("glm4", "folded in 3 of 4"), ("kimi", "folded in 3 of 4"), ("qwen3_moe", "6 tensors")):
        source, out = good(family)
        result = verify(out, source)
        assert result.problems == ()
        assert any(said in line for line in result.checked)


@pytest.mark.parametrize(
    ("family", "damage", "said"),
    [
        ("glm4", times(f"{PREFIX}k_norm.weight", 2.0), "k_norm.weight: is not the source's times the powers of two"),
        ("glm4", times(f"{PREFIX}o_proj.weight_scale", 0.5), "is not the source's times the powers of two"),
        ("glm4", times(f"{PREFIX}v_proj.bias", 4.0), "v_proj.bias: is not the source's times the powers of two"),
        # tensors and records agree with each other, and attention is wrong all the same
        ("glm4", times(f"{PREFIX}k_norm.weight", 2.0, refold("k_norm.weight", 1)), "the scores change"),
        ("glm4", times(f"{PREFIX}o_proj.weight_scale", 2.0, refold("o_proj.weight", 1)), "the values change"),
        (
            "glm4",
            times(f"{PREFIX}v_proj.bias", 2.0, refold("v_proj.bias", 1)),
            "weight and bias, have different factors",
        ),
        ("kimi", times(f"{PREFIX}kv_a_layernorm.weight", 2.0), "kv_a_layernorm.weight: is not the source's times"),
        ("kimi", times(f"{PREFIX}kv_b_proj.weight_scale_inv", 2.0, refold("kv_b_proj.weight", 1)), "the scores change"),
    ],
)
def test_a_wrong_fold_never_passes(
    family: str, damage: Callable[[Path], None], said: str, good: Callable[[str], Pair], tmp_path: Path
) -> None:
    source, out = copy(good(family), tmp_path)
    damage(out)
    problems = verify(out, source).problems
    assert any(said in problem for problem in problems), problems


def test_a_fold_that_the_report_forgets_or_misstates(good: Callable[[str], Pair], tmp_path: Path) -> None:
    source, out = copy(good("glm4"), tmp_path)
    edit_report(out, drop("q_norm.weight"))
    problems = verify(out, source).problems
    assert any("q_norm.weight: kept, but its bytes differ" in problem for problem in problems)
    assert any("layer 1" in problem and "the scores change" in problem for problem in problems)

    shutil.rmtree(out)
    source, out = copy(good("glm4"), tmp_path)
    edit_report(out, lambda kv: kv["layers"]["1"]["scale"].update({"k": 32.0}))
    assert [p for p in verify(out).problems if p.startswith("layer 1: its weights divide k by 16, the report says 32")]


def test_receipts_and_report_must_tell_the_same(good: Callable[[str], Pair], tmp_path: Path) -> None:
    source, out = copy(good("glm4"), tmp_path)
    report = json.loads((out / "moepress_report.json").read_text())
    report["kv_cache"] = {"emission": "none", "reason": "", "layers": [], "left": {}, "tensors": []}
    (out / "moepress_report.json").write_text(json.dumps(report))
    problems = verify(out, source).problems
    assert any("k_norm.weight: its receipt folds a KV scale as" in problem for problem in problems)
    assert any("k_norm.weight: kept, but its bytes differ from the source's" in problem for problem in problems)


@pytest.mark.parametrize(
    ("name", "tensor", "said"),
    [
        ("self_attn.k_scale", torch.tensor([0.5]), "the report says"),
        ("self_attn.k_scale", torch.tensor([0.5, 0.5]), "servers read one float32 value"),
        ("self_attn.v_scale", torch.tensor([-1.0]), "a scale is a positive number"),
        ("self_attn.v_scale", None, "no shard holds"),
        ("self_attn.qkv_proj.k_scale", torch.tensor([0.5]), "is a name that the server does not read"),
    ],
)
def test_written_scales_are_held_against_the_contract(
    name: str, tensor: torch.Tensor | None, said: str, good: Callable[[str], Pair], tmp_path: Path
) -> None:
    """KV-02, KV-11: another name, a scale per head, a value that is none, and one that went missing."""
    source, out = copy(good("qwen3_moe"), tmp_path)

    def edit(state: dict[str, torch.Tensor]) -> None:
        if tensor is None:
            del state[f"model.layers.1.{name}"]
        else:
            state[f"model.layers.1.{name}"] = tensor

    change(out, f"{PREFIX}k_scale", edit)
    assert any(said in problem for problem in verify(out, source).problems)


def test_scheme_and_scales_come_together(good: Callable[[str], Pair], tmp_path: Path) -> None:
    """KV-01, KV-13: scales without the scheme stay unused; a scheme without scales is an FP8 cache at 1.0."""
    for family, scheme, said in (
        ("qwen3_moe", None, "has no kv_cache_scheme"),
        ("qwen3_moe", {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": True}, "is not static"),
        ("glm4", {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}, "no shard holds a scale"),
    ):
        source, out = copy(good(family), tmp_path / f"{family}-{scheme is None}-{said[:6]}")
        config = json.loads((out / "config.json").read_text())
        config["quantization_config"]["kv_cache_scheme"] = scheme
        (out / "config.json").write_text(json.dumps(config))
        assert any(said in problem for problem in verify(out, source).problems)


@pytest.mark.parametrize(("value", "wrong"), [(1.0, False), (0.05, True)])
def test_a_scale_on_mla_is_wrong_unless_it_is_one(
    value: float, wrong: bool, good: Callable[[str], Pair], tmp_path: Path
) -> None:
    """KV-04, KV-05: flashmla multiplies on read, nobody divides on write."""
    source, out = copy(good("kimi"), tmp_path)
    name = f"{PREFIX}k_proj.k_scale"
    change(out, f"{PREFIX}kv_a_layernorm.weight", lambda state: state.update({name: torch.tensor([value])}))
    problems = [problem for problem in verify(out, source).problems if "any value but 1.0 is wrong here" in problem]
    assert bool(problems) == wrong
