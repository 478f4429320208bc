from __future__ import annotations

import json
from pathlib import Path

import pytest

from moepress.errors import CheckpointError
from moepress.serving.validation.bench_tokenizer import tokenizer_copy


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"auto_map": {"AutoConfig": "configuration_x.C"}}')
    (folder / "configuration_x.py").write_text("raise SystemExit('the code of a checkpoint was run')")
    (folder / "tokenizer.json").write_text("{}")
    config = {"tokenizer_class": "OwnTokenizer", "auto_map": {"AutoTokenizer": ["t.T", None]}, "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def test_no_code_and_no_word_of_it_reaches_the_benchmark(model: Path, tmp_path: Path) -> None:
    copy = tokenizer_copy(model, tmp_path / "copy", trust_remote_code=False)
    assert {path.name for path in copy.iterdir()} == {"tokenizer.json", "tokenizer_config.json"}
    config = json.loads((copy / "tokenizer_config.json").read_text())
    assert config == {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"}


def test_a_tokenizer_that_is_code_needs_permission(model: Path, tmp_path: Path) -> None:
    (model / "tokenizer.json").rename(model / "tiktoken.model")
    with pytest.raises(CheckpointError, match="run the Python code") as refusal:
        tokenizer_copy(model, tmp_path / "copy", trust_remote_code=False)
    assert "--trust-remote-code" in str(refusal.value)
    copy = tokenizer_copy(model, tmp_path / "copy", trust_remote_code=True)
    assert (copy / "configuration_x.py").exists()
    assert "auto_map" in json.loads((copy / "tokenizer_config.json").read_text())
