"""Calibration sets: what is read, in which order, and what is refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers

from moepress.calibration.text import (
    CalibrationSet,
    Document,
    dataset_address,
    default_documents,
    hub_documents,
    load_tokenizer,
    make_samples,
    read_documents,
)
from moepress.errors import CheckpointError, PlanRefused

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }} {% endfor %}"
WORDS = ["[UNK]", "[EOS]", *(f"w{index}" for index in range(30)), "user", "assistant", ":", "hello", "there"]

OWN_TOKENIZER = """
import json
import os
import subprocess
import sys
from pathlib import Path
from transformers import PreTrainedTokenizer

Path({marker!r}).write_text("")

class OwnTokenizer(PreTrainedTokenizer):
    vocab_files_names = {{"vocab_file": "words.json"}}

    def __init__(self, vocab_file, **kwargs):
        self.words = json.loads(Path(vocab_file).read_text())["model"]["vocab"]
        super().__init__(**kwargs)

    vocab_size = property(lambda self: len(self.words))

    def get_vocab(self):
        return self.words

    def _tokenize(self, text):
        return text.split()

    def _convert_token_to_id(self, token):
        return self.words.get(token, 0)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint's folder with a tokenizer of whole words."""
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "[EOS]",
        "unk_token": "[UNK]",
        "chat_template": TEMPLATE,
        "model_max_length": 8,
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    return tmp_path


def documents(count: int = 12, words: int = 10) -> list[Document]:
    return [Document(text=" ".join(f"w{(index * 7 + word) % 30}" for word in range(words))) for index in range(count)]


def made(folder: Path, of: list[Document], samples: int = 4, length: int = 8, seed: int = 0) -> CalibrationSet:
    tokenizer = load_tokenizer(folder)
    return make_samples(of, tokenizer, samples=samples, length=length, seed=seed, vocab_size=len(WORDS))


def test_samples_are_full_and_separated(folder: Path) -> None:
    one = made(folder, documents())
    assert one.token_ids.shape == (4, 8)
    assert one.token_ids.dtype == torch.int64
    assert one.tokens == 32
    assert (one.token_ids == 1).any(), "an end-of-text token stands between documents"
    assert one.documents == 3, "three documents of 10 + 1 tokens are enough for 32"


def test_seed_and_content_decide_everything(folder: Path) -> None:
    one, again = made(folder, documents()), made(folder, list(reversed(documents())))
    assert torch.equal(one.token_ids, again.token_ids), "the order in the file does not matter"
    assert (one.text_sha256, one.token_sha256) == (again.text_sha256, again.token_sha256)
    other_seed = made(folder, documents(), seed=1)
    assert other_seed.token_sha256 != one.token_sha256
    without = [made(folder, documents()[:index] + documents()[index + 1 :]).token_sha256 for index in range(12)]
    assert sum(digest != one.token_sha256 for digest in without) == one.documents, "those that were used, no others"


def test_digests_are_stable(folder: Path) -> None:
    """Literals: a resumed run may not depend on library versions."""
    one = made(folder, documents())
    assert one.token_sha256 == "d6e8a66627d38421eaa55ebba19c6be1082d29df4bc065c21ef37e8bd28558d6"
    assert one.text_sha256 == "d0c10576160e41098155ae91f7c2051966ae36afa5ebc7c349b7cb59b506b1fc"


def test_windows_of_one_long_document_are_chosen_by_seed(folder: Path) -> None:
    long = documents(1, words=200)
    zero, one = made(folder, long), made(folder, long, seed=1)
    assert zero.token_ids.shape == one.token_ids.shape == (4, 8)
    assert not torch.equal(zero.token_ids, one.token_ids)


def test_a_stream_is_read_only_as_far_as_needed(folder: Path) -> None:
    taken = []

    def stream() -> object:
        for document in documents():
            taken.append(document)
            yield document

    tokenizer = load_tokenizer(folder)
    make_samples(stream(), tokenizer, samples=2, length=8, seed=0, vocab_size=len(WORDS))  # type: ignore[arg-type]
    assert len(taken) == 2


def test_conversations_go_through_the_chat_template(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "chat.jsonl"
    messages = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "there"}]
    path.write_text(json.dumps({"messages": messages}) + "\n\n" + json.dumps({"text": "w1 w2 w3 w4"}) + "\n")
    chat, text = read_documents(path)
    assert chat.messages == messages
    assert text.text == "w1 w2 w3 w4"
    one = made(folder, [chat], samples=1, length=7)
    words = [WORDS[token] for token in one.token_ids[0]]
    assert words == ["user", ":", "hello", "assistant", ":", "there", "[EOS]"]


def test_text_files_split_at_form_feeds(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("one\n\f\ntwo\nlines\n\f\n \n")
    assert [document.text for document in read_documents(path)] == ["one", "two\nlines"]


def test_the_default_set_is_there() -> None:
    texts = [document.text for document in default_documents()]
    assert len(texts) >= 8
    assert all(texts)


def test_datasets_by_name(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text("".join(json.dumps({"text": f"w{index}"}) + "\n" for index in range(5)))
    (tmp_path / "test.jsonl").write_text(json.dumps({"text": "held out"}) + "\n")
    assert [document.text for document in hub_documents(str(tmp_path))] == ["w0", "w1", "w2", "w3", "w4"]
    assert [document.text for document in hub_documents(f"{tmp_path}@test")] == ["held out"]
    with pytest.raises(PlanRefused, match="cannot be opened") as caught:
        list(hub_documents(f"{tmp_path}@nowhere"))
    assert "split nowhere" in str(caught.value.where)


def test_a_dataset_without_a_connection_says_what_to_do_instead() -> None:
    """In a process that was told to stay offline: what a machine without the Hub sees."""
    program = (
        "from moepress.calibration.text import hub_documents\n"
        "from moepress.errors import PlanRefused\n"
        "try: next(iter(hub_documents('owner/not-here:part@train_sft')))\n"
        "except PlanRefused as refused: print(refused)\n"
    )
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env=environment)
    assert "cannot be opened" in done.stdout
    assert "owner/not-here, split train_sft, subset part" in done.stdout
    assert "FILE.jsonl" in done.stdout


def test_datasets_missing_is_said_with_the_command_that_installs_it() -> None:
    program = (
        "import sys; sys.modules['datasets'] = None\n"
        "from moepress.calibration.text import hub_documents\n"
        "from moepress.errors import PlanRefused\n"
        "try: next(iter(hub_documents('owner/name')))\n"
        "except PlanRefused as refused: print(refused)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "needs the library `datasets`" in done.stdout
    assert "pip install datasets" in done.stdout


@pytest.mark.parametrize(
    ("address", "parts"),
    [
        ("owner/name", ("owner/name", None, "train")),
        ("owner/name@train_sft", ("owner/name", None, "train_sft")),
        ("owner/name:en@test", ("owner/name", "en", "test")),
        ("/a@b/c:d/name:en", ("/a@b/c:d/name", "en", "train")),
        ("name", ("name", None, "train")),
    ],
)
def test_dataset_addresses(address: str, parts: tuple[str, str | None, str]) -> None:
    assert dataset_address(address) == parts


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "empty"),
        (b" \n\f\n", "empty"),
        (b"\xff\xfe", "not UTF-8: byte 0"),
    ],
)
def test_text_that_cannot_be_used(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.txt"
    path.write_bytes(content)
    with pytest.raises(PlanRefused, match=message):
        read_documents(path)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not JSON"),
        ("[1]", "this is a list"),
        ('{"prompt": "x"}', "this has prompt"),
        ('{"text": 3}', "this has text"),
        ('{"messages": []}', "this has messages"),
    ],
)
def test_lines_that_are_not_documents_are_named(line: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text('{"text": "fine"}\n' + line + "\n")
    with pytest.raises(PlanRefused, match=message) as caught:
        read_documents(path)
    assert str(caught.value.where).endswith("bad.jsonl:2")


def test_no_such_file(tmp_path: Path) -> None:
    with pytest.raises(PlanRefused, match="No such file"):
        read_documents(tmp_path / "nothing.txt")


def test_too_little_text_says_how_much(folder: Path) -> None:
    with pytest.raises(PlanRefused, match="132 tokens in 12 documents; 64 samples of 8 need 512") as caught:
        made(folder, documents(), samples=64)
    assert "fewer samples: 16" in str(caught.value.hint)


def test_tokens_beyond_the_embedding(folder: Path) -> None:
    with pytest.raises(CheckpointError, match=r"token id \d+, the embedding has 10 rows"):
        make_samples(documents(), load_tokenizer(folder), samples=4, length=8, seed=0, vocab_size=10)


def test_no_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no tokenizer: none of tokenizer\.json"):
        load_tokenizer(tmp_path)


def test_no_chat_template(folder: Path) -> None:
    config = json.loads((folder / "tokenizer_config.json").read_text())
    del config["chat_template"]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    chat = Document(text=None, messages=[{"role": "user", "content": "hello"}])
    with pytest.raises(CheckpointError, match="needs the model's chat template"):
        made(folder, [chat], samples=1, length=2)


def test_remote_code_runs_only_when_allowed(folder: Path) -> None:
    marker = folder / "ran"
    (folder / "tokenizer.json").rename(folder / "words.json")
    (folder / "tokenization_own.py").write_text(OWN_TOKENIZER.format(marker=str(marker)))
    config = {
        "tokenizer_class": "OwnTokenizer",
        "auto_map": {"AutoTokenizer": [None, "tokenization_own.OwnTokenizer"]},
        "eos_token": "[EOS]",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError) as caught:
        load_tokenizer(folder)
    assert "--trust-remote-code" in str(caught.value.hint)
    assert not marker.exists()
    tokenizer = load_tokenizer(folder, trust_remote_code=True)
    assert marker.exists()
    assert tokenizer.encode("w1 w2", add_special_tokens=False) == [3, 4]
