"""SGLang itself, booted on a tiny pressed Kimi K2 with the CPU lab: what it says and answers.

How a server that dies or is killed is dealt with: test_validate.py, through the command.
"""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from moepress.errors import ServingError
from moepress.formats.checkpoint import open_checkpoint
from moepress.serving.launch import Launch, ServeOptions, sglang_launch
from moepress.serving.load_proof import RECORDER, RECORDER_VARIABLE, prove_load, read_reports
from moepress.serving.sglang import SGLangServer, start_anywhere
from tests.pressing import press
from tests.tiny_checkpoints import TinyCheckpoint

pytestmark = [pytest.mark.slow, pytest.mark.oracle]

PROMPT = [5, 17, 42, 99, 101, 7, 7, 300]
PAGE, POOL = 16, 1024
OPTIONS = ServeOptions(tokenizer=False, max_total_tokens=POOL, page_size=PAGE, extra=("--chunked-prefill-size", "64"))
ROUNDING = 0.1
"""Log-probabilities by another batch shape: bfloat16 rounds elsewhere."""


@pytest.fixture(scope="module")
def pressed(tiny: Callable[[str], TinyCheckpoint], tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("serve") / "out"
    press(tiny("kimi").folder, out, "kimi")
    return out


@pytest.fixture(scope="module")
def server(sglang_python: Path, pressed: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SGLangServer]:
    work = tmp_path_factory.mktemp("server")
    variables = {RECORDER_VARIABLE: str(work / "loaded"), "TORCHINDUCTOR_CACHE_DIR": str(work / "compiled")}
    taken: list[socket.socket] = []

    def launch(port: int) -> Launch:
        found = sglang_launch(sglang_python, pressed, port=port, options=OPTIONS, cpu_lab=True, plugins=[RECORDER])
        if not taken:
            threading.Thread(target=take, args=(port,), daemon=True).start()
        return replace(found, variables={**found.variables, **variables})

    def take(port: int) -> None:
        """Once the server has begun, and long before it binds."""
        log = work / "server.log"
        while not (log.exists() and log.stat().st_size):
            time.sleep(0.05)
        taken.append(socket.create_server(("127.0.0.1", port)))

    with start_anywhere(launch, log=work / "server.log", timeout_s=800) as running:
        (rival,) = taken
        assert running.url != f"http://127.0.0.1:{rival.getsockname()[1]}"
        rival.close()
        yield running


def test_a_port_that_is_taken_while_it_loads_costs_a_second_boot(server: SGLangServer) -> None:
    """SGLang 0.5.23 does not end when it cannot bind: the fixture's first boot would wait twelve minutes for itself."""
    assert server.running
    assert server.boot_seconds > 0


def test_the_cpu_lab_compiles_nothing(server: SGLangServer) -> None:
    """On a busy machine a compiler in the first forward takes longer than SGLang's watchdog allows."""
    assert list((server.log_path.parent / "compiled").rglob("*.*")) == []


def test_it_is_up_and_says_what_it_loaded(server: SGLangServer, pressed: Path) -> None:
    log = server.read_log()
    assert log.ready
    assert log.cpu_lab
    assert (log.model_class, log.quantization) == ("DeepseekV3ForCausalLM", "compressed-tensors")
    assert (log.kv_dtype, log.kv_tokens) == ("bfloat16", POOL)
    assert (log.unused_tensors, log.death) == ((), None)
    assert server.client.server_info()["version"] == "0.5.23"
    assert server.client.memory().kv_tokens == POOL


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


def words(seed: int, count: int) -> list[int]:
    return random.Random(seed).choices(range(3, 500), k=count)


def scores(server: SGLangServer, shared: list[int], own: list[int]) -> list[float]:
    """Log-probabilities of `own` after `shared`, whose pages the server may take from its cache."""
    return list(
        server.client.generate([*shared, *own], max_new_tokens=1, logprobs_from=len(shared) + 1).prompt_logprobs
    )


def apart(one: list[float], other: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


def test_a_prefix_of_about_a_page_answers_alike_from_the_cache_and_without(server: SGLangServer) -> None:
    """KC-01: prefixes of one page, a token less and a token more, and of several; a flush before is the cache off."""
    for length in (PAGE - 1, PAGE, PAGE + 1, 3 * PAGE):
        shared, own = words(length, length), words(1, 16)
        server.client.flush_cache()
        cold = scores(server, shared, own)
        server.client.flush_cache()
        scores(server, shared, words(2, 16))  # leaves the prefix in the cache
        assert apart(scores(server, shared, own), cold) < ROUNDING, length
        assert apart(scores(server, words(length + 500, length), own), cold) > 2 * ROUNDING, "the prefix matters"


def test_a_prefill_cut_short_leaves_nothing_wrong_in_the_cache(server: SGLangServer) -> None:
    """KC-02: a long prompt is given up in its first chunks and sent again; the answer after a flush is the judge."""
    shared, own = words(7, 500), words(8, 16)
    server.client.flush_cache()
    cold = scores(server, shared, own)
    for moment in (0.0, 0.02, 0.1):
        server.client.flush_cache()
        impatient = threading.Thread(target=_given_up, args=(server.client.url, [*shared, *own], moment))
        impatient.start()
        impatient.join()
        assert apart(scores(server, shared, own), cold) < ROUNDING, moment


def _given_up(url: str, prompt: list[int], after_s: float) -> None:
    """Asks, and closes the connection before the answer."""
    host, _, port = url.removeprefix("http://").partition(":")
    body = json.dumps({"input_ids": prompt, "sampling_params": {"max_new_tokens": 400}, "stream": True}).encode()
    with socket.create_connection((host, int(port))) as connection:
        head = f"POST /generate HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body)
        time.sleep(after_s)


def test_a_full_pool_evicts_and_still_answers_alike(server: SGLangServer) -> None:
    """KC-04: more prefixes than the pool's 1,024 tokens hold, at once and again; the first ones come back as they were.

    The pool is in bfloat16 here; with FP8 scales the case needs a GPU, where `validate --kv-integrity` checks pages.
    """
    prompts = [(words(100 + number, 300), words(number, 16)) for number in range(5)]
    server.client.flush_cache()
    cold = [scores(server, shared, own) for shared, own in prompts]
    with ThreadPoolExecutor(len(prompts)) as pool:
        crowded = list(pool.map(lambda prompt: scores(server, *prompt), prompts))
    again = [scores(server, shared, own) for shared, own in prompts]
    for first, busy, later in zip(cold, crowded, again, strict=True):
        assert apart(first, busy) < ROUNDING
        assert apart(first, later) < ROUNDING


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
