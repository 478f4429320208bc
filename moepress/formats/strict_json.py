"""JSON objects read without losing anything: repeated keys are seen, and every failure is ours.

Python's parser, like most, keeps the last of two equal keys and says nothing. In a header the first one's bytes then
look like a hole; in an index a tensor silently changes its shard. Here the pairs are looked at before a dict
collapses them, and the caller decides what a repeat means.

What a parser can throw at hostile text, besides the usual error: RecursionError (a hundred thousand brackets),
ValueError (an integer of ten thousand digits), UnicodeDecodeError. All become one FormatError with the place.
"""

from __future__ import annotations

import json
from typing import Any

from moepress.errors import FormatError
from moepress.formats.foreign_bytes import SNIFF_BYTES, recognise


def parse_object(text: str | bytes, *, where: str) -> tuple[dict[str, Any], list[str]]:
    """The JSON object that ``text`` is, and the keys that some object in it names more than once.

    Args:
        text: the whole document; bytes must be UTF-8.
        where: file name for the errors.

    Returns:
        The object (the last of repeated keys, as every parser does), and the repeated keys in order.

    Raises:
        FormatError: not UTF-8, not JSON (says what the text looks like instead), or not an object.
    """
    repeated: list[str] = []

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        collapsed = dict(pairs)
        if len(collapsed) != len(pairs):
            seen: set[str] = set()
            for key, _ in pairs:
                if key in seen:
                    repeated.append(key)
                seen.add(key)
        return collapsed

    try:
        decoded = text if isinstance(text, str) else text.decode("utf-8")
        value = json.loads(decoded, object_pairs_hook=unique)
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        raise FormatError(f"not UTF-8 text: byte {error.start} is 0x{byte:02x}", where=where) from None
    except json.JSONDecodeError as error:
        raw = decoded.encode("utf-8", "replace")
        foreign = None if raw.lstrip()[:1] == b"{" else recognise(raw[:SNIFF_BYTES], len(raw))
        if foreign:
            raise FormatError(f"not JSON but {foreign.what}", where=where, hint=foreign.hint) from None
        raise FormatError(f"not JSON: {error.msg} at line {error.lineno} column {error.colno}", where=where) from None
    except (ValueError, RecursionError) as error:
        raise FormatError(f"not JSON that can be read: {type(error).__name__}: {error}", where=where) from None
    if not isinstance(value, dict):
        raise FormatError(f"a JSON {type(value).__name__} where an object is expected", where=where)
    return value, repeated
