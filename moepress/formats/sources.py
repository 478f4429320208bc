"""Where a checkpoint's files come from: names, sizes, byte ranges.

Looking at a checkpoint needs three things of a place, whether it is a folder or the Hub: which files it has and how
large they are, a text file's contents, and a few bytes of a shard. That is the whole seam; a place that can answer
them can be inspected and planned without a download.

A local folder lists regular files only. It follows links to files, because a Hub cache is nothing but links
(``snapshots/REV/name -> ../../blobs/SHA``), and does not follow links to folders, which can form loops. Names inside
are relative, with forward slashes.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Protocol

from moepress.errors import CheckpointError, FormatError
from moepress.formats.foreign_bytes import SNIFF_BYTES, recognise

SKIPPED_FOLDERS = frozenset((".git", ".cache", ".huggingface", ".moepress"))
"""Bookkeeping of git, of the Hub client and of moepress: no part of a checkpoint, at any depth."""

TEMPORARY_SUFFIX = ".moepress-tmp"
"""Ending of a file that is still being written. One that stays behind belongs to a process that was killed."""


class HeaderSource(Protocol):
    """A place that holds a checkpoint's files."""

    def list_files(self) -> dict[str, int]:
        """Relative name to size in bytes, for every file."""

    def read_text(self, name: str) -> str:
        """A UTF-8 file's contents."""

    def read_range(self, name: str, start: int, end: int) -> bytes:
        """Bytes ``start`` up to ``end`` of a file; fewer only if the file ends before ``end``."""


class LocalFolder:
    """A folder on this machine.

    Args:
        folder: an existing directory.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def list_files(self) -> dict[str, int]:
        """Relative name to size, for every regular file and every link to one; sorted by name.

        Raises:
            CheckpointError: the folder, or one inside it, cannot be listed.
        """

        def refuse(error: OSError) -> None:
            raise CheckpointError(f"cannot list the folder: {error.strerror}", where=str(error.filename)) from error

        sizes: dict[str, int] = {}
        for root, folders, names in os.walk(self.folder, onerror=refuse):
            folders[:] = [name for name in folders if name not in SKIPPED_FOLDERS]
            for name in names:
                if name.endswith(TEMPORARY_SUFFIX):
                    continue
                path = Path(root, name)
                if not name.isprintable():  # also what Python makes of bytes that are not UTF-8
                    raise CheckpointError(f"a file name that cannot be printed: {name!r}", where=root)
                try:
                    status = path.stat()
                except OSError:
                    continue  # a link to nothing; `why_unusable` names it when somebody needs the file
                if stat.S_ISREG(status.st_mode):
                    sizes[path.relative_to(self.folder).as_posix()] = status.st_size
        return dict(sorted(sizes.items()))

    def read_text(self, name: str) -> str:
        """A UTF-8 file's contents.

        Raises:
            FormatError: the bytes are not UTF-8; says what the file looks like instead.
            CheckpointError: the file cannot be opened or read.
        """
        path = self.folder / name
        try:
            raw = path.read_bytes()
        except OSError as error:
            raise CheckpointError(f"{name}: {why_unusable(path)}", where=str(path)) from error
        try:
            return raw.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            foreign = recognise(raw[:SNIFF_BYTES], len(raw))
            what = f"not text but {foreign.what}" if foreign else f"not UTF-8 text (byte {error.start})"
            raise FormatError(f"{name}: {what}", where=str(path), hint=foreign.hint if foreign else None) from None

    def read_range(self, name: str, start: int, end: int) -> bytes:
        """Bytes ``start`` up to ``end`` of a file; fewer only if the file ends before ``end``.

        Raises:
            CheckpointError: the file cannot be opened or read.
        """
        path = self.folder / name
        try:
            with path.open("rb", buffering=0) as file:
                file.seek(start)
                return file.read(end - start)
        except OSError as error:
            raise CheckpointError(f"{name}: {why_unusable(path)}", where=str(path)) from error


def why_unusable(path: Path) -> str:
    """Why a path that should be a readable file is not one, in words that follow its name."""
    try:
        if path.is_symlink() and not path.exists():
            return f"a link to a file that is gone ({path.readlink()}); if this is a Hub cache, its blobs were removed"
        status = path.stat()
        if stat.S_ISDIR(status.st_mode):
            return "a folder where a file is expected"
        if not stat.S_ISREG(status.st_mode):
            return "a device, pipe or socket where a file is expected"
        with path.open("rb"):
            return "cannot be read"
    except FileNotFoundError:
        return "missing"
    except OSError as error:
        return f"cannot be read: {error.strerror}"
