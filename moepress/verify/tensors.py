"""Every tensor of the output against the source, one weight at a time.

The source is decoded here a second time, in plain torch and from the safetensors library's tensors, so that a mistake in
the converter's decoder, packer or kernels cannot hide in its own mirror:

    FP8     codes.float() · scale spread over its blocks
    INT4    compressed_tensors' unpack_from_int32, times the scale spread over its groups

Kept weights must be equal bit for bit, but for the powers of two behind a rescaled norm (`norm_factors`). A quantized
weight must be finite, close to the source, as close as its receipt says, and for round-to-nearest each code must be the
nearest one to w / s and each scale one that the recipe gives (`rounded_scales`).
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32
from safetensors import safe_open

from moepress.formats.checkpoint import Checkpoint, TensorRef
from moepress.formats.families import Component, Family, classify
from moepress.formats.storage import StoredWeight
from moepress.verify.files import PACKED, SCALE_NAMES, OutputFiles
from moepress.verify.findings import Findings
from moepress.verify.kv_folds import FoldedWeights, recorded_folds
from moepress.verify.norm_factors import NormFactors
from moepress.verify.rounded_scales import max_scales_off, searched_scales_off

FACTOR_TOLERANCE = 0.2
"""How far a fitted pair of AWQ factors may be from cancelling: they are fitted to rounded rows and columns."""

DEFAULT_LIMIT = 0.25
"""Largest relative error where no recipe says otherwise."""


OPEN_SHARDS = 8
"""Shards that a thread keeps open: opening one reads its whole header, which has thousands of names."""


class OpenShards:
    """Tensors by the safetensors library; each thread has its own files, the least used is closed."""

    def __init__(self) -> None:
        self._local = threading.local()

    def tensor(self, path: Path, name: str) -> torch.Tensor:
        files: OrderedDict[Path, Any] = self._local.__dict__.setdefault("files", OrderedDict())
        if path not in files:
            while len(files) >= OPEN_SHARDS:
                files.popitem(last=False)
            files[path] = safe_open(path, framework="pt")
        files.move_to_end(path)
        tensor: torch.Tensor = files[path].get_tensor(name)
        return tensor


class WeightCheck:
    """Compares weights of one output with one source; used from several threads."""

    def __init__(
        self,
        output: OutputFiles,
        source: Checkpoint,
        storage: Mapping[str, StoredWeight],
        family: Family,
        findings: Findings,
    ) -> None:
        self.output, self.source, self.family, self.findings = output, source, family, findings
        self._shards = OpenShards()
        self._storage = storage
        recipe = output.report.get("recipe") or {}
        self.limit = float((recipe.get("limits") or {}).get("max_relative_error", DEFAULT_LIMIT))
        weights = recipe.get("weights") or {}
        self.algorithm, self.scale = weights.get("algorithm"), weights.get("scale")
        self.signed_scales = bool(weights.get("signed_scales"))
        self._norms = NormFactors(
            source.config,
            family,
            storage,
            rescaled="awq" in str(self.algorithm) and bool((weights.get("awq") or {}).get("norm")),
            pressed={name for name in output.tensors if name.endswith(".weight_packed")},
            truth=self.truth,
            served=self._out,
            findings=findings,
        )
        self._folded = FoldedWeights(
            recorded_folds(output.report),
            output,
            original=self._src,
            truth=self.truth,
            served=self._out,
            findings=findings,
        )
        self.records: Mapping[str, Any] = {
            name: record for receipt in output.receipts.values() for name, record in receipt.get("weights", {}).items()
        }

    def check(self, stored: StoredWeight) -> list[str]:
        """Checks one logical weight; returns the output tensors that belong to it."""
        module = stored.name.removesuffix(".weight")
        present = self.output.tensors
        if f"{module}.weight_packed" in present and stored.kind != "int4_packed":
            names = [f"{module}.{part}" for part in PACKED]
            if all(self._there(name) for name in names):
                self._packed(stored, module)
            return names
        if stored.name in self._folded:
            return self._folded.check(stored)
        if stored.name in present and (exact := self._norms.holds(stored)) is not None:
            if not exact:
                self.findings.problem(stored.name, "is not the source's times the factors of the norm before it")
            return [stored.name]
        if stored.kind.startswith("fp8") and stored.name in present:
            dtype = present[stored.name][1]
            if dtype == "BF16":
                self._rounded(stored)
                return [stored.name]
            scale = next((f"{module}.{end}" for end in SCALE_NAMES if f"{module}.{end}" in present), None)
            if scale is None:
                self.findings.problem(stored.name, f"{dtype} without a scale beside it")
                return [stored.name]
            self._same_bits(stored.parts["weight"], stored.name)
            self._same_scale(stored, scale)
            rest = [ref for role, ref in stored.parts.items() if role not in ("weight", "scale")]
            for ref in rest:
                self._same_bits(ref, ref.name)
            return [stored.name, scale, *(ref.name for ref in rest)]
        for ref in stored.parts.values():
            if self._there(ref.name):
                self._same_bits(ref, ref.name)
        return [ref.name for ref in stored.parts.values()]

    def _there(self, name: str) -> bool:
        if name in self.output.tensors:
            return True
        self.findings.problem(name, "missing")
        return False

    def _same_bits(self, ref: TensorRef, name: str) -> None:
        _, dtype, shape = self.output.tensors[name]
        if (dtype, shape) != (ref.dtype, ref.shape):
            self.findings.problem(name, f"is {dtype} {list(shape)}, the source has {ref.dtype} {list(ref.shape)}")
        elif not torch.equal(_raw(self._out(name)), _raw(self._src(ref))):
            self.findings.problem(name, "kept, but its bytes differ from the source's")

    def _same_scale(self, stored: StoredWeight, name: str) -> None:
        mine, theirs = self._out(name), self._src(stored.parts["scale"])
        if stored.scale_encoding == "e8m0":
            theirs = _e8m0(theirs)
        rows = (theirs.numel(), 1)  # one per channel, which servers want as a column
        shapes = {
            tuple(theirs.shape),
            rows if stored.kind == "fp8_channel" and theirs.ndim == 1 else tuple(theirs.shape),
        }
        if mine.dtype != theirs.dtype or tuple(mine.shape) not in shapes or not torch.equal(_raw(mine), _raw(theirs)):
            self.findings.problem(name, "differs from the source's scale")

    def _rounded(self, stored: StoredWeight) -> None:
        mine = self._out(stored.name)
        if tuple(mine.shape) != stored.shape:
            self.findings.problem(stored.name, f"is {list(mine.shape)}, the source has {list(stored.shape)}")
        elif not torch.equal(_raw(mine), _raw(self.truth(stored).to(torch.bfloat16))):
            self.findings.problem(stored.name, "is not the source's FP8 rounded to BF16")

    def _packed(self, stored: StoredWeight, module: str) -> None:
        problem = self.findings.problem
        if classify(self.family, self.source.config, stored.name).component is not Component.ROUTED_EXPERT:
            problem(stored.name, "is quantized, and is not a routed expert")
        packed, scale, shape = (self._out(f"{module}.{part}") for part in PACKED)
        rows, columns = stored.shape
        wrong = [
            f"{name} is {tensor.dtype} {list(tensor.shape)}"
            for name, tensor, dtype, want in (
                ("weight_packed", packed, torch.int32, (rows, -(-columns // 8))),
                ("weight_scale", scale, torch.bfloat16, (rows, scale.shape[-1] if scale.ndim == 2 else -1)),
                ("weight_shape", shape, torch.int64, (2,)),
            )
            if tensor.dtype != dtype or tuple(tensor.shape) != want
        ]
        if wrong or shape.tolist() != [rows, columns] or columns % scale.shape[-1]:
            problem(
                stored.name,
                f"is [{rows}, {columns}] in the source; {'; '.join(wrong)} weight_shape {shape.tolist()}, "
                f"scale {list(scale.shape)}",
            )
            return
        expected_group = self._group_size(columns)
        if expected_group is not None and columns // scale.shape[1] != expected_group:
            problem(stored.name, f"has groups of {columns // scale.shape[1]}, config.json says {expected_group}")
        sizes = scale.abs() if self.signed_scales else scale
        if not bool((torch.isfinite(scale) & (sizes > 0)).all()):
            problem(
                stored.name,
                f"has scales that are not {'numbers other than 0' if self.signed_scales else 'positive numbers'}",
            )
            return
        codes = unpack_from_int32(packed, 4, torch.Size((rows, columns))).float()
        spread = scale.float().repeat_interleave(columns // scale.shape[1], 1)
        truth = self.truth(stored)
        if (factors := self._norms.reader(stored)) is not None:
            truth = truth * factors
        if self.records.get(stored.name, {}).get("awq_alpha"):
            truth = self._smoothed(stored, truth, codes * spread)
        served = codes * spread
        error = float((truth - served).double().pow(2).sum())
        energy = float(truth.double().pow(2).sum())
        relative = (error / energy) ** 0.5 if energy > 0 else (0.0 if error == 0 else float("inf"))
        if not relative <= self.limit:
            problem(stored.name, f"relative error {relative:.4f}, above the limit {self.limit}")
        self._hold_against_receipt(stored.name, relative)
        if self.algorithm == "rtn":
            self._as_rounded(stored.name, truth, scale, served)
            nearest = (truth / spread).round_().clamp_(-8, 7)
            off = int((nearest != codes).sum())
            if off:
                problem(stored.name, f"{off} of {codes.numel()} codes are not the nearest to the source")

    def _as_rounded(self, name: str, truth: torch.Tensor, scale: torch.Tensor, served: torch.Tensor) -> None:
        """The scales are those that rounding to nearest gives (`rounded_scales`)."""
        if self.scale == "max":
            if off := max_scales_off(truth, scale):
                self.findings.problem(
                    name, f"{off} of {scale.numel()} scales are not those of the recipe, max|w| / 7.5"
                )
        elif self.scale == "mse":
            strange, worse, judged = searched_scales_off(truth, scale, served, name=name, signed=self.signed_scales)
            if strange:
                self.findings.problem(
                    name, f"{strange} of {scale.numel()} scales are none that the recipe's search tries"
                )
            if worse:
                self.findings.problem(
                    name, f"{worse} of {judged} judged groups have a scale that loses more than another of the search"
                )

    def _smoothed(self, stored: StoredWeight, truth: torch.Tensor, served: torch.Tensor) -> torch.Tensor:
        """The source's matrix with AWQ's factors, which no file holds: up's rows × s, down's columns ÷ s.

        Each factor is the least-squares fit of the served row (column) by the source's. That they belong together, and so
        cancel in the expert's output, is checked where both are known: at down.
        """
        if stored.name.endswith(".up_proj.weight"):
            return truth * _fit(truth, served, dim=1)[:, None]
        if not stored.name.endswith(".down_proj.weight"):
            return truth
        factors = _fit(truth, served, dim=0)
        up = stored.name.replace(".down_proj.", ".up_proj.")
        partner = self._storage[up]
        packed, scale = (self._out(f"{up}_{part}") for part in ("packed", "scale"))
        codes = unpack_from_int32(packed, 4, torch.Size(partner.shape)).float()
        up_served = codes * scale.float().repeat_interleave(partner.shape[1] // scale.shape[1], 1)
        behind_norm = self._norms.reader(partner)
        up_truth = self.truth(partner) if behind_norm is None else self.truth(partner) * behind_norm
        product = _fit(up_truth, up_served, dim=1) * factors
        off = (product - 1).abs()
        # errors weighed by the predictions may leave single channels, which those hardly hear, far from the source
        weighed = "weighed_by" in self.records.get(stored.name, {})
        worst = float(off.median() if weighed else off.max())
        if worst > FACTOR_TOLERANCE:
            where = "half of its channels" if weighed else "a channel"
            self.findings.problem(
                stored.name, f"AWQ's factors of up and down do not cancel: off by {worst:.1%} in {where}"
            )
        return truth * factors

    def _hold_against_receipt(self, name: str, relative: float) -> None:
        record = self.records.get(name)
        if record is None:
            if self.records:
                self.findings.problem(name, "quantized, but no receipt mentions it")
            return
        claimed = record.get("relative_error")
        # AWQ's factors are fitted here, which flatters the measured error a little
        tolerance = 1e-5 + (2e-2 if record.get("awq_alpha") else 1e-4) * relative
        if claimed is None or abs(claimed - relative) > tolerance:
            self.findings.problem(name, f"relative error is {relative:.6f}, its receipt says {claimed}")

    def _group_size(self, columns: int) -> int | None:
        groups = (self.output.config.get("quantization_config") or {}).get("config_groups") or {}
        for group in groups.values():
            weights = group.get("weights") or {}
            if weights.get("type") == "int":
                size = weights.get("group_size")
                return columns if size in (None, -1) else int(size)
        return None

    def truth(self, stored: StoredWeight) -> torch.Tensor:
        """The source's values, float32, decoded independently of the converter."""
        weight = self._src(stored.parts["weight"])
        if "scale" not in stored.parts:
            return weight.float()
        scale = self._src(stored.parts["scale"])
        scale = _e8m0(scale) if stored.scale_encoding == "e8m0" else scale.float()
        rows, columns = stored.shape
        if stored.block:
            high, wide = stored.block
            spread = scale.repeat_interleave(high, 0)[:rows].repeat_interleave(wide, 1)[:, :columns]
        else:
            spread = scale.reshape(-1, 1)
        return weight.float() * spread

    def _out(self, name: str) -> torch.Tensor:
        return self._shards.tensor(self.output.folder / self.output.tensors[name][0], name)

    def _src(self, ref: TensorRef) -> torch.Tensor:
        return self._shards.tensor(self.source.path(ref.shard), ref.name)


def _fit(truth: torch.Tensor, served: torch.Tensor, *, dim: int) -> torch.Tensor:
    """Least-squares factor of each row (dim 1) or column (dim 0): ⟨served, truth⟩ / ⟨truth, truth⟩; 1 where truth is zero."""
    energy = truth.square().sum(dim)
    return torch.where(energy > 0, (served * truth).sum(dim) / energy.clamp_min(1e-38), 1.0)


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _e8m0(scale: torch.Tensor) -> torch.Tensor:
    return torch.exp2(scale.contiguous().view(torch.uint8).float() - 127)


def check_alone(output: OutputFiles, findings: Findings) -> None:
    """What packed weights and scales show without a source: numbers that no rounding gives, and shapes that fit no words."""
    shards = OpenShards()

    def read(name: str) -> torch.Tensor:
        return shards.tensor(output.folder / output.tensors[name][0], name)

    signed = bool(((output.report.get("recipe") or {}).get("weights") or {}).get("signed_scales"))
    for name, (_, dtype, shape) in output.tensors.items():
        module, _, part = name.rpartition(".")
        if part in SCALE_NAMES and dtype in ("BF16", "F32", "F16"):
            scale = read(name).float()
            packed = f"{module}.weight_packed" in output.tensors
            good = torch.isfinite(scale) & (
                (scale != 0) if packed and signed else (scale > 0) if packed else (scale >= 0)
            )
            if bad := scale.numel() - int(good.sum()):
                findings.problem(name, f"{bad} of {scale.numel()} scales are no numbers that a scale can be")
        elif part == "weight_shape" and shape == (2,) and f"{module}.weight_packed" in output.tensors:
            rows, columns = read(name).tolist()
            words = output.tensors[f"{module}.weight_packed"][2]
            if len(words) != 2 or (rows, -(-columns // 8)) != words:
                findings.problem(name, f"says [{rows}, {columns}], the packed words are {list(words)}")
