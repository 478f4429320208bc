"""Are two checkpoints one model? Their configurations say so, how they are quantized and who wrote them aside.

Two questions, the second stricter:

    two_models           do both announce the same weights, by place and logical shape? An output and what it is held against
                         must: whatever were compared after that would be hundreds of names, and mean nothing
    config_differences   do all fields agree? Two servers that share a cache must compute the same
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from moepress.formats.architecture import expected_weights
from moepress.formats.families import canonical_name, identify_family

NOT_THE_MODEL = (
    "quantization_config",
    "compression_config",
    "torch_dtype",
    "dtype",
    "transformers_version",
    "_name_or_path",
)
"""Fields of config.json in which two checkpoints of one model may differ."""

EXAMPLES = 2
"""Weights named of each kind of difference: enough to see what kind it is."""


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


def two_models(
    first: Mapping[str, Any], second: Mapping[str, Any], *, names: tuple[str, str] = ("the output", "the source")
) -> str | None:
    """What makes them two models, with counts and examples; None where both announce the same weights in the same shapes.

    Args:
        first, second: each one's config.json. A wrapper's prefix and the copies of an MTP layer make no difference.
        names: what to call them.

    Raises:
        CheckpointError: one of them is of no known family, or contradicts itself.
    """
    mine, theirs = announced_weights(first), announced_weights(second)
    alone = [name for name in mine if name not in theirs]
    missing = [name for name in theirs if name not in mine]
    other = [name for name, shape in mine.items() if name in theirs and theirs[name] != shape]
    differences = []
    if alone:
        differences.append(f"{len(alone):,} weights are in {names[0]} alone ({_some(alone)})")
    if missing:
        differences.append(f"{len(missing):,} are in {names[1]} alone ({_some(missing)})")
    if other:
        shapes = [f"{name} is {list(mine[name])} and {list(theirs[name])}" for name in other[:EXAMPLES]]
        differences.append(f"{len(other):,} have another shape ({_some(shapes, len(other))})")
    if not differences:
        return None
    titles = [identify_family(config).title for config in (first, second)]
    kinds = f", {titles[0]} and {titles[1]}" if titles[0] != titles[1] else ""
    return f"these are two models{kinds}: {'; '.join(differences)}"


def announced_weights(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Logical shape of every weight that a config.json announces, by its name without a wrapper's prefix; no copies."""
    family = identify_family(config)
    return {canonical_name(family, spec.name): spec.shape for spec in expected_weights(config) if spec.copy_of is None}


def _some(words: Sequence[str], count: int | None = None) -> str:
    """The first of them."""
    more = ", …" if (count or len(words)) > EXAMPLES else ""
    return ", ".join(words[:EXAMPLES]) + more
