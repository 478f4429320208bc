"""SRC of a command, whether it is a folder here or a repository on the Hub: one call, one checkpoint.

From the Hub only headers are fetched; with ``side_files`` also the small files beside the weights, into huggingface_hub's
own cache, for what needs a tokenizer. A checkpoint that has no tensors here says so when somebody wants one.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from tqdm import tqdm

from moepress import __version__
from moepress.formats.checkpoint import Checkpoint, open_checkpoint
from moepress.hub.address import hub_address
from moepress.hub.connection import Tell, endpoint, explained
from moepress.hub.pulling import files_of
from moepress.hub.reading import open_hub_checkpoint


class _NoBar(tqdm):  # type: ignore[misc]
    """A few small files are not worth a bar."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{**options, "disable": True})


def open_source(source: str | Path, *, side_files: bool = False, tell: Tell | None = None) -> Checkpoint:
    """A checkpoint for looking at and planning.

    Args:
        source: a folder, or ``org/name[@revision]``.
        side_files: of a repository, fetch config, index and tokenizer as well; then `Checkpoint.path` finds those.

    Raises:
        HubError, CheckpointError, FormatError: it cannot be reached, or is not whole.
    """
    address = hub_address(source)
    if address is None:
        return open_checkpoint(source)
    checkpoint, snapshot = open_hub_checkpoint(address, tell=tell)
    if not side_files:
        return checkpoint
    small = [file.name for file in files_of(checkpoint, snapshot) if file.name not in checkpoint.shards]
    with explained(snapshot.repo, snapshot.commit):
        folder = snapshot_download(
            snapshot.repo,
            revision=snapshot.commit,
            allow_patterns=small,
            endpoint=endpoint(),
            library_name="moepress",
            library_version=__version__,
            tqdm_class=_NoBar,
        )
    return replace(checkpoint, folder=Path(folder))
