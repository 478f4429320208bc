"""Shards written byte by byte, so that a test can say what no library would write."""

from __future__ import annotations

import json
from typing import Any


def shard_bytes(header: dict[str, Any] | str | bytes, data: bytes = b"") -> bytes:
    """A safetensors file: length, header as given (a dict is dumped, text is taken as it is), data."""
    text = json.dumps(header) if isinstance(header, dict) else header
    raw = text.encode("utf-8") if isinstance(text, str) else text
    return len(raw).to_bytes(8, "little") + raw + data


def entry(dtype: str, shape: list[int], start: int, end: int) -> dict[str, Any]:
    """One tensor's line of a header."""
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
