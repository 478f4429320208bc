"""Xet's storage, as far as hf-xet itself needs it: files as runs of chunks, chunks in xorbs, shards that say how.

    POST /xet/v1/xorbs/default/HASH       chunks, one after the other: version, packed size (3), scheme, size (3), bytes
    POST /xet/v1/shards                   48-byte records: header; per file its hash, its segments (xorb, size, first and
                                          last chunk), their verification, its SHA-256; an end mark of ones
    GET  /xet/v1/reconstructions/HASH     the segments of a file, and where their bytes can be fetched

A client that finds nothing under newer addresses (grants for direct upload, v2) takes these. Layout as in the published
specification of the protocol, https://huggingface.co/docs/xet.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass, field

import pyarrow

RECORD = 48
WITH_VERIFICATION, WITH_SHA256 = 1 << 31, 1 << 30
STORED, LZ4, GROUPED_LZ4 = 0, 1, 2


@dataclass(frozen=True)
class Segment:
    """A run of a xorb's chunks, ``first`` up to ``last``, of ``size`` bytes unpacked."""

    xorb: str
    size: int
    first: int
    last: int


@dataclass
class XetStore:
    """Xorbs by hash with the byte position of every chunk, and files by Xet hash and by SHA-256."""

    xorbs: dict[str, bytes] = field(default_factory=dict)
    starts: dict[str, list[int]] = field(default_factory=dict)
    files: dict[str, list[Segment]] = field(default_factory=dict)
    hashes: dict[str, str] = field(default_factory=dict)

    def put_xorb(self, name: str, body: bytes) -> bool:
        """Keeps a xorb; whether it was new."""
        new = name not in self.xorbs
        self.xorbs[name] = body
        self.starts[name] = [0]
        position = 0
        while position < len(body):
            position += 8 + int.from_bytes(body[position + 1 : position + 4], "little")
            self.starts[name].append(position)
        return new

    def put_shard(self, body: bytes) -> dict[str, bytes]:
        """Registers the files of a shard; their contents by SHA-256.

        Raises:
            ValueError: bytes that do not hash to what the shard says, or a xorb that is not here.
        """
        position, contents = RECORD, {}
        while body[position : position + 32] != b"\xff" * 32:
            name = text(body[position : position + 32])
            flags, count = struct.unpack_from("<II", body, position + 32)
            position += RECORD
            segments = []
            for _ in range(count):
                _, size, first, last = struct.unpack_from("<IIII", body, position + 32)
                segments.append(Segment(text(body[position : position + 32]), size, first, last))
                position += RECORD
            position += RECORD * count * bool(flags & WITH_VERIFICATION)
            content = b"".join(self.unpack(segment) for segment in segments)
            if flags & WITH_SHA256:
                sha256 = text(body[position : position + 32])
                position += RECORD
                if hashlib.sha256(content).hexdigest() != sha256:
                    raise ValueError(f"{name}: its bytes hash to something else than {sha256}")
                contents[sha256] = content
                self.hashes[sha256] = name
            self.files[name] = segments
        return contents

    def unpack(self, segment: Segment) -> bytes:
        """The bytes of a segment."""
        body, starts = self.xorbs[segment.xorb], self.starts[segment.xorb]
        chunks = [unpack_chunk(body[starts[i] : starts[i + 1]]) for i in range(segment.first, segment.last)]
        content = b"".join(chunks)
        if len(content) != segment.size:
            raise ValueError(f"{segment.xorb}: {len(content)} bytes instead of {segment.size}")
        return content

    def reconstruction(self, name: str, address: str) -> dict[str, object]:
        """How a file is put together. ``address``: where xorbs are served."""
        terms, places = [], {}
        for segment in self.files[name]:
            chunks = {"start": segment.first, "end": segment.last}
            starts = self.starts[segment.xorb]
            terms.append({"hash": segment.xorb, "unpacked_length": segment.size, "range": chunks})
            # the end of a byte range is part of it, the end of a chunk range is not
            place = {"start": starts[segment.first], "end": starts[segment.last] - 1}
            entry = {"range": chunks, "url": f"{address}/{segment.xorb}", "url_range": place}
            places.setdefault(segment.xorb, []).append(entry)
        return {"offset_into_first_range": 0, "terms": terms, "fetch_info": places}


def text(raw: bytes) -> str:
    """A hash as Xet writes it: four little-endian numbers in hex. The SHA-256 of a file is stored that way too."""
    return "".join(f"{number:016x}" for number in struct.unpack("<4Q", raw))


def unpack_chunk(raw: bytes) -> bytes:
    """A chunk's bytes from its header on."""
    scheme, size = raw[4], int.from_bytes(raw[5:8], "little")
    if scheme == STORED:
        return raw[8:]
    content: bytes = pyarrow.decompress(raw[8:], decompressed_size=size, codec="lz4", asbytes=True)
    if scheme == GROUPED_LZ4:  # every fourth byte stands together
        out, position = bytearray(size), 0
        for group in range(4):
            count = (size - group + 3) // 4
            out[group::4] = content[position : position + count]
            position += count
        content = bytes(out)
    return content
