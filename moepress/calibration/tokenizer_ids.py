"""Are a tokenizer's ids numbers that an embedding could have? Asked before a library reads the file.

A fast tokenizer keeps one place for every id up to its largest: one token with the id 2³¹ takes gigabytes, and where memory
is limited the library does not raise but ends the process. So tokenizer.json is read here first, as JSON, and its two lists of
ids are held against a bound that no published vocabulary comes near (the largest have 262,144).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from moepress.errors import CheckpointError

MOST_IDS = 1 << 24


def check_ids(folder: Path) -> None:
    """Looks at every id in ``folder/tokenizer.json`` and in the added tokens of tokenizer_config.json.

    What else may be wrong with the files is for the library to say.

    Raises:
        CheckpointError: a file that is no JSON, or an id that is not in 0 … 2²⁴ − 1; with the token.
    """
    for name, ids in (("tokenizer.json", _ids), ("tokenizer_config.json", _added_later)):
        path = folder / name
        if not path.is_file():
            continue
        try:
            tree = json.loads(path.read_text(encoding="utf-8-sig"))
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"cannot be read: {str(error) or type(error).__name__}", where=str(path)) from error
        for token, number in ids(tree):
            if type(number) is not int or not 0 <= number < MOST_IDS:
                raise CheckpointError(
                    f"the token {str(token)[:60]!r} has the id {str(number)[:60]}, which is none of 0 to {MOST_IDS - 1:,}",
                    where=str(path),
                    hint="download the checkpoint's tokenizer files again: moepress pull ID DIR",
                )


def _ids(tree: Any) -> Iterator[tuple[Any, Any]]:
    model = tree.get("model") if isinstance(tree, dict) else None
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocabulary, dict):  # Unigram's is a list, whose ids are its places
        yield from vocabulary.items()
    added = tree.get("added_tokens") if isinstance(tree, dict) else None
    for entry in added if isinstance(added, list) else ():
        if isinstance(entry, dict) and "id" in entry:
            yield entry.get("content"), entry["id"]


def _added_later(tree: Any) -> Iterator[tuple[Any, Any]]:
    added = tree.get("added_tokens_decoder") if isinstance(tree, dict) else None
    for number, entry in added.items() if isinstance(added, dict) else ():
        token = entry.get("content") if isinstance(entry, dict) else entry
        yield token, int(number) if number.isdecimal() and len(number) < 20 else number
