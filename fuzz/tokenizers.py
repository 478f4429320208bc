"""Tokenizers: tokenizer.json, tokenizer_config.json and chat template of a checkpoint, damaged; loaded as calibration does.

The libraries that read them are not ours, and they do not end in one kind of error: tokenizers raises bare ``Exception`` and,
where its Rust code panics, a ``BaseException``; a template is a program of its own. Whoever asks for a tokenizer must get one
that gives whole numbers for text, or one of our errors.
"""

from __future__ import annotations

import copy
import json
import random
import shutil
from contextlib import suppress
from functools import cache
from typing import Any

from fuzz.bounded import Wrong
from fuzz.scratch_folder import scratch_folder
from fuzz.wild import TEXTS, edit_bytes, edit_tree, to_text
from moepress.calibration.text import Document, load_tokenizer, make_samples
from moepress.errors import CheckpointError

TEXT = "The quick brown fox\njumps over 13 lazy dogs — naïve, 漢字, 🙂."
VOCAB = 280
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] | trim }}"
    "{% if message.tool_calls %}{{ message.tool_calls | tojson }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
_WORDS = (
    "{% endfor %}",
    "{{ x.y.z }}",
    "{% if %}",
    "{{ 1 // 0 }}",
    "{% raw %}",
    "{{ messages[9]['a'] }}",
    "{{ raise_exception('no') }}",
)

Case = dict[str, bytes]


@cache
def honest() -> dict[str, Any]:
    """A byte-level BPE of a few merges, as published ones are written; by file name."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in visible]
    letters = [chr(c) for c in visible] + [chr(256 + i) for i in range(len(hidden))]
    merges = [("t", "h"), ("th", "e"), ("o", "x"), ("Ġ", "b"), ("l", "a"), ("u", "m"), ("o", "v"), ("e", "r")]
    vocab = {letter: i for i, letter in enumerate(letters)}
    vocab |= {a + b: len(letters) + i for i, (a, b) in enumerate(merges)}
    special = [("<s>", 264), ("</s>", 265), ("<|user|>", 266), ("<|assistant|>", 267)]
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {
        "tokenizer.json": {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [{"id": number, "content": content, **flags} for content, number in special],
            "normalizer": {"type": "Sequence", "normalizers": [{"type": "NFC"}]},
            "pre_tokenizer": {
                "type": "Sequence",
                "pretokenizers": [
                    {
                        "type": "Split",
                        "pattern": {"Regex": r"\p{N}{1,3}|\s+|[^\s\p{N}]+"},
                        "behavior": "Isolated",
                        "invert": False,
                    },
                    {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
                ],
            },
            "post_processor": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False, "use_regex": True},
            "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
            "model": {
                "type": "BPE",
                "dropout": None,
                "unk_token": None,
                "continuing_subword_prefix": None,
                "end_of_word_suffix": None,
                "fuse_unk": False,
                "byte_fallback": False,
                "ignore_merges": False,
                "vocab": vocab,
                "merges": [list(pair) for pair in merges],
            },
        },
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<s>",
            "eos_token": "</s>",
            "pad_token": None,
            "model_max_length": 131072,
            "clean_up_tokenization_spaces": False,
            "added_tokens_decoder": {str(number): {"content": content, **flags} for content, number in special},
            "additional_special_tokens": ["<|user|>", "<|assistant|>"],
        },
    }


def case(seed: int, number: int) -> Case:
    """The files of case ``number`` of a seed."""
    rng = random.Random(f"tokenizers/{seed}/{number}")
    trees = copy.deepcopy(honest())
    template = TEMPLATE.encode()
    if rng.random() < 0.2:
        trees["tokenizer_config.json"]["chat_template"] = TEMPLATE
        template = b""
    for _ in range(rng.choice((0, 1, 1, 2, 3))):
        tree = trees[rng.choice(list(trees))]
        edit_tree(rng, _without_vocabulary(tree) if rng.random() < 0.9 else tree)
    files = {name: to_text(rng, tree) for name, tree in trees.items()}
    if template:
        files["chat_template.jinja"] = template
    for _ in range(rng.choice((0, 0, 0, 1, 2))):
        name = rng.choice(list(files))
        files[name] = edit_bytes(rng, files[name])
    if "chat_template.jinja" in files and rng.random() < 0.1:
        at = rng.randrange(len(files["chat_template.jinja"]) + 1)
        raw = files["chat_template.jinja"]
        files["chat_template.jinja"] = raw[:at] + rng.choice(_WORDS).encode() + raw[at:]
    change = rng.random()
    if change < 0.05:
        del files[rng.choice(list(files))]
    elif change < 0.08:
        files[rng.choice(list(files))] = rng.choice(TEXTS)
    return files


def _without_vocabulary(tree: dict[str, Any]) -> Any:
    """The tree, its 264 letters hidden, so that an edit finds the fields that say how they are used."""
    if "model" not in tree or not isinstance(tree["model"], dict):
        return tree
    return {**tree, "model": {key: value for key, value in tree["model"].items() if key != "vocab"}}


def judge(files: Case) -> str:
    """Loads the tokenizer, and makes a sample of a text and of a conversation.

    Raises:
        MoepressError: as it may.
        Wrong: ids that are none.
    """
    folder = scratch_folder() / "tokenizer"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for name, raw in files.items():
        (folder / name).write_bytes(raw)
    tokenizer = load_tokenizer(folder)
    talk = [{"role": "user", "content": TEXT}, {"role": "assistant", "content": "Yes."}]
    documents = [Document(text=TEXT), Document(text=None, messages=talk)]
    made = make_samples(iter(documents), tokenizer, samples=1, length=64, seed=1, vocab_size=VOCAB)
    ids = made.token_ids
    if tuple(ids.shape) != (1, 64) or int(ids.min()) < 0 or int(ids.max()) >= VOCAB:
        raise Wrong(f"ids {list(ids.shape)} from {int(ids.min())} to {int(ids.max())}")
    return "loaded, text and conversation tokenized"


def warm_up() -> None:
    """Libraries, before memory is limited, also those of a folder without tokenizer.json; and the honest one must load."""
    with suppress(CheckpointError):
        judge({"tokenizer_config.json": b"{}"})
    judge(
        {name: json.dumps(tree).encode() for name, tree in honest().items()}
        | {"chat_template.jinja": TEMPLATE.encode()}
    )
