"""The whole recipe, and the meaning that is part of the resume key."""

from __future__ import annotations

import json
from typing import Literal

from pydantic import Field, model_validator

from moepress.recipe.demands import Evaluation, Gates, Limits, Serving
from moepress.recipe.pressing import Calibration, KvCache, Mtp, Output, Rest, Weights
from moepress.recipe.section import Section


class Recipe(Section):
    """Everything a conversion is told. See the module docstring for an example."""

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9._-]*$", description="lower case, for file names and the model card")
    description: str = ""
    families: tuple[str, ...] = Field(
        min_length=1, description="model families this recipe is for (see `moepress recipes families`)"
    )
    engine: Literal["moepress", "llmcompressor"] = Field(
        "moepress",
        description="who makes the experts' integers by gptq: moepress, layer by layer; or llm-compressor's oneshot, in a "
        "process of its own that holds the whole model",
    )
    weights: Weights = Weights()
    calibration: Calibration = Calibration()  # type: ignore[call-arg]
    rest: Rest = Rest()
    mtp: Mtp = Mtp()
    serving: Serving = Serving()
    kv_cache: KvCache = KvCache()  # type: ignore[call-arg]
    output: Output = Output()  # type: ignore[call-arg]
    limits: Limits = Limits()
    gates: Gates = Gates()  # type: ignore[call-arg]
    evaluation: Evaluation = Evaluation()  # type: ignore[call-arg]

    @model_validator(mode="after")
    def _kept_whole(self) -> Recipe:
        if not self.keeps_experts:
            return self
        widened = [f"rest.{part}" for part, wish in self.rest if wish == "bf16"]
        widened += [f"mtp.{part}" for part, wish in self.mtp if wish == "bf16"]
        if widened:
            raise ValueError(
                "weights.algorithm is keep, so the source's own quantization_config describes the output, and it knows no "
                f"BF16 here: {', '.join(widened)} must be source"
            )
        return self

    @property
    def calibrated(self) -> bool:
        """The algorithm needs calibration text."""
        return self.weights.algorithm not in ("rtn", "keep")

    @property
    def keeps_experts(self) -> bool:
        """Nothing is quantized: the output is the source with KV scales folded in, described as the source is."""
        return self.weights.algorithm == "keep"

    @property
    def smooths_norms(self) -> bool:
        """Norms before the experts, and all that reads them, are rescaled."""
        return "awq" in self.weights.algorithm and self.weights.awq.norm

    @property
    def weighs_predictions(self) -> bool:
        """Errors are weighed by what they do to the model's predictions, for which the source is run backwards once."""
        return "gptq" in self.weights.algorithm and self.calibration.loss == "kl"

    def canonical_json(self) -> str:
        """One spelling per meaning: sorted keys, defaults written out. Part of the resume key, so without the
        gates, bounds and deployment: whoever changes what a server must reach has not changed what is pressed."""
        kept = self.model_dump(
            mode="json", exclude={"gates": True, "evaluation": True, "serving": {"disaggregation": True}}
        )
        return json.dumps(kept, sort_keys=True, separators=(",", ":"))
