"""KV scales taken from another output of the same model, instead of measuring them again.

A prefill server fills the cache that a decode server reads, so both artifacts must have the very same scales. Two
measurements agree when source, text and settings do; taking over what was decided agrees always, and runs no layer:

    DECODE/moepress_report.json, kv_cache ──▶ emission, and per layer s and why ──▶ this plan ──▶ folds of these weights

The weights may be stored in another way here than there. What decides is the exponent of each cached tensor; which rows
of which weights carry it follows from the architecture (`fold`), and where these weights have no room for it the plan is
refused: leaving it out would give other bytes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, get_args

from moepress.convert.kv.layer_scales import LayerScales
from moepress.errors import PlanRefused
from moepress.formats.checkpoint import Checkpoint
from moepress.formats.kv_contract import KvEmission
from moepress.formats.same_model import config_differences
from moepress.formats.sealed_json import content_digest
from moepress.results import REPORT_NAME

OPTION = "--same-kv-as"


@dataclass(frozen=True)
class TakenScales:
    """What another output decided.

    Attributes:
        place: the other output, as it was named.
        plan_key: its own, which names it in our report.
        emission: how it hands its scales over.
        layers: index -> scales; empty for ``none``.
        settings: its recipe's ``kv_cache``, which says how they were measured.
    """

    place: str
    plan_key: str
    emission: KvEmission
    layers: Mapping[int, LayerScales]
    settings: Mapping[str, Any]

    @property
    def folds_nothing(self) -> bool:
        """Every scale is 1.0, so the other's cache is the source's."""
        return all(scale == 1.0 for layer in self.layers.values() for scale in layer.scale.values())

    def digest(self) -> str:
        """SHA-256 of what decides bytes: part of the resume key."""
        scales = {str(index): dict(layer.scale) for index, layer in self.layers.items()}
        return content_digest([self.emission, scales])


def take_scales(other: str | Path, checkpoint: Checkpoint) -> TakenScales:
    """Reads them.

    Args:
        other: an output of moepress.
        checkpoint: the source of this conversion, which must be the same model.

    Raises:
        PlanRefused: no such output, or of another model.
    """
    folder = Path(other)
    path = folder / REPORT_NAME
    if not path.is_file() or not (folder / "config.json").is_file():
        raise PlanRefused(
            f"{folder} is no finished output of moepress: there is no {path.name} with a config.json beside it",
            where=OPTION,
            hint="name the folder that `moepress convert` wrote",
        )
    differing = config_differences(_json(folder / "config.json"), checkpoint.config)
    if differing:
        raise PlanRefused(
            f"{folder} is another model than {checkpoint.location}:\n  " + "\n  ".join(differing[:5]),
            where=OPTION,
            hint="both sides of a pair come from one source",
        )
    report = _json(path)
    recorded = report.get("kv_cache") or {}
    emission: KvEmission | None = next((e for e in get_args(KvEmission) if e == recorded.get("emission")), None)
    if emission is None:
        raise PlanRefused(f"{path} says nothing about KV scales", where=OPTION)
    layers = recorded["layers"] if emission != "none" else {}
    return TakenScales(
        place=str(other),
        plan_key=str(report.get("plan_key")),
        emission=emission,
        layers={int(index): _layer(int(index), figures, path) for index, figures in layers.items()},
        settings=dict((report.get("recipe") or {}).get("kv_cache") or {}),
    )


def _json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise PlanRefused(f"{path} cannot be read: {error}", where=OPTION) from error
    if not isinstance(data, dict):
        raise PlanRefused(f"{path} is not a JSON object", where=OPTION)
    return data


def _layer(index: int, figures: Mapping[str, Any], path: Path) -> LayerScales:
    try:
        return LayerScales(index, **{f.name: figures[f.name] for f in fields(LayerScales) if f.name != "layer"})
    except KeyError as error:
        raise PlanRefused(f"{path} has no {error} for layer {index}", where=OPTION) from error
