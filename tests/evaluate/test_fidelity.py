"""Source and pressed side by side: which text, and which two checkpoints."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from moepress.calibration.text import default_documents
from moepress.cli import app
from moepress.errors import CheckpointError
from moepress.evaluate.fidelity import measure_fidelity
from moepress.evaluate.texts import domain_documents
from tests.pressing import press
from tests.tiny_checkpoints import TinyCheckpoint


def test_the_shipped_domains_are_no_text_that_ships_for_calibration() -> None:
    calibrated_on = "".join(document.text or "" for document in default_documents())
    for name, documents in domain_documents().items():
        lines = {line.strip() for document in documents for line in (document.text or "").splitlines()}
        shared = [line for line in lines if len(line) > 60 and line in calibrated_on]
        assert len(shared) <= 0.01 * len(lines), (name, shared[:3])


@pytest.fixture(scope="module")
def pair(tiny: Callable[[str], TinyCheckpoint], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A source that has a chat template, and what was pressed from it."""
    folder = tmp_path_factory.mktemp("fidelity")
    source = shutil.copytree(tiny("qwen3_moe").folder, folder / "source")
    press(source, folder / "pressed", "qwen3_moe")
    return folder / "pressed", source


def test_without_a_file_it_reads_held_out_domains(pair: tuple[Path, Path]) -> None:
    found = measure_fidelity(*pair, samples=1, length=16)
    assert set(found.texts) == set(domain_documents())
    assert found.as_json()["samples"] == 1
    assert all(text.tokens == 16 and text.kl > 0 for text in found.texts.values())


def test_conversations_are_left_out_where_there_is_no_chat_template(pair: tuple[Path, Path], tmp_path: Path) -> None:
    source = shutil.copytree(pair[1], tmp_path / "source")
    (source / "chat_template.jinja").unlink()
    assert set(measure_fidelity(pair[0], source, samples=1, length=16).texts) == {"prose", "code"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--text", "a/held-out.txt", "--text", "b/held-out.jsonl"), "two files are called 'held-out'"),
        (("--picture", "errors.txt"), "it has to end in .svg"),
        (("--picture", "no-such-folder/errors.svg"), "in a folder that is there"),
    ],
)
def test_what_would_be_lost_is_refused_before_a_layer_is_run(
    pair: tuple[Path, Path], words: tuple[str, ...], message: str
) -> None:
    done = CliRunner().invoke(app, ["fidelity", str(pair[0]), "--source", str(pair[1]), *words])
    assert message in str(done.exception)


def test_two_models_are_refused_before_a_layer_is_run(
    pair: tuple[Path, Path], tiny: Callable[[str], TinyCheckpoint]
) -> None:
    with pytest.raises(CheckpointError, match="these are two models"):
        measure_fidelity(pair[0], tiny("kimi").folder)
