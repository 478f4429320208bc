"""Files that are gone, cut, swapped, renamed, doubled, linked, or nobody's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from fuzz.small import INDEX
from tests.verify.corruptions.written import REPORT, Corrupt, put, receipt, reseal


def file_corruptions(side: list[str], receipts: list[str]) -> Iterator[tuple[str, str, Corrupt]]:
    for name in side:
        yield f"{name}: changed", "kimi", lambda out, n=name: put(out / n, (out / n).read_bytes() + b" ")
        yield f"{name}: removed", "kimi", lambda out, n=name: (out / n).unlink()
    for name in ("config.json", INDEX, REPORT, ".moepress/plan.json", *receipts):
        yield f"{name}: gone", "kimi", lambda out, n=name: (out / n).unlink()
        yield f"{name}: cut", "kimi", lambda out, n=name: put(out / n, (out / n).read_bytes()[:-20])
        yield f"{name}: empty", "kimi", lambda out, n=name: put(out / n, b"")
    first, second = (f"model-0000{n}-of-00003.safetensors" for n in (1, 2))

    def swap(out: Path) -> None:
        a, b = (out / first).read_bytes(), (out / second).read_bytes()
        put(out / first, b)
        put(out / second, a)

    def move(out: Path) -> None:
        (out / first).rename(out / "model-00009-of-00009.safetensors")

    def link(out: Path) -> None:
        (out / "tiktoken.model").unlink()
        (out / "tiktoken.model").symlink_to("/etc/hostname")

    def folder(out: Path) -> None:
        (out / first).unlink()
        (out / first).mkdir()

    def no_format(out: Path) -> None:
        raw = (out / first).read_bytes()
        start = 8 + int.from_bytes(raw[:8], "little")
        text = raw[8:start].replace(b'"format":"pt"', b'"format":"tf"')
        put(out / first, raw[:8] + text + raw[start:])
        reseal(out)

    def byte(place: int) -> Corrupt:
        def corrupt(out: Path) -> None:
            raw = bytearray((out / first).read_bytes())
            raw[place] ^= 1
            put(out / first, bytes(raw))

        return corrupt

    shards: dict[str, Corrupt] = {
        "a shard gone": lambda out: (out / first).unlink(),
        "a shard cut by one byte": lambda out: put(out / first, (out / first).read_bytes()[:-1]),
        "a shard with a byte more": lambda out: put(out / first, (out / first).read_bytes() + b"\x00"),
        "a shard empty": lambda out: put(out / first, b""),
        "two shards swapped": swap,
        "a shard renamed": move,
        "a shard twice": lambda out: put(out / "model.safetensors", (out / first).read_bytes()),
        "a shard that is a folder": folder,
        "a side file that is a link": link,
        "a header without its format": no_format,
        "the first byte of a shard": byte(0),
        "a byte in the header of a shard": byte(40),
        "the last byte of a shard": byte(-1),
        "weights of another format": lambda out: put(out / "pytorch_model.bin", b"\x80\x02."),
        "code that nobody wrote": lambda out: put(out / "modeling_x.py", b"import os\n"),
        "a stranger in a folder": lambda out: put(out / "docs" / "x.md", b"x"),
        "a stranger without a name": lambda out: put(out / ".env", b"TOKEN=x"),
        "a receipt too many": lambda out: put(
            receipt(out, "model-00004-of-00004.safetensors"), receipt(out, first).read_bytes()
        ),
        "a receipt of another shard": lambda out: put(receipt(out, first), receipt(out, second).read_bytes()),
    }
    for said, corrupt in shards.items():
        yield said, "kimi", corrupt
