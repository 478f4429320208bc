"""The published configurations in tests/configs, and the weights they imply: worked out once for all tests."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from moepress.formats.architecture import WeightSpec, expected_weights

CONFIGS = Path(__file__).parents[1] / "configs"


def config_of(model: str) -> dict[str, Any]:
    """The model's config.json (its own copy)."""
    config: dict[str, Any] = json.loads((CONFIGS / f"{model}.json").read_text())
    return config


@cache
def weights_of(model: str) -> tuple[WeightSpec, ...]:
    """All weights that the configuration implies."""
    return tuple(expected_weights(config_of(model)))
