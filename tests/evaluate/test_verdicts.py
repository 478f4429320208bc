"""From the command line to the verdict, over servers that run the trained tiny Kimi in transformers.

The bounds are tightened to the tiny model's scale: INT4 of its experts costs 0.003 nats a token, so 0.01 is what a larger
model's 0.05 is.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from moepress.cli import app
from moepress.results import REPORT_NAME, read_results
from tests.evaluate.conftest import EXAMPLES, Servers
from tests.evaluate.tiny_cases import write_cases

pytestmark = pytest.mark.slow

HELDOUT = EXAMPLES / "tiny_kimi" / "heldout"
SMALL = ("--windows", "16", "--length", "64", "--top-k", "256", "--drift-prompts", "16", "--drift-tokens", "16")
BOUNDS = ("evaluation.max_kl=0.012", "evaluation.min_top1_agreement=0.85", "evaluation.max_perplexity_rise=0.03",
          "evaluation.max_drift_rate=0.04", "evaluation.min_samples=30",
          "evaluation.max_tool_call_drop=0.15", "evaluation.max_truncated_share=0.3")  # fmt: skip


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_cases(tmp_path_factory.mktemp("cases") / "cases.jsonl", singles=28, conversations=4, turns=3)


def run(servers: Servers, candidate: str, answers: Path, cases: Path, *options: str, url: str | None = None) -> Any:
    """One evaluation against the source; the runner's result."""
    words = ["evaluate", str(servers.folders[candidate]), "--baseline", str(servers.folders["fp8"])]
    words += ["--url", url or servers.served[candidate].url, "--baseline-url", servers.served["fp8"].url]
    words += ["--answers", str(answers), "--tool-cases", str(cases), "--max-tokens", "48", *SMALL]
    for domain, file in (("prose", "python-doc"), ("chat", "chat")):
        words += ["--text", f"{domain}={HELDOUT / file}.txt"]
    for bound in BOUNDS:
        words += ["--set", bound]
    if candidate == "fp8":
        words += ["--recipe", "kimi-k2-bf16"]
    return CliRunner().invoke(app, [*words, *options])  # the last word on a bound counts


def found(result: Any) -> dict[str, Any]:
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return json.loads(result.stdout)


def by_metric(data: dict[str, Any], metric: str) -> list[dict[str, Any]]:
    return [row for row in data["rows"] if row["metric"].startswith(metric)]


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for the whole module: the source is asked once."""
    return tmp_path_factory.mktemp("answers")


def test_the_source_against_itself_is_accepted(servers: Servers, answers: Path, cases: Path, tmp_path: Path) -> None:
    """Asked a second time, under another identity (a copy), so that nothing but the model makes them equal."""
    copy = shutil.copytree(servers.folders["fp8"], tmp_path / "copy", copy_function=shutil.copyfile)
    again = Servers({**servers.folders, "fp8-again": copy}, servers.served)
    words = ("--recipe", "kimi-k2-bf16", "--json")
    result = run(again, "fp8-again", answers, cases, *words, url=servers.served["fp8"].url)
    data = found(result)
    assert (result.exit_code, data["verdict"]) == (0, "ACCEPT"), [row["why"] for row in data["rows"]]
    texts, once = (
        16 * 2 + 16,
        28 + 4 * 3,
    )  # windows of two domains, and prompts; cases and turns, which may take a reply each
    assert data["requests"]["asked"] >= 2 * (texts + once) + 16, "both sides were asked, and the source's texts twice"
    assert data["requests"]["from_cache"] == 0
    assert data["source"]["identity"] != data["candidate"]["identity"]
    for row in by_metric(data, "KL"):
        assert abs(row["candidate"]) < 1e-6
    for row in by_metric(data, "same top token"):
        assert row["candidate"] == 1
    assert data["drift"]["candidate"]["diverged"] == data["drift"]["noise"]["diverged"] == 0
    (drift,) = by_metric(data, "divergence rate")
    assert (drift["source"], drift["candidate"], drift["verdict"]) == (0, 0, "ACCEPT")
    assert 0 < drift["interval"][1] < 0.04, "nothing parted, and that says something only about as much as was watched"
    (calls,) = by_metric(data, "all calls right")
    assert calls["mcnemar"] == {"only_source": 0, "only_candidate": 0, "p": 1.0}
    assert calls["source"] > 0.3, "a model that can do nothing has nothing to lose"


def test_int4_is_accepted_and_kept_for_the_report(servers: Servers, answers: Path, cases: Path) -> None:
    words = ("--json", "--tasks", "fidelity,drift", "--set", "evaluation.max_drift_rate=0.1")  # 256 tokens say no more
    result = run(servers, "int4", answers, cases, *words)
    data = found(result)
    assert (result.exit_code, data["verdict"]) == (0, "ACCEPT"), [row["why"] for row in data["rows"]]
    assert {row["verdict"] for row in data["rows"]} == {"ACCEPT"}
    assert data["next"].startswith("moepress report")
    kept, stale = read_results(servers.folders["int4"])
    assert not stale
    assert (kept["evaluate"]["verdict"], kept["evaluate"]["found"]) == ("pass", data)


def test_damage_shows_in_its_order(servers: Servers, answers: Path, cases: Path) -> None:
    """INT4 < INT3 < erased experts in KL on every domain, and the last two are regressions with exit code 1."""
    kl: dict[str, list[float]] = {}
    for name, tasks in (("int4", "fidelity,drift"), ("int3", "fidelity"), ("erased", "fidelity,drift,tool-calls")):
        result = run(
            servers, name, answers, cases, "--json", "--tasks", tasks, "--set", "evaluation.max_tool_call_drop=0.05"
        )
        data = found(result)
        kl[name] = [row["candidate"] for row in by_metric(data, "KL")]
        if name != "int4":
            assert (result.exit_code, data["verdict"]) == (1, "REGRESSION")
            assert {row["verdict"] for row in by_metric(data, "KL")} == {"REGRESSION"}
    assert all(0 < four < three < one for four, three, one in zip(*kl.values(), strict=True))
    assert {row["verdict"] for row in by_metric(data, "perplexity")} == {"REGRESSION"}
    (calls,) = by_metric(data, "all calls right")
    assert (calls["verdict"], calls["mcnemar"]["p"] < 0.001) == ("REGRESSION", True)
    survival = data["tool_calls"]["multi-turn"]["survival"]
    assert survival["candidate"]["restricted_mean"] < survival["source"]["restricted_mean"]
    assert data["drift"]["candidate"]["restricted_mean"] < data["drift"]["noise"]["restricted_mean"]
    (drift,) = by_metric(data, "divergence rate")
    assert drift["verdict"] == "REGRESSION"
    assert data["next"].startswith("moepress fidelity")


def test_a_finished_run_asks_nothing_and_says_the_same(servers: Servers, answers: Path, cases: Path) -> None:
    words = ("--json", "--tasks", "fidelity,tool-calls")
    first = found(run(servers, "erased", answers, cases, *words))
    seen = {name: len(model.requests) for name, model in servers.served.items()}
    again = found(run(servers, "erased", answers, cases, *words))
    assert {name: len(model.requests) for name, model in servers.served.items()} == seen
    assert (again["requests"]["asked"], again["rows"]) == (0, first["rows"])


def test_what_people_read(servers: Servers, answers: Path, cases: Path) -> None:
    shown = run(servers, "erased", answers, cases).stdout
    assert "a lower bound" in shown
    assert "REGRESSION fidelity (KL, prose" in shown
    assert "itself, again" in shown
    assert "no error so far, pressed" in shown
    assert shown.rstrip().splitlines()[-1].startswith("next: moepress fidelity")


def test_an_api_without_probabilities_costs_the_default_task_not_the_run(
    servers: Servers, answers: Path, cases: Path, tmp_path: Path
) -> None:
    """Under another digest the candidate has no kept answers, so its server is asked; the source's are there."""
    served = servers.served["erased"]
    copy = shutil.copytree(servers.folders["erased"], tmp_path / "copy", copy_function=shutil.copyfile)
    report = json.loads((copy / REPORT_NAME).read_text())
    (copy / REPORT_NAME).write_text(json.dumps({**report, "again": True}))
    servers = Servers({**servers.folders, "copy": copy}, {**servers.served, "copy": served})
    served.refuses = ("/generate",)
    try:
        data = found(run(servers, "copy", answers, cases, "--json", "--limit", "4"))
        assert [entry["task"] for entry in data["skipped"]] == ["fidelity", "drift"]
        assert "the candidate's server refused: POST /generate: HTTP 400" in data["skipped"][0]["why"]
        assert [row["task"] for row in data["rows"]] == ["tool calls"]
        asked_for = run(servers, "copy", answers, cases, "--json", "--tasks", "fidelity")
        assert "HTTP 400" in str(asked_for.exception)
    finally:
        served.refuses = ()


def test_cut_off_answers_fail_the_task(servers: Servers, cases: Path, tmp_path: Path) -> None:
    """With room for 6 tokens every answer of both is cut off: nothing can be said, and no parser is to blame for it."""
    words = ("--json", "--tasks", "tool-calls", "--max-tokens", "6", "--limit", "8")
    data = found(run(servers, "int4", tmp_path, cases, *words))
    (row,) = data["rows"]
    assert row["truncated"] == {"source": 8, "candidate": 8}
    assert row["verdict"] == "NOT ENOUGH DATA"
    assert "--max-tokens is too low" in row["why"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--tasks", "gsm9k"), "no such task: gsm9k"),
        (("--tasks", ""), "no such task: (none given)"),
        (("--text", "prose"), "is not NAME=FILE"),
        (("--text", f"prose={__file__}"), "two files are called 'prose'"),
        (("--set", "evaluation.max_klx=1"), "evaluation.max_klx: no such field"),
        (("--windows", "4000"), "too little text"),
        (("--api-key-env", "NO_SUCH_VARIABLE"), "is not set"),
        (("--tasks", "gsm8k", "--lm-eval-python", sys.executable + "-missing"), "no such Python"),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_asked(
    servers: Servers, cases: Path, tmp_path: Path, options: tuple[str, ...], message: str
) -> None:
    before = sum(len(model.requests) for model in servers.served.values())
    result = run(servers, "int4", tmp_path, cases, *options)
    assert message in str(result.exception)
    assert sum(len(model.requests) for model in servers.served.values()) == before
