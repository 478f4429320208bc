"""Answers are kept, a run resumes, what passes by itself is tried again, and what does not is one clear error."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch

from moepress.errors import EvaluateError
from moepress.evaluate import endpoint as endpoint_module
from moepress.evaluate.answers import Answers, Contestant
from moepress.evaluate.endpoint import Endpoint, RequestRefused, connect
from moepress.evaluate.identity import answers_identity, checkpoint_identity
from tests.evaluate.served_model import ServedModel, serve

PATH = "/v1/completions"


class Doubling(ServedModel):
    """Answers with twice the number it is asked: enough where no model is needed."""

    def __init__(self, *, sglang: bool = False) -> None:
        super().__init__(torch.nn.Identity(), None, sglang)

    def answer(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        return {"double": 2 * body["number"]}


@pytest.fixture
def server() -> Iterator[ServedModel]:
    with serve(Doubling()) as running:
        yield running


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint_module, "_LONGEST_PAUSE_S", 0.0)


def contestant(answers: Answers, url: str, identity: str = "me", *, attempts: int = 4) -> Contestant:
    endpoint = Endpoint(url, "openai", "tiny", "test", attempts=attempts, timeout_s=5)
    return Contestant("source", "SRC", identity, "openai", "test", lambda: endpoint, answers, concurrency=4)


def bodies(count: int) -> list[dict[str, Any]]:
    return [{"number": number} for number in range(count)]


def test_answers_come_in_order_and_are_asked_once(server: ServedModel, tmp_path: Path) -> None:
    with Answers(tmp_path) as answers:
        who = contestant(answers, server.url)
        first = who.ask_all(PATH, bodies(20), label="doubles")
        assert [answer["double"] for answer in first] == list(range(0, 40, 2))
        assert (who.asked, who.kept, len(server.requests)) == (20, 0, 20)
    with Answers(tmp_path) as answers:  # another run, and a server that is not even there
        who = contestant(answers, "http://127.0.0.1:9")
        assert who.ask_all(PATH, bodies(20), label="doubles") == first
        assert (who.asked, who.kept, who.reached) == (0, 20, None)


def test_a_stopped_run_asks_only_what_is_missing(server: ServedModel, tmp_path: Path) -> None:
    with Answers(tmp_path) as answers:
        contestant(answers, server.url).ask_all(PATH, bodies(7), label="doubles")
        server.faults = [400]
        with pytest.raises(RequestRefused, match="HTTP 400"):
            contestant(answers, server.url).ask_all(PATH, bodies(12), label="doubles")
        server.requests.clear()
        who = contestant(answers, server.url)
        who.ask_all(PATH, bodies(12), label="doubles")
        assert who.kept >= 7
        assert who.asked == len(server.requests) <= 5


def test_other_weights_or_another_take_are_other_answers(server: ServedModel, tmp_path: Path) -> None:
    with Answers(tmp_path) as answers:
        contestant(answers, server.url, "one").ask(PATH, {"number": 1})
        contestant(answers, server.url, "other").ask(PATH, {"number": 1})
        contestant(answers, server.url, "one").ask(PATH, {"number": 1}, take=1)
        assert len(server.requests) == 3
        contestant(answers, server.url, "one").ask(PATH, {"number": 1}, take=1)
        assert len(server.requests) == 3


@pytest.mark.parametrize("faults", [[503, 500], [429, 429, 429], [0], [0, 503, 429]])
def test_what_passes_by_itself_is_tried_again(server: ServedModel, tmp_path: Path, faults: list[int]) -> None:
    server.faults = list(faults)
    with Answers(tmp_path) as answers:
        assert contestant(answers, server.url).ask(PATH, {"number": 4}) == {"double": 8}
    assert len(server.requests) == len(faults) + 1


def test_tries_are_bounded_and_the_error_says_what_is_kept(server: ServedModel, tmp_path: Path) -> None:
    with Answers(tmp_path) as answers:
        who = contestant(answers, server.url)
        who.ask_all(PATH, bodies(3), label="doubles")
        server.faults = [503] * 50
        with pytest.raises(EvaluateError, match="no answer after 4 tries: HTTP 503") as failure:
            who.ask_all(PATH, [{"number": 99}], label="doubles")
    assert "3 answers of the source are kept" in str(failure.value)
    assert len(server.requests) == 3 + 4


def test_ctrl_c_does_not_wait_for_further_tries(
    server: ServedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between tries nothing is left to wait for; a pause of half a minute would be."""
    server.faults = [503] * 50
    endpoint = Endpoint(server.url, "openai", "tiny", "test", attempts=6, timeout_s=5)
    with Answers(tmp_path) as answers:
        who = Contestant("source", "SRC", "me", "openai", "test", lambda: endpoint, answers)
        who.endpoint()

        def interrupted() -> None:
            raise KeyboardInterrupt

        started = time.monotonic()
        monkeypatch.setattr(endpoint_module, "_LONGEST_PAUSE_S", 20.0)
        with pytest.raises(KeyboardInterrupt):
            who.each([lambda: who.ask(PATH, {"number": 1}), interrupted], label="doubles")
        assert time.monotonic() - started < 10


def test_a_broken_file_of_answers_is_named(tmp_path: Path) -> None:
    (tmp_path / "answers.sqlite").write_bytes(b"this is no database, it is a sentence of some length\n" * 40)
    with pytest.raises(EvaluateError, match="cannot be used") as failure:
        Answers(tmp_path)
    assert f"rm {tmp_path / 'answers.sqlite'}" in str(failure.value)


def test_two_runs_share_one_file(server: ServedModel, tmp_path: Path) -> None:
    failures: list[BaseException] = []

    def run(start: int) -> None:
        try:
            with Answers(tmp_path) as answers:
                asked = [{"number": number} for number in range(start, start + 30)]
                contestant(answers, server.url).ask_all(PATH, asked, label="doubles")
        except BaseException as error:  # noqa: BLE001 - shown below
            failures.append(error)

    threads = [threading.Thread(target=run, args=(start,)) for start in (0, 15)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    with Answers(tmp_path) as answers:
        who = contestant(answers, "http://127.0.0.1:9")
        assert len(who.ask_all(PATH, bodies(45), label="doubles")) == 45


def test_who_answers_at_a_url(server: ServedModel) -> None:
    found = connect(server.url + "/v1")
    assert (found.url, found.kind, found.model) == (server.url, "openai", "tiny")
    with serve(Doubling(sglang=True)) as sglang:
        found = connect(sglang.url)
        assert (found.kind, found.software, dict(found.facts)) == (
            "sglang",
            "SGLang 0.5.23",
            {"kv_cache_dtype": "auto"},
        )


@pytest.mark.parametrize(
    ("url", "model", "message"),
    [
        ("127.0.0.1:30000", None, "is not the URL of a server"),
        ("http://127.0.0.1:9", None, "no answer after 3 tries"),
        (None, "another", "has no model 'another'; it has tiny"),
    ],
)
def test_nobody_or_somebody_else_at_a_url(
    server: ServedModel, url: str | None, model: str | None, message: str
) -> None:
    with pytest.raises(EvaluateError, match=message):
        connect(url or server.url, model=model)


def test_a_server_too_busy_to_say_what_it_is_is_not_taken_for_another() -> None:
    """SGLang's own requests and OpenAI's give other figures, and are kept under other names."""

    class Busy(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/v1/models" else 503)
            self.end_headers()
            self.wfile.write(b'{"data": [{"id": "tiny"}]}')

        def log_message(self, *_: object) -> None:
            """Quiet."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Busy) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            with pytest.raises(EvaluateError, match="GET /server_info: no answer after 3 tries: HTTP 503"):
                connect(f"http://127.0.0.1:{server.server_port}")
        finally:
            server.shutdown()


def test_a_key_is_sent_and_never_kept(tmp_path: Path) -> None:
    seen: list[str] = []

    class Guarded(Doubling):
        def answer(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
            seen.append(json.dumps(body))
            return super().answer(path, body)

    with serve(Guarded()) as server, Answers(tmp_path) as answers:
        endpoint = Endpoint(server.url, "openai", "tiny", "test", api_key="very-secret")
        who = Contestant("source", "SRC", "me", "openai", "test", lambda: endpoint, answers)
        who.ask(PATH, {"number": 1})
    assert b"very-secret" not in (tmp_path / "answers.sqlite").read_bytes()
    assert seen == ['{"model": "tiny", "number": 1}']


def test_identity_is_the_weights_and_how_they_are_served(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"1234")
    first = checkpoint_identity(str(folder))
    assert checkpoint_identity(str(folder)) == first
    assert answers_identity(str(folder), "kv=fp8") != answers_identity(str(folder), "kv=bf16")
    (folder / "model.safetensors").write_bytes(b"12345")
    assert checkpoint_identity(str(folder)) != first
    (folder / "moepress_report.json").write_text('{"shards": {"model.safetensors": "abc"}}')
    pressed = checkpoint_identity(str(folder))
    (folder / "moepress_report.json").write_text('{"shards": {"model.safetensors": "abd"}}')
    assert checkpoint_identity(str(folder)) != pressed
    with pytest.raises(EvaluateError, match="no checkpoint"):
        checkpoint_identity(str(tmp_path))
