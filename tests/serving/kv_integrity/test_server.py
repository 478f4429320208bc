"""SGLang booted with the plug-in: 32 streams with shared prefixes, a fault in one of them, and nobody else notices.

Two boots: latent attention with pages of 16 tokens, and grouped queries with pages of one token, where SGLang retracts
requests all the time and mixes decoding requests into prefill batches. In float32, so that a batch of 31 gives a request
the same tokens as a batch of 32 (`dense`).
"""

from __future__ import annotations

import json
import re
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from moepress.serving.kv_integrity import LOG_VARIABLE, MODE_VARIABLE, SITE, STATUS_KEY
from moepress.serving.launch import Launch, ServeOptions, sglang_launch
from moepress.serving.sglang import SGLangServer, start_anywhere
from tests.serving.kv_integrity.dense import unquantized
from tests.serving.kv_integrity.streams import Stream, generate, generate_all, prompts
from tests.tiny_checkpoints import TinyCheckpoint

pytestmark = [pytest.mark.slow, pytest.mark.oracle]

STREAMS, VICTIM, NEW_TOKENS = 32, 7, 24
ASKED = prompts(STREAMS, groups=4, shared=48, own=6, vocabulary=500)
RETRACTION = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "9"}


@dataclass
class Guarded:
    """A server under the plug-in, and where faults go in and lines come out."""

    server: SGLangServer
    faults: Path
    lines_path: Path

    @property
    def url(self) -> str:
        return self.server.url

    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = self.server.client.server_info()["internal_states"][0][STATUS_KEY]
        return found

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.lines_path.read_text().splitlines()]

    def arm(self, kind: str, rid: str, **when: int) -> None:
        (self.faults / "injected.json").unlink(missing_ok=True)
        (self.faults / "fault.json").write_text(json.dumps({"kind": kind, "rid": rid, **when}))

    def injected(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.faults / "injected.json").read_text())
        return found

    def settled(self) -> dict[str, Any]:
        """The status once the server was idle and has rebuilt what it had to."""
        deadline = time.monotonic() + 60
        while (found := self.status())["suspect"]:
            assert time.monotonic() < deadline, found
            time.sleep(0.2)
        urllib.request.urlopen(f"{self.url}/flush_cache").close()
        return found


@pytest.fixture(scope="module", params=["latent", "grouped"])
def guarded(
    request: pytest.FixtureRequest,
    sglang_python: Path,
    tiny: Callable[[str], TinyCheckpoint],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Guarded]:
    family, page_size, more, flags = {
        "latent": ("kimi", 16, {}, ("--chunked-prefill-size", "128")),
        "grouped": ("qwen3_moe", 1, RETRACTION, ("--chunked-prefill-size", "64", "--enable-mixed-chunk")),
    }[request.param]
    work = tmp_path_factory.mktemp(request.param)
    model = unquantized(tiny(family), work / "model")
    faults = work / "faults"
    faults.mkdir()
    options = ServeOptions(
        tokenizer=False,
        max_total_tokens=8192,
        page_size=page_size,
        extra=("--dtype", "float32", "--max-running-requests", "40", "--enable-metrics", *flags),
    )
    variables = {
        **more,
        MODE_VARIABLE: "enforce",
        LOG_VARIABLE: str(work / "violations.jsonl"),
        f"{MODE_VARIABLE}_FAULTS": str(faults),
    }

    def launch(port: int) -> Launch:
        found = sglang_launch(sglang_python, model, port=port, options=options, cpu_lab=True, plugins=[SITE])
        return replace(found, variables={**found.variables, **variables})

    with start_anywhere(launch, log=work / "server.log", timeout_s=800) as server:
        yield Guarded(server, faults, work / "violations.jsonl")


@pytest.fixture(scope="module")
def clean(guarded: Guarded) -> list[Stream]:
    """All streams without a fault, which raises no alarm."""
    seen = generate_all(guarded.url, ASKED, NEW_TOKENS, run="clean")
    assert [len(stream.tokens) for stream in seen] == [NEW_TOKENS] * STREAMS
    status = guarded.status()
    assert status["active"]
    assert status["mode"] == "enforce"
    assert status["violations"] == {}
    assert all(rank["active"] and rank["checks"] > 0 for rank in status["ranks"])
    return seen


def test_it_is_active_and_shares_prefixes(guarded: Guarded, clean: list[Stream]) -> None:
    log = guarded.server.log_text()
    assert "moepress KV integrity: active (enforce" in log
    again = generate(guarded.url, ASKED[0], "again", 4)
    assert again.tokens == clean[0].tokens[:4]
    cached = re.findall(r"#cached-token: (\d+)", guarded.server.log_text())
    assert max(map(int, cached)) >= 48
    status = guarded.status()
    assert status["checks"] < status["requests"] < status["pages"]
    if "SGLANG_TEST_RETRACT" in guarded.server.command:
        assert "Testing retraction" in log


@pytest.mark.parametrize("kind", ["use_after_free", "reuse", "double_allocation", "wrong_mapping", "swapped_pages"])
def test_a_fault_in_one_stream_ends_that_one_only(kind: str, guarded: Guarded, clean: list[Stream]) -> None:
    before = guarded.settled()
    guarded.arm(kind, f"{kind}-{VICTIM}", after=5)
    seen = generate_all(guarded.url, ASKED, NEW_TOKENS, run=kind)
    made = guarded.injected()
    assert made["made"]

    victim = seen[VICTIM]
    assert (victim.finish["type"], victim.finish["status_code"]) == ("abort", 500)
    assert victim.finish["err_type"] == "KVIntegrityError"
    # Under overlap the token of the forward before the fault is still on its way when it is made.
    assert made["output_ids"] <= len(victim.tokens) <= made["output_ids"] + 1
    assert victim.tokens == clean[VICTIM].tokens[: len(victim.tokens)]

    others = [index for index in range(STREAMS) if index != VICTIM]
    assert [seen[index].finish["type"] for index in others] == ["length"] * (STREAMS - 1)
    assert [seen[index].tokens for index in others] == [clean[index].tokens for index in others]

    after = guarded.settled()
    assert after["aborted"] == before["aborted"] + 1
    assert after["rebuilds"] == before["rebuilds"] + 1
    line = next(line for line in guarded.lines() if line.get("request") == f"{kind}-{VICTIM}")
    assert line["kind"] == "page_mismatch"
    assert set(line) == {"time", "mode", "kind", "request", "position", "expected", "found", "action"}
    assert line["expected"] != line["found"]
    assert generate(guarded.url, ASKED[VICTIM], f"{kind}-after", NEW_TOKENS).tokens == clean[VICTIM].tokens


def test_a_client_that_does_not_stream_gets_http_500(guarded: Guarded, clean: list[Stream]) -> None:
    guarded.settled()
    guarded.arm("use_after_free", "whole", after=3)
    seen = generate(guarded.url, ASKED[0], "whole", NEW_TOKENS, stream=False)
    assert seen.status == 500
    assert "KV cache page integrity check failed" in seen.error
    assert seen.tokens == []


def test_a_fault_between_the_chunks_of_a_prompt(guarded: Guarded, clean: list[Stream]) -> None:
    guarded.settled()
    long = [(3 * k + 11) % 500 for k in range(600)]
    guarded.arm("swapped_pages", "chunked", prefilled=200)
    with ThreadPoolExecutor(2) as pool:
        victim = pool.submit(generate, guarded.url, long, "chunked", 4, stream=False)
        neighbour = pool.submit(generate, guarded.url, ASKED[1], "neighbour", NEW_TOKENS)
        assert (victim.result().status, neighbour.result().tokens) == (500, clean[1].tokens)
    assert guarded.injected()["prefix"] >= 200
    guarded.settled()
    assert generate(guarded.url, long, "chunked-after", 4).finish["type"] == "length", "nothing of it is in the tree"


def test_the_counters_are_on_the_metrics_page(guarded: Guarded, clean: list[Stream]) -> None:
    time.sleep(1.5)
    with urllib.request.urlopen(f"{guarded.url}/metrics") as page:
        text = page.read().decode()
    for name in ("checks_total", "requests_total", "pages_total", "aborted_total", "suspect"):
        assert f"moepress_kv_integrity_{name}" in text
    assert 'moepress_kv_integrity_violations_total{kind="page_mismatch"' in text
