"""What a file that is not safetensors looks like.

A shard's first eight bytes are a length, so any other file reads as an absurdly long header, and 'header too large'
is what people are told for a Git LFS pointer, an error page saved under the shard's name, or a pickle renamed by
hand. The first bytes say which it is. Only magic numbers and opening words are looked at; nothing is ever unpickled
or unzipped.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

SNIFF_BYTES = 512
"""How much of a file's start decides. 'ustar', the deepest of the marks, stands at byte 257."""

LFS_POINTER = b"version https://git-lfs"

_MAGIC: tuple[tuple[bytes, str], ...] = (
    (b"PK\x03\x04", "a zip archive: most likely a PyTorch checkpoint (.bin, .pt, .pth)"),
    (b"GGUF", "a GGUF file"),
    (b"\x93NUMPY", "a numpy array (.npy)"),
    (b"\x89HDF\r\n\x1a\n", "an HDF5 file"),
    (b"\x1f\x8b", "a gzip archive"),
    (b"\x28\xb5\x2f\xfd", "a zstd archive"),
    (b"\xfd7zXZ\x00", "an xz archive"),
)

_PROTOCOLS = (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")


@dataclass(frozen=True, slots=True)
class Foreign:
    """A recognised kind of file: what it is, and what to do about it."""

    what: str
    hint: str | None


def _lfs_pointer(head: bytes) -> Foreign:
    size = re.search(rb"^size (\d{1,20})\s*$", head, re.MULTILINE)
    real = f"; the real one has {int(size[1]):,} bytes" if size else ""
    return Foreign(
        f"a Git LFS pointer, not the file itself{real}",
        "the clone was made without LFS: run `git lfs pull` in it, or download the file again from the Hub",
    )


def recognise(head: bytes, file_bytes: int) -> Foreign | None:
    """What kind of file starts with ``head``, if it is one of the kinds seen under a shard's name.

    Args:
        head: the first `SNIFF_BYTES` bytes of the file (fewer if it is shorter).
        file_bytes: its whole size.
    """
    again = "download it again"
    if file_bytes == 0:
        return Foreign("an empty file (0 bytes)", again)
    if head and not any(head):
        what = f"zeros (the first {len(head):,} of its {file_bytes:,} bytes): preallocated and never written"
        return Foreign(what, again)
    if head.startswith(LFS_POINTER):
        return _lfs_pointer(head)
    for magic, what in _MAGIC:
        if head.startswith(magic):
            return Foreign(what, None)
    if head[257:262] == b"ustar":
        return Foreign("a tar archive", None)
    if head.startswith(_PROTOCOLS) and head[2:8] != bytes(6):
        return Foreign("a Python pickle: most likely an old PyTorch checkpoint", None)
    text = head.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if text.startswith((b"<!doctype html", b"<html", b"<head", b"<body")):
        return Foreign("an HTML page: most likely an error or login page saved under this name", again)
    if text.startswith((b"<?xml", b"<error")):
        return Foreign("an XML document: most likely a storage service's error saved under this name", again)
    if text.startswith(b"{"):
        return Foreign("a JSON document: most likely a service's error saved under this name", again)
    if text and all(32 <= byte < 127 or byte in b"\t\r\n" for byte in head):
        line = head.strip().splitlines()[0][:60].decode("ascii")
        return Foreign(f"text that starts {line!r}", again)
    return None
