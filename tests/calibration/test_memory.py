"""Memory stays that of one layer; the estimate holds; threads do not change bytes when MKL is told so."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from moepress.calibration.memory import memory_need

MIB = 1 << 20

# 64 experts a layer: 48 MiB of experts in a layer, 6 MiB of everything else, 1 MiB of embedding.
CONFIG: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "architectures": ["DeepseekV3ForCausalLM"],
    "hidden_size": 256,
    "intermediate_size": 1024,
    "moe_intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 128,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
    "first_k_dense_replace": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 1,
    "num_experts_per_tok": 4,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
    "num_nextn_predict_layers": 0,
    "hidden_act": "silu",
    "vocab_size": 1024,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}

RUN = """
import hashlib, json, sys, zlib
import torch
from moepress.calibration.activations import Scratch
from moepress.calibration.run_settings import RunSettings
from moepress.calibration.statistics import down_moments, gate_up_moments
from moepress.calibration.streamed_model import StreamedModel
from moepress.formats.architecture import expected_weights
from pathlib import Path

config, folder, threads, samples, length, expert_bytes = json.loads(sys.argv[1])
torch.set_num_threads(threads)

class MadeUpWeights:
    '''Made when asked for, from the name alone: a model of any size that is nowhere.'''
    def __init__(self):
        self.shapes = {spec.name: spec.shape for spec in expected_weights(config)}
    def names(self):
        return self.shapes.keys()
    def expect(self, names, rows=None):
        pass
    def load(self, name, rows=None, *, device="cpu"):
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        made = torch.randn(self.shapes[name], generator=generator)
        return made.abs() if "norm" in name else made * self.shapes[name][-1] ** -0.5

def status(field):
    return int(Path("/proc/self/status").read_text().split(field + ":")[1].split()[0]) * 1024

with Scratch(Path(folder), memory_bytes=0) as scratch:
    settings = RunSettings(batch_size=2, expert_bytes=expert_bytes)
    model = StreamedModel(config, MadeUpWeights(), scratch, settings)
    ids = torch.randint(0, config["vocab_size"], (samples, length), generator=torch.Generator().manual_seed(0))
    before = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here, not from the imports
    stream = model.embed(ids)
    digest = hashlib.sha256()
    for index in range(model.num_layers):
        with model.open_layer(index) as layer:
            routed = layer.dense_part(stream)
            if routed is None:
                continue
            experts = range(0, 4)
            for moments in (gate_up_moments(routed, experts), down_moments(routed, layer.load_experts(experts))):
                digest.update(moments.gram.numpy().tobytes())
            layer.experts(stream, routed)
            routed.release()
    model.finish(stream)
    digest.update(stream.hidden.read(0, samples).numpy().tobytes())
    print(json.dumps({"peak": status("VmHWM") - before, "digest": digest.hexdigest()}))
"""


SAMPLES, LENGTH, EXPERT_BYTES = 4, 160, 8 * MIB


def run(folder: Path, *, layers: int, threads: int) -> dict[str, Any]:
    """A whole streamed run with moments, in a process of its own."""
    arguments = [{**CONFIG, "num_hidden_layers": layers}, str(folder), threads, SAMPLES, LENGTH, EXPERT_BYTES]
    environment = {
        **os.environ,
        "MKL_CBWR": "AUTO,STRICT",
        "OMP_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": "PASSIVE",
    }
    done = subprocess.run(
        [sys.executable, "-c", RUN, json.dumps(arguments)], capture_output=True, text=True, check=True, env=environment
    )
    assert not list(folder.iterdir()), "scratch files are deleted"
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


@pytest.fixture(scope="module")
def two_layers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run(tmp_path_factory.mktemp("scratch"), layers=2, threads=1)


def test_peak_does_not_grow_with_layers_and_keeps_to_the_estimate(two_layers: dict[str, Any], tmp_path: Path) -> None:
    """AW-05: weights are streamed layer by layer, experts in blocks; nothing is unpacked up front."""
    four_layers = run(tmp_path, layers=4, threads=1)
    config = {**CONFIG, "num_hidden_layers": 4}
    needed = memory_need(config, samples=SAMPLES, length=LENGTH, batch_size=2, expert_bytes=EXPERT_BYTES)
    assert four_layers["peak"] < two_layers["peak"] + 8 * MIB, "two more layers are 108 MiB of weights"
    assert four_layers["peak"] < needed.resident(0) + 32 * MIB, (
        "the rest is code of torch and MKL, met for the first time"
    )


def test_threads_do_not_change_a_byte_when_mkl_is_strict(two_layers: dict[str, Any], tmp_path: Path) -> None:
    assert run(tmp_path, layers=2, threads=2)["digest"] == two_layers["digest"]


def test_estimate_of_a_published_model() -> None:
    """Kimi K2: the dense part of a layer in float32, 16 experts, 128 samples of 2048 tokens in files."""
    config = json.loads((Path(__file__).parents[1] / "configs" / "kimi_k2_instruct.json").read_text())
    needed = memory_need(config, samples=128, length=2048, batch_size=4, expert_bytes=4 << 30)
    expert = 3 * 7168 * 2048
    assert needed.experts == ((4 << 30) // (expert * 4)) * expert * 4 + expert * 4
    assert needed.activations == 128 * 2048 * 7168 * 12
    assert needed.vocabulary == 163840 * 7168 * 4
    assert needed.resident(0) < 16 << 30, "of a model of 4,100 GB in float32"
    assert needed.resident(1 << 50) == needed.resident(0) + needed.activations
    assert needed.scratch_files(0) == needed.activations
    assert needed.scratch_files(needed.activations) == 0


@pytest.mark.parametrize("streams", [1, 2])
def test_streams_are_counted(streams: int) -> None:
    config = {**CONFIG, "num_hidden_layers": 2}
    needed = memory_need(config, samples=2, length=8, batch_size=2, expert_bytes=1, streams=streams, dtype_bytes=2)
    assert needed.activations == 2 * 8 * 256 * (2 * (streams + 1) + 4)
    assert needed.experts == 3 * 256 * 256 * (2 + 4)
