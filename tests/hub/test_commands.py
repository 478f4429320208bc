"""The commands as a user types them, against the local Hub; `moepress run` in a process of its own, as its steps are."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from typer.testing import CliRunner

from moepress.cli import app
from moepress.errors import MoepressError
from tests.hub.local_hub import Fault, LocalHub
from tests.tiny_checkpoints import build

SOURCE, TARGET = "press/tiny-kimi", "press/tiny-kimi-int4"
SMALL = ["--set", "serving.tensor_parallel=1", "--set", "output.shard_size=1MB", "--set", "kv_cache.scales=none"]


def moepress(
    hub: LocalHub, folder: Path, *words: str, code: int = 0, **environment: str
) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-m", "moepress.cli", *words],
        cwd=folder,
        env={
            **{name: value for name, value in os.environ.items() if not name.startswith("HF_")},
            "PYTHONPATH": str(Path(__file__).parents[2]),
            "HF_ENDPOINT": hub.endpoint,
            "HF_TOKEN": hub.token,
            "HF_HOME": str(folder / "hf-home"),
            "HF_HUB_DISABLE_XET": "1",
            "NO_PROXY": "127.0.0.1,localhost",
            **environment,
        },
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == code, f"{words}\n{done.stdout}\n{done.stderr}"
    assert hub.token not in done.stdout + done.stderr
    assert "signature=" not in done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done


class Typed:
    """A command in this process: what it printed, and its exit code checked."""

    def __init__(self, hub: LocalHub, words: tuple[str, ...], code: int) -> None:
        try:
            result = CliRunner().invoke(app, list(words))
        finally:
            huggingface_hub.close_session()
        self.stdout, self.stderr = result.stdout, result.stderr
        if isinstance(result.exception, MoepressError):
            self.stderr += str(result.exception)
            assert result.exception.exit_code == code, result.exception
        else:
            assert result.exit_code == code, f"{words}\n{result.stdout}\n{result.stderr}\n{result.exception!r}"
        assert hub.token not in self.stdout + self.stderr


def typed(hub: LocalHub, *words: str, code: int = 0) -> Typed:
    return Typed(hub, words, code)


@pytest.fixture
def filled(hub: LocalHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LocalHub:
    monkeypatch.chdir(tmp_path)
    hub.repository(SOURCE).add_folder(build("kimi", tmp_path / "src", shards=4).folder)
    return hub


def journal(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / ".moepress" / "run.json").read_text())["steps"])


@pytest.mark.slow
def test_looking_planning_and_pulling(filled: LocalHub, tmp_path: Path) -> None:
    assert "DeepSeek V3 / Kimi K2" in typed(filled, "inspect", SOURCE).stdout
    plan = json.loads(typed(filled, "plan", SOURCE, "--recipe", "kimi-k2", *SMALL, "--json").stdout)
    assert plan["plan"]["source"] == SOURCE
    assert "on the Hub" in " ".join(plan["warnings"])
    gptq = ["--set", "weights.algorithm=gptq", "--set", "calibration.samples=4", "--set", "calibration.length=64"]
    calibrated = typed(filled, "plan", SOURCE, "--recipe", "kimi-k2", *SMALL, *gptq, "--json")
    assert json.loads(calibrated.stdout)["plan"]["calibration"]
    assert not [line for line in filled.requests("GET /cdn/") if not line.range]
    pulled = typed(filled, "pull", SOURCE, "here")
    assert "every checksum is the Hub's" in pulled.stdout
    assert "next: moepress inspect here" in pulled.stdout
    wrong = typed(filled, "pull", "press/nobody", "there", code=2)
    assert "hint:" in wrong.stderr


@pytest.mark.slow
def test_a_hub_id_is_pressed_as_it_lands(filled: LocalHub, tmp_path: Path) -> None:
    words = ["convert", SOURCE, "out", "--recipe", "kimi-k2", *SMALL, "--stream", "--delete-source"]
    done = typed(filled, *words)
    assert "next: moepress verify out\n" in done.stdout
    assert not list((tmp_path / "out-source").glob("*.safetensors"))
    planned = typed(filled, "publish", "out", TARGET, "--dry-run")
    assert "against its receipts alone, the source is not here" in planned.stderr
    refused = typed(filled, "convert", "src", "out2", "--recipe", "kimi-k2", "--stream", code=2)
    assert "nothing to stream" in refused.stderr


@pytest.mark.slow
def test_from_hub_to_hub(filled: LocalHub, tmp_path: Path) -> None:
    """HB-10: one command; a gate that fails ends it with nothing on the Hub; the same command goes on and sends the rest."""
    words = ["run", "kimi-k2", "--source", SOURCE, "--to", TARGET, *SMALL, "--skip", "validate", "--skip", "evaluate"]
    filled.faults.append(Fault("PUT /lfs/", status=403, times=9999, after=2))
    cut = moepress(filled, tmp_path, *words, code=2)
    assert "publish: stopped" in cut.stderr
    assert "validate: not run: --skip validate" in cut.stderr
    assert filled.repositories[TARGET].tree().keys() == {".gitattributes"}
    steps = journal(tmp_path / "tiny-kimi-int4")
    assert {name: entry["outcome"] for name, entry in steps.items()} == {
        "plan": "passed",
        "pull": "passed",
        "convert": "passed",
        "verify": "passed",
        "validate": "not run",
        "evaluate": "not run",
        "publish": "stopped",
    }
    filled.faults.clear()
    before = len(filled.log)
    data = json.loads(moepress(filled, tmp_path, *words, "--json").stdout)
    assert data["exit_code"] == 0
    assert data["steps"]["publish"]["data"]["merged"] is True
    assert not [line for line in filled.log[before:] if f"/{SOURCE}/" in line.path]  # plan, pull and convert had passed
    card = filled.repositories[TARGET].tree()["README.md"].data.decode()
    assert f"base_model: {SOURCE}" in card
    assert filled.repositories[SOURCE].refs["refs/heads/main"] in card
    assert "**Not run: a server.**" in card
    assert str(tmp_path) not in card
    for name, file in filled.repositories[TARGET].tree().items():
        assert str(tmp_path).encode() not in file.data, name
    again = moepress(filled, tmp_path, *words)
    assert again.stderr.count("passed before") == 5
    assert "[green]" not in again.stdout, "markup that nobody rendered"
    assert "verify    passed" in again.stdout


@pytest.mark.slow
def test_a_gate_that_fails_ends_the_chain(filled: LocalHub, tmp_path: Path) -> None:
    limits = ["--set", "limits.max_relative_error=0.001"]
    words = [
        "run",
        "kimi-k2",
        "--source",
        "src",
        "--to",
        TARGET,
        *SMALL,
        *limits,
        "--skip",
        "validate",
        "--skip",
        "evaluate",
    ]
    done = moepress(filled, tmp_path, *words, code=1)
    assert "convert: failed; not reached: verify, publish" in done.stderr
    assert TARGET not in filled.repositories


@pytest.mark.slow
def test_what_would_fail_at_the_end_is_refused_at_the_start(filled: LocalHub, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["run", "kimi-k2", "--source", SOURCE, "--to", TARGET]
    done = typed(filled, *words, "--sglang-python", "/nowhere/python", code=2)
    assert "need a server" in done.stderr
    assert "--skip validate" in done.stderr
    skips = ["--skip", "validate", "--skip", "evaluate"]
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", "/nowhere")
    done = typed(filled, *words, *skips, code=2)
    assert "not logged in" in done.stderr
    done = typed(filled, *words, "--skip", "verify", code=2)
    assert "'verify' cannot be skipped" in done.stderr
    done = typed(filled, *words, "--skip", "validate", "--stream", "--delete-source", code=2)
    assert "evaluate asks the source too" in done.stderr
    assert filled.log == []


@pytest.mark.slow
def test_a_dry_run_sends_nothing(filled: LocalHub, tmp_path: Path) -> None:
    typed(filled, "convert", "src", "out", "--recipe", "kimi-k2", *SMALL)
    done = typed(filled, "publish", "out", TARGET, "--dry-run", "--base-model", SOURCE)
    assert "nothing was sent" in done.stdout
    assert "verifying before anything is sent" in done.stderr
    assert not filled.requests("POST|PUT|DELETE")
    data = json.loads(typed(filled, "publish", "out", TARGET, "--dry-run", "--json").stdout)
    assert {file["name"] for file in data["files"]} >= {"README.md", "config.json", "moepress_receipts.json.gz"}
    card = typed(filled, "card", "out").stdout
    assert card.startswith("---\n")
    assert "These weights are quantized" in card
