"""Which files beside the weights a checkpoint needs: all of them, except what another step writes.

An allow-list of tokenizer names is how converted checkpoints lose ``tiktoken.model``, ``tokenization_kimi.py`` and
the module it imports. So it is the other way round: everything travels, subfolders too, except

- config.json and any ``*.index.json``, which the converter writes itself (a copied index names shards that are gone);
- weights, ours and those in other formats (.bin, .pth, .gguf, ...), which would be a second model in the folder;
- links out of the folder: a cloned repository may hold a link to anything on this machine, and a side file gets
  published. A Hub cache's own links, from a snapshot into its blobs, are the files themselves.

What is left behind for the last two reasons is said, in a warning; nothing is dropped quietly.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

from moepress.errors import CheckpointError
from moepress.formats.foreign_bytes import LFS_POINTER, SNIFF_BYTES, recognise
from moepress.formats.sources import SKIPPED_FOLDERS, why_unusable

CONFIG_NAME = "config.json"

OTHER_WEIGHT_SUFFIXES = (
    *(".bin", ".pt", ".pth", ".ckpt", ".npz", ".h5", ".msgpack"),
    *(".gguf", ".ggml", ".onnx", ".onnx_data", ".tflite", ".mlmodel"),
)
"""Weights in formats that are not read here."""


_SCALE_LIST = re.compile(r"(^|/)kv_?(cache)?_?scales?[^/]*\.json$", re.IGNORECASE)


def is_weights(name: str) -> bool:
    """Whether a file of this name holds weights, in safetensors or in another format."""
    return name.lower().endswith((".safetensors", *OTHER_WEIGHT_SUFFIXES))


def select_side_files(names: Iterable[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Split what is not config or index into what travels and what stays.

    Args:
        names: relative names of every file of the checkpoint.

    Returns:
        (side files, weight files), both sorted. The second includes the checkpoint's own shards.
    """
    side: list[str] = []
    weights: list[str] = []
    for name in sorted(names):
        path = PurePosixPath(name)
        if name == CONFIG_NAME or name.endswith(".index.json") or SKIPPED_FOLDERS.intersection(path.parts):
            continue
        (weights if is_weights(path.name) else side).append(name)
    return tuple(side), tuple(weights)


def _cache_blobs(folder: Path) -> Path | None:
    """The blobs of the Hub cache that ``folder`` is a snapshot of: models--ORG--NAME/{snapshots/REV, blobs}."""
    real = folder.resolve()
    blobs = real.parent.parent / "blobs"
    return blobs if real.parent.name == "snapshots" and blobs.is_dir() else None


def links_outside(folder: Path, names: Iterable[str]) -> list[str]:
    """Those of ``names`` that are links to a file outside ``folder`` and outside its Hub cache."""
    allowed = [path for path in (folder.resolve(), _cache_blobs(folder)) if path is not None]
    outside = []
    for name in names:
        path = folder / name
        if path.is_symlink() and not any(path.resolve().is_relative_to(place.resolve()) for place in allowed):
            outside.append(name)
    return outside


def unlisted_links(folder: Path, listed: Iterable[str]) -> list[str]:
    """Links that a listing leaves out: to folders, and to files that are gone."""
    known = set(listed)
    found = []
    for root, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name not in SKIPPED_FOLDERS]
        for name in (*folders, *names):
            path = Path(root, name)
            relative = path.relative_to(folder).as_posix()
            if path.is_symlink() and relative not in known:
                found.append(relative)
    return sorted(found)


def scale_lists(names: Iterable[str]) -> list[str]:
    """Side files that list KV scales as JSON, for SGLang's ``--quantization-param-path``: a legacy that servers half ignore."""
    return [name for name in names if _SCALE_LIST.search(name)]


def check_not_pointers(folder: Path, names: Iterable[str]) -> None:
    """Refuse side files that are Git LFS pointers: a tokenizer of three lines breaks the result long after the work.

    Raises:
        CheckpointError: names the files.
    """
    pointers, hint = [], None
    for name in names:
        path = folder / name
        try:
            with path.open("rb", buffering=0) as file:
                head = file.read(SNIFF_BYTES)
        except OSError as error:
            raise CheckpointError(f"{name}: {why_unusable(path)}", where=str(path)) from error
        if head.startswith(LFS_POINTER) and (foreign := recognise(head, len(head))):
            pointers.append(name)
            hint = foreign.hint
    if pointers:
        raise CheckpointError(f"Git LFS pointers instead of files: {', '.join(pointers)}", where=str(folder), hint=hint)
