"""KV scales of an output: names and scheme are what the server reads, and folds cancel around the cache.

Whether factors cancel is asked of attention itself, not of the code that chose them. With e(W) the exponents of a
weight's rows, n those of the norm before the latent, and per head:

    MLA   scores   e(q)[nope] + e(kv_b)[K] + n = 0          GQA   scores   e(q) + e(k) = 0
                   e(q)[rope] + e(kv_a)[rope]  = 0                output   e(v) + e(o) = 0
          output   e(kv_b)[V] + n + e(o)       = 0                with per-head norms, the norms' alone count

and what comes before a norm must not be scaled at all (the norm would take it out again). What the cache then holds is
x · 2^n (latent), x · 2^e(kv_a)[rope] (k_pe), x · 2^e(k), x · 2^e(v): the recorded scales must be the inverses.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from safetensors import safe_open

from moepress.errors import PlanRefused
from moepress.formats.families import Family, classify, text_config
from moepress.formats.kv_contract import SCALE_ENDINGS
from moepress.formats.runtime_contract import Contract, contract_for
from moepress.verify.files import REPORT, OutputFiles
from moepress.verify.findings import Findings
from moepress.verify.kv_folds import Bands, recorded_folds, row_exponents

ATTENTION = ".self_attn."
SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}
"""What servers take as kv_cache_scheme."""


def check_kv(output: OutputFiles, family: Family, findings: Findings) -> list[str]:
    """Everything about KV scales that the output alone shows. Returns what was checked, in words."""
    contract = recorded_contract(output, family, findings)
    if contract is None:
        return []
    recorded = output.report.get("kv_cache") or {"emission": "none"}
    _check_written(output, recorded, contract, findings)
    folds = recorded_folds(output.report)
    _check_receipts(output, folds, findings)
    _check_cancelling(output, family, recorded, folds, findings)
    folded = sum(bool(layer.get("folds")) for layer in (recorded.get("layers") or {}).values())
    if recorded["emission"] == "none":
        return ["KV scales: none, and none is found"]
    if recorded["emission"] == "checkpoint":
        return [f"KV scales: {len(recorded['tensors'])} tensors, under the names {contract.server} reads"]
    return [f"KV scales: folded in {folded} of {len(recorded['layers'])} layers; the factors cancel around the cache"]


def recorded_contract(output: OutputFiles, family: Family, findings: Findings) -> Contract | None:
    """The contract of the server that the report names; None, and a problem, where there is none."""
    serving = (output.report.get("recipe") or {}).get("serving") or {}
    try:
        return contract_for(str(serving.get("server")), str(serving.get("version")), family.key)
    except PlanRefused as error:
        findings.problem(REPORT, error.what)
        return None


def written_scales(output: OutputFiles) -> dict[str, torch.Tensor]:
    """Tensors of the output that are KV scales, by name."""
    found = {}
    for name, (shard, *_) in output.tensors.items():
        if name.endswith(SCALE_ENDINGS):
            with safe_open(output.folder / shard, framework="pt") as file:
                found[name] = file.get_tensor(name)
    return found


def _check_written(output: OutputFiles, recorded: Mapping[str, Any], contract: Contract, findings: Findings) -> None:
    scales = written_scales(output)
    for name, tensor in scales.items():
        if tensor.numel() != 1 or tensor.dtype != torch.float32:
            findings.problem(name, f"is {tensor.dtype} {list(tensor.shape)}; servers read one float32 value")
            continue
        value = float(tensor)
        if not 0 < value < math.inf:
            findings.problem(name, f"is {value:g}; a scale is a positive number")
        elif (wrong := contract.kv_scales.problem(name, value)) is not None:
            findings.problem(name, wrong)
    scheme = (output.config.get("quantization_config") or {}).get("kv_cache_scheme")
    if scheme is not None and any(scheme.get(field) != value for field, value in SCHEME.items()):
        findings.problem("config.json", f"kv_cache_scheme is not static, symmetric float8 per tensor: {scheme}")
    if scheme is not None and not scales:
        findings.problem("config.json", "has a kv_cache_scheme, no shard holds a scale: the cache would be FP8 at 1.0")
    if recorded.get("emission") != "checkpoint":
        return
    if scheme is None:
        findings.problem("config.json", "has no kv_cache_scheme, so the server leaves the scales unused")
    expected = {}
    for layer, figures in recorded["layers"].items():
        for cached, suffix in contract.kv_scales.written:
            ending = f".layers.{layer}{ATTENTION}{suffix}"
            written = next((str(n) for n in recorded["tensors"] if str(n).endswith(ending)), ending[1:])
            expected[written] = figures["scale"][cached]
    for name, value in expected.items():
        if name not in scales:
            findings.problem(name, "a KV scale that the report has and no shard holds")
        elif scales[name].numel() == 1 and float(scales[name]) != value:
            findings.problem(name, f"is {float(scales[name]):g}, the report says {value:g}")
    for name in scales.keys() - expected.keys():
        findings.problem(name, "a KV scale that the report does not have")


def _check_receipts(output: OutputFiles, folds: Mapping[str, Bands], findings: Findings) -> None:
    """Report and receipts agree on what was folded."""
    for receipt in output.receipts.values():
        for name, record in receipt.get("weights", {}).items():
            claimed = tuple((int(r), int(e)) for r, e in record.get("fold") or ())
            if claimed != folds.get(name, ()):
                findings.problem(
                    name, f"its receipt folds a KV scale as {claimed or 'none'}, the report as {folds.get(name)}"
                )


def _check_cancelling(
    output: OutputFiles, family: Family, recorded: Mapping[str, Any], folds: Mapping[str, Bands], findings: Findings
) -> None:
    layers: dict[int, dict[str, str]] = {}
    for name in output.tensors:
        layer, inner = classify(family, output.config, name).layer, name.partition(ATTENTION)[2]
        if layer is not None and inner.endswith((".weight", ".bias")):
            layers.setdefault(layer, {})[inner] = name
    known = {name for names in layers.values() for name in names.values()}
    for name in folds.keys() - known:
        findings.problem(name, "the report folds a KV scale into it, and it is no weight of attention")
    for layer, names in sorted(layers.items()):
        figures = (recorded.get("layers") or {}).get(str(layer))
        if figures is None:
            if recorded["emission"] != "none":
                findings.problem(f"layer {layer}", "has no KV scales in the report")
            continue
        rows = _Layer({inner: output.tensors[name][2][0] for inner, name in names.items()}, names, folds)
        wrong, cached = _mla(rows, text_config(family, output.config)) if family.attention == "mla" else _gqa(rows)
        for problem in wrong:
            findings.problem(f"layer {layer}", f"KV scales folded into its weights do not cancel: {problem}")
        for name, exponent in cached.items():
            folded_scale = 2.0**-exponent
            if recorded["emission"] == "folded" and figures["scale"].get(name) != folded_scale:
                findings.problem(
                    f"layer {layer}",
                    f"its weights divide {name} by {folded_scale:g}, the report says {figures['scale'].get(name)}",
                )
            elif recorded["emission"] != "folded" and exponent:
                findings.problem(f"layer {layer}", f"{name} is folded, and the emission is {recorded['emission']}")


class _Layer:
    """Exponents of the rows of one layer's weights, by name inside ``self_attn``; zero where nothing is folded."""

    def __init__(self, rows: Mapping[str, int], names: Mapping[str, str], folds: Mapping[str, Bands]) -> None:
        self._rows, self._names, self._folds = rows, names, folds
        self._asked: set[str] = set()

    def __contains__(self, inner: str) -> bool:
        return inner in self._rows

    def of(self, inner: str) -> torch.Tensor:
        """int64 [rows]; one zero for a weight that the layer does not have."""
        self._asked.add(inner)
        bands = self._folds.get(self._names.get(inner, ""))
        rows = self._rows.get(inner, 1)
        return torch.zeros(rows, dtype=torch.int64) if bands is None else row_exponents(bands, rows)

    def strangers(self) -> list[str]:
        """Folded weights that nobody asked about."""
        return [inner for inner, name in self._names.items() if name in self._folds and inner not in self._asked]


def _mla(layer: _Layer, text: Mapping[str, Any]) -> tuple[list[str], dict[str, int]]:
    """Problems, and the exponents with which latent and k_pe arrive in the cache."""
    rank, rope, nope, v = (
        int(text[key]) for key in ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
    )
    norm, out = layer.of("kv_a_layernorm.weight"), layer.of("o_proj.weight")
    kv_a, kv_b = layer.of("kv_a_proj_with_mqa.weight"), layer.of("kv_b_proj.weight").view(-1, nope + v)
    if "q_a_layernorm.weight" in layer:
        before = layer.of("q_a_layernorm.weight")
        query = layer.of("q_b_proj.weight").view(-1, nope + rope) + before[0]
    else:
        before = torch.zeros(1, dtype=torch.int64)
        query = layer.of("q_proj.weight").view(-1, nope + rope)
    n, o, p = norm[0], out[0], kv_a[rank]
    wrong = []
    if not (bool((norm == n).all()) and bool((before == before[0]).all()) and bool((out == o).all())):
        wrong.append("a norm or o_proj has more than one factor")
    if bool(kv_a[:rank].any()) or not bool((kv_a[rank:] == p).all()):
        wrong.append("kv_a_proj_with_mqa: its latent rows stand before a norm, its rotary rows are one vector")
    if "kv_a_proj_with_mqa.bias" in layer and not torch.equal(layer.of("kv_a_proj_with_mqa.bias"), kv_a):
        wrong.append("kv_a_proj_with_mqa: weight and bias differ")
    if bool((query[:, :nope] + kv_b[:, :nope] + n).any()) or bool((query[:, nope:] + p).any()):
        wrong.append("the scores change")
    if bool((kv_b[:, nope:] + n + o).any()):
        wrong.append("the values change")
    wrong += [f"{name} is folded" for name in layer.strangers()]
    return wrong, {"latent": int(n), "k_pe": int(p)}


def _gqa(layer: _Layer) -> tuple[list[str], dict[str, int]]:
    """Problems, and the exponents with which K and V arrive in the cache."""
    wrong = []
    exponents: dict[str, int] = {}
    normed = "k_norm.weight" in layer
    for role, module in {
        "q": "q_norm" if normed else "q_proj",
        "k": "k_norm" if normed else "k_proj",
        "v": "v_proj",
        "o": "o_proj",
    }.items():
        rows = layer.of(f"{module}.weight")
        exponents[role] = int(rows[0])
        with_bias = layer.of(f"{module}.bias") if f"{module}.bias" in layer else rows
        if not bool((rows == rows[0]).all()) or (role != "o" and not bool((with_bias == rows[0]).all())):
            wrong.append(f"{module}: rows, or weight and bias, have different factors")
        if role == "o" and f"{module}.bias" in layer and bool(with_bias.any()):
            wrong.append("o_proj.bias is folded")
    if exponents["q"] + exponents["k"]:
        wrong.append("the scores change")
    if exponents["v"] + exponents["o"]:
        wrong.append("the values change")
    wrong += [f"{name} is folded" for name in layer.strangers()]
    return wrong, {"k": exponents["k"], "v": exponents["v"]}
