"""From the command line through SGLang itself, booted on the CPU for one model after the other. Slow: four boots of 35 s.

The same bounds for all: FP8 again, INT4, and codes of 3 bits where 4 are declared. SGLang parses the tool calls.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from moepress.cli import app
from moepress.results import read_results
from tests.evaluate.conftest import EXAMPLES
from tests.evaluate.tiny_cases import write_cases
from tests.serving.conftest import sglang_python  # noqa: F401 - a fixture

pytestmark = [pytest.mark.slow, pytest.mark.oracle, pytest.mark.timeout(1800)]

HELDOUT = EXAMPLES / "tiny_kimi" / "heldout"
SMALL = ("--windows", "16", "--length", "64", "--top-k", "256", "--drift-prompts", "16", "--drift-tokens", "16")
BOUNDS = ("max_kl=0.012", "min_top1_agreement=0.85", "max_perplexity_rise=0.03", "max_drift_rate=0.1",
          "min_samples=8", "max_tool_call_drop=0.35")  # fmt: skip


Evaluate = Callable[..., Any]


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for the module: the source is booted once."""
    return tmp_path_factory.mktemp("answers")


@pytest.fixture(scope="module")
def evaluate(sglang_python: Path, folders: dict[str, Path], answers: Path) -> Evaluate:  # noqa: F811
    """Evaluates a folder against the source; what ``--json`` says."""
    cases = write_cases(answers / "cases.jsonl", singles=8, conversations=1, turns=2)

    def run(candidate: Path, *words: str) -> Any:
        line = ["evaluate", str(candidate), "--baseline", str(folders["fp8"]), "--cpu-lab", "--json", *SMALL, *words]
        line += ["--sglang-python", str(sglang_python), "--boot-timeout", "800", "--recipe", "kimi-k2-bf16"]
        line += ["--answers", str(answers), "--tool-cases", str(cases), "--max-tokens", "48"]
        line += ["--text", f"prose={HELDOUT / 'python-doc.txt'}"]
        for bound in BOUNDS:
            line += ["--set", f"evaluation.{bound}"]
        result = CliRunner().invoke(app, line)
        assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
        return json.loads(result.stdout)

    return run


def test_the_source_against_itself_is_accepted_through_sglang(
    evaluate: Evaluate, folders: dict[str, Path], tmp_path: Path
) -> None:
    again = shutil.copytree(folders["fp8"], tmp_path / "fp8-again", copy_function=shutil.copyfile)
    itself = evaluate(again)
    assert itself["verdict"] == "ACCEPT", [row["why"] for row in itself["rows"]]
    assert itself["source"]["server"] == itself["candidate"]["server"] == "SGLang 0.5.23 on the CPU lab"
    assert itself["requests"]["asked"] >= 2 * (16 + 16 + 10) + 16, (
        "both were booted and asked, the source's texts twice"
    )
    assert itself["fidelity"]["prose"]["kl"] < 1e-4
    assert itself["drift"]["candidate"]["diverged"] == itself["drift"]["noise"]["diverged"] == 0
    assert itself["tool_calls"]["single"]["source"]["correct"] > 0.5


def test_int4_is_accepted_and_three_bits_are_a_regression_through_sglang(
    evaluate: Evaluate, folders: dict[str, Path], answers: Path
) -> None:
    int3 = evaluate(folders["int3"])
    verdicts = {row["metric"]: row["verdict"] for row in int3["rows"]}
    assert (int3["verdict"], verdicts["KL, prose"]) == ("REGRESSION", "REGRESSION")
    assert read_results(folders["int3"])[0]["evaluate"]["verdict"] == "fail"
    logs = sorted((answers / "servers").glob("*.log"))
    written = [log.stat().st_mtime_ns for log in logs]
    after = evaluate(folders["int3"])
    assert (after["requests"]["asked"], after["rows"]) == (0, int3["rows"])
    assert [log.stat().st_mtime_ns for log in logs] == written, "all answers are kept: nothing was booted"

    int4 = evaluate(folders["int4"], "--tasks", "fidelity")
    assert int4["verdict"] == "ACCEPT", [row["why"] for row in int4["rows"]]
    assert 1e-4 < int4["fidelity"]["prose"]["kl"] < int3["fidelity"]["prose"]["kl"] / 3
