"""A checkpoint as a whole: complete, and saying one thing, before any of its tensors is touched.

    open_checkpoint:  config.json  ->  index (or the shards' own names)  ->  every shard's header  ->  cross-check

Three accounts of the same tensors exist: the index, the headers and the files on disk. Servers check one of them at
most, and load a folder with a shard missing as random weights. Here they must agree, both ways, or the error lists
what differs. The cost is the headers (a few MB for 700 GB), so this is done first, always, and the rest of the code
may believe it.

Errors are what would change the result; warnings (`Checkpoint.warnings`) are what a reader should know and nothing
depends on: a wrong ``total_size``, weights in another format, a side file that will not travel.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from moepress.errors import CheckpointError, FormatError
from moepress.formats.header import ShardHeader, fetch_header
from moepress.formats.shard_index import (
    INDEX_NAME,
    SHARD_NAME,
    SINGLE_NAME,
    ShardIndex,
    list_some,
    parse_index,
    shards_without_index,
)
from moepress.formats.side_files import (
    CONFIG_NAME,
    check_not_pointers,
    links_outside,
    scale_lists,
    select_side_files,
    unlisted_links,
)
from moepress.formats.sources import HeaderSource, LocalFolder, why_unusable
from moepress.formats.strict_json import parse_object

__all__ = ["Checkpoint", "HeaderSource", "LocalFolder", "TensorRef", "open_checkpoint"]

GENERATION_CONFIG_NAME = "generation_config.json"
HEADER_THREADS = 8
"""Headers are fetched side by side; it is the latency of a request to the Hub that this hides."""


@dataclass(frozen=True, slots=True)
class TensorRef:
    """Where one tensor's bytes are. ``start`` and ``end`` are byte positions in the shard's file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    shard: str
    start: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.start

    @property
    def numel(self) -> int:
        """Elements, counted by the header's shape (logical for sub-byte types)."""
        return prod(self.shape)


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose headers were read and agree.

    Attributes:
        location: what the user called it, for messages.
        folder: where its files are; None if only headers were fetched.
        config: config.json.
        generation_config: generation_config.json, None if there is none.
        tensors: by name, sorted by shard, then by position in it: reading in this order reads files front to back.
        shards: by name, sorted.
        side_files: relative names of everything that travels to a converted copy as it is.
        warnings: one sentence each.
    """

    location: str
    folder: Path | None
    config: dict[str, Any]
    generation_config: dict[str, Any] | None
    tensors: dict[str, TensorRef]
    shards: dict[str, ShardHeader]
    side_files: tuple[str, ...]
    warnings: tuple[str, ...]

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensors: what an index calls ``total_size``."""
        return sum(ref.nbytes for ref in self.tensors.values())

    def path(self, name: str) -> Path:
        """Where a shard or side file is.

        Raises:
            CheckpointError: this checkpoint is not on this machine.
        """
        if self.folder is None:
            raise CheckpointError(
                f"{self.location}: only its headers are here, not its tensors",
                hint=f"fetch it first: moepress pull {self.location} DIR",
            )
        return self.folder / name

    def is_here(self, name: str) -> bool:
        """Whether `path` answers at once: a file that is still arriving makes it wait."""
        return self.folder is not None and name in self.shards


def open_checkpoint(source: str | Path, *, files: HeaderSource | None = None) -> Checkpoint:
    """Read everything but the tensors, and check that it fits together.

    Args:
        source: the checkpoint's folder; with ``files``, whatever it is called there.
        files: another place to ask than a local folder.

    Raises:
        CheckpointError: no such folder, or files, index and headers contradict each other.
        FormatError: a file that is not what its name says.
    """
    location = str(source)
    folder = None
    if files is None:
        folder = _local_folder(location)
        files = LocalFolder(folder)
    sizes = files.list_files()
    config, warnings = _read_config(files, sizes, location, folder)
    index = _read_index(files, sizes, location, folder)
    shards = index.shards if index else shards_without_index(_top_level(sizes), where=location)
    headers = _read_headers(files, sizes, shards, location, folder)
    tensors = _tensor_refs(headers, location)
    if index:
        _check_index(index, headers, tensors, location)
        warnings += _compare_total_size(index, tensors)
    elif shards != (SINGLE_NAME,):
        warnings.append(f"no {INDEX_NAME}: took the {len(shards)} shards by the numbers in their names")
    side_files, weights = select_side_files(sizes)
    warnings += _unlisted_weights([name for name in weights if name not in headers], location)
    if listed := scale_lists(side_files):
        warnings.append(
            f"{list_some(listed)}: KV scales as JSON are a legacy that servers half ignore; it travels as it is, and no "
            "launch line of ours names it"
        )
    if folder:
        outside = links_outside(folder, side_files)
        left = sorted({*outside, *unlisted_links(folder, sizes)})
        side_files = tuple(name for name in side_files if name not in outside)
        if left:
            warnings.append(f"links that lead out of the folder, or to nothing, will not travel: {list_some(left)}")
        check_not_pointers(folder, side_files)
    generation_config = None
    if GENERATION_CONFIG_NAME in sizes:
        where = f"{location}/{GENERATION_CONFIG_NAME}"
        generation_config, _ = parse_object(files.read_text(GENERATION_CONFIG_NAME), where=where)
    return Checkpoint(location, folder, config, generation_config, tensors, headers, side_files, tuple(warnings))


def _local_folder(location: str) -> Path:
    folder = Path(location).expanduser()
    if folder.is_dir():
        return folder
    if folder.is_symlink() or folder.exists():
        raise CheckpointError(
            f"{location} is {_kind(folder)}, not a checkpoint's folder",
            where=str(folder.absolute()),
            hint=f"name the folder that holds config.json and the shards: {folder.parent}"
            if folder.is_file()
            else None,
        )
    hint = "check the path; a checkpoint's folder holds config.json and *.safetensors"
    if re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", location):
        hint = f"if this is a Hub id, fetch it first: moepress pull {location} DIR"
    raise CheckpointError(f"no folder {location!r}", where=str(folder.absolute()), hint=hint)


def _kind(path: Path) -> str:
    return "a file" if path.is_file() else "a link to something that is gone" if path.is_symlink() else "no folder"


def _require(sizes: Mapping[str, int], name: str, location: str, folder: Path | None) -> bool:
    """Whether ``name`` is there; an error if something is there under that name and is not a file."""
    if name in sizes:
        return True
    if folder and os.path.lexists(folder / name):
        raise CheckpointError(f"{name}: {why_unusable(folder / name)}", where=location)
    return False


def _read_config(
    files: HeaderSource, sizes: Mapping[str, int], location: str, folder: Path | None
) -> tuple[dict[str, Any], list[str]]:
    if not _require(sizes, CONFIG_NAME, location, folder):
        hint = "point at the folder that holds config.json and the shards"
        if folder and (folder / "snapshots").is_dir():
            hint = f"this is a Hub cache: point at one of its snapshots, {folder / 'snapshots'}/REVISION"
        elif any(name.lower().endswith(".gguf") for name in sizes):
            hint = "GGUF files cannot be converted: start from the publisher's safetensors checkpoint (FP8 or BF16)"
        raise CheckpointError("no config.json", where=location, hint=hint)
    config, repeated = parse_object(files.read_text(CONFIG_NAME), where=f"{location}/{CONFIG_NAME}")
    warnings = [f"config.json: the key {key!r} is there twice; the last one counts" for key in repeated[:5]]
    return config, warnings


def _read_index(files: HeaderSource, sizes: Mapping[str, int], location: str, folder: Path | None) -> ShardIndex | None:
    if not _require(sizes, INDEX_NAME, location, folder):
        return None
    return parse_index(files.read_text(INDEX_NAME), where=f"{location}/{INDEX_NAME}")


def _top_level(sizes: Mapping[str, int]) -> list[str]:
    return [name for name in sizes if name.endswith(".safetensors") and "/" not in name]


def _read_headers(
    files: HeaderSource, sizes: Mapping[str, int], shards: tuple[str, ...], location: str, folder: Path | None
) -> dict[str, ShardHeader]:
    missing = [shard for shard in shards if not _require(sizes, shard, location, folder)]
    if missing:
        raise CheckpointError(
            f"{len(missing)} of {len(shards)} shards that the index names are not there: {list_some(missing)}",
            where=location,
            hint="download the missing shards; a server would load this folder as random weights",
        )

    def fetch(shard: str) -> ShardHeader:
        def read_range(start: int, end: int) -> bytes:
            return files.read_range(shard, start, end)

        try:
            return fetch_header(read_range, file_bytes=sizes[shard], name=shard)
        except FormatError as error:
            raise FormatError(error.what, where=error.where or f"{location}/{shard}", hint=error.hint) from None

    with ThreadPoolExecutor(max_workers=HEADER_THREADS) as pool:
        return dict(zip(shards, pool.map(fetch, shards), strict=True))


def _tensor_refs(headers: Mapping[str, ShardHeader], location: str) -> dict[str, TensorRef]:
    refs: dict[str, TensorRef] = {}
    twice = []
    for shard, header in headers.items():
        for entry in header.entries:
            if entry.name in refs:
                twice.append(f"{entry.name} ({refs[entry.name].shard} and {shard})")
            else:
                refs[entry.name] = TensorRef(entry.name, entry.dtype, entry.shape, shard, entry.start, entry.end)
    if twice:
        raise CheckpointError(
            f"{len(twice)} tensors are in two shards: {list_some(twice)}",
            where=location,
            hint="shards of two different runs are mixed in one folder: download or convert it again",
        )
    if not refs:
        raise CheckpointError(f"no tensors in {len(headers)} shards", where=location)
    return refs


def _check_index(
    index: ShardIndex, headers: Mapping[str, ShardHeader], tensors: Mapping[str, TensorRef], location: str
) -> None:
    absent = [f"{name} ({shard})" for name, shard in index.weight_map.items() if name not in tensors]
    unknown = [f"{ref.name} ({ref.shard})" for ref in tensors.values() if ref.name not in index.weight_map]
    moved = [
        f"{ref.name} (index: {index.weight_map[ref.name]}, found in {ref.shard})"
        for ref in tensors.values()
        if index.weight_map.get(ref.name, ref.shard) != ref.shard
    ]
    problems = []
    if absent:
        problems.append(f"{len(absent)} tensors of the index are in no shard: {list_some(absent)}")
    if unknown:
        problems.append(f"{len(unknown)} tensors of the shards are not in the index: {list_some(unknown)}")
    if moved:
        problems.append(f"{len(moved)} tensors are in another shard than the index says: {list_some(moved)}")
    if problems:
        raise CheckpointError(
            f"index and {len(headers)} shards disagree: " + "; ".join(problems),
            where=location,
            hint="index and shards are of different versions: download both again from one revision",
        )


def _compare_total_size(index: ShardIndex, tensors: Mapping[str, TensorRef]) -> list[str]:
    total = sum(ref.nbytes for ref in tensors.values())
    if index.total_size is None or index.total_size == total:
        return []
    return [f"{INDEX_NAME}: total_size is {index.total_size!r}, the tensors have {total:,} bytes; the headers count"]


def _unlisted_weights(unlisted: list[str], location: str) -> list[str]:
    """Weight files that no index names: harmless in another format, a second checkpoint in this one.

    A server that reads ``*.safetensors`` without looking at the index mixes the two.
    """
    rivals = [name for name in unlisted if name == SINGLE_NAME or ("/" not in name and SHARD_NAME.fullmatch(name))]
    if rivals:
        raise CheckpointError(
            f"{len(rivals)} shards are in the folder but not in the index: {list_some(rivals)}",
            where=location,
            hint="they are of another download or run: remove them, or restore the index that names them",
        )
    return [f"{len(unlisted)} weight files are not part of the checkpoint: {list_some(unlisted)}"] if unlisted else []
