"""SGLang itself, booted on a tiny pressed Kimi K2 with the CPU lab: what it says and answers.

How a server that dies or is killed is dealt with: test_validate.py, through the command.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from moepress.errors import ServingError
from moepress.formats.checkpoint import open_checkpoint
from moepress.serving.launch import ServeOptions, sglang_launch
from moepress.serving.load_proof import RECORDER, RECORDER_VARIABLE, prove_load, read_reports
from moepress.serving.sglang import SGLangServer, free_port, start
from tests.pressing import press
from tests.tiny_checkpoints import TinyCheckpoint

pytestmark = [pytest.mark.slow, pytest.mark.oracle]

PROMPT = [5, 17, 42, 99, 101, 7, 7, 300]
OPTIONS = ServeOptions(tokenizer=False, max_total_tokens=4000)


@pytest.fixture(scope="module")
def pressed(tiny: Callable[[str], TinyCheckpoint], tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("serve") / "out"
    press(tiny("kimi").folder, out, "kimi")
    return out


@pytest.fixture(scope="module")
def server(sglang_python: Path, pressed: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SGLangServer]:
    work = tmp_path_factory.mktemp("server")
    launch = sglang_launch(sglang_python, pressed, port=free_port(), options=OPTIONS, cpu_lab=True, plugins=[RECORDER])
    launch.variables[RECORDER_VARIABLE] = str(work / "loaded")
    with start(launch, log=work / "server.log", timeout_s=800) as running:
        yield running


def test_it_is_up_and_says_what_it_loaded(server: SGLangServer, pressed: Path) -> None:
    log = server.read_log()
    assert log.ready
    assert log.cpu_lab
    assert (log.model_class, log.quantization) == ("DeepseekV3ForCausalLM", "compressed-tensors")
    assert (log.kv_dtype, log.kv_tokens) == ("bfloat16", 4000)
    assert (log.unused_tensors, log.death) == ((), None)
    assert server.client.server_info()["version"] == "0.5.23"
    assert server.client.memory().kv_tokens == 4000


def test_every_tensor_of_ours_is_in_it(server: SGLangServer, pressed: Path) -> None:
    reports = read_reports(server.log_path.parent / "loaded")
    proof = prove_load(open_checkpoint(pressed), reports)
    assert proof.complete, [str(problem) for problem in proof.problems]
    assert proof.used + sum(proof.excused.values()) == proof.tensors
    (names,) = server.client.checksums().values()
    loaded = {name for name, held in reports[0]["parameters"].items() if held["filled"]}
    assert {name for name in loaded if not name.endswith("weight_scale_inv")} <= names.keys()


def test_greedy_answers_repeat_and_agree_with_scoring(server: SGLangServer) -> None:
    first = server.client.generate(PROMPT, max_new_tokens=16, ignore_eos=True, logprobs=True)
    again = server.client.generate(PROMPT, max_new_tokens=16, ignore_eos=True, logprobs=True)
    assert first == again
    assert len(first.tokens) == len(first.logprobs) == 16
    scored = server.client.generate(
        [*PROMPT, *first.tokens], max_new_tokens=1, logprobs_from=len(PROMPT)
    ).prompt_logprobs
    difference = [abs(one - other) for one, other in zip(scored, first.logprobs, strict=True)]
    assert sum(difference) / 16 < 0.1, "another batch shape rounds bfloat16 elsewhere, and no more"


def test_an_error_of_the_server_is_ours(server: SGLangServer) -> None:
    with pytest.raises(ServingError, match="HTTP 4"):
        server.client.generate(PROMPT, max_new_tokens=1, temperature=-1.0)


def test_a_server_that_dies_while_it_serves_leaves_a_cause(server: SGLangServer) -> None:
    """The last test of the server: it does not survive."""
    assert server.autopsy(wait_s=0.1) is None
    for pid in reversed(server.pids()[1:]):
        os.kill(pid, signal.SIGKILL)
    death = server.autopsy(wait_s=60)
    assert death is not None
    assert "while it served" in death.what
    assert server.pids() == []
