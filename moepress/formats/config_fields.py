"""Fields of config.json that shapes and counts are made of: whole numbers in a sane range, and lists of the right things.

A configuration is somebody else's text. ``"num_hidden_layers": "61"``, ``true``, ``1e400`` or ten to the thirtieth would
otherwise surface as a TypeError in the middle of a plan, or as a loop over more layers than memory holds. All fields are
looked at together, where a family is identified and before anything is computed from them; the rest of the code then
takes ``int(text["hidden_size"])`` for what it says.

Fields that are absent or null are left to whoever needs them. Fields that no shape depends on are carried, not read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moepress.errors import CheckpointError

MAX_LAYERS = 4096
MAX_EXPERTS = 65_536
MAX_SIZE = 2**31 - 1
MAX_WEIGHTS = 1_000_000
"""Fourteen times Kimi K2's. A configuration of a few kilobytes must not make us list more than that."""

_LAYER_COUNTS = ("num_hidden_layers", "num_nextn_predict_layers", "vt_num_hidden_layers")
_EXPERT_COUNTS = ("n_routed_experts", "num_experts", "num_local_experts", "n_shared_experts", "num_experts_per_tok")
_SIZES = (
    *("hidden_size", "intermediate_size", "moe_intermediate_size", "vocab_size"),
    *("num_attention_heads", "num_key_value_heads", "head_dim"),
    *("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
    *("first_k_dense_replace", "moe_layer_freq", "decoder_sparse_step"),
    *("index_topk", "index_head_dim", "index_n_heads", "index_topk_freq", "index_skip_topk_offset"),
)
_VISION_SIZES = (
    *("vt_hidden_size", "hidden_size", "vt_intermediate_size", "intermediate_size", "num_hidden_layers", "patch_size"),
    *("init_pos_emb_height", "pos_emb_height", "init_pos_emb_width", "pos_emb_width"),
)
_MOST = {
    **dict.fromkeys(_SIZES, MAX_SIZE),
    **dict.fromkeys(_LAYER_COUNTS, MAX_LAYERS),
    **dict.fromkeys(_EXPERT_COUNTS, MAX_EXPERTS),
}
_VISION_MOST = {
    **dict.fromkeys(_VISION_SIZES, MAX_SIZE),
    "vt_num_hidden_layers": MAX_LAYERS,
    "num_hidden_layers": MAX_LAYERS,
}
_PER_LAYER = ("mlp_layer_types", "indexer_types", "index_topk_pattern")


def check_fields(config: Mapping[str, Any], text: Mapping[str, Any]) -> None:
    """Refuse fields that are not what every reader of them expects.

    Args:
        config: the parsed config.json.
        text: the text model's part of it, or the same.

    Raises:
        CheckpointError: names up to five fields with what they are and what they should be.
    """
    problems = [*_numbers(text, _MOST, ""), *_lists(text)]
    vision = config.get("vision_config")
    if isinstance(vision, Mapping):
        problems += _numbers(vision, _VISION_MOST, "vision_config.")
        kernel = vision.get("merge_kernel_size", (2, 2))
        if not _are(int, kernel) or len(kernel) != 2:
            problems.append(f"vision_config.merge_kernel_size is {_short(kernel)}, not two whole numbers")
    elif vision is not None:
        problems.append(f"vision_config is {_short(vision)}, not an object")
    layers, experts = text.get("num_hidden_layers"), max(_count(text.get(field)) for field in _EXPERT_COUNTS[:3])
    if not problems and _count(layers) * experts * 3 > MAX_WEIGHTS:
        problems.append(f"{layers:,} layers of {experts:,} experts are more than {MAX_WEIGHTS:,} weights")
    if problems:
        more = f"; and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise CheckpointError(
            f"config.json cannot be right: {'; '.join(problems[:5])}{more}",
            where="config.json",
            hint="download config.json again, from the revision the shards are of",
        )


def required_number(text: Mapping[str, Any], field: str) -> int:
    """A whole number that must be there; its range was checked with all others.

    Raises:
        CheckpointError: it is absent or null.
    """
    value = text.get(field)
    if value is None:
        raise CheckpointError(
            f"the configuration has no {field}", where="config.json", hint="download config.json again"
        )
    return int(value)


def _numbers(part: Mapping[str, Any], most: Mapping[str, int], prefix: str) -> list[str]:
    found = []
    for field, largest in most.items():
        value = part.get(field)
        if value is not None and not (type(value) is int and 0 <= value <= largest):
            found.append(f"{prefix}{field} is {_short(value)}, not a whole number from 0 to {largest:,}")
    return found


def _lists(text: Mapping[str, Any]) -> list[str]:
    found = []
    layers = text.get("num_hidden_layers")
    for field in _PER_LAYER:
        value = text.get(field)
        if not value:
            continue
        if not (isinstance(value, str) and field == "index_topk_pattern") and not _are(str, value):
            found.append(f"{field} is {_short(value)}, not a list of words")
        elif len(value) != layers:
            found.append(f"{field} has {len(value)} entries for {_short(layers)} layers")
    dense = text.get("mlp_only_layers")
    if dense and not _are(int, dense):
        found.append(f"mlp_only_layers is {_short(dense)}, not a list of layers")
    return found


def _are(kind: type, value: Any) -> bool:
    return isinstance(value, list | tuple) and all(type(each) is kind for each in value)


def _count(value: Any) -> int:
    return value if type(value) is int else 0


def _short(value: Any) -> str:
    """A value for a message: its beginning, whatever its size."""
    if isinstance(value, list | tuple | dict):
        return f"a {type(value).__name__} of {len(value)}"
    text = f"a number of {value.bit_length()} bits" if type(value) is int and value.bit_length() > 128 else repr(value)
    return text if len(text) <= 60 else f"{text[:60]}…"
