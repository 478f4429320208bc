"""A prefill and a decode server behind a router, on a CPU: the cache that one fills, with folded scales, the other reads.

SGLang's own protocol, pools and pages, mooncake's transfer over TCP, the router; kernels are the CPU lab's.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from examples.tiny_kimi import export
from moepress.convert.run import convert
from moepress.formats.checkpoint import open_checkpoint
from moepress.recipe import load_recipe
from moepress.serving.client import SGLangClient
from moepress.serving.launch import ServeOptions
from moepress.serving.ports import free_ports
from moepress.serving.running import running
from moepress.serving.serve import Server, open_pressed, prefill_and_decode
from moepress.serving.validation.prompts import load_prompts
from moepress.serving.validation.reference import TOP, compare_with_reference
from tests.stretched import stretch_folder

pytestmark = [pytest.mark.slow, pytest.mark.oracle]

TINY = Path(export.__file__).parent
ONE_GPU = "serving.tensor_parallel=1"
LITTLE_TEXT = (f"calibration.text={TINY / 'calibration.txt'}", "calibration.samples=8", "calibration.length=128")
NEEDED = ("from mooncake.engine import TransferEngine", "import sglang_router")


@pytest.fixture
def python(sglang_python: Path) -> Path:
    """SGLang's, with a transfer engine and a router."""
    for line in NEEDED:
        found = subprocess.run([sglang_python, "-c", line], capture_output=True, text=True, check=False)
        if found.returncode:
            pytest.skip(f"SGLang's environment fails at `{line}`: {found.stderr.strip().splitlines()[-1]}")
    return sglang_python


def test_what_prefill_caches_decode_reads(python: Path, tmp_path: Path) -> None:
    """The latent is stretched past 448 in two layers; decode folds it back, and prefill takes the same folds."""
    source = export.export(tmp_path / "fp8")
    stretch_folder(source, {0: 300.0, 1: 900.0})
    decode, prefill = tmp_path / "decode", tmp_path / "prefill"
    convert(source, decode, load_recipe("kimi-k2", [ONE_GPU, "kv_cache.scales=folded", *LITTLE_TEXT]))
    convert(source, prefill, load_recipe("prefill", [ONE_GPU]), same_kv_as=decode)

    pressed = open_pressed(decode, ["serving.disaggregation.transfer_backend=mooncake_tcp"])
    prompts = load_prompts(decode, TINY / "prompts.jsonl", longest=None, vocabulary=2048)[:6]
    ports = free_ports(4)
    deployment = prefill_and_decode(
        open_checkpoint(prefill),
        pressed,
        (Server("127.0.0.1", ports[0], 1), Server("127.0.0.1", ports[1], 1)),
        Server("127.0.0.1", ports[2], 0),
        bootstrap_port=ports[3],
        python=python,
        router_python=python,
        options=ServeOptions(max_total_tokens=4000),
        cpu_lab=True,
    )
    with running(deployment, logs=tmp_path / "logs", timeout_s=800) as started:
        router = SGLangClient(deployment.url)
        answers = [
            router.generate(prompt.tokens, max_new_tokens=12, ignore_eos=True, logprobs=True, top_logprobs=TOP)
            for prompt in prompts
        ]
        logs = [role.server.read_log() for role in started[:2]]
    assert [log.kv_dtype for log in logs] == ["float8_e4m3fn", "float8_e4m3fn"]
    assert [log.quantization for log in logs] == ["fp8", "compressed-tensors"]
    found = compare_with_reference(
        [prompt.tokens for prompt in prompts],
        answers,
        pressed.checkpoint,
        open_checkpoint(source),
        layer_done=lambda done, of: None,
    )
    assert found.agreement.first_equal == len(prompts), "first tokens are the prefill server's"
    assert (found.agreement.wrong, found.agreement.tokens) == (0, 12 * len(prompts)), found.agreement
    assert 0 < found.kl_serving.value < 0.02
