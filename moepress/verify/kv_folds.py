"""Weights with a KV scale folded in: each must be the source's times powers of two, bit for bit.

The report says which weights, and which rows by how much; what it says is believed nowhere: the tensors are compared with
it here, and whether the factors cancel around the cache is asked in `kv`. So a wrong fold fails one of the two.

    BF16, F32     out = source · 2^a, rounded to its type
    kept FP8      the same codes; scale = source's scale · 2^a of its rows (E8M0 decoded first)
    FP8 → BF16    out = bf16(decoded source · 2^a)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from moepress.formats.checkpoint import TensorRef
from moepress.formats.storage import StoredWeight
from moepress.verify.files import SCALE_NAMES, OutputFiles
from moepress.verify.findings import Findings

Bands = tuple[tuple[int, int], ...]


def recorded_folds(report: Mapping[str, Any]) -> dict[str, Bands]:
    """Weight -> bands of (rows, exponent), as the report has them; what cannot be read is left to `kv.check_kv`."""
    found: dict[str, Bands] = {}
    for layer in ((report.get("kv_cache") or {}).get("layers") or {}).values():
        for name, bands in (layer.get("folds") or {}).items():
            found[name] = tuple((int(rows), int(exponent)) for rows, exponent in bands)
    return found


def row_exponents(bands: Bands, rows: int) -> torch.Tensor:
    """int64 [rows]: the bands written out one after the other, again and again until the rows end."""
    once = torch.tensor([exponent for count, exponent in bands for _ in range(count)])
    return once.repeat(-(-rows // len(once)))[:rows]


class FoldedWeights:
    """Compares folded weights of one output with one source.

    Args:
        folds: from `recorded_folds`.
        output: the output.
        original: reads a tensor of the source.
        truth: decodes a weight of the source, float32.
        served: reads a tensor of the output by name.
    """

    def __init__(
        self,
        folds: Mapping[str, Bands],
        output: OutputFiles,
        *,
        original: Callable[[TensorRef], torch.Tensor],
        truth: Callable[[StoredWeight], torch.Tensor],
        served: Callable[[str], torch.Tensor],
        findings: Findings,
    ) -> None:
        self._folds, self._output, self._findings = folds, output, findings
        self._original, self._truth, self._served = original, truth, served

    def __contains__(self, name: str) -> bool:
        return name in self._folds

    def check(self, stored: StoredWeight) -> list[str]:
        """Checks one folded weight; returns the output tensors that belong to it."""
        if stored.name not in self._output.tensors:
            self._findings.problem(stored.name, "missing")
            return [stored.name]
        factors = torch.exp2(row_exponents(self._folds[stored.name], stored.shape[0]).float())
        mine = self._served(stored.name)
        if tuple(mine.shape) != stored.shape:
            self._findings.problem(stored.name, f"is {list(mine.shape)}, the source has {list(stored.shape)}")
            return [stored.name]
        if not stored.kind.startswith("fp8"):
            source = self._original(stored.parts["weight"])
            self._compare(stored.name, mine, _times(source.float(), factors).to(source.dtype))
            return [stored.name]
        if mine.dtype == torch.bfloat16:
            self._compare(stored.name, mine, _times(self._truth(stored), factors).to(torch.bfloat16))
            return [stored.name]
        return self._kept_fp8(stored, mine, factors)

    def _kept_fp8(self, stored: StoredWeight, mine: torch.Tensor, factors: torch.Tensor) -> list[str]:
        module = stored.name.removesuffix(".weight")
        scale = next((f"{module}.{end}" for end in SCALE_NAMES if f"{module}.{end}" in self._output.tensors), None)
        if scale is None:
            self._findings.problem(stored.name, f"{mine.dtype} without a scale beside it")
            return [stored.name]
        self._compare(stored.name, mine, self._original(stored.parts["weight"]))
        theirs = self._original(stored.parts["scale"])
        if stored.scale_encoding == "e8m0":
            theirs = torch.exp2(theirs.contiguous().view(torch.uint8).float() - 127)
        high = stored.block[0] if stored.block else max(1, stored.shape[0] // max(1, theirs.numel()))
        first_rows = torch.arange(0, stored.shape[0], high)
        by_block = factors[first_rows]
        if not bool((factors == by_block.repeat_interleave(high)[: len(factors)]).all()):
            self._findings.problem(stored.name, "has one FP8 scale over rows of two factors")
        expected = _times(theirs.float().reshape(len(first_rows), -1), by_block).to(theirs.dtype)
        self._compare(scale, self._served(scale), expected)
        rest = [ref for role, ref in stored.parts.items() if role not in ("weight", "scale")]
        for ref in rest:
            self._compare(ref.name, self._served(ref.name), self._original(ref))
        return [stored.name, scale, *(ref.name for ref in rest)]

    def _compare(self, name: str, mine: torch.Tensor, expected: torch.Tensor) -> None:
        raw = [t.contiguous().reshape(-1).view(torch.uint8) for t in (mine, expected)]
        if mine.dtype != expected.dtype or not torch.equal(*raw):
            self._findings.problem(name, "is not the source's times the powers of two of the KV scale folded in")


def _times(values: torch.Tensor, by_row: torch.Tensor) -> torch.Tensor:
    """Rows × factors; values [R] or [R, …]."""
    return values * by_row.reshape(-1, *[1] * (values.ndim - 1))
