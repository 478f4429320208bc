"""What a boot adds to the headers: the recorder's proof, the log's words, and a second boot. With reports that are given."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from moepress.formats.checkpoint import Checkpoint, open_checkpoint
from moepress.serving.launch import ServeOptions
from moepress.serving.server_log import parse_log
from moepress.serving.validation.loads import after_boot, before_boot
from moepress.serving.validation.sides import Boot, Side
from tests.tiny_checkpoints import TinyCheckpoint

IGNORED = "[12:00:00] WARNING: Using KV cache scaling factor 1.0 for fp8_e4m3. This may cause less accurate results.\n"


@pytest.fixture(scope="module")
def checkpoint(tiny: Callable[[str], TinyCheckpoint]) -> Checkpoint:
    return open_checkpoint(tiny("qwen3_moe").folder)


def booted(checkpoint: Checkpoint, work: Path, *, log: str = "", sums: list[dict[str, str]] | None = None) -> Side:
    """A side whose server used everything that it was given."""
    parameters = {
        name: {"dtype": "bfloat16", "shape": list(ref.shape), "filled": math.prod(ref.shape), "sources": [name]}
        for name, ref in checkpoint.tensors.items()
    }
    offered = {name: ["bfloat16", list(ref.shape)] for name, ref in checkpoint.tensors.items()}
    parameters["w13_weight_g_idx"] = {"dtype": "int32", "shape": [8, 256], "filled": 0, "sources": []}
    report = {
        "model_class": "M",
        "offered": offered,
        "unused": [],
        "parameters": parameters,
        "casts": [],
        "failure": None,
    }
    (work / "M-1.json").write_text(json.dumps(report))
    boots = [Boot(1.0, parse_log(log), work / "log", "", work, {"tp0": sum_}) for sum_ in sums or [{"a": "1"}]]
    return Side("candidate", Path(checkpoint.location), ServeOptions(), boots=boots)


def test_everything_used_is_no_problem(checkpoint: Checkpoint, tmp_path: Path) -> None:
    found = after_boot(before_boot(checkpoint, ()), checkpoint, booted(checkpoint, tmp_path), ())
    assert found.problems == ()
    assert found.after is not None
    assert found.after.used == found.tensors == len(checkpoint.tensors)
    assert found.unchanged is None


def test_a_second_boot_that_holds_something_else(checkpoint: Checkpoint, tmp_path: Path) -> None:
    never_filled = [{"a": "1", "w13_weight_g_idx": "2"}, {"a": "1", "w13_weight_g_idx": "3"}]
    same = booted(checkpoint, tmp_path, sums=never_filled)
    assert after_boot(before_boot(checkpoint, ()), checkpoint, same, ()).unchanged == ()
    other = booted(checkpoint, tmp_path, sums=[{"a": "1"}, {"a": "2"}])
    found = after_boot(before_boot(checkpoint, ()), checkpoint, other, ())
    assert [problem.kind for problem in found.problems] == ["parameter with other contents"]
    assert found.as_json()["unchanged"] is False


def test_kv_scales_that_the_server_replaced_by_one(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """KV-02: the log's warning counts when the checkpoint has scales, and is what it should say when there are none."""
    plain = after_boot(before_boot(checkpoint, ()), checkpoint, booted(checkpoint, tmp_path, log=IGNORED), ())
    assert plain.problems == ()
    tensors: dict[str, torch.Tensor] = {}
    for shard in Path(checkpoint.location).glob("*.safetensors"):
        tensors |= load_file(shard)
    name = "model.layers.0.self_attn.k_proj.k_scale"
    folder = tmp_path / "scaled"
    folder.mkdir()
    save_file(tensors | {name: torch.tensor(0.06)}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(checkpoint.config))
    scaled = open_checkpoint(folder)
    found = after_boot(before_boot(scaled, (".k_scale",)), scaled, booted(scaled, tmp_path, log=IGNORED), (".k_scale",))
    (problem,) = found.problems
    assert (problem.kind, problem.names) == ("KV scale that the server replaced by 1.0", (name,))


def test_a_name_that_the_log_says_was_passed_over(checkpoint: Checkpoint, tmp_path: Path) -> None:
    name = next(iter(checkpoint.tensors))
    side = booted(checkpoint, tmp_path, log=f"[1] Parameter {name} not found in params_dict\n")
    (problem,) = after_boot(before_boot(checkpoint, ()), checkpoint, side, ()).problems
    assert problem.names == (name,)


def test_somebody_elses_server_proves_nothing(checkpoint: Checkpoint, tmp_path: Path) -> None:
    side = replace(booted(checkpoint, tmp_path), boots=[], url="http://127.0.0.1:1")
    found = after_boot(before_boot(checkpoint, ()), checkpoint, side, ())
    assert found.after is None
    assert "somebody else" in found.not_proven
