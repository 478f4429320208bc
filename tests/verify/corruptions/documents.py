"""config.json field by field, its quantization_config leaf by leaf, the index, and what moepress says of itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from fuzz.small import INDEX, build
from tests.verify.corruptions.weights import EXPERT
from tests.verify.corruptions.written import Corrupt, document


def leaves(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths of everything that is no object or non-empty list."""
    inside = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    if not isinstance(tree, dict | list) or not tree:
        yield path
    for key, value in inside:
        yield from leaves(value, (*path, key))


def changed(value: Any) -> Any:
    """Another value of the same kind."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    return (
        value + "x"
        if isinstance(value, str)
        else ["x"]
        if isinstance(value, list)
        else {"x": 1}
        if value == {}
        else "x"
    )


def at(path: tuple[Any, ...], how: Callable[[Any], Any] | None) -> Callable[[Any], None]:
    """Changes the value at a path, or removes it."""

    def edit(tree: Any) -> None:
        for key in path[:-1]:
            tree = tree[key]
        if how is None:
            del tree[path[-1]]
        else:
            tree[path[-1]] = how(tree[path[-1]])

    return edit


def config_corruptions() -> Iterator[tuple[str, str, Corrupt]]:
    for family in ("kimi", "glm4", "qwen3"):
        config = build(family).config
        for key in config:
            if key == "quantization_config" or (family != "kimi" and key in build("kimi").config):
                continue
            yield f"config {key}: changed", family, document("config.json", at((key,), changed), resealed=True)
            yield f"config {key}: removed", family, document("config.json", at((key,), None), resealed=True)
    added = {"a field": {"attn_implementation": "x"}, "a second description": {"compression_config": {"format": "x"}}}
    for said, more in added.items():
        yield (
            f"config: {said} added",
            "kimi",
            document("config.json", lambda c, m=more: c.update(m), resealed=said == "a field"),
        )


def described(descriptions: dict[str, dict[str, Any]]) -> Iterator[tuple[str, str, Corrupt]]:
    """Every leaf of what the good outputs say of their quantization."""
    for family, quantization in descriptions.items():
        for path in leaves(quantization):
            name = ".".join(map(str, path))
            yield (
                f"{family} quantization_config {name}: changed",
                family,
                document("config.json", at(("quantization_config", *path), changed)),
            )
            if family != "kimi":
                continue
            yield (
                f"{family} quantization_config {name}: removed",
                family,
                document("config.json", at(("quantization_config", *path), None)),
            )


def _meant(edit: Callable[[dict[str, Any]], None]) -> Corrupt:
    return document("config.json", lambda config: edit(config["quantization_config"]), resealed=True)


def described_with_checksums() -> Iterator[tuple[str, str, Corrupt]]:
    """What a server would read otherwise, written so from the start."""
    first = lambda q: q["config_groups"]["group_0"]  # noqa: E731
    edits: dict[str, Callable[[dict[str, Any]], None]] = {
        "gone": lambda q: q.clear(),
        "quant_method fp8": lambda q: q.update(quant_method="fp8"),
        "format mixed": lambda q: q.update(format="mixed-precision"),
        "format float": lambda q: q.update(format="float-quantized"),
        "no groups": lambda q: q.update(config_groups={}),
        "eight bits": lambda q: first(q)["weights"].update(num_bits=8),
        "another group size": lambda q: first(q)["weights"].update(group_size=64),
        "channel strategy": lambda q: first(q)["weights"].update(strategy="channel", group_size=None),
        "not symmetric": lambda q: first(q)["weights"].update(symmetric=False),
        "float codes": lambda q: first(q)["weights"].update(type="float"),
        "dynamic": lambda q: first(q)["weights"].update(dynamic=True),
        "activation order": lambda q: first(q)["weights"].update(actorder="group"),
        "quantized activations": lambda q: first(q).update(input_activations={"num_bits": 8, "type": "int"}),
        "targets that hit nothing": lambda q: first(q).update(targets=["re:.*nothing.*"]),
        "experts ignored": lambda q: q["ignore"].append("re:.*experts.*"),
        "one expert ignored": lambda q: q["ignore"].append(EXPERT),
        "head not ignored": lambda q: q.update(ignore=[line for line in q["ignore"] if "lm_head" not in line]),
        "a pattern that takes for ever": lambda q: q["ignore"].append("re:(([a-z.0-9_]+)+)+!$"),
        "a pattern that is none": lambda q: q["ignore"].append("re:["),
        "a KV scheme without scales": lambda q: q.update(
            kv_cache_scheme={"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}
        ),
        "a KV scheme that is none": lambda q: q.update(kv_cache_scheme=7),
        "FP8 description gone": lambda q: q.pop("linear_fp8_config"),
        "FP8 blocks of another size": lambda q: q["linear_fp8_config"].update(weight_block_size=[64, 64]),
        "FP8 scales as exponents": lambda q: q["linear_fp8_config"].update(scale_fmt="ue8m0"),
        "FP8 of another kind": lambda q: q["linear_fp8_config"].update(fmt="e5m2"),
    }
    for said, edit in edits.items():
        yield f"description, resealed: {said}", "kimi", _meant(edit)


def index_corruptions() -> Iterator[tuple[str, str, Corrupt]]:
    name = f"{EXPERT}.weight_packed"
    edits: dict[str, Callable[[Any], Any]] = {
        "an entry dropped": lambda i: i["weight_map"].pop(name) and None,
        "an entry added": lambda i: i["weight_map"].update({f"{EXPERT}.weight": i["weight_map"][name]}),
        "an entry renamed": lambda i: i["weight_map"].update({f"{name}x": i["weight_map"].pop(name)}),
        "an entry in another shard": lambda i: i["weight_map"].update({name: i["weight_map"]["model.norm.weight"]}),
        "an entry outside the folder": lambda i: i["weight_map"].update({name: "../x.safetensors"}),
        "an entry that is a number": lambda i: i["weight_map"].update({name: 3}),
        "total_size one more": lambda i: i["metadata"].update(total_size=i["metadata"]["total_size"] + 1),
        "total_size a text": lambda i: i["metadata"].update(total_size=str(i["metadata"]["total_size"])),
        "total_size removed": lambda i: i["metadata"].pop("total_size") and None,
        "total_parameters doubled": lambda i: i["metadata"].update(
            total_parameters=2 * i["metadata"]["total_parameters"]
        ),
        "metadata a list": lambda i: i.update(metadata=[1]),
        "metadata removed": lambda i: i.pop("metadata") and None,
        "weight_map removed": lambda i: i.pop("weight_map") and None,
        "weight_map a list": lambda i: i.update(weight_map=[]),
        "weight_map empty": lambda i: i.update(weight_map={}),
        "a list": lambda i: [],
    }
    for said, edit in edits.items():
        yield f"index: {said}", "kimi", document(INDEX, edit)


def state_corruptions(states: dict[str, Any]) -> Iterator[tuple[str, str, Corrupt]]:
    """Every leaf of the plan and of the report, every field of a receipt and of one quantized weight's record."""
    for name, value in states.items():
        label = name.removeprefix(".moepress/")
        every = [path for path in leaves(value) if not any(isinstance(key, int) and key > 0 for key in path)]
        weights = [path for path in every if "weights" in path[:1]]
        if weights:  # of a receipt's records, those of one weight
            every = [path for path in every if path not in weights or path[1] == weights[0][1]]
        for path in every:
            yield f"{label} {'.'.join(map(str, path))}: changed", "kimi", document(name, at(path, changed))
        for key in value:
            yield f"{label} {key}: removed", "kimi", document(name, at((key,), None))
