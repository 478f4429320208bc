"""What the server is asked: a set that ships with moepress, or a file; as token ids, through the model's own template.

Code, diffs, tool calls, several languages: what a coding agent sends. Short on purpose, so that a greedy comparison of
sixteen prompts stays under a minute on a GPU, and the reference's forward pass is over a few thousand tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Protocol, cast

from moepress.calibration.text import Document, load_tokenizer, read_documents
from moepress.errors import CheckpointError

_SHIPPED = "prompts.jsonl"


class _Tokenizer(Protocol):
    chat_template: Any

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...

    def apply_chat_template(
        self,
        conversation: list[dict[str, Any]],
        *,
        tools: list[Any] | None,
        add_generation_prompt: bool,
        tokenize: bool,
    ) -> str: ...


@dataclass(frozen=True)
class Prompt:
    """`text` as the model sees it, and its token ids."""

    text: str
    tokens: tuple[int, ...]


def load_prompts(
    model: Path, file: Path | None, *, longest: int | None, vocabulary: int, trust_remote_code: bool = False
) -> list[Prompt]:
    """The prompts, ready to be sent.

    Args:
        model: whose tokenizer and chat template are used.
        file: ``.jsonl`` (`text`, or `messages` with optional `tools`) or text with form feeds between prompts; None = shipped.
        longest: tokens a prompt may have; longer ones lose their beginning. None = any length.
        vocabulary: rows of the embedding.
        trust_remote_code: run Python code that the checkpoint brings for its tokenizer.

    Raises:
        CheckpointError: no usable tokenizer. PlanRefused: no usable prompts.
    """
    tokenizer = cast(_Tokenizer, load_tokenizer(model, trust_remote_code=trust_remote_code))
    if file is None:
        with resources.as_file(resources.files(__package__).joinpath("data", _SHIPPED)) as path:
            documents = read_documents(path)
    else:
        documents = read_documents(file)
    prompts = []
    for document in documents:
        text = _render(document, tokenizer)
        ids = tokenizer.encode(text, add_special_tokens=False)
        if not ids:
            continue
        if max(ids) >= vocabulary:
            raise CheckpointError(
                f"the tokenizer gives token id {max(ids)}, the embedding has {vocabulary} rows", where=str(model)
            )
        prompts.append(Prompt(text, tuple(ids if longest is None else ids[-longest:])))
    return prompts


def _render(document: Document, tokenizer: _Tokenizer) -> str:
    if document.messages is None:
        return document.text or ""
    if not tokenizer.chat_template:
        return "\n\n".join(str(message.get("content") or "") for message in document.messages)
    return tokenizer.apply_chat_template(
        document.messages, tools=document.tools, add_generation_prompt=True, tokenize=False
    )
