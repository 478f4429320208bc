"""A checkpoint on the Hub, read as far as its headers: `formats.sources.HeaderSource` over HTTP ranges.

    140 shards x (64 KiB, and the rest of the header where it is longer)      about 30 MB of 700 GB, some seconds

Ranges of a large file cannot be checked against its SHA-256; they serve for looking and planning, and the header parser
holds them against themselves and against the file's size. Texts (config, index) are read whole and checked.
"""

from __future__ import annotations

import hashlib
from urllib.parse import quote

import httpx
from huggingface_hub import HfApi
from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

from moepress import __version__
from moepress.errors import FormatError, HubError
from moepress.formats.checkpoint import Checkpoint, open_checkpoint
from moepress.formats.foreign_bytes import SNIFF_BYTES, recognise
from moepress.hub.address import Address
from moepress.hub.connection import Tell, connect, endpoint, explained
from moepress.hub.listing import RemoteFile, Snapshot, git_blob_sha1, take_snapshot

MAX_TEXT_BYTES = 200_000_000
"""An index of 210,000 tensors has 20 MB."""

ATTEMPTS = 3
"""At one range, where the line breaks inside the answer."""


class HubFiles:
    """The files of a snapshot, as far as looking needs them. Safe to use from several threads.

    Args:
        snapshot: which commit.
    """

    def __init__(self, snapshot: Snapshot) -> None:
        self.snapshot = snapshot

    def list_files(self) -> dict[str, int]:
        """Name to size, for every file of the commit."""
        return {name: file.size for name, file in self.snapshot.files.items()}

    def read_text(self, name: str) -> str:
        """A UTF-8 file's contents, whole and checked.

        Raises:
            HubError: no access, or the bytes are not those that the Hub lists.
            FormatError: not UTF-8, or no text at all.
        """
        file = self.snapshot.files[name]
        if file.size > MAX_TEXT_BYTES:
            raise FormatError(
                f"{name}: {file.size:,} bytes; at most {MAX_TEXT_BYTES:,} are read as text",
                where=self.snapshot.repo,
            )
        raw = self.read_range(name, 0, file.size) if file.size else b""
        if _checksum(raw, file) != file.checksum:
            raise HubError(
                f"{name}: the bytes that came ({len(raw):,}) are not those of commit {self.snapshot.commit[:12]}",
                where=self.snapshot.repo,
                hint="run the same command again; a proxy that alters downloads does this too",
            )
        try:
            return raw.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            foreign = recognise(raw[:SNIFF_BYTES], len(raw))
            what = f"not text but {foreign.what}" if foreign else f"not UTF-8 text (byte {error.start})"
            raise FormatError(f"{name}: {what}", where=self.snapshot.repo) from None

    def read_range(self, name: str, start: int, end: int) -> bytes:
        """Bytes ``start`` up to ``end`` of a file, and no others over the line.

        Raises:
            HubError: no access; or the Hub, or a proxy, does not keep to the range.
        """
        address = f"{endpoint()}/{self.snapshot.repo}/resolve/{self.snapshot.commit}/{quote(name)}"
        headers = build_hf_headers(library_name="moepress", library_version=__version__)
        headers |= {"Range": f"bytes={start}-{end - 1}", "Accept-Encoding": "identity"}
        for _ in range(ATTEMPTS):
            with explained(self.snapshot.repo, self.snapshot.commit):
                raw = self._get(address, headers, name, start, end)
            if raw is not None:
                return raw
        raise HubError(
            f"{name}: the connection broke {ATTEMPTS} times inside bytes {start:,} to {end:,}",
            where=endpoint(),
            hint="run the same command again",
        )

    def _get(self, address: str, headers: dict[str, str], name: str, start: int, end: int) -> bytes | None:
        """The range, or None if the line broke on the way."""
        size = self.snapshot.files[name].size
        with get_session().stream("GET", address, headers=headers) as response:
            if response.status_code >= 400:
                response.read()
            hf_raise_for_status(response)
            if response.status_code != 206 and (start or size > max(end, 1 << 20)):
                raise HubError(
                    f"{name}: the whole file of {size:,} bytes would come instead of {end - start:,}",
                    where=str(response.url.host),
                    hint="a proxy on the way takes out HTTP ranges: set NO_PROXY for the Hub, or download with moepress pull",
                )
            try:
                raw = response.read()
            except httpx.TransportError:
                return None
        raw = raw if response.status_code == 206 else raw[:end]
        return raw if len(raw) == min(end, size) - start else None


def _checksum(raw: bytes, file: RemoteFile) -> str:
    digest = hashlib.sha256() if file.sha256 else git_blob_sha1(len(raw))
    digest.update(raw)
    return digest.hexdigest()


def open_hub_checkpoint(address: Address, *, tell: Tell | None = None) -> tuple[Checkpoint, Snapshot]:
    """A checkpoint on the Hub: headers only, ``folder`` None.

    Raises:
        HubError: no access, no such repository or revision.
        CheckpointError, FormatError: as `open_checkpoint`.
    """
    snapshot = snapshot_of(address, tell=tell)
    return open_checkpoint(str(address), files=HubFiles(snapshot)), snapshot


def snapshot_of(address: Address, *, tell: Tell | None = None, api: HfApi | None = None) -> Snapshot:
    """Connects, and takes the snapshot.

    Raises:
        HubError: see `take_snapshot`.
    """
    return take_snapshot(api or connect(tell), address)
