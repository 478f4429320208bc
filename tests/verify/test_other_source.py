"""A source that the output was not made from is one clear error, for every command that holds the two against each other."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from moepress.cli import app
from moepress.errors import CheckpointError
from moepress.formats.same_model import two_models
from moepress.results import RESULTS_FOLDER
from moepress.verify.run import verify
from tests.pressing import press
from tests.tiny_checkpoints import FAMILIES, build

NOBODY = "http://127.0.0.1:9"
"""Where no server is: a command that asked one would say so."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    source = build("kimi", folder / "kimi")
    press(source.folder, folder / "out", "kimi")
    build("kimi", folder / "other-numbers", seed=1)
    build("qwen3_moe", folder / "qwen")
    return {name: folder / name for name in ("kimi", "out", "other-numbers", "qwen")}


@pytest.mark.parametrize(
    ("command", "option"),
    [
        (["verify"], "--source"),
        (["fidelity"], "--source"),
        (["report"], "--source"),
        (["validate", "--url", NOBODY], "--baseline"),
        (["evaluate", "--url", NOBODY, "--baseline-url", NOBODY], "--baseline"),
    ],
    ids=lambda words: words[0] if isinstance(words, list) else "",
)
def test_every_command_names_what_differs_and_the_right_source(
    command: list[str], option: str, folders: dict[str, Path]
) -> None:
    words = [command[0], str(folders["out"]), *command[1:], option, str(folders["qwen"])]
    error = CliRunner().invoke(app, words).exception
    assert isinstance(error, CheckpointError)
    assert "these are two models" in error.what
    assert "lm_head.weight" not in error.what, "both have it, in one shape"
    assert "weights are in the output alone (" in error.what
    assert str(error.hint).endswith(f"{option} {folders['kimi']}")
    assert not (folders["out"] / RESULTS_FOLDER).exists(), "a wrong source says nothing about the output"


def test_publish_refuses_before_anything_is_sent(folders: dict[str, Path]) -> None:
    words = ["publish", str(folders["out"]), "press/tiny", "--dry-run", "--source", str(folders["qwen"])]
    assert "these are two models" in str(CliRunner().invoke(app, words).exception)


def test_the_other_side_of_a_pair_too(folders: dict[str, Path]) -> None:
    with pytest.raises(CheckpointError, match="two models") as refused:
        verify(folders["out"], same_kv_as=folders["qwen"])
    assert "one source" in str(refused.value.hint)


def test_a_model_of_the_same_shape_with_other_numbers(folders: dict[str, Path]) -> None:
    with pytest.raises(CheckpointError, match="two models of the same shape: of 16 weights that were looked at"):
        verify(folders["out"], folders["other-numbers"])


def test_an_output_that_is_damaged_everywhere_is_no_other_model(folders: dict[str, Path], tmp_path: Path) -> None:
    """Its shards are not what its receipts say, so what differs from the source is listed."""
    out = Path(shutil.copytree(folders["out"], tmp_path / "out"))
    for shard in out.glob("*.safetensors"):
        content = bytearray(shard.read_bytes())
        begin = 8 + int.from_bytes(content[:8], "little")
        content[begin:] = bytes(255 - byte for byte in content[begin:])
        shard.write_bytes(content)
    assert len(verify(out, folders["kimi"]).problems) > 16


@pytest.mark.parametrize("field", ["num_hidden_layers", "n_routed_experts", "vocab_size", "moe_intermediate_size"])
def test_a_damaged_configuration_is_no_other_model(field: str, folders: dict[str, Path], tmp_path: Path) -> None:
    out = Path(shutil.copytree(folders["out"], tmp_path / "out"))
    config = json.loads((out / "config.json").read_text())
    config[field] //= 2
    (out / "config.json").write_text(json.dumps(config))
    assert any(problem.startswith("config.json: ") for problem in verify(out, folders["kimi"]).problems)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_is_itself_however_it_is_stored(family: str, tmp_path: Path) -> None:
    config = build(family, tmp_path / "tiny").config
    assert two_models(config, config) is None
    text = config.get("text_config") or config
    fewer = json.loads(json.dumps(config))
    (fewer.get("text_config") or fewer)["vocab_size"] = text["vocab_size"] // 2
    assert "have another shape" in str(two_models(config, fewer))
