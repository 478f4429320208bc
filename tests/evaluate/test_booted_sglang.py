"""From the command line through SGLang itself, booted on the CPU for one model after the other. Slow: two boots of 35 s."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from moepress.cli import app
from moepress.results import read_results
from tests.evaluate.conftest import EXAMPLES
from tests.evaluate.tiny_cases import write_cases
from tests.serving.conftest import sglang_python  # noqa: F401 - a fixture

HELDOUT = EXAMPLES / "tiny_kimi" / "heldout"


@pytest.mark.slow
@pytest.mark.oracle
def test_a_damaged_checkpoint_is_a_regression_through_sglang(
    sglang_python: Path,  # noqa: F811
    folders: dict[str, Path],
    tmp_path: Path,
) -> None:
    """Codes of 3 bits where 4 are declared: KL and agreement say so, tool calls go through SGLang's own parser."""
    cases = write_cases(tmp_path / "cases.jsonl", singles=8, conversations=1, turns=2)
    words = ["evaluate", str(folders["int3"]), "--baseline", str(folders["fp8"]), "--cpu-lab"]
    words += ["--sglang-python", str(sglang_python), "--boot-timeout", "800", "--json"]
    words += ["--text", f"prose={HELDOUT / 'python-doc.txt'}"]
    words += ["--windows", "16", "--length", "64", "--top-k", "256", "--drift-prompts", "4", "--drift-tokens", "16"]
    words += ["--tool-cases", str(cases), "--max-tokens", "48", "--set", "evaluation.max_kl=0.012"]
    result = CliRunner().invoke(app, words)
    assert isinstance(result.exception, SystemExit), result.exception
    data = json.loads(result.stdout)
    assert (result.exit_code, data["verdict"]) == (1, "REGRESSION")
    assert {row["metric"]: row["verdict"] for row in data["rows"]}["KL, prose"] == "REGRESSION"
    assert data["source"]["server"] == data["candidate"]["server"] == "SGLang 0.5.23 on the CPU lab"
    assert data["tool_calls"]["single"]["source"]["correct"] > 0.5
    assert data["drift"]["noise"]["diverged"] == 0, "one request at a time, one thread: the source repeats itself"
    assert read_results(folders["int3"])[0]["evaluate"]["verdict"] == "fail"

    logs = sorted((folders["int3"] / ".moepress" / "evaluate" / "servers").glob("*.log"))
    assert [log.name for log in logs] == ["baseline-1.log", "candidate-1.log"]
    written = [log.stat().st_mtime_ns for log in logs]
    again = CliRunner().invoke(app, words)
    after = json.loads(again.stdout)
    assert (after["requests"]["asked"], after["rows"]) == (0, data["rows"])
    assert [log.stat().st_mtime_ns for log in logs] == written, "all answers are kept: nothing was booted"
