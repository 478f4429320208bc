"""The files beside the weights: a byte-level tokenizer that really loads, a chat template, code that imports code."""

from __future__ import annotations

import json
from pathlib import Path

SPECIAL = ("<|bos|>", "<|eos|>", "<|pad|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>")
BOS, EOS, PAD = 256, 257, 258

CHAT_TEMPLATE = """<|bos|>{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|eos|>
{%- endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}
"""

TOKENIZATION = '''"""Stands for a publisher's tokenizer code: it imports a second file, and both must travel."""

from .encoding_tiny import ROLES


def roles():
    return ROLES
'''

ENCODING = 'ROLES = ("system", "user", "assistant", "tool")\n'


def byte_alphabet() -> list[str]:
    """GPT-2's printable character for each of the 256 bytes."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def tokenizer_json() -> dict[str, object]:
    """A BPE model of 256 byte tokens, no merges, and seven special tokens."""
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": 256 + i, "content": token, **flags} for i, token in enumerate(SPECIAL)],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": {token: i for i, token in enumerate(byte_alphabet())},
            "merges": [],
        },
    }


def write_side_files(folder: Path) -> None:
    """Write everything but weights, index and config.json; one file in a subfolder, one binary."""
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIAL[0],
        "eos_token": SPECIAL[1],
        "pad_token": SPECIAL[2],
        "model_max_length": 4096,
    }
    generation_config = {"bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD, "max_length": 4096}
    for name, content in {
        "tokenizer.json": json.dumps(tokenizer_json(), ensure_ascii=False, indent=1),
        "tokenizer_config.json": json.dumps(tokenizer_config, indent=2),
        "generation_config.json": json.dumps(generation_config, indent=2),
        "chat_template.jinja": CHAT_TEMPLATE,
        "tokenization_tiny.py": TOKENIZATION,
        "encoding_tiny.py": ENCODING,
        "LICENSE": "Tiny untrained weights; do with them what you like.\n",
        "docs/deploy_guidance.md": "# Deployment\n\nNot for deployment.\n",
    }.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content, encoding="utf-8")
    (folder / "tiktoken.model").write_bytes(bytes(range(256)))
