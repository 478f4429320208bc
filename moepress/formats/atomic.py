"""A file is there whole, or not at all: temporary name, fsync, rename, fsync of the folder.

    .NAME.PID-RANDOM.moepress-tmp  --write-->  fsync  --rename-->  NAME  -->  fsync(folder)

The temporary name is in the same folder (a rename across file systems copies) and unique, so two processes on one
shared folder never append to one file. Because the final name only ever appears by rename, a file that was opened or
mapped under it before stays as it was. The mode is that of any new file, 0666 minus the umask. Files written here can
be trusted after a power cut; the price is one flush to the disk per file, nothing beside the writing of shards.

A failed write removes its temporary file and says how much space there is.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import re
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from moepress.errors import CheckpointError, ConvertError, FormatError, MoepressError
from moepress.formats.sources import TEMPORARY_SUFFIX, why_unusable

COPY_BYTES = 4 << 20
_HALF_CHARACTER = re.compile("[\ud800-\udfff]")

_NO_FOLDER_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.EBADF, errno.EACCES)
"""What network and FUSE file systems answer to fsync of a folder. They order renames themselves, or not at all."""


def write_error(path: Path, error: OSError) -> MoepressError:
    """An operating system's error while writing ``path``, as ours, with the space that is left."""
    where = str(path)
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        try:
            space = os.statvfs(path.parent)
            left = f"{space.f_bavail * space.f_frsize:,} bytes are left in {path.parent}"
        except OSError:
            left = str(path.parent)
        quota = "the disk quota is used up" if error.errno == errno.EDQUOT else "the disk is full"
        return ConvertError(
            f"{path.name}: {quota} ({left}); the unfinished file was removed",
            where=where,
            hint="free some space and run the same command again: finished files are kept",
        )
    return ConvertError(f"{path.name}: cannot be written: {error.strerror or error}", where=where)


def sync_folder(folder: Path) -> None:
    """Make renames in ``folder`` survive a power cut, where the file system can."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NO_FOLDER_SYNC:
            raise
    finally:
        os.close(descriptor)


@contextmanager
def atomic_file(path: Path) -> Iterator[int]:
    """A descriptor to write to; when the block ends, its content is ``path``, durably.

    An exception inside the block removes the temporary file, leaves ``path`` as it was, and passes on unchanged.

    Args:
        path: the final name. Its folder must exist. A file of that name is replaced.

    Raises:
        ConvertError: the operating system refused to open, flush or rename; the disk is full.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}{TEMPORARY_SUFFIX}")
    try:
        descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise write_error(path, error) from error
    try:
        try:
            yield descriptor
            _flush(descriptor, path)
        finally:
            os.close(descriptor)
        _publish(temporary, path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise


def _flush(descriptor: int, path: Path) -> None:
    try:
        os.fsync(descriptor)
    except OSError as error:
        raise write_error(path, error) from error


def _publish(temporary: Path, path: Path) -> None:
    try:
        temporary.rename(path)
        sync_folder(path.parent)
    except OSError as error:
        raise write_error(path, error) from error


def write_all(descriptor: int, data: memoryview, path: Path) -> None:
    """All of ``data``: the kernel may take less than it is given, and never more than 2 GiB at once.

    Raises:
        ConvertError: it was refused; ``path`` is the name for the message.
    """
    try:
        while data:
            data = data[os.write(descriptor, data) :]
    except OSError as error:
        raise write_error(path, error) from error


def atomic_write_text(path: Path, text: str) -> None:
    """Write a UTF-8 text file, whole or not at all.

    Raises:
        ConvertError: see `atomic_file`.
    """
    with atomic_file(path) as descriptor:
        write_all(descriptor, memoryview(text.encode("utf-8")), path)


def atomic_write_json(path: Path, value: Any) -> None:
    """Write ``value`` as JSON, indented, keys sorted, so that equal values are equal bytes.

    Raises:
        FormatError: a number that JSON has no word for (NaN, infinity); says where it stands in ``value``.
        ConvertError: see `atomic_file`.
    """
    try:
        text = json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False, allow_nan=False)
    except ValueError as error:
        place = _not_finite(value, path.name)
        raise FormatError(f"{path.name}: {place or error} cannot be written as JSON", where=str(path)) from None
    if _HALF_CHARACTER.search(text):  # a lone surrogate, which JSON may hold as an escape and UTF-8 may not
        text = json.dumps(value, indent=2, sort_keys=True, ensure_ascii=True)
    atomic_write_text(path, text + "\n")


def _not_finite(value: Any, place: str) -> str | None:
    """The first NaN or infinity in ``value``, as 'place.key[3] = nan'."""
    if isinstance(value, float) and not math.isfinite(value):
        return f"{place} = {value}"
    inside: Iterator[tuple[str, Any]] = iter(())
    if isinstance(value, dict):
        inside = ((f"{place}.{key}", item) for key, item in value.items())
    elif isinstance(value, list | tuple):
        inside = ((f"{place}[{position}]", item) for position, item in enumerate(value))
    return next((found for name, item in inside if (found := _not_finite(item, name))), None)


def copy_file(source: Path, target: Path) -> str:
    """Copy a file's content, whole or not at all; links are followed, mode and times are not copied.

    Args:
        source: a regular file.
        target: its new place; missing folders above it are made.

    Returns:
        SHA-256 of the content, in hex.

    Raises:
        CheckpointError: the source is missing, no file, or unreadable; source and target are the same file.
        ConvertError: the target cannot be written.
    """
    try:
        status = source.stat()
        if not stat.S_ISREG(status.st_mode):  # asked before opening: a pipe would wait for its writer
            raise CheckpointError(f"{source.name}: {why_unusable(source)}", where=str(source))
        reading = source.open("rb", buffering=0)
    except OSError as error:
        raise CheckpointError(f"{source.name}: {why_unusable(source)}", where=str(source)) from error
    digest = hashlib.sha256()
    buffer = bytearray(COPY_BYTES)
    with reading:
        if target.exists() and os.path.samestat(status, target.stat()):
            raise CheckpointError(f"{target.name}: would be copied onto itself", where=f"{source} -> {target}")
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise write_error(target, error) from error
        with atomic_file(target) as descriptor:
            while count := reading.readinto(buffer):
                part = memoryview(buffer)[:count]
                digest.update(part)
                write_all(descriptor, part, target)
    return digest.hexdigest()
