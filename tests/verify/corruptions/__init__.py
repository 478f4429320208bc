"""Single corruptions of a good output, by the hundred: each a function with a name, applied to a copy.

    weights     numbers, signs, nibbles, scales, dtypes, shapes, names, places    every checksum is made to agree,
                (`numbers`: the edits)                                            so only the contents can give it away
    documents   config.json and quantization_config, field by field; index;       as a hand or a disk would change them
                receipts, plan, report
    files       shards, side files, strangers, links

`corruptions` maps a name to (family, corrupt); corrupt(folder) changes one thing in the copy (`written`).
"""

from __future__ import annotations

from pathlib import Path

from fuzz.small import build
from tests.verify.corruptions.documents import (
    config_corruptions,
    described,
    described_with_checksums,
    index_corruptions,
    state_corruptions,
)
from tests.verify.corruptions.files import file_corruptions
from tests.verify.corruptions.weights import tensor_corruptions
from tests.verify.corruptions.written import REPORT, Corrupt, load


def corruptions(good: dict[str, Path]) -> dict[str, tuple[str, Corrupt]]:
    """Every corruption, by name.

    Args:
        good: undamaged outputs by family, whose documents say which fields there are.
    """
    kimi = good["kimi"]
    receipts = sorted(f".moepress/receipts/{path.name}" for path in (kimi / ".moepress" / "receipts").iterdir())
    states = {name: load(kimi / name) for name in (REPORT, ".moepress/plan.json", receipts[1])}
    side = sorted(build("kimi").side)
    descriptions = {family: load(good[family] / "config.json")["quantization_config"] for family in ("kimi", "glm4")}
    table: dict[str, tuple[str, Corrupt]] = {}
    for part in (
        tensor_corruptions(),
        config_corruptions(),
        described(descriptions),
        described_with_checksums(),
        index_corruptions(),
        state_corruptions(states),
        file_corruptions(side, receipts),
    ):
        for name, family, corrupt in part:
            assert (name, family) not in {(n, f) for n, (f, _) in table.items()}, name
            table[f"{name}" if family == "kimi" else f"{family}, {name.removeprefix(f'{family} ')}"] = family, corrupt
    return table
