"""Held-out text by domain, cut into windows of token ids: what both models read.

Errors of a quantized mixture of experts are not the same everywhere, because routers send code, chat markup and tool calls
to other experts than prose. Hence four domains, each small and shipped (see ``data/README.md``), and files of one's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import resources
from pathlib import Path

from moepress.calibration.text import Document, Tokenizer, make_samples, read_documents

SHIPPED = {"prose": "prose.txt", "code": "code.txt", "chat": "chat.jsonl", "tool calls": "tool_calls.jsonl"}
"""Domain -> file in the package's data folder."""


def domain_documents(files: Mapping[str, Path] | None = None) -> dict[str, list[Document]]:
    """Documents by domain: the shipped ones, or a user's files under the names given.

    Raises:
        PlanRefused: a file that holds no documents.
    """
    if files:
        return {name: read_documents(path) for name, path in files.items()}
    found = {}
    for name, file in SHIPPED.items():
        with resources.as_file(resources.files("moepress.evaluate") / "data" / file) as path:
            found[name] = read_documents(path)
    return found


def cut_windows(
    documents: Mapping[str, list[Document]], tokenizer: Tokenizer, *, windows: int, length: int, vocab_size: int
) -> dict[str, list[list[int]]]:
    """Per domain, `windows` × `length` token ids. One seed: the same windows for every checkpoint of a model.

    Raises:
        PlanRefused: too little text. CheckpointError: a tokenizer that does not fit, or has no chat template.
    """
    return {
        name: make_samples(
            some, tokenizer, samples=windows, length=length, seed=1, vocab_size=vocab_size
        ).token_ids.tolist()
        for name, some in documents.items()
    }
