"""Edits that break things: values no writer writes, changes anywhere in a JSON tree, and changes of bytes.

Every function takes the random generator of its case and changes nothing else.
"""

from __future__ import annotations

import copy
import json
import random
from typing import Any

VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 7, 8, 16, 128, 255, 2**16, 2**31 - 1, 2**31, 2**32, 2**40, 2**53 + 1),
    *(2**63 - 1, 2**63, 2**64 - 1, 2**64, 10**30, -(2**63), 0.0, -0.0, 0.5, 1e308, 1e-308, float("nan"), float("inf")),
    *(
        "",
        " ",
        "0",
        "-1",
        "128",
        "..",
        "../x",
        "../../etc/passwd",
        "/etc/passwd",
        "a\\b",
        "\x00",
        "lm_head\x00x",
        "\ud800",
        "é",
        "漢字",
        "%s%n",
    ),
    *(
        "__metadata__",
        "F32",
        "BF16",
        "F4",
        "F8_E4M3",
        "I64",
        "bool",
        "weight",
        "x" * 300,
        "re:(a+)+$",
        "re:[",
        "re:.*",
        "Linear",
    ),
    *(
        [],
        {},
        [[]],
        [{}],
        {"": 0},
        {"a": {"b": []}},
        [0, 0],
        [0, 2**63],
        [1, 2, 3],
        [-1, 0],
        [0.5, 1.0],
        ["a"],
        [None],
        [2**40] * 3,
    ),
    [1] * 100,
)
"""What takes the place of an honest value."""

TEXTS = (
    *(
        b"",
        b" ",
        b"{",
        b"}",
        b"[]",
        b"null",
        b"{}",
        b"0",
        b'""',
        b"\xef\xbb\xbf{}",
        b"\xff\xfe{\x00}\x00",
        b"\x00" * 64,
        b"NaN",
    ),
    *(
        b"[" * 100_000,
        b'{"a":' * 50_000,
        b'{"a":' + b"9" * 10_000 + b"}",
        b'{"a":1e99999}',
        b'{"a":"\\ud800"}',
        b"\x80\x81",
    ),
    b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 4999819336\n",
    *(
        b"<!DOCTYPE html><html><body>401</body></html>",
        b"PK\x03\x04" + b"\x00" * 60,
        b"\x80\x02}q\x00.",
        b"GGUF" + b"\x00" * 60,
        b"\x1f\x8b\x08\x00" + b"\x00" * 20,
    ),
)
"""Whole files that stand where another was expected."""


def wild_value(rng: random.Random) -> Any:
    """One of `VALUES`, or a number near a power of two, or something random."""
    kind = rng.random()
    if kind < 0.7:
        return copy.deepcopy(rng.choice(VALUES))
    if kind < 0.85:
        return rng.choice((-1, 1)) * (2 ** rng.randrange(0, 70) + rng.randrange(-1, 2))
    if kind < 0.95:
        return "".join(
            chr(rng.choice((rng.randrange(32, 127), rng.randrange(0, 0x2FF)))) for _ in range(rng.randrange(0, 12))
        )
    return [wild_value(rng) for _ in range(rng.randrange(0, 4))]


def places(tree: Any) -> list[tuple[Any, Any]]:
    """(container, key) of every value below ``tree``."""
    found: list[tuple[Any, Any]] = []
    queue = [tree]
    while queue:
        node = queue.pop()
        keys = list(node) if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ()
        for key in keys:
            found.append((node, key))
            queue.append(node[key])
    return found


def edit_tree(rng: random.Random, tree: Any) -> None:
    """One change somewhere in a JSON tree, in place."""
    found = places(tree)
    if not found:
        return
    node, key = rng.choice(found)
    change = rng.randrange(9)
    if change <= 2:
        node[key] = wild_value(rng)
    elif change == 3:
        del node[key]
    elif change == 4 and isinstance(node, dict):
        node[str(wild_value(rng))] = node.pop(key)
    elif change == 5:
        other, place = rng.choice(found)
        node[key] = other[place] if not isinstance(other[place], dict | list) else json.loads(json.dumps(other[place]))
    elif change == 6:
        value = node[key]
        node[key] = rng.choice(([value], {"a": value}, str(value) if not isinstance(value, dict | list) else []))
    elif change == 7 and isinstance(node[key], int | float):
        node[key] = rng.choice(
            (-node[key], node[key] + 1, node[key] - 1, node[key] * 2, node[key] / 2, float(node[key]))
        )
    elif isinstance(node, dict):
        node[str(wild_value(rng))] = wild_value(rng)
    else:
        node.append(wild_value(rng))


def to_text(rng: random.Random, tree: Any) -> bytes:
    """JSON bytes of a tree; sometimes with a key that is there twice, which no dict can hold."""
    text = json.dumps(tree, ensure_ascii=rng.random() < 0.5)
    if rng.random() < 0.08 and isinstance(tree, dict) and tree:
        key = rng.choice(list(tree))
        again = json.dumps(tree[key] if rng.random() < 0.5 else wild_value(rng))
        text = text[:-1] + f", {json.dumps(key)}: {again}}}"
    return text.encode("utf-8", "surrogatepass")


def edit_bytes(rng: random.Random, raw: bytes) -> bytes:
    """One change of bytes: a bit, a cut, a hole, an insertion, a repetition, an exchange."""
    if not raw:
        return rng.choice(TEXTS)
    data = bytearray(raw)
    at = rng.randrange(len(data))
    size = min(len(data) - at, 1 + int(rng.expovariate(1 / 8)))
    change = rng.randrange(8)
    if change <= 2:
        data[at] ^= 1 << rng.randrange(8)
    elif change == 3:
        del data[at:]
    elif change == 4:
        del data[at : at + size]
    elif change == 5:
        data[at:at] = rng.randbytes(size)
    elif change == 6:
        data[at:at] = data[at : at + size]
    else:
        other = rng.randrange(len(data))
        data[at], data[other] = data[other], data[at]
    return bytes(data)
