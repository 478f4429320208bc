"""How servers match the names in a quantization config, and under which names they ask.

A line is a module name, a class name such as ``Linear``, or ``re:`` and a pattern. Everyone matches patterns with
``re.match``: anchored at the start, open at the end, so ``re:.*mlp.gate`` also hits ``mlp.gate_proj``. On plain names
they differ: SGLang takes an exact match or a dotted suffix (``lm_head`` hits ``language_model.lm_head``); vLLM,
transformers and compressed-tensors take an exact match alone.

They also ask under other names than the checkpoint's. A wrapper's prefix may be gone (SGLang builds Kimi K2.5's text
model without ``language_model.``), projections are fused (``qkv_proj``), and MTP layers are built elsewhere
(``model.decoder.…`` in SGLang, ``….mtp_block.…`` in vLLM). A line that only knows the checkpoint's name matches nothing
there, and the server then builds a dense module as a quantized one, or the reverse, often without a word.

Read in SGLang 0.5.23 (layers/quantization/compressed_tensors/utils.py:28-190, models/kimi_k25.py:693-703,
models/deepseek_nextn.py:118-131) and vLLM 0.32.0 (layers/quantization/utils/config_utils.py:344-412).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from moepress.errors import CheckpointError
from moepress.formats.module_patterns import module_pattern

FUSED_PROJECTIONS: Mapping[str, tuple[str, ...]] = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "fused_qkv_a_proj_with_mqa": ("q_a_proj", "kv_a_proj_with_mqa"),  # SGLang
    "fused_qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa"),  # vLLM
}
"""Modules that servers build from several of the checkpoint's, which must then be stored alike."""

_TEXT_LAYER = re.compile(r"(?P<wrapper>(?:model\.)?language_model\.)?(?:model\.)?layers\.(?P<layer>\d+)\.(?P<path>.+)")
_WRAPPER = re.compile(r"(?:model\.)?language_model\.(?:model\.)?")


def split_layer(name: str) -> tuple[int, str] | None:
    """(layer, path inside it) of a module of the text model's layers; None for any other module."""
    found = _TEXT_LAYER.fullmatch(name)
    return (int(found["layer"]), found["path"]) if found else None


def server_names(name: str, *, num_layers: int) -> tuple[str, ...]:
    """Every name under which a server may ask for a module, the checkpoint's first.

    Args:
        name: the checkpoint's.
        num_layers: ``num_hidden_layers``; layers from there on are MTP layers.
    """
    names = [name]
    if wrapper := _WRAPPER.match(name):
        bare = name[wrapper.end() :]
        names += [f"model.{bare}", f"language_model.model.{bare}"] if bare.startswith("layers.") else [bare]
    if (found := split_layer(name)) and found[0] >= num_layers:
        path = found[1]
        names += [seen.removesuffix(path) + f"mtp_block.{path}" for seen in names]
        names.append(f"model.decoder.{path}")
    return tuple(dict.fromkeys(names))


def fused_modules(modules: Collection[str]) -> dict[str, tuple[str, ...]]:
    """Fused module name to the modules it is built from, wherever one of those is there. Routed experts stay single."""
    fused: dict[str, tuple[str, ...]] = {}
    for name in modules:
        parent, _, leaf = name.rpartition(".")
        for fused_leaf, leaves in FUSED_PROJECTIONS.items():
            if leaf in leaves and ".experts." not in name:
                present = tuple(f"{parent}.{each}" for each in leaves if f"{parent}.{each}" in modules)
                fused[f"{parent}.{fused_leaf}"] = present
    return fused


class Lines:
    """Some lines of a config, matched against names quickly: one pattern for all, and sets for the plain ones."""

    def __init__(self, lines: Iterable[str], *, where: str = "ignore") -> None:
        self.lines = tuple(lines)
        self._patterns: dict[str, re.Pattern[str]] = {}
        for line in self.lines:
            if line.startswith("re:"):
                self._patterns[line] = module_pattern(line, where=where)
        self._any = re.compile("|".join(f"(?:{pattern.pattern})" for pattern in self._patterns.values()) or r"(?!)")
        self._plain = frozenset(line for line in self.lines if not line.startswith("re:"))
        self._endings = tuple(f".{line}" for line in self._plain)

    def match_exactly(self, name: str) -> bool:
        """As vLLM, transformers and compressed-tensors do."""
        return name in self._plain or self._any.match(name) is not None

    def match_suffix(self, name: str) -> bool:
        """As SGLang does for ``ignore``: a plain line also hits as a dotted suffix."""
        return self.match_exactly(name) or name.endswith(self._endings)

    def hits(self, name: str) -> list[str]:
        """Each line that hits a name by either rule."""
        found = []
        for line in self.lines:
            pattern = self._patterns.get(line)
            if pattern.match(name) if pattern else name == line or name.endswith(f".{line}"):
                found.append(line)
        return found


def match_counts(config: Mapping[str, Any], modules: Collection[str], *, num_layers: int) -> dict[str, int]:
    """How many modules each line of a compressed-tensors config hits.

    Args:
        config: a ``quantization_config``.
        modules: the checkpoint's linear modules.
        num_layers: ``num_hidden_layers``.

    Returns:
        Count by line, the ignore lines first, then the groups' targets. A module counts once, under whichever of its
        names it is hit. ``Linear`` counts what no name target and no ignore line hits.
    """
    ignore = Lines(config.get("ignore") or ())
    targets = Lines(target for group in config["config_groups"].values() for target in group["targets"])
    counts = dict.fromkeys((*ignore.lines, *targets.lines), 0)
    fused = {part: name for name, parts in fused_modules(modules).items() for part in parts}
    for module in modules:
        names = server_names(module, num_layers=num_layers)
        names += server_names(fused[module], num_layers=num_layers) if module in fused else ()
        hit = {line for name in names if ignore.match_suffix(name) for line in ignore.hits(name)}
        hit |= {line for name in names if targets.match_exactly(name) for line in targets.hits(name)}
        if not hit and "Linear" in counts:
            hit = {"Linear"}
        for line in hit:
            counts[line] += 1
    return counts


def scheme_of(config: Mapping[str, Any], name: str) -> str:
    """What a server makes of a linear module or expert, from its name alone.

    Args:
        config: a ``quantization_config``.
        name: a name the server asks under.

    Returns:
        The config group's name, ``linear_fp8_config``, ``ignored``, or ``unmatched`` (SGLang refuses to start, others
        build a dense module).
    """
    return Schemes(config).of(name)


class Schemes:
    """`scheme_of` for many names."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._ignore = Lines(config.get("ignore") or ())
        groups: Mapping[str, Any] = config["config_groups"]
        self._groups = [(name, Lines(group["targets"], where=name)) for name, group in groups.items()]
        self._class_group = next((name for name, lines in self._groups if "Linear" in lines.lines), None)
        self._linear_fp8 = "linear_fp8_config" in config

    def of(self, name: str) -> str:
        """See `scheme_of`.

        Raises:
            CheckpointError: servers would disagree about the module.
        """
        expert = ".experts." in name
        if self._linear_fp8 and not expert and not name.endswith(("lm_head", "shared_head.head")):
            return "linear_fp8_config"
        if self._ignore.match_suffix(name):
            if not self._ignore.match_exactly(name):
                raise CheckpointError(
                    f"SGLang would ignore {name} and other readers would not: {self._ignore.hits(name)}"
                )
            return "ignored"
        for group, targets in self._groups:
            if targets.match_exactly(name):
                return group
        return self._class_group or "unmatched"
