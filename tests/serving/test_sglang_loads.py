"""SGLang's own loader on tiny pressed checkpoints of every family, whole and damaged.

One process imports SGLang and forks for each checkpoint (`sglang_loads`). Slow: about a minute on two quiet cores.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from moepress.formats.checkpoint import open_checkpoint
from moepress.serving.launch import CPU_LAB
from moepress.serving.load_proof import RECORDER, LoadProof, compare_headers, prove_load, read_reports
from tests.pressing import press
from tests.tiny_checkpoints import TinyCheckpoint

pytestmark = [pytest.mark.slow, pytest.mark.oracle]

EXPERT = "model.layers.1.mlp.experts.3.up_proj"
NO_FUSION = ["--disable-shared-experts-fusion"]
FUSION = ["--enforce-shared-experts-fusion"]


class Loaded:
    """What SGLang did with one checkpoint."""

    def __init__(self, folder: Path, answer: dict[str, Any], reports: Path, log: Path) -> None:
        self.checkpoint = open_checkpoint(folder)
        self.error = answer["error"]
        self.model_class = answer.get("model_class")
        self.log = log.read_text(errors="replace")
        self._reports = reports

    def proof(self) -> LoadProof:
        return prove_load(self.checkpoint, read_reports(self._reports))


def damaged(source: Path, folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    """A copy in two files with an index, its tensors changed."""
    folder.mkdir()
    tensors: dict[str, torch.Tensor] = {}
    for shard in sorted(source.glob("*.safetensors")):
        tensors |= load_file(shard)
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_bytes((source / "config.json").read_bytes())
    return folder


def drop_scale(tensors: dict[str, torch.Tensor]) -> None:
    del tensors[f"{EXPERT}.weight_scale"]


def rename_expert(tensors: dict[str, torch.Tensor]) -> None:
    for part in ("weight_packed", "weight_scale", "weight_shape"):
        tensors[f"{EXPERT}_.{part}"] = tensors.pop(f"{EXPERT}.{part}")


def other_group_size(tensors: dict[str, torch.Tensor]) -> None:
    tensors[f"{EXPERT}.weight_scale"] = tensors[f"{EXPERT}.weight_scale"][:, ::2].clone()


def lose_a_third(tensors: dict[str, torch.Tensor]) -> None:
    for name in [name for name in tensors if ".layers.2." in name]:
        del tensors[name]


@pytest.fixture(scope="module")
def loaded(
    sglang_python: Path, tiny: Callable[[str], TinyCheckpoint], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Loaded]:
    work = tmp_path_factory.mktemp("sglang")
    folders: dict[str, tuple[Path, list[str]]] = {}
    for family in ("kimi", "glm4", "glm5", "qwen3_moe"):
        press(tiny(family).folder, work / family, family)
        folders[family] = (work / family, NO_FUSION)
    for change in (drop_scale, rename_expert, other_group_size, lose_a_third):
        name = change.__name__
        folders[name] = (damaged(work / "kimi", work / name, change), NO_FUSION)
    folders["fused"] = (work / "kimi", FUSION)
    jobs = [
        {"model": str(folder), "flags": flags, "report": str(work / f"{name}.report"), "log": str(work / f"{name}.log")}
        for name, (folder, flags) in folders.items()
    ]
    (work / "jobs.json").write_text(json.dumps(jobs))
    run = subprocess.run(
        [sglang_python, Path(__file__).with_name("sglang_loads.py"), work / "jobs.json"],
        env={
            **{name: value for name, value in os.environ.items() if name != "VIRTUAL_ENV"},
            "PYTHONPATH": f"{CPU_LAB}:{RECORDER}",
            "SGLANG_USE_CPU_ENGINE": "1",
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
        },
        capture_output=True,
        text=True,
        timeout=850,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    answers = [json.loads(line) for line in run.stdout.splitlines() if line.startswith('{"model"')]
    assert len(answers) == len(jobs), run.stdout
    return {
        name: Loaded(folder, answer, work / f"{name}.report", work / f"{name}.log")
        for (name, (folder, _)), answer in zip(folders.items(), answers, strict=True)
    }


@pytest.mark.parametrize(
    ("family", "model_class"),
    [
        ("kimi", "DeepseekV3ForCausalLM"),
        ("glm4", "Glm4MoeForCausalLM"),
        ("glm5", "GlmMoeDsaForCausalLM"),
        ("qwen3_moe", "Qwen3MoeForCausalLM"),
    ],
)
def test_every_tensor_of_a_pressed_checkpoint_is_loaded(
    family: str, model_class: str, loaded: dict[str, Loaded]
) -> None:
    of = loaded[family]
    assert of.error is None, of.log[-3000:]
    assert of.model_class == model_class
    proof = of.proof()
    assert proof.complete, [str(problem) for problem in proof.problems]
    assert proof.used + sum(proof.excused.values()) == proof.tensors
    assert not compare_headers(of.checkpoint)


def test_sglang_says_nothing_about_a_dropped_scale_and_the_proof_does(loaded: dict[str, Loaded]) -> None:
    of = loaded["drop_scale"]
    assert of.error is None
    assert EXPERT not in of.log
    assert any("w13_weight_scale" in str(problem) for problem in of.proof().problems)
    assert any(f"{EXPERT}.weight_scale" in str(problem) for problem in compare_headers(of.checkpoint))


def test_a_renamed_expert(loaded: dict[str, Loaded]) -> None:
    of = loaded["rename_expert"]
    found = [
        str(problem) for problem in (*compare_headers(of.checkpoint), *(of.proof().problems if not of.error else ()))
    ]
    assert any(f"{EXPERT}_.weight_packed" in problem for problem in found)
    if of.error is None:
        assert any("went into no parameter" in problem for problem in found)
        assert any("was not filled" in problem for problem in found)


def test_another_group_size_in_one_tensor(loaded: dict[str, Loaded]) -> None:
    of = loaded["other_group_size"]
    assert "must match the size of tensor" in of.error
    assert any("another shape" in problem.kind for problem in compare_headers(of.checkpoint))


def test_a_missing_shard_loads_without_a_word_and_the_proof_names_it(loaded: dict[str, Loaded]) -> None:
    of = loaded["lose_a_third"]
    assert of.error is None
    unfilled = next(problem for problem in of.proof().problems if problem.kind == "parameter that was not filled")
    assert all(".layers.2." in name for name in unfilled.names)
    assert any(".layers.2." in str(problem) for problem in compare_headers(of.checkpoint))


def test_a_shared_expert_fused_into_an_int4_slot_is_caught(loaded: dict[str, Loaded]) -> None:
    """LD-02: fused by force here, as SGLang does by itself for some families on GPUs."""
    of = loaded["fused"]
    assert of.error is None, "SGLang has no objection"
    problems = of.proof().problems
    assert any("shared_experts" in name for problem in problems for name in problem.names), problems
