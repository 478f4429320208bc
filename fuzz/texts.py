"""Documents: index, config.json, recipe, receipts. Each is an honest one, edited as a tree, as text, or replaced.

index      parse_index                      right: shard names inside the folder, the map that the JSON library reads
config     family, quantization, all expected weights, tensor-parallel check
recipe     load_recipe                      right: it can be written out and read again as the same recipe
receipts   the table of weights' records, also from the one file of a published copy
"""

from __future__ import annotations

import copy
import gzip
import json
import random
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from fuzz import small
from fuzz.bounded import Wrong
from fuzz.scratch_folder import scratch_folder
from fuzz.wild import TEXTS, edit_bytes, edit_tree, to_text
from moepress.convert.journal import STATE_FOLDER
from moepress.convert.plan import check_parallel
from moepress.convert.receipts import PUBLISHED_RECEIPTS, expert_errors, weight_records
from moepress.formats.architecture import expected_weights
from moepress.formats.families import identify_family, mtp_layers, text_config
from moepress.formats.shard_index import parse_index
from moepress.formats.source_quantization import parse_source_quantization
from moepress.formats.strict_json import parse_object
from moepress.recipe import load_recipe, recipe_text, shipped_recipes

READERS = ("index", "config", "recipe", "receipts")
MOST_WEIGHTS = 2_000_000
"""Far above any published model; a configuration of a few KB must not make us list more."""

BOMB = (
    "a: &a [x,x,x,x,x,x,x,x,x]\n"
    + "".join(f"{b}: &{b} [{','.join(['*' + a] * 9)}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True))
    + "name: *i\n"
).encode()


def case(seed: int, number: int) -> tuple[str, bytes]:
    """(reader, document) of case ``number`` of a seed."""
    rng = random.Random(f"texts/{seed}/{number}")
    reader = rng.choice(READERS)
    if rng.random() < 0.02:
        return reader, rng.choice((*TEXTS, BOMB))
    tree = copy.deepcopy(_honest(reader, rng))
    for _ in range(rng.choice((0, 1, 1, 1, 2, 4))):
        edit_tree(rng, tree)
    raw = (
        yaml.safe_dump(tree, sort_keys=False).encode("utf-8", "replace")
        if reader == "recipe" and rng.random() < 0.7
        else to_text(rng, tree)
    )
    for _ in range(rng.choice((0, 0, 0, 1, 3))):
        raw = edit_bytes(rng, raw)
    if reader == "receipts" and rng.random() < 0.3:
        raw = gzip.compress(raw, 1)
        if rng.random() < 0.5:
            raw = edit_bytes(rng, raw)
    return reader, raw


def _honest(reader: str, rng: random.Random) -> Any:
    kind = rng.choice(small.KINDS)
    if reader == "index":
        return small.build(kind).index()
    if reader == "config":
        return small.build(kind).config
    if reader == "recipe":
        return yaml.safe_load(recipe_text(rng.choice(shipped_recipes()))[0])
    record = {"action": "quantize", "reason": "", "relative_error": 0.05, "decision": "quantized", "sqnr_db": 25.0}
    names = [f"model.layers.1.mlp.experts.{e}.{p}_proj.weight" for e in range(2) for p in ("gate", "up", "down")]
    weights = {name: dict(record) for name in names} | {"model.norm.weight": {"action": "keep", "reason": "norm"}}
    receipt = {"unit": "model-00001-of-00001.safetensors", "sha256": "0" * 64, "weights": weights}
    return rng.choice((receipt, {"report_sha256": "0" * 64, "receipts": {"model-00001-of-00001.safetensors": receipt}}))


def judge(case: tuple[str, bytes]) -> str:
    """Reads the document.

    Raises:
        MoepressError: as it may.
        Wrong: a result that is not right.
    """
    reader, raw = case
    return {"index": _index, "config": _config, "recipe": _recipe, "receipts": _receipts}[reader](raw)


def _text(raw: bytes) -> str:
    """As a local folder reads a text file."""
    from moepress.formats.sources import LocalFolder

    (scratch_folder() / "text").write_bytes(raw)
    return LocalFolder(scratch_folder()).read_text("text")


def _index(raw: bytes) -> str:
    index = parse_index(_text(raw), where="index")
    for shard in index.shards:
        target = (Path("/safe") / shard).resolve()
        if not str(target).startswith("/safe/") or "\x00" in shard:
            raise Wrong(f"a shard outside the folder: {shard!r}")
    if json.loads(raw.decode("utf-8-sig"))["weight_map"] != index.weight_map:
        raise Wrong("another map than the JSON library reads")
    return "index read"


def _config(raw: bytes) -> str:
    config, _ = parse_object(_text(raw), where="config.json")
    family = identify_family(config)
    text_config(family, config)
    mtp_layers(family, config)
    parse_source_quantization(config)
    weights = expected_weights(config)
    if len(weights) > MOST_WEIGHTS:
        raise Wrong(f"{len(weights):,} weights listed")
    if not all(all(type(size) is int and size > 0 for size in spec.shape) for spec in weights):
        raise Wrong("a weight without a size")
    check_parallel(config, _kimi())
    return "config read"


@cache
def _kimi() -> Any:
    return load_recipe("kimi-k2", ["serving.tensor_parallel=1"])


def _recipe(raw: bytes) -> str:
    path = scratch_folder() / "recipe.yaml"
    path.write_bytes(raw)
    recipe = load_recipe(str(path))
    path.write_text(json.dumps(recipe.model_dump(mode="json")))
    if load_recipe(str(path)).canonical_json() != recipe.canonical_json():
        raise Wrong("a recipe written out is another recipe")
    return "recipe read"


def _receipts(raw: bytes) -> str:
    out = scratch_folder() / "out"
    shutil.rmtree(out, ignore_errors=True)
    receipts = out / STATE_FOLDER / "receipts"
    receipts.mkdir(parents=True)
    if raw[:2] == b"\x1f\x8b":
        (out / PUBLISHED_RECEIPTS).write_bytes(raw)
    else:
        (receipts / "model-00001-of-00001.safetensors.json").write_bytes(raw)
    records = weight_records(out)
    config = small.build("kimi").config
    expert_errors(records, identify_family(config), config)
    return "receipts read"
