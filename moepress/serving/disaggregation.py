"""Prefill and decode on servers of their own: what two checkpoints must share, and what SGLang 0.5.23 refuses.

    prompt ─▶ router ─▶ prefill server ── KV cache, byte for byte ──▶ decode server ─▶ tokens
                        FP8 weights                                   INT4 experts
                        many tokens at once, bound by compute         few at once, bound by reading weights

SGLang compares the KV dtype and the page size of the two, as strings, when decode first meets prefill; it compares
neither weights nor scales. So FP8 weights may fill a cache that INT4 weights read, if every byte means the same to both:

    refused by SGLang, and here before it starts     another KV dtype, another page size
    refused here, unnoticed there                    another config.json, other KV scales (in files, or folded in weights)

A BF16 cache on the prefill side with an FP8 one on the decode side is therefore not possible in 0.5.23: nothing converts
on the way, and the name of the dtype differs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from moepress.errors import PlanRefused
from moepress.formats.checkpoint import Checkpoint
from moepress.formats.runtime_contract import Contract
from moepress.formats.same_model import config_differences
from moepress.verify.kv_pair import kv_differences

KvDtypeName = Literal["bfloat16", "fp8_e4m3"]
"""SGLang's own names. ``bf16`` means the same to a server, and not to the comparison of two."""

_NAMES: Mapping[str, KvDtypeName] = {
    "bf16": "bfloat16",
    "bfloat16": "bfloat16",
    "fp8": "fp8_e4m3",
    "fp8_e4m3": "fp8_e4m3",
}
COMPARED_AT = "read in disaggregation/common/conn.py:1320-1335"
_SHOWN = 5
ROWS = 64
"""Rows of each weight before the cache that are read before a launch: a folded scale is the same in all."""


def kv_dtype_name(word: str, *, where: str = "--kv-dtype") -> KvDtypeName:
    """SGLang's name of a KV dtype.

    Raises:
        PlanRefused: none that both servers can be given.
    """
    if word not in _NAMES:
        raise PlanRefused(f"{word!r} is not one of {', '.join(_NAMES)}", where=where)
    return _NAMES[word]


def check_kv_dtypes(prefill: KvDtypeName, decode: KvDtypeName, contract: Contract) -> None:
    """Both servers keep their cache in one dtype.

    Raises:
        PlanRefused: they do not.
    """
    if prefill == decode:
        return
    server = f"{contract.server} {contract.version}"
    what = (
        f"a {prefill} KV cache on the prefill side with a {decode} one on the decode side is not possible in {server}"
    )
    raise PlanRefused(
        f"{what}: the bytes travel as they are, and decode refuses another dtype than its own ({COMPARED_AT})",
        where="--prefill-kv-dtype, --decode-kv-dtype",
        hint="--kv-dtype fp8_e4m3 or --kv-dtype bfloat16, for both",
    )


def check_pair(prefill: Checkpoint, decode: Checkpoint, contract: Contract) -> None:
    """The two checkpoints are one model, whose cached bytes mean the same to both.

    Raises:
        PlanRefused: with everything that differs.
    """
    problems = config_differences(prefill.config, decode.config)
    # two models are told apart already, and their weights would say nothing about scales
    differing = [] if problems else kv_differences(prefill, decode, contract.kv_scales, rows=ROWS)
    if differing:
        more = f" … and {len(differing) - _SHOWN:,} more" if len(differing) > _SHOWN else ""
        problems.append(
            f"{len(differing):,} KV scales differ, so cached values would be read at the wrong size: "
            f"{'; '.join(map(str, differing[:_SHOWN]))}{more}"
        )
    if problems:
        hint = "both must come from one source"
        if differing:
            hint = (
                f"moepress convert SRC PREFILL --recipe prefill --same-kv-as {decode.location}, and prefill with that"
            )
        raise PlanRefused(
            f"{prefill.location} cannot prefill for {decode.location}:\n  " + "\n  ".join(problems),
            where="--prefill, --decode",
            hint=hint,
        )
