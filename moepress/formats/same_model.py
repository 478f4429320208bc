"""Are two checkpoints one model? Their configurations say so, how they are quantized and who wrote them aside."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

NOT_THE_MODEL = (
    "quantization_config",
    "compression_config",
    "torch_dtype",
    "dtype",
    "transformers_version",
    "_name_or_path",
)
"""Fields of config.json in which two checkpoints of one model may differ."""


def config_differences(first: Mapping[str, Any], second: Mapping[str, Any], path: str = "") -> list[str]:
    """Fields in which they differ, in words, nested parts included; empty for one model."""
    found = []
    for key in sorted({*first, *second} - {*NOT_THE_MODEL}):
        one, other = first.get(key), second.get(key)
        if isinstance(one, Mapping) and isinstance(other, Mapping):
            found += config_differences(one, other, f"{path}{key}.")
        elif one != other:
            found.append(f"config.json: {path}{key} is {one!r} and {other!r}")
    return found
