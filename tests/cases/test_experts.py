"""T5, AC, GQ: routed experts and nothing else become INT4, all of them, and a run that did less says so."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from moepress.errors import CheckpointError, PlanRefused
from moepress.verify.run import verify
from tests.cases.rewritten import INDEX, rewrite_json, rewrite_sealed, rewrite_tensors, same_bits, tensors_of
from tests.pressing import press
from tests.tiny_checkpoints import TinyCheckpoint, build, storage

ROUTER = "model.layers.1.mlp.gate.weight"


def test_packed_experts_fused_in_one_tensor_are_refused(tmp_path: Path) -> None:
    """T5-03: gate_up_proj_packed is 'unexpected' to a loader, which then fills experts at random."""
    source = build("kimi", tmp_path / "src")
    fused = {"model.layers.1.mlp.experts.gate_up_proj_packed": torch.zeros(8, 512, 32, dtype=torch.int32)}
    rewrite_tensors(source, lambda tensors: tensors.update(fused))
    with pytest.raises(CheckpointError, match="gate_up_proj_packed"):
        press(source.folder, tmp_path / "out", "kimi")


def test_all_experts_and_only_experts_are_packed_and_the_bytes_are_those_planned(
    tiny: Callable[[str], TinyCheckpoint], tmp_path: Path
) -> None:
    """T5-01, AC-01, AC-03, GQ-06: counted against config.json; the output is as small as the plan said."""
    source = tiny("kimi")
    result = press(source.folder, tmp_path / "out", "kimi")
    output = tensors_of(tmp_path / "out")
    packed = {name.removesuffix(".weight_packed") for name in output if name.endswith(".weight_packed")}
    layers = range(source.config["first_k_dense_replace"], source.config["num_hidden_layers"] + 1)
    assert packed == {
        f"model.layers.{layer}.mlp.experts.{expert}.{projection}_proj"
        for layer in layers
        for expert in range(source.config["n_routed_experts"])
        for projection in ("gate", "up", "down")
    }
    written = sum(tensor.numel() * tensor.element_size() for tensor in output.values())
    assert written == result.plan.output_bytes < result.plan.source_bytes
    assert same_bits(output[ROUTER], source.tensors[ROUTER])


def test_a_model_without_routed_experts_is_refused(tmp_path: Path) -> None:
    """AC-03: nothing would be quantized: an error with what was found instead, not a copy of the source."""
    source = build("kimi", tmp_path / "src", layers=1, mtp=0)
    with pytest.raises(PlanRefused, match="nothing to quantize: no routed expert was found"):
        press(source.folder, tmp_path / "out", "kimi")
    assert not (tmp_path / "out").exists()


def test_a_quantized_router_is_not_verified(tmp_path: Path) -> None:
    """AC-01: whoever made it: a router in 4 bits changes which experts a token sees."""
    source = build("kimi", tmp_path / "src")
    out = tmp_path / "out"
    press(source.folder, out, "kimi")
    shard = out / json.loads((out / INDEX).read_text())["weight_map"][ROUTER]
    state = load_file(shard)
    parts, _ = storage.int4(state.pop(ROUTER).float(), torch.int64)
    named = {ROUTER.replace("weight", part): tensor for part, tensor in parts.items()}
    save_file(state | named, shard, metadata={"format": "pt"})

    def rename(index: dict[str, Any]) -> None:
        del index["weight_map"][ROUTER]
        index["weight_map"].update(dict.fromkeys(named, shard.name))

    rewrite_json(out / INDEX, rename)
    assert f"{ROUTER}: is quantized, and is not a routed expert" in verify(out, source.folder).problems


def test_fallbacks_above_the_budget_fail_the_run(tmp_path: Path) -> None:
    """GQ-02: each is in its shard's receipt, they are summed in the report, and above 1 % the exit code is 1."""
    source = build("kimi", tmp_path / "src")
    press(source.folder, tmp_path / "out", "kimi")
    receipts = tmp_path / "out" / ".moepress" / "receipts"
    receipt = max(receipts.glob("*.json"))
    weight = next(iter(json.loads(receipt.read_text())["weights"]))

    def fall_back(data: dict[str, Any]) -> None:
        data["weights"][weight] |= {"decision": "fallback", "reason": "not positive definite at any damping"}

    rewrite_sealed(receipt, fall_back)
    command = ["convert", str(source.folder), str(tmp_path / "out"), "--recipe", "kimi-k2"]
    done = subprocess.run(
        [sys.executable, "-m", "moepress.cli", *command, "--set", "serving.tensor_parallel=1"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "COLUMNS": "200", "NO_COLOR": "1"},
    )
    assert done.returncode == 1, done.stderr
    assert "1 of 72 weights used a fallback (1.4%), above limits.max_fallback_share 1.0%" in done.stderr
    report = json.loads((tmp_path / "out" / "moepress_report.json").read_text())
    assert report["fallbacks"] == {weight: "not positive definite at any damping"}
