"""What SGLang will ask for, against headers; and what its recorder reports, against the checkpoint. Without SGLang."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from moepress.errors import ServingError
from moepress.formats.checkpoint import Checkpoint, open_checkpoint
from moepress.serving.load_proof import (
    compare_checksums,
    compare_headers,
    expected_tensors,
    prove_load,
    read_reports,
)
from tests.pressing import press
from tests.tiny_checkpoints import TinyCheckpoint


@pytest.fixture(scope="module")
def pressed(tiny: Callable[[str], TinyCheckpoint], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def get(family: str) -> Path:
        if family not in made:
            made[family] = tmp_path_factory.mktemp(family) / "out"
            press(tiny(family).folder, made[family], family)
        return made[family]

    return get


def changed(source: Path, folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    """A copy of a checkpoint in one file, with its tensors changed."""
    folder.mkdir()
    tensors: dict[str, torch.Tensor] = {}
    for shard in source.glob("*.safetensors"):
        tensors |= load_file(shard)
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_bytes((source / "config.json").read_bytes())
    return folder


@pytest.mark.parametrize("family", ["kimi", "deepseek_v32", "glm4", "glm5", "qwen3_moe"])
def test_a_source_and_its_pressed_form_are_what_the_server_will_ask_for(
    family: str, tiny: Callable[[str], TinyCheckpoint], pressed: Callable[[str], Path]
) -> None:
    assert compare_headers(open_checkpoint(tiny(family).folder)) == ()
    assert compare_headers(open_checkpoint(pressed(family))) == ()


EXPERT = "model.layers.1.mlp.experts.0.down_proj"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda t: t.pop(f"{EXPERT}.weight_scale"), f"1 × tensor that the server will ask for.*{EXPERT}.weight_scale"),
        (lambda t: t.update({f"{EXPERT}_0.weight_packed": t.pop(f"{EXPERT}.weight_packed")}), "no parameter.*_0"),
        (lambda t: t.update({f"{EXPERT}.weight_scale": t[f"{EXPERT}.weight_scale"][:, ::2].clone()}), "shape.*read as"),
        (lambda t: t.update({"model.norm.weight": t["model.norm.weight"].double()}), "dtype.*F64"),
    ],
    ids=["dropped scale", "renamed expert", "other group size", "other dtype"],
)
def test_headers_tell(
    change: Callable[[dict[str, torch.Tensor]], None], says: str, pressed: Callable[[str], Path], tmp_path: Path
) -> None:
    problems = compare_headers(open_checkpoint(changed(pressed("kimi"), tmp_path / "changed", change)))
    assert any(re.search(says, str(problem)) for problem in problems), [str(problem) for problem in problems]


def test_kv_scales_are_surplus_unless_declared_inert(pressed: Callable[[str], Path], tmp_path: Path) -> None:
    name = "model.layers.0.self_attn.k_proj.k_scale"
    folder = changed(pressed("kimi"), tmp_path / "scaled", lambda t: t.update({name: torch.ones(1)}))
    checkpoint = open_checkpoint(folder)
    assert [problem.names for problem in compare_headers(checkpoint)] == [(name,)]
    assert compare_headers(checkpoint, inert=("k_proj.k_scale",)) == ()


def report_of(
    checkpoint: Checkpoint, *, skip: str | None = None, model_class: str = "DeepseekV3ForCausalLM"
) -> dict[str, Any]:
    """A recorder's report of a server that used everything, in one parameter for each tensor."""
    used = {name: ref for name, ref in checkpoint.tensors.items() if skip is None or skip not in name}
    return {
        "model_class": model_class,
        "offered": {name: ["any", list(ref.shape)] for name, ref in checkpoint.tensors.items()},
        "unused": sorted(checkpoint.tensors.keys() - used.keys()),
        "scalars": [],
        "elsewhere": [],
        "parameters": {
            name: {"dtype": "any", "shape": list(ref.shape), "filled": math.prod(ref.shape), "sources": [name]}
            for name, ref in used.items()
        },
        "casts": [],
        "failure": None,
    }


def test_a_server_that_used_everything(pressed: Callable[[str], Path]) -> None:
    checkpoint = open_checkpoint(pressed("kimi"))
    proof = prove_load(checkpoint, [report_of(checkpoint)])
    assert proof.complete
    assert proof.used == proof.tensors == len(checkpoint.tensors)


def test_the_mtp_layer_is_excused_without_a_draft_model_and_missed_with_one(pressed: Callable[[str], Path]) -> None:
    checkpoint = open_checkpoint(pressed("glm4"))
    layers = checkpoint.config["num_hidden_layers"]
    main = report_of(checkpoint, skip=f"layers.{layers}.", model_class="Glm4MoeForCausalLM")
    proof = prove_load(checkpoint, [main])
    assert proof.complete
    assert list(proof.excused) == ["MTP layer; no draft model was served"]
    draft = report_of(checkpoint, skip=f"layers.{layers}.mlp.experts.1.", model_class="Glm4MoeForCausalLMNextN")
    problems = prove_load(checkpoint, [main, draft]).problems
    assert [problem.kind for problem in problems] == ["tensor that went into no parameter"]
    assert all(f"layers.{layers}.mlp.experts.1." in name for name in problems[0].names)


def test_what_ranks_share_is_used_when_one_of_them_used_it(pressed: Callable[[str], Path]) -> None:
    checkpoint = open_checkpoint(pressed("kimi"))
    ranks = [report_of(checkpoint, skip=".experts.0."), report_of(checkpoint, skip=".experts.1.")]
    assert prove_load(checkpoint, ranks).complete
    assert not prove_load(checkpoint, ranks[:1]).complete


def test_parameters_that_were_not_filled_are_named(pressed: Callable[[str], Path]) -> None:
    checkpoint = open_checkpoint(pressed("kimi"))
    report = report_of(checkpoint)
    report["parameters"]["model.norm.weight"]["filled"] -= 1
    report["parameters"]["model.layers.1.mlp.experts.w13_weight_g_idx"] = {"shape": [8, 256], "filled": 0}
    (problem,) = prove_load(checkpoint, [report]).problems
    assert str(problem) == "1 × parameter that was not filled: model.norm.weight"


def test_tensors_of_an_absent_shard_were_never_read(pressed: Callable[[str], Path]) -> None:
    checkpoint = open_checkpoint(pressed("kimi"))
    report = report_of(checkpoint)
    del report["offered"][f"{EXPERT}.weight_packed"]
    (problem,) = prove_load(checkpoint, [report]).problems
    assert (problem.kind, problem.names) == (
        "tensor of the checkpoint that the server never read",
        (f"{EXPERT}.weight_packed",),
    )


def test_a_correction_bias_rounded_to_bfloat16_is_a_problem(pressed: Callable[[str], Path]) -> None:
    checkpoint = open_checkpoint(pressed("kimi"))
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    report = report_of(checkpoint)
    report["casts"] = [{"from": "float32", "to": "bfloat16", "parameter": name, "example": name}]
    (problem,) = prove_load(checkpoint, [report]).problems
    assert (problem.kind, problem.names) == ("tensor that was rounded to a smaller dtype", (name,))


def test_reports_are_read_from_a_folder_and_none_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ServingError, match="no report"):
        read_reports(tmp_path)
    (tmp_path / "A-1.json").write_text(json.dumps({"model_class": "A"}))
    assert read_reports(tmp_path) == [{"model_class": "A"}]


def test_checksums_of_two_servers() -> None:
    one = {"tp0": {"a": "1", "b": "2"}}
    assert compare_checksums(one, {"tp0": {"b": "2", "a": "1"}}) == ()
    problems = compare_checksums(one, {"tp0": {"a": "1", "b": "3", "c": "4"}})
    assert [(problem.kind, problem.names) for problem in problems] == [
        ("parameter that only one of them has", ("tp0: c",)),
        ("parameter with other contents", ("tp0: b",)),
    ]
    assert compare_checksums(one, {"tp1": {"a": "1"}})[0].kind == "rank that only one of them has"


def test_scales_are_asked_for_under_the_layouts_name(pressed: Callable[[str], Path]) -> None:
    config = open_checkpoint(pressed("kimi")).config
    assert "model.layers.0.self_attn.o_proj.weight_scale_inv" in expected_tensors(config)
    block = config["quantization_config"].pop("linear_fp8_config")["weight_block_size"]
    weights = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": block, "symmetric": True}
    group = {"targets": ["Linear"], "weights": weights, "format": "float-quantized"}
    config["quantization_config"]["config_groups"]["group_1"] = group
    assert "model.layers.0.self_attn.o_proj.weight_scale" in expected_tensors(config)
