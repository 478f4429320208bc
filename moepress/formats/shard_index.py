"""model.safetensors.index.json: which shard holds which tensor.

    {"metadata": {"total_size": bytes of all tensors, "total_parameters": ...}, "weight_map": {tensor: shard}}

The index is an opinion about the shards, so what it claims is compared with their headers, both ways. Shard names are
taken from it as they are ('model-00001-of-000163.safetensors' has six digits on one side), but one that leads out of
the folder is refused. ``total_size`` is only ever displayed, by the Hub; a wrong one is a warning.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from moepress.errors import CheckpointError, FormatError
from moepress.formats.atomic import atomic_write_json
from moepress.formats.strict_json import parse_object

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
SHARD_NAME = re.compile(r"(?P<stem>.+)-(?P<number>\d+)-of-(?P<count>\d+)\.safetensors")
"""Any digit counts, also different ones on the two sides."""


@dataclass(frozen=True)
class ShardIndex:
    """Attributes: ``weight_map`` tensor to shard; ``total_size`` as written, None if absent."""

    weight_map: dict[str, str]
    total_size: Any

    @property
    def shards(self) -> tuple[str, ...]:
        """Names of the shards, sorted."""
        return tuple(sorted(set(self.weight_map.values())))


def check_shard_name(shard: str) -> None:
    """Refuse a shard name that is not a plain relative path to a .safetensors file.

    Raises:
        FormatError: absolute, with '..' or a backslash, a control character, or another ending.
    """
    path = PurePosixPath(shard)
    # as_posix() differs for './x', 'a//b' and 'a/': spellings under which no listing of the folder has the file.
    unsafe = path.is_absolute() or ".." in path.parts or "\\" in shard or path.as_posix() != shard
    if unsafe or not shard.isprintable() or not shard.endswith(".safetensors"):
        raise FormatError(
            f"shard name {shard!r} is not a plain relative path to a .safetensors file",
            hint="an index must only name files of its own folder; do not use this copy",
        )


def parse_index(text: str, *, where: str) -> ShardIndex:
    """The index, with every shard name checked.

    Args:
        text: the file's contents.
        where: its path for the errors.

    Raises:
        FormatError: not JSON, no ``weight_map``, a tensor listed twice, a shard name that is not a string or unsafe.
    """
    index, repeated = parse_object(text, where=where)
    if repeated:
        raise FormatError(
            f"{INDEX_NAME}: the same name twice: {list_some(repeated)}",
            where=where,
            hint="nothing says which of the two shards counts: download the index again",
        )
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict):
        found = "no weight_map" if weight_map is None else f"a weight_map that is a {type(weight_map).__name__}"
        raise FormatError(f"{INDEX_NAME}: {found}; its keys are {sorted(index)[:5]}", where=where)
    if not weight_map:
        raise FormatError(f"{INDEX_NAME}: weight_map is empty", where=where)
    for tensor, shard in weight_map.items():
        if not isinstance(shard, str):
            raise FormatError(f"{INDEX_NAME}: the shard of {tensor!r} is {shard!r}, not a file name", where=where)
    for shard in sorted(set(weight_map.values())):
        try:
            check_shard_name(shard)
        except FormatError as error:
            raise FormatError(f"{INDEX_NAME}: {error.what}", where=where, hint=error.hint) from None
    metadata = index.get("metadata")
    return ShardIndex(weight_map, metadata.get("total_size") if isinstance(metadata, dict) else None)


def shards_without_index(names: Iterable[str], *, where: str) -> tuple[str, ...]:
    """The shards of a folder that has no index.

    One ``model.safetensors`` needs none. Numbered shards are accepted when the numbers in their names prove that all
    are there (servers read such folders; transformers does not, so the caller warns).

    Args:
        names: top-level .safetensors files.
        where: the folder, for the errors.

    Raises:
        CheckpointError: none, several sets, or a set with numbers missing.
    """
    present = sorted(names)
    if present == [SINGLE_NAME]:
        return (SINGLE_NAME,)
    if not present:
        raise CheckpointError(
            "no weights: neither model.safetensors nor an index",
            where=where,
            hint="download the .safetensors files; other formats (.bin, .pth, .gguf) are not read",
        )
    matches = [match for name in present if (match := SHARD_NAME.fullmatch(name))]
    sets = {(match["stem"], int(match["count"])) for match in matches}
    if len(matches) != len(present) or len(sets) != 1:
        raise CheckpointError(
            f"{len(present)} .safetensors files and no {INDEX_NAME} to say which belong together: {list_some(present)}",
            where=where,
            hint="download the index, or remove the files that are not of this checkpoint",
        )
    ((stem, count),) = sets
    missing = sorted(set(range(1, count + 1)) - {int(match["number"]) for match in matches})
    if missing or len(matches) != count:
        raise CheckpointError(
            f"no {INDEX_NAME}, and of {count} shards {len(matches)} are here; "
            f"{stem!r} lacks the numbers {list_some([str(number) for number in missing])}",
            where=where,
            hint="download the missing shards and the index",
        )
    return tuple(present)


def index_content(weight_map: Mapping[str, str], total_size: int, total_parameters: int) -> dict[str, Any]:
    """What an index says.

    Args:
        weight_map: tensor name to shard name.
        total_size: bytes of all tensors.
        total_parameters: logical parameters; packed words count as the values they hold.

    Raises:
        FormatError: a shard name that no loader may follow.
    """
    for shard in sorted(set(weight_map.values())):
        check_shard_name(shard)
    metadata = {"total_parameters": total_parameters, "total_size": total_size}
    return {"metadata": metadata, "weight_map": dict(weight_map)}


def write_index(path: Path, weight_map: Mapping[str, str], total_size: int, total_parameters: int) -> None:
    """Write an index, atomically, with sorted keys; arguments and errors as `index_content`.

    Args:
        path: its final place.
    """
    atomic_write_json(path, index_content(weight_map, total_size, total_parameters))


def list_some(names: Iterable[str], limit: int = 5) -> str:
    """Up to ``limit`` names and how many more there are."""
    every = list(names)
    more = f" and {len(every) - limit} more" if len(every) > limit else ""
    return ", ".join(every[:limit]) + more
