"""Calibration text: documents in, fixed-length samples of token ids out, the same for the same seed.

    read      a text file (a form feed between documents), JSONL (`text`, or `messages` with optional `tools`), or a
              dataset from the Hub by name
    render    conversations through the model's own chat template: routers send chat markup to other experts than prose
    order     documents by SHA-256(seed, document): no random generator, so no library version can change it
    tokenize  one document after the other, an end-of-text token between them, until N·S tokens are there
    cut       into windows of S tokens; when the last document was long and there are more than N, N are chosen by seed

    token_ids [N, S] int64, every sample full: no padding

Two digests name a set: of the documents that were used (after rendering), and of the token ids. The second is what the
statistics depend on, so it belongs into the fingerprint of a resumable run.

The tokenizer comes from the checkpoint's folder. Some checkpoints bring Python code for it (Kimi's tiktoken wrapper):
that code runs only when the caller says so.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from moepress.calibration.tokenizer_ids import check_ids
from moepress.errors import CheckpointError, PlanRefused

DEFAULT_SET = "default.txt"
DOCUMENT_BREAK = "\f"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "tiktoken.model", "vocab.json")
_TEXT_FIELDS = ("text", "messages")


class Tokenizer(Protocol):
    """What calibration asks of a transformers tokenizer."""

    eos_token_id: int | None

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...

    def apply_chat_template(
        self, conversation: list[dict[str, Any]], *, tools: list[Any] | None, tokenize: bool
    ) -> str: ...


@dataclass(frozen=True)
class Document:
    """One text, or one conversation.

    Attributes:
        text: plain text; None for a conversation.
        messages: a conversation, as chat templates take it.
        tools: the tools it declares.
        where: file and line, for messages.
    """

    text: str | None
    messages: list[dict[str, Any]] | None = None
    tools: list[Any] | None = None
    where: str = ""


@dataclass(frozen=True, eq=False)
class CalibrationSet:
    """Samples, and what they were made of. Two sets are the same when their `token_sha256` are.

    Attributes:
        token_ids: [N, S] int64.
        documents: how many were used.
        text_sha256: of the documents used, rendered, in order.
        token_sha256: of shape and token ids.
    """

    token_ids: torch.Tensor
    documents: int
    text_sha256: str
    token_sha256: str

    @property
    def tokens(self) -> int:
        """Tokens in all samples."""
        return self.token_ids.numel()


def read_documents(path: Path) -> list[Document]:
    """Documents of a file: ``.jsonl`` by line, anything else as text, split at form feeds.

    Raises:
        PlanRefused: no such file, nothing in it, not UTF-8, or a line that is not a document.
    """
    try:
        content = path.read_text(encoding="utf-8")
    except OSError as error:
        raise PlanRefused(f"calibration text: {error.strerror}", where=str(path)) from error
    except UnicodeDecodeError as error:
        raise PlanRefused(f"calibration text is not UTF-8: byte {error.start}", where=str(path)) from error
    if path.suffix == ".jsonl":
        documents = [
            _json_document(line, f"{path}:{number}")
            for number, line in enumerate(content.split("\n"), start=1)
            if line.strip()
        ]
    else:
        documents = _text_documents(content, str(path))
    if not documents:
        raise PlanRefused("calibration text is empty", where=str(path))
    return documents


def default_documents() -> list[Document]:
    """The set that comes with moepress: small, permissively licensed, for trying things out."""
    content = resources.files("moepress.calibration").joinpath("data", DEFAULT_SET).read_text(encoding="utf-8")
    return _text_documents(content, DEFAULT_SET)


def hub_documents(address: str) -> Iterator[Document]:
    """Documents of a dataset, streamed, so that no more is fetched than is used; rows need ``text`` or ``messages``.

    Args:
        address: ``OWNER/NAME``, or a local folder of data files; then ``:SUBSET`` and ``@SPLIT``, where the dataset has
            several. The split is ``train`` when none is named. Datasets that need code are refused by the library.

    Raises:
        PlanRefused: the ``datasets`` library is missing, the dataset cannot be opened or read, or a row is not a document.
    """
    name, subset, split = dataset_address(address)
    try:
        from datasets import load_dataset
        from datasets.exceptions import DatasetsError
        from httpx import HTTPError
    except ImportError as error:
        raise PlanRefused(
            "calibration from a dataset needs the library `datasets`", where=address, hint="pip install datasets"
        ) from error
    row = -1
    try:
        for row, fields in enumerate(load_dataset(name, subset, split=split, streaming=True)):
            yield _document(fields, f"{name}, split {split}, row {row}")
    except (OSError, ValueError, DatasetsError, HTTPError) as error:
        raise PlanRefused(
            f"the dataset cannot be {'opened' if row < 0 else f'read after row {row}'}: {error}",
            where=f"{name}, split {split}" + (f", subset {subset}" if subset else ""),
            hint="without a connection to the Hub, write its rows to a .jsonl file elsewhere and calibrate on that: "
            "calibration.text=FILE.jsonl",
        ) from error


def dataset_address(address: str) -> tuple[str, str | None, str]:
    """(name, subset or None, split) of ``NAME[:SUBSET][@SPLIT]``."""
    folder, slash, last = address.rpartition("/")
    last, _, split = last.partition("@")
    last, _, subset = last.partition(":")
    return folder + slash + last, subset or None, split or "train"


def load_tokenizer(folder: Path, *, trust_remote_code: bool = False) -> Tokenizer:
    """The checkpoint's own tokenizer, from files only.

    Args:
        folder: the checkpoint.
        trust_remote_code: run Python code that the checkpoint brings for its tokenizer.

    Raises:
        CheckpointError: no tokenizer, one that cannot be loaded, or one that needs code that was not allowed.
    """
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise CheckpointError(
            f"no tokenizer: none of {', '.join(TOKENIZER_FILES)}",
            where=str(folder),
            hint="download the checkpoint's tokenizer files too: moepress pull ID DIR",
        )
    check_ids(folder)
    # It warns about texts longer than the model's context, which are cut into samples anyway.
    logging.getLogger("transformers.tokenization_utils_base").setLevel(logging.ERROR)
    tokenizer: Tokenizer
    try:
        if (folder / "tokenizer.json").is_file():  # complete by itself; the automatic class would read config.json too
            from transformers import PreTrainedTokenizerFast

            tokenizer = PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
        else:
            from transformers import AutoTokenizer  # imports every family's configuration: two seconds

            tokenizer = AutoTokenizer.from_pretrained(
                folder, local_files_only=True, trust_remote_code=trust_remote_code
            )
        tokenizer.encode(" one\n1", add_special_tokens=False)  # some fields of its files are only looked at here
    except Exception as error:  # the library's Rust half raises bare Exception for a file that it cannot read
        needs_code = not trust_remote_code and "auto_map" in _tokenizer_config(folder)
        hint = "it brings its own Python code: read it, then allow it with --trust-remote-code" if needs_code else None
        if isinstance(error, ImportError):
            hint = "install what it asks for into this environment: pip install tiktoken sentencepiece"
        raise CheckpointError(f"the tokenizer cannot be loaded: {error}", where=str(folder), hint=hint) from error
    end = tokenizer.eos_token_id
    if end is not None and type(end) is not int:
        raise CheckpointError(
            f"the tokenizer's end-of-text token has no id but {str(end)[:60]!r}",
            where=str(folder),
            hint="compare tokenizer_config.json with the publisher's",
        )
    return tokenizer


def make_samples(
    documents: Sequence[Document] | Iterator[Document],
    tokenizer: Tokenizer,
    *,
    samples: int,
    length: int,
    seed: int,
    vocab_size: int,
) -> CalibrationSet:
    """Tokenize, pack and cut.

    Args:
        documents: a sequence is put in seed order first; a stream is taken as it comes, only as far as needed.
        tokenizer: the model's.
        samples, length: N and S.
        seed: chooses the order of documents and, among the windows of a long last document, which are used.
        vocab_size: rows of the model's embedding.

    Raises:
        PlanRefused: fewer than N·S tokens in all documents.
        CheckpointError: the tokenizer gives ids beyond the embedding, or has no chat template for conversations.
    """
    if isinstance(documents, Sequence):
        documents = iter(sorted(documents, key=lambda document: _order(seed, document)))
    wanted = samples * length
    ids: list[int] = []
    used: list[str] = []
    for document in documents:
        text = _render(document, tokenizer)
        used.append(text)
        ids.extend(tokenizer.encode(text, add_special_tokens=False))
        if tokenizer.eos_token_id is not None:
            ids.append(tokenizer.eos_token_id)
        if len(ids) >= wanted:
            break
    if len(ids) < wanted:
        raise PlanRefused(
            f"too little text: {len(ids):,} tokens in {len(used):,} document{'s' if len(used) != 1 else ''}; "
            f"{samples:,} samples of {length:,} need {wanted:,}",
            hint=f"give more text, or ask for fewer samples: {len(ids) // length:,} of this length is what it holds",
        )
    if max(ids) >= vocab_size:
        raise CheckpointError(
            f"the tokenizer gives token id {max(ids)}, the embedding has {vocab_size} rows",
            hint="the tokenizer does not belong to this checkpoint",
        )
    windows = torch.tensor(ids[: len(ids) // length * length], dtype=torch.int64).reshape(-1, length)
    chosen = sorted(sorted(range(len(windows)), key=lambda index: _digest(seed, str(index)))[:samples])
    token_ids = windows[chosen].contiguous()
    return CalibrationSet(token_ids, len(used), text_digest(used), token_digest(token_ids))


def text_digest(texts: Sequence[str]) -> str:
    """SHA-256 of texts and their boundaries."""
    return hashlib.sha256(json.dumps(list(texts), ensure_ascii=False).encode()).hexdigest()


def token_digest(token_ids: torch.Tensor) -> str:
    """SHA-256 of shape and token ids, little-endian. token_ids [N, S] int64."""
    head = json.dumps(list(token_ids.shape)).encode()
    return hashlib.sha256(head + token_ids.contiguous().numpy().astype(np.dtype("<i8")).tobytes()).hexdigest()


def _text_documents(content: str, where: str) -> list[Document]:
    return [Document(text=part.strip("\n"), where=where) for part in content.split(DOCUMENT_BREAK) if part.strip()]


def _json_document(line: str, where: str) -> Document:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise PlanRefused(f"not JSON: {error.msg} at column {error.colno}", where=where) from error
    return _document(row, where)


def _document(row: Any, where: str) -> Document:
    if isinstance(row, dict):
        text, messages = (row.get(field) for field in _TEXT_FIELDS)
        if isinstance(text, str) and text.strip():
            return Document(text=text, where=where)
        if isinstance(messages, list) and messages and all(isinstance(message, dict) for message in messages):
            return Document(text=None, messages=messages, tools=row.get("tools"), where=where)
    fields = f"has {', '.join(map(str, row)) or 'none'}" if isinstance(row, dict) else f"is a {type(row).__name__}"
    raise PlanRefused(
        f"a document needs `text` (a string) or `messages` (a list of objects), this {fields}",
        where=where,
        hint='one document per line: {"text": "…"} or {"messages": [{"role": "user", "content": "…"}]}',
    )


def _render(document: Document, tokenizer: Tokenizer) -> str:
    if document.text is not None:
        return document.text
    try:
        return tokenizer.apply_chat_template(document.messages or [], tools=document.tools, tokenize=False)
    except Exception as error:  # a template is a program
        raise CheckpointError(
            f"a conversation needs the model's chat template: {error}",
            where=document.where,
            hint="add chat_template.jinja to the checkpoint's folder, or calibrate on plain text",
        ) from error


def _order(seed: int, document: Document) -> str:
    content = [document.text, document.messages, document.tools]
    return _digest(seed, json.dumps(content, ensure_ascii=False, sort_keys=True))


def _digest(seed: int, content: str) -> str:
    return hashlib.sha256(f"{seed}\n{content}".encode()).hexdigest()


def _tokenizer_config(folder: Path) -> dict[str, Any]:
    try:
        config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return config if isinstance(config, dict) else {}
