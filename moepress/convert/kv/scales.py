"""KV scales of a conversion: measured in the source model, decided per layer, kept in the journal.

    measure   a source run meets each layer: amax over all samples, errors on a few        (calibration.kv_cache)
    decide    folded      2^a ≥ headroom · amax / 448 where values do not fit 1.0, or where it lowers the error
              checkpoint  headroom · amax / 448 for every layer
    keep      OUT/.moepress/kv/layer-00007.json, so that a stopped run does not measure twice

Always the source model, also where GPTQ runs a quantized one beside it: the scales then depend on source, text and the
recipe's `calibration` and `kv_cache` alone, not on how the experts are quantized, and a prefill and a decode artifact
made with the same of these carry the same scales.

e4m3 is a float: a power of two moves nothing but what clips or is subnormal. Folding where 1.0 is as good would change
weights for no gain, so it is not done, and the report says so.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from moepress.convert.journal import Journal, read_json
from moepress.convert.kv.fold import Fold, layer_folds
from moepress.convert.kv.layer_scales import LayerScales
from moepress.convert.kv.plan import KvPlan, attention_weights
from moepress.convert.layout import ShardPlan
from moepress.convert.plan import ConversionPlan
from moepress.convert.units import METADATA, make_receipt
from moepress.errors import ConvertError
from moepress.formats.atomic import atomic_write_json
from moepress.formats.writer import ShardWriter

if TYPE_CHECKING:
    from moepress.calibration.kv_cache import LayerCache, StoredShare
    from moepress.calibration.layer_runner import OpenLayer
    from moepress.calibration.stream import Stream
    from moepress.convert.executor import Executor

FOLDER = "kv"
WORTH_IT = 0.98
"""A fold below 1.0 has to lower the stored values' error to this share of it."""

LARGEST = 448.0


class KvScales:
    """Measures layers that are not measured yet, and knows the scales of those that are.

    Args:
        plan: with an emission other than ``none``.
        journal: of the open output folder.
    """

    def __init__(self, plan: ConversionPlan, journal: Journal) -> None:
        self.plan, self._journal = plan, journal
        self._folder: Path = journal.state / FOLDER
        self.layers: dict[int, LayerScales] = {}
        if plan.kv.taken is not None:
            self.layers = dict(plan.kv.taken.layers)
            return
        for layer in plan.kv.layers:
            path = self._path(layer)
            if path.exists():
                self.layers[layer] = self._read(path)

    @property
    def missing(self) -> set[int]:
        """Layers still to be measured."""
        return set(self.plan.kv.layers) - self.layers.keys()

    def measure(self, layer: OpenLayer, stream: Stream, executor: Executor) -> Callable[[], None]:
        """Has an open layer measured unless that was done; before anything replaces its inputs.

        Args:
            layer: of the source model.
            stream: the source run; only read, and not needed any more when this returns.
            executor: measures.

        Returns:
            Waits for the scales and keeps them. To be called before the next layer.

        Raises:
            QuantizeError: also from what is returned: values that are not finite, or all zero.
        """
        if layer.index not in self.missing:
            return lambda: None
        coming = executor.measure(layer, stream)

        def keep() -> None:
            found = coming()
            self._folder.mkdir(parents=True, exist_ok=True)
            atomic_write_json(self._path(found.layer), {"plan_key": self.plan.key, **asdict(found)})
            self.layers[found.layer] = found

        return keep

    def folds(self) -> dict[str, Fold]:
        """Weight -> fold, of all layers.

        Raises:
            ConvertError: a layer was never measured.
        """
        if self.missing:
            raise ConvertError(f"KV scales of layer {min(self.missing)} were never measured")
        if self.plan.kv.emission != "folded":
            return {}
        found = {}
        for index, weights in attention_weights(self.plan.decisions).items():
            for inner, fold in layer_folds(self.plan.kv.shape, weights, self.layers[index].exponents).items():
                found[weights[inner].stored.name] = fold
        return found

    def pressed_plan(self) -> ConversionPlan:
        """The plan with every fold in the decision of its weight; the key stays."""
        decisions = dict(self.plan.decisions)
        for name, fold in self.folds().items():
            decision = decisions[name]
            decisions[name] = replace(decision, fold=fold, reason=f"{decision.reason}; a KV scale folded in")
        return replace(self.plan, decisions=decisions)

    def write_shard(self, shard: ShardPlan, out: Path) -> dict[str, Any]:
        """Writes the scales' own shard (``checkpoint``) and returns its receipt: F32 [1] each."""
        started = time.monotonic()
        values = {t.name: self.layers[layer].scale[cached] for (layer, cached), t in self.plan.kv.tensors.items()}
        with ShardWriter(out / shard.name, [(t.name, t.dtype, t.shape) for t in shard.added], METADATA) as writer:
            for tensor in shard.added:
                writer.write(tensor.name, np.array([values[tensor.name]], np.float32))
        return make_receipt(shard, self.plan, writer, {}, started)

    def as_json(self) -> dict[str, Any]:
        """For the report: what was chosen and why, per layer."""
        from moepress.calibration.kv_cache import suspicious

        folds: dict[int, dict[str, Any]] = {}
        for name, fold in self.folds().items():
            index = self.plan.decisions[name].identity.layer
            folds.setdefault(index or 0, {})[name] = fold.as_json()
        contract, taken = self.plan.recipe.serving, self.plan.kv.taken
        return {
            **self.plan.kv.as_json(),
            "dtype": self.plan.recipe.kv_cache.dtype,
            "headroom": (taken.settings if taken else {}).get("headroom", self.plan.recipe.kv_cache.headroom),
            **({"taken_from": taken.plan_key} if taken else {}),
            "server": f"{contract.server} {contract.version}",
            "suspicious": suspicious([layer.amax for layer in self.layers.values()]),
            "layers": {
                str(index): {
                    **_without_index(self.layers[index]),
                    "emission": self._emission(index, folds),
                    "folds": folds.get(index, {}),
                }
                for index in sorted(self.layers)
            },
        }

    def _emission(self, index: int, folds: Mapping[int, Any]) -> str:
        if self.plan.kv.emission == "checkpoint":
            return "checkpoint"
        return "folded" if index in folds else "none"

    def _path(self, layer: int) -> Path:
        return self._folder / f"layer-{layer:05d}.json"

    def _read(self, path: Path) -> LayerScales:
        data = read_json(path)
        if data.pop("plan_key", None) != self.plan.key:
            raise ConvertError(
                "measured KV scales belong to another plan",
                where=str(path),
                hint="delete the output folder to start over",
            )
        return LayerScales(**data)


def measure_layer(layer: OpenLayer, stream: Stream, plan: ConversionPlan) -> LayerScales:
    """Measures an open layer and chooses its scales; before anything replaces its inputs.

    Args:
        layer: of the source model.
        stream: the source run; only read.
        plan: with an emission other than ``none``.

    Raises:
        QuantizeError: values that are not finite, or all zero.
    """
    from moepress.calibration.kv_cache import measure_cache

    wish, kv = plan.recipe.kv_cache, plan.kv
    reasons: dict[str, str] = {}

    def choose(amax: Mapping[str, float], shares: Mapping[str, Mapping[str, StoredShare]]) -> dict[str, float]:
        return choose_scales(kv, wish.headroom, amax, shares, reasons)

    wanted = ("unit", "power_of_two" if kv.emission == "folded" else "calibrated")
    measured = measure_cache(
        layer, stream, headroom=wish.headroom, samples=wish.samples, candidates=wanted, choose=choose
    )
    return _layer_scales(measured, reasons)


def choose_scales(
    plan: KvPlan,
    headroom: float,
    amax: Mapping[str, float],
    shares: Mapping[str, Mapping[str, StoredShare]],
    reasons: dict[str, str],
) -> dict[str, float]:
    """The scales of one layer.

    Args:
        plan: how they are handed over, and what cannot be folded.
        headroom: of the recipe.
        amax: cached tensor -> largest magnitude.
        shares: candidate -> cached tensor -> how it is stored; ``unit`` is read, and ``calibrated`` or ``power_of_two``.
        reasons: filled, per cached tensor.
    """
    chosen = {}
    for name in plan.shape.cached:
        chosen[name], reasons[name] = _choose(plan, headroom, name, amax[name], shares)
    return chosen


def _choose(
    plan: KvPlan, headroom: float, name: str, largest: float, shares: Mapping[str, Mapping[str, StoredShare]]
) -> tuple[float, str]:
    unit = shares["unit"][name]
    span = f"{headroom:g} × {largest:.4g}"
    if plan.emission == "checkpoint":
        return float(np.float32(shares["calibrated"][name].scale)), f"{span} / {LARGEST:g}"
    folded = shares["power_of_two"][name]
    if folded.scale > 1:
        why = f"{span} does not fit {LARGEST:g}"
    elif folded.scale < 1 and folded.error < WORTH_IT * unit.error:
        why = f"error of stored values {unit.error:.4f} → {folded.error:.4f}"
    else:
        return 1.0, f"1.0 is as good: {span} fits {LARGEST:g}, error of stored values {unit.error:.4f}"
    if name in plan.left:
        return 1.0, f"{why}, but {plan.left[name]}"
    return folded.scale, why


def _layer_scales(measured: LayerCache, reasons: dict[str, str]) -> LayerScales:
    unit, chosen = measured.shares["unit"], measured.shares["chosen"]
    return LayerScales(
        layer=measured.layer,
        scale={name: share.scale for name, share in chosen.items()},
        reason=reasons,
        amax=measured.amax,
        clipped_at_one={name: share.clipped for name, share in unit.items()},
        below_normal_at_one={name: share.below_normal for name, share in unit.items()},
        clipped={name: share.clipped for name, share in chosen.items()},
        below_normal={name: share.below_normal for name, share in chosen.items()},
        attention_error_at_one=measured.attention_error["unit"],
        attention_error=measured.attention_error["chosen"],
    )


def _without_index(scales: LayerScales) -> dict[str, Any]:
    return {key: value for key, value in asdict(scales).items() if key != "layer"}
