"""The recipe: one YAML file that says what a conversion does, checked whole before a byte is read.

A recipe is strict (an unknown field is an error, never ignored), frozen (nobody changes it on the way) and complete
(every default is visible in ``moepress recipes show``). Its canonical JSON is part of the resume key, so two recipes that
mean the same thing press the same bytes.

    name: kimi-k2-int4
    families: [kimi_k2, deepseek_v3]
    weights: {algorithm: rtn, num_bits: 4, group_size: 32, scale: mse}
    rest:    {attention: source, shared_experts: source, dense_mlp: source, indexer: source}
    mtp:     {experts: quantize, rest: source}
    serving: {server: sglang, version: 0.5.23, layout: auto, tensor_parallel: 8}
    kv_cache: {scales: auto, headroom: 2}
    output:  {shard_size: 5GB}

Single fields are overridden on the command line by their path: ``--set weights.group_size=64``.
"""

from moepress.recipe.demands import Evaluation, Gates, Limits, Serving
from moepress.recipe.pressing import (
    MAX_SHARD_BYTES,
    Awq,
    Calibration,
    KvCache,
    Mtp,
    Output,
    Rest,
    Weights,
)
from moepress.recipe.reading import check_recipe, load_recipe, recipe_schema, recipe_text, shipped_recipes
from moepress.recipe.recipe import Recipe
from moepress.recipe.section import parse_size

__all__ = [
    "MAX_SHARD_BYTES",
    "Awq",
    "Calibration",
    "Evaluation",
    "Gates",
    "KvCache",
    "Limits",
    "Mtp",
    "Output",
    "Recipe",
    "Rest",
    "Serving",
    "Weights",
    "check_recipe",
    "load_recipe",
    "parse_size",
    "recipe_schema",
    "recipe_text",
    "shipped_recipes",
]
