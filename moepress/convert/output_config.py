"""The output's ``config.json``: the source's, with the quantization it now has and no trace of the one it had."""

from __future__ import annotations

import copy
from typing import Any

from moepress.convert.plan import ConversionPlan
from moepress.formats.checkpoint import Checkpoint
from moepress.formats.families import text_config

SOURCE_QUANTIZATION = ("quantization_config", "compression_config")
"""Fields, at the top of a configuration or in its text part, that describe the source's own storage."""


def output_config(checkpoint: Checkpoint, plan: ConversionPlan) -> dict[str, Any]:
    """The configuration of the converted checkpoint. Experts that were INT4 already keep the description they came with."""
    config = copy.deepcopy(checkpoint.config)
    if plan.description.quantization_config is None:
        return config
    for part in (config, text_config(plan.family, config)):
        for field in SOURCE_QUANTIZATION:
            part.pop(field, None)  # type: ignore[attr-defined]
    config["quantization_config"] = plan.description.quantization_config
    return config
