"""Single corruptions of a good output, by the hundred: each a function with a name, applied to a copy.

    tensors     numbers, signs, nibbles, scales, dtypes, shapes, names, places    resealed: every checksum is made to agree,
    config      every field, one by one                                           so only the contents can give it away
    described   every leaf of quantization_config; index; receipts, plan, report  as a hand or a disk would change them
    files       shards, side files, strangers, links

``CORRUPTIONS`` maps a name to (family, corrupt); corrupt(folder) changes one thing in the copy.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from fuzz.small import INDEX, Tensor, build, shard_bytes
from moepress.formats.sealed_json import content_digest, sealed

Corrupt = Callable[[Path], None]
REPORT = "moepress_report.json"
EXPERT = "model.layers.1.mlp.experts.1.up_proj"


# writing in a copy whose files are links


def put(path: Path, raw: bytes) -> None:
    path.unlink(missing_ok=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(raw)


def load(path: Path) -> Any:
    return json.loads(path.read_text())


def store(path: Path, value: Any) -> None:
    put(path, json.dumps(value).encode())


def reseal(out: Path) -> None:
    """Every checksum says what is there now: an adversary's, or a bug's that wrote checksum and mistake together."""
    report = load(out / REPORT)
    for shard in report["shards"]:
        if (out / shard).exists():
            report["shards"][shard] = hashlib.sha256((out / shard).read_bytes()).hexdigest()
            path = receipt(out, shard)
            size = (out / shard).stat().st_size
            store(path, sealed({**load(path), "sha256": report["shards"][shard], "file_bytes": size}))
    for name in ("config.json", INDEX):
        report["content_sha256"][name] = content_digest(load(out / name))
    store(out / REPORT, sealed(report))


def receipt(out: Path, shard: str) -> Path:
    return out / ".moepress" / "receipts" / f"{shard}.json"


def read_shard(path: Path) -> dict[str, Tensor]:
    raw = path.read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    return {
        name: Tensor(e["dtype"], e["shape"], raw[start + e["data_offsets"][0] : start + e["data_offsets"][1]])
        for name, e in json.loads(raw[8:start]).items()
        if name != "__metadata__"
    }


def tensors(edit: Callable[[dict[str, Tensor]], None], name: str) -> Corrupt:
    """Edits the shard that holds ``name``; index and checksums follow."""

    def corrupt(out: Path) -> None:
        index = load(out / INDEX)
        shard = index["weight_map"][name]
        before = read_shard(out / shard)
        held = read_shard(out / shard)
        edit(held)
        put(out / shard, shard_bytes(held))
        for gone in before.keys() - held.keys():
            del index["weight_map"][gone]
        index["weight_map"] |= dict.fromkeys(held, shard)
        index["metadata"]["total_size"] += sum(len(t.data) for t in held.values()) - sum(
            len(t.data) for t in before.values()
        )
        store(out / INDEX, index)
        reseal(out)

    return corrupt


def document(name: str, edit: Callable[[Any], Any], *, resealed: bool = False) -> Corrupt:
    """Edits a JSON file; ``edit`` returns the new value, or None for the one it changed."""

    def corrupt(out: Path) -> None:
        value = load(out / name)
        changed = edit(value)
        store(out / name, value if changed is None else changed)
        if resealed:
            reseal(out)

    return corrupt


# one tensor


def lowest_bit(t: Tensor) -> None:
    t.data = bytes([t.data[0] ^ 1]) + t.data[1:]


def sign(t: Tensor) -> None:
    t.data = t.data[:-1] + bytes([t.data[-1] ^ 0x80])


def zeros(t: Tensor) -> None:
    t.data = bytes(len(t.data))


def nan(t: Tensor) -> None:
    size = {"F8_E4M3": 1, "BF16": 2, "F32": 4}[t.dtype]
    t.data = {1: b"\x7f", 2: b"\xc0\x7f", 4: b"\x00\x00\xc0\x7f"}[size] + t.data[size:]


def rows_swapped(t: Tensor) -> None:
    step = len(t.data) // t.shape[0]
    t.data = t.data[step : 2 * step] + t.data[:step] + t.data[2 * step :]


def row_missing(t: Tensor) -> None:
    t.data = t.data[: len(t.data) // t.shape[0] * (t.shape[0] - 1)]
    t.shape = [t.shape[0] - 1, *t.shape[1:]]


def row_more(t: Tensor) -> None:
    t.data += t.data[: len(t.data) // t.shape[0]]
    t.shape = [t.shape[0] + 1, *t.shape[1:]]


def shape_reversed(t: Tensor) -> None:
    t.shape = t.shape[::-1] if t.shape[::-1] != t.shape else [*t.shape, 1]


def relabelled(t: Tensor) -> None:
    t.dtype = {"BF16": "F16", "F32": "I32", "F8_E4M3": "U8", "I32": "U32", "I64": "U64"}[t.dtype]


def widened(t: Tensor) -> None:
    """The same numbers in a wider type."""
    if t.dtype == "BF16":
        t.data = (np.frombuffer(t.data, np.uint16).astype(np.uint32) << 16).tobytes()
        t.dtype = "F32"
    elif t.dtype == "F32":
        t.data = np.frombuffer(t.data, np.float32).astype(np.float64).tobytes()
        t.dtype = "F64"


def doubled(t: Tensor) -> None:
    if t.dtype == "F32":
        t.data = (np.frombuffer(t.data, np.float32) * 2).tobytes()
    else:
        bits = np.frombuffer(t.data, np.uint16)
        t.data = np.where(bits & 0x7F80, bits + 0x80, bits).astype(np.uint16).tobytes()


# packed weights


def nibbles_reversed(t: Tensor) -> None:
    raw = np.frombuffer(t.data, np.uint8)
    t.data = ((raw << 4) | (raw >> 4)).tobytes()


def bytes_reversed(t: Tensor) -> None:
    t.data = np.frombuffer(t.data, np.uint32).byteswap().tobytes()


def twos_complement(t: Tensor) -> None:
    """Codes as two's complement instead of plus 8."""
    t.data = (np.frombuffer(t.data, np.uint32) ^ np.uint32(0x88888888)).tobytes()


def negated(t: Tensor) -> None:
    raw = np.frombuffer(t.data, np.uint32)
    codes = (raw[:, None] >> (4 * np.arange(8, dtype=np.uint32))) & 15
    codes = np.clip(16 - codes, 0, 15)
    t.data = (codes << (4 * np.arange(8, dtype=np.uint32))).sum(1).astype(np.uint32).tobytes()


def one_code(t: Tensor) -> None:
    raw = np.frombuffer(t.data, np.uint32).copy()
    raw[3] ^= 0x10
    t.data = raw.tobytes()


def codes_shifted(t: Tensor) -> None:
    """Every code one place to the right."""
    t.data = np.roll(np.frombuffer(t.data, np.uint32), 1).tobytes()


def bf16_first(value: int) -> Callable[[Tensor], None]:
    def put_first(t: Tensor) -> None:
        t.data = value.to_bytes(2, "little") + t.data[2:]

    return put_first


def scale_one_step(t: Tensor) -> None:
    t.data = (int.from_bytes(t.data[:2], "little") + 1).to_bytes(2, "little") + t.data[2:]


def scales_transposed(t: Tensor) -> None:
    rows, groups = t.shape
    t.data = np.frombuffer(t.data, np.uint16).reshape(rows, groups).T.copy().tobytes()


def scales_finer(t: Tensor) -> None:
    """Groups half as wide, each scale twice: the same numbers, and not what config.json says."""
    rows, groups = t.shape
    t.data = np.frombuffer(t.data, np.uint16).repeat(2).tobytes()
    t.shape = [rows, 2 * groups]


def true_shape(values: list[int]) -> Callable[[Tensor], None]:
    def put_shape(t: Tensor) -> None:
        t.data = np.array(values, np.int64).tobytes()

    return put_shape


def swapped(a: str, b: str) -> Callable[[dict[str, Tensor]], None]:
    def edit(held: dict[str, Tensor]) -> None:
        for part in ("weight_packed", "weight_scale"):
            held[f"{a}.{part}"], held[f"{b}.{part}"] = held[f"{b}.{part}"], held[f"{a}.{part}"]

    return edit


def on(name: str, edit: Callable[[Tensor], None]) -> Corrupt:
    return tensors(lambda held: edit(held[name]), name)


def extra(name: str, tensor: Tensor, beside: str) -> Corrupt:
    return tensors(lambda held: held.update({name: tensor}), beside)


KEPT = {
    "kimi": {
        "embedding": "model.embed_tokens.weight",
        "head": "lm_head.weight",
        "final norm": "model.norm.weight",
        "norm": "model.layers.1.input_layernorm.weight",
        "latent norm": "model.layers.0.self_attn.kv_a_layernorm.weight",
        "query codes": "model.layers.1.self_attn.q_b_proj.weight",
        "ragged codes": "model.layers.0.self_attn.kv_a_proj_with_mqa.weight",
        "ragged scale": "model.layers.0.self_attn.kv_a_proj_with_mqa.weight_scale_inv",
        "absorbed codes": "model.layers.1.self_attn.kv_b_proj.weight",
        "output scale": "model.layers.1.self_attn.o_proj.weight_scale_inv",
        "dense codes": "model.layers.0.mlp.down_proj.weight",
        "dense scale": "model.layers.0.mlp.gate_proj.weight_scale_inv",
        "router": "model.layers.1.mlp.gate.weight",
        "router bias": "model.layers.1.mlp.gate.e_score_correction_bias",
        "shared codes": "model.layers.1.mlp.shared_experts.up_proj.weight",
        "shared scale": "model.layers.1.mlp.shared_experts.down_proj.weight_scale_inv",
        "MTP projection": "model.layers.2.eh_proj.weight",
        "MTP norm": "model.layers.2.enorm.weight",
        "MTP attention codes": "model.layers.2.self_attn.q_a_proj.weight",
    },
    "glm4": {
        "key norm": "model.layers.1.self_attn.k_norm.weight",
        "query norm": "model.layers.1.self_attn.q_norm.weight",
        "value bias": "model.layers.0.self_attn.v_proj.bias",
        "channel codes": "model.layers.0.self_attn.v_proj.weight",
        "channel scale": "model.layers.0.self_attn.v_proj.weight_scale",
        "MTP embedding": "model.layers.2.embed_tokens.weight",
        "MTP head": "model.layers.2.shared_head.head.weight",
    },
    "qwen3": {
        "block codes": "model.layers.0.self_attn.k_proj.weight",
        "block scale": "model.layers.0.self_attn.o_proj.weight_scale",
        "router": "model.layers.0.mlp.gate.weight",
    },
    "packed": {
        "carried words": f"{EXPERT}.weight_packed",
        "carried scale": f"{EXPERT}.weight_scale",
        "carried shape": f"{EXPERT}.weight_shape",
        "attention": "model.layers.0.self_attn.o_proj.weight",
    },
}
"""A tensor of every kind that a conversion keeps, by family."""

ANY = (lowest_bit, sign, rows_swapped, row_missing, shape_reversed, relabelled)
PROJECTIONS = {
    "gate": "model.layers.1.mlp.experts.0.gate_proj",
    "up": EXPERT,
    "down": "model.layers.1.mlp.experts.0.down_proj",
    "MTP": "model.layers.2.mlp.experts.1.down_proj",
}
WORDS = (
    one_code,
    sign,
    zeros,
    nibbles_reversed,
    bytes_reversed,
    twos_complement,
    negated,
    codes_shifted,
    rows_swapped,
    relabelled,
)
SCALES = {
    "negative": bf16_first(0xBC00),
    "zero": bf16_first(0),
    "NaN": bf16_first(0x7FC0),
    "infinite": bf16_first(0x7F80),
    "one step larger": scale_one_step,
    "doubled": doubled,
    "zeros": zeros,
    "transposed": scales_transposed,
    "finer groups": scales_finer,
    "in F32": widened,
    "rows swapped": rows_swapped,
    "a row missing": row_missing,
}


def _tensor_corruptions() -> Iterator[tuple[str, str, Corrupt]]:
    for family, kinds in KEPT.items():
        for kind, name in kinds.items():
            for edit in ANY:
                yield f"{kind}: {edit.__name__}", family, on(name, edit)
    for kind in ("embedding", "norm", "router bias", "ragged scale", "head"):
        name = KEPT["kimi"][kind]
        for edit in (zeros, nan, widened, doubled, row_more):
            yield f"{kind}: {edit.__name__}", "kimi", on(name, edit)
        yield f"{kind}: dropped", "kimi", tensors(lambda held, n=name: held.pop(n) and None, name)
        yield f"{kind}: renamed", "kimi", tensors(lambda held, n=name: held.update({f"{n}_old": held.pop(n)}), name)
    for which, module in PROJECTIONS.items():
        for edit in WORDS:
            yield f"{which} words: {edit.__name__}", "kimi", on(f"{module}.weight_packed", edit)
        for said, change in SCALES.items():
            if said == "transposed" and module.endswith("down_proj"):
                continue  # one column
            yield f"{which} scales: {said}", "kimi", on(f"{module}.weight_scale", change)
        rows, columns = (64, 32) if module.endswith("down_proj") else (32, 64)
        for said, values in {"transposed": [columns, rows], "too wide": [rows, columns + 8], "zero": [0, 0]}.items():
            yield f"{which} shape: {said}", "kimi", on(f"{module}.weight_shape", true_shape(values))
        for part in ("weight_packed", "weight_scale", "weight_shape"):
            name = f"{module}.{part}"
            yield f"{which} {part}: dropped", "kimi", tensors(lambda held, n=name: held.pop(n) and None, name)
    gate, up, other = (f"model.layers.1.mlp.experts.{e}" for e in ("1.gate_proj", "1.up_proj", "0.up_proj"))
    packed = f"{up}.weight_packed"
    yield "gate and up swapped", "kimi", tensors(swapped(gate, up), packed)
    yield "two experts swapped", "kimi", tensors(swapped(up, other), packed)
    yield (
        "weight_g_idx added",
        "kimi",
        extra(f"{up}.weight_g_idx", Tensor("I32", [64], np.arange(64, dtype=np.int32).tobytes()), packed),
    )
    yield "weight_zero_point added", "kimi", extra(f"{up}.weight_zero_point", Tensor("I32", [4, 2], bytes(32)), packed)
    yield "input_scale added", "kimi", extra(f"{up}.input_scale", Tensor("F32", [1], b"\x00\x00\x80\x3f"), packed)
    yield (
        "the unpacked weight beside the packed one",
        "kimi",
        extra(f"{up}.weight", Tensor("BF16", [32, 64], bytes(4096)), packed),
    )
    yield (
        "an expert too many",
        "kimi",
        extra("model.layers.1.mlp.experts.2.up_proj.weight", Tensor("BF16", [32, 64], bytes(4096)), packed),
    )
    yield (
        "k_scale added",
        "kimi",
        extra("model.layers.1.self_attn.k_scale", Tensor("F32", [1], b"\x00\x00\x00\x3f"), packed),
    )
    yield (
        "v_scale added",
        "glm4",
        extra("model.layers.0.self_attn.v_scale", Tensor("F32", [1], b"\x00\x00\x00\x40"), packed),
    )
    yield "a KV factor on one side: k_norm", "glm4", on("model.layers.1.self_attn.k_norm.weight", doubled)
    yield "a KV factor on one side: v_proj", "glm4", on("model.layers.1.self_attn.v_proj.weight_scale", doubled)
    yield "a KV factor on one side: latent", "kimi", on("model.layers.1.self_attn.kv_a_layernorm.weight", doubled)
    yield "a KV factor on one side: kv_b", "kimi", on("model.layers.1.self_attn.kv_b_proj.weight_scale_inv", doubled)


# documents


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


def _config_corruptions() -> Iterator[tuple[str, str, Corrupt]]:
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


def _described(described: dict[str, dict[str, Any]]) -> Iterator[tuple[str, str, Corrupt]]:
    """Every leaf of what the good outputs say of their quantization."""
    for family, quantization in described.items():
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


def _described_with_checksums() -> Iterator[tuple[str, str, Corrupt]]:
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


def _index_corruptions() -> Iterator[tuple[str, str, Corrupt]]:
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


def _state_corruptions(states: dict[str, Any]) -> Iterator[tuple[str, str, Corrupt]]:
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


# files


def _file_corruptions(side: list[str], receipts: list[str]) -> Iterator[tuple[str, str, Corrupt]]:
    for name in side:
        yield f"{name}: changed", "kimi", lambda out, n=name: put(out / n, (out / n).read_bytes() + b" ")
        yield f"{name}: removed", "kimi", lambda out, n=name: (out / n).unlink()
    for name in ("config.json", INDEX, REPORT, ".moepress/plan.json", *receipts):
        yield f"{name}: gone", "kimi", lambda out, n=name: (out / n).unlink()
        yield f"{name}: cut", "kimi", lambda out, n=name: put(out / n, (out / n).read_bytes()[:-20])
        yield f"{name}: empty", "kimi", lambda out, n=name: put(out / n, b"")
    first, second = (f"model-0000{n}-of-00003.safetensors" for n in (1, 2))

    def swap(out: Path) -> None:
        a, b = (out / first).read_bytes(), (out / second).read_bytes()
        put(out / first, b)
        put(out / second, a)

    def move(out: Path) -> None:
        (out / first).rename(out / "model-00009-of-00009.safetensors")

    def link(out: Path) -> None:
        (out / "tiktoken.model").unlink()
        (out / "tiktoken.model").symlink_to("/etc/hostname")

    def folder(out: Path) -> None:
        (out / first).unlink()
        (out / first).mkdir()

    def no_format(out: Path) -> None:
        raw = (out / first).read_bytes()
        start = 8 + int.from_bytes(raw[:8], "little")
        text = raw[8:start].replace(b'"format":"pt"', b'"format":"tf"')
        put(out / first, raw[:8] + text + raw[start:])
        reseal(out)

    def byte(place: int) -> Corrupt:
        def corrupt(out: Path) -> None:
            raw = bytearray((out / first).read_bytes())
            raw[place] ^= 1
            put(out / first, bytes(raw))

        return corrupt

    shards: dict[str, Corrupt] = {
        "a shard gone": lambda out: (out / first).unlink(),
        "a shard cut by one byte": lambda out: put(out / first, (out / first).read_bytes()[:-1]),
        "a shard with a byte more": lambda out: put(out / first, (out / first).read_bytes() + b"\x00"),
        "a shard empty": lambda out: put(out / first, b""),
        "two shards swapped": swap,
        "a shard renamed": move,
        "a shard twice": lambda out: put(out / "model.safetensors", (out / first).read_bytes()),
        "a shard that is a folder": folder,
        "a side file that is a link": link,
        "a header without its format": no_format,
        "the first byte of a shard": byte(0),
        "a byte in the header of a shard": byte(40),
        "the last byte of a shard": byte(-1),
        "weights of another format": lambda out: put(out / "pytorch_model.bin", b"\x80\x02."),
        "code that nobody wrote": lambda out: put(out / "modeling_x.py", b"import os\n"),
        "a stranger in a folder": lambda out: put(out / "docs" / "x.md", b"x"),
        "a stranger without a name": lambda out: put(out / ".env", b"TOKEN=x"),
        "a receipt too many": lambda out: put(
            receipt(out, "model-00004-of-00004.safetensors"), receipt(out, first).read_bytes()
        ),
        "a receipt of another shard": lambda out: put(receipt(out, first), receipt(out, second).read_bytes()),
    }
    for said, corrupt in shards.items():
        yield said, "kimi", corrupt


def corruptions(good: dict[str, Path]) -> dict[str, tuple[str, Corrupt]]:
    """Every corruption, by name.

    Args:
        good: undamaged outputs by family, whose documents say which fields there are.
    """
    kimi = good["kimi"]
    receipts = sorted(f".moepress/receipts/{path.name}" for path in (kimi / ".moepress" / "receipts").iterdir())
    states = {name: load(kimi / name) for name in (REPORT, ".moepress/plan.json", receipts[1])}
    side = sorted(build("kimi").side)
    described = {family: load(good[family] / "config.json")["quantization_config"] for family in ("kimi", "glm4")}
    table: dict[str, tuple[str, Corrupt]] = {}
    for part in (
        _tensor_corruptions(),
        _config_corruptions(),
        _described(described),
        _described_with_checksums(),
        _index_corruptions(),
        _state_corruptions(states),
        _file_corruptions(side, receipts),
    ):
        for name, family, corrupt in part:
            assert (name, family) not in {(n, f) for n, (f, _) in table.items()}, name
            table[f"{name}" if family == "kimi" else f"{family}, {name.removeprefix(f'{family} ')}"] = family, corrupt
    return table
