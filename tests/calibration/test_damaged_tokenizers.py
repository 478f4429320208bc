"""A checkpoint's tokenizer files may say anything: the libraries' errors, and what they do not survive, end in one of ours."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from fuzz.tokenizers import TEMPLATE, honest
from moepress.calibration.text import Document, load_tokenizer, make_samples
from moepress.calibration.tokenizer_ids import MOST_IDS, check_ids
from moepress.errors import CheckpointError


def written(folder: Path, name: str = "", path: tuple[Any, ...] = (), value: Any = None) -> Path:
    """The honest files, one value of one of them changed."""
    trees = copy.deepcopy(honest())
    if path:
        node = trees[name]
        for key in path[:-1]:
            node = node[key]
        node[path[-1]] = value
    for file, tree in trees.items():
        (folder / file).write_text(json.dumps(tree))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def test_the_honest_files_are_read(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(written(tmp_path))
    assert tokenizer.encode("the ox", add_special_tokens=False)
    assert tokenizer.eos_token_id == 265


@pytest.mark.parametrize(
    ("name", "path", "value"),
    [
        ("tokenizer.json", ("added_tokens", 0, "special"), []),
        ("tokenizer.json", ("model", "type"), "F4"),
        ("tokenizer.json", ("pre_tokenizer", "pretokenizers", 0, "pattern"), {"Regex": "("}),
        ("tokenizer_config.json", ("eos_token",), {"a": 1}),
        ("tokenizer_config.json", ("model_max_length",), {"a": {"b": []}}),
        ("tokenizer_config.json", ("added_tokens_decoder",), [1]),
    ],
)
def test_a_field_that_the_libraries_refuse_ends_in_our_error(
    name: str, path: tuple[Any, ...], value: Any, tmp_path: Path
) -> None:
    """The Rust half raises bare Exception; a length that is an object raises TypeError with the first text."""
    with pytest.raises(CheckpointError) as error:
        load_tokenizer(written(tmp_path, name, path, value))
    assert str(tmp_path) in str(error.value)


@pytest.mark.parametrize("number", [MOST_IDS, 2**31, 2**32 - 1, -1, 0.5, "7"])
def test_an_id_that_would_take_gigabytes_is_refused_before_the_library_reads_it(number: Any, tmp_path: Path) -> None:
    """The library keeps a place for each id up to the largest, and ends the process where there is no memory for them."""
    folder = written(tmp_path, "tokenizer.json", ("model", "vocab", "A"), number)
    with pytest.raises(CheckpointError, match=r"the token 'A' has the id .*, which is none of 0 to 16,777,215"):
        check_ids(folder)
    folder = written(tmp_path, "tokenizer_config.json", ("added_tokens_decoder", "4294967295"), {"content": "<x>"})
    with pytest.raises(CheckpointError, match="'<x>' has the id 4294967295"):
        check_ids(folder)


@pytest.mark.parametrize("raw", [b"[" * 100_000, b"\xff\xfe{\x00", b"{", b""])
@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_file_that_is_no_json_is_named(name: str, raw: bytes, tmp_path: Path) -> None:
    written(tmp_path)
    (tmp_path / name).write_bytes(raw)
    with pytest.raises(CheckpointError, match="cannot be read") as error:
        load_tokenizer(tmp_path)
    assert str(error.value.where).endswith(name)


@pytest.mark.parametrize("template", ["{{ 1 // 0 }}", "{{ 'a' + 1 }}", "{% if %}", "{{ messages[9]['a'] }}"])
def test_a_template_that_fails_is_the_checkpoints_error(template: str, tmp_path: Path) -> None:
    written(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(template)
    talk = Document(text=None, messages=[{"role": "user", "content": "ox"}], where="talk.jsonl, line 1")
    with pytest.raises(CheckpointError, match="needs the model's chat template"):
        make_samples([talk], load_tokenizer(tmp_path), samples=1, length=2, seed=1, vocab_size=280)
