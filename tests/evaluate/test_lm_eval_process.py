"""lm-eval itself, in its own environment, against the served tiny Kimi; its tasks get local data."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from moepress.calibration.text import load_tokenizer
from moepress.errors import EvaluateError
from moepress.evaluate.answers import Answers, Contestant
from moepress.evaluate.endpoint import connect
from moepress.evaluate.lm_eval_process import LmSettings, LmTask, find_lm_eval, task_named
from moepress.evaluate.measurements import LmEval
from moepress.recipe import Evaluation
from tests.evaluate.conftest import EXAMPLES, Servers

HELDOUT = EXAMPLES / "tiny_kimi" / "heldout"
TASKS = Path(__file__).parent / "lm_tasks"


@pytest.fixture(scope="module")
def lm_eval() -> tuple[Path, str]:
    """Skips where there is none: `make lm-eval` builds one."""
    try:
        return find_lm_eval()
    except EvaluateError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The task definitions, with data beside them."""
    folder = tmp_path_factory.mktemp("lm_tasks")
    paragraphs = [p for p in (HELDOUT / "python-doc.txt").read_text().split("\n\n") if 200 < len(p) < 900][:40]
    choices = []
    for paragraph in paragraphs[:24]:
        words = paragraph.split(" ")
        choices.append({"text": " ".join(words[:20]), "choices": [" " + words[20], " of of of"], "label": 0})
    names = ("zipfile.ZipFile", "pathlib.Path.exists", "json.dumps", "socket.connect")
    data = {
        "tiny_choice": choices,
        "tiny_text": [{"text": paragraph} for paragraph in paragraphs],
        "tiny_call": [{"question": f"What is {name}?", "answer": name} for name in names],
    }
    for task, rows in data.items():
        file = folder / f"{task}.jsonl"
        file.write_text("\n".join(map(json.dumps, rows)) + "\n")
        (folder / f"{task}.yaml").write_text((TASKS / f"{task}.yaml").read_text().replace("DATA", str(file)))
    return folder


def measurement(servers: Servers, lm_eval: tuple[Path, str], task: LmTask, tasks: Path, folder: Path) -> LmEval:
    tokenizer = load_tokenizer(servers.folders["fp8"])
    return LmEval(
        task,
        LmSettings(max_tokens=24, max_length=1000, include=str(tasks)),
        *lm_eval,
        servers.folders["fp8"],
        folder,
        lambda text: len(tokenizer.encode(text, add_special_tokens=False)),
    )


def contestant(servers: Servers, name: str, role: str, answers: Answers) -> Contestant:
    endpoint = connect(servers.served[name].url)
    return Contestant(role, name, name, endpoint.kind, endpoint.software, lambda: endpoint, answers, concurrency=2)


BOUNDS = Evaluation(min_samples=20, min_windows=16, max_perplexity_rise=0.04)  # type: ignore[call-arg]


@pytest.mark.slow
@pytest.mark.oracle
def test_tasks_are_paired_by_document_and_judged(
    servers: Servers, lm_eval: tuple[Path, str], tasks: Path, tmp_path: Path
) -> None:
    """Three kinds of figure of source and damaged model; a second look runs nothing."""
    with Answers(tmp_path) as answers:
        sides = [contestant(servers, "fp8", "source", answers), contestant(servers, "erased", "candidate", answers)]
        texts = measurement(servers, lm_eval, LmTask("tiny_text", "tiny_text"), tasks, tmp_path / "lm")
        found = [texts.ask(who) for who in sides]
        (row,) = texts.compare(*found, BOUNDS).rows
        assert (row.metric, row.samples, row.verdict) == ("word_perplexity", 40, "REGRESSION")
        logs = [value for value in found[0].scores.values() if isinstance(value, tuple)]
        expected = math.exp(-sum(log for log, _ in logs) / sum(weight for _, weight in logs))
        assert row.source == pytest.approx(expected)

        seen = len(servers.served["fp8"].requests)
        assert texts.ask(sides[0]).scores == found[0].scores
        assert len(servers.served["fp8"].requests) == seen

        choice = measurement(servers, lm_eval, LmTask("tiny_choice", "tiny_choice", "acc"), tasks, tmp_path / "lm")
        first = choice.ask(sides[0])
        (row,) = choice.compare(first, first, BOUNDS).rows
        assert row.source > 0.7
        assert (row.samples, row.test is not None and row.test.p) == (24, 1.0)

        made = measurement(servers, lm_eval, LmTask("tiny_call", "tiny_call", generates=True), tasks, tmp_path / "lm")
        answered = made.ask(sides[0])
        assert (len(answered.scores), answered.metric) == (4, "exact_match")
        assert answered.truncated >= 1, "answers of 24 tokens are cut off, and counted"


@pytest.mark.slow
@pytest.mark.oracle
def test_data_of_the_hub_out_of_reach(
    servers: Servers, lm_eval: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "nothing-cached"))
    with Answers(tmp_path) as answers:
        who = contestant(servers, "fp8", "source", answers)
        gsm8k = task_named("gsm8k")
        assert gsm8k is not None
        with pytest.raises(EvaluateError, match="could not load its data from the Hub") as failure:
            measurement(servers, lm_eval, gsm8k, TASKS, tmp_path / "lm").ask(who)
    assert "lm_eval.log" in str(failure.value)


def write_run(folder: Path, rows: list[dict[str, object]]) -> None:
    folder.mkdir(parents=True)
    (folder / "samples_a_sub_2026-01-01T00-00-00.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    (folder / "done.json").write_text("{}")


def test_a_metric_that_is_not_there_is_named(tmp_path: Path) -> None:
    from moepress.evaluate import lm_eval_process

    write_run(
        tmp_path / "run", [{"doc_id": 0, "metrics": ["acc"], "acc": 1.0, "filter": "none", "resps": [[["x", True]]]}]
    )
    settings = LmSettings()
    found = lm_eval_process._read_samples(tmp_path / "run", LmTask("a", "a"), settings, len, "1")
    assert (found.metric, found.scores) == ("acc", {("a_sub", "0"): 1.0})
    with pytest.raises(EvaluateError, match="no metric 'exact'; they have acc"):
        lm_eval_process._read_samples(tmp_path / "run", LmTask("a", "a", "exact"), settings, len, "1")
    shutil.rmtree(tmp_path / "run")
    with pytest.raises(EvaluateError, match="left no samples"):
        lm_eval_process._read_samples(tmp_path / "run", LmTask("a", "a"), settings, len, "1")


def test_one_of_several_answer_filters(tmp_path: Path) -> None:
    from moepress.evaluate import lm_eval_process

    rows = [
        {"doc_id": n, "metrics": ["exact_match"], "exact_match": score, "filter": name, "resps": [["x" * n]]}
        for n in range(3)
        for name, score in (("strict-match", 0.0), ("flexible-extract", 1.0))
    ]
    write_run(tmp_path / "run", rows)
    task = LmTask("g", "g", "exact_match", "flexible-extract", generates=True)
    found = lm_eval_process._read_samples(tmp_path / "run", task, LmSettings(max_tokens=2), len, "1")
    assert set(found.scores.values()) == {1.0}
    assert found.truncated == 1


@pytest.mark.parametrize(
    ("word", "task", "metric"),
    [("gsm8k", "gsm8k", "exact_match"), ("lm:piqa", "piqa", ""), ("lm:piqa:acc", "piqa", "acc")],
)
def test_words_of_the_command_line(word: str, task: str, metric: str) -> None:
    found = task_named(word)
    assert found is not None
    assert (found.task, found.metric) == (task, metric)
    assert task_named("no_such_task") is None


def test_kill_minus_nine_leaves_no_lm_eval(tmp_path: Path) -> None:
    """It asks for hours; nobody would know why the server is busy."""
    owner = f"""
import sys
from pathlib import Path
from moepress.evaluate.answers import Answers, Contestant
from moepress.evaluate.endpoint import Endpoint
from moepress.evaluate.lm_eval_process import _execute
run = Path({str(tmp_path)!r})
endpoint = Endpoint("http://127.0.0.1:1", "openai", "m", "")
with Answers(run) as answers:
    who = Contestant("source", "m", "m", "openai", "", lambda: endpoint, answers)
    code = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
    _execute([sys.executable, "-c", code], who, run)
"""
    process = subprocess.Popen([sys.executable, "-c", owner])
    deadline = time.monotonic() + 60
    log = tmp_path / "lm_eval.log"
    while not (log.exists() and log.read_text().endswith("\n")):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    asking = Path(f"/proc/{int(log.read_text())}")
    assert asking.exists()
    process.kill()
    process.wait()
    while asking.exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
