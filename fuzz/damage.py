"""What can happen to a checkpoint on its way: one function a kind, each changes the files in memory.

tensors   bytes, dtypes, shapes, names, places; before the shards are written, so headers and index stay honest
files     shards, index, config and side files as bytes; headers and index need not be honest any more
folder    what only a file system can do: links, folders in the place of files, names that lead outside
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fuzz.small import INDEX, Files, Tensor
from fuzz.wild import TEXTS, edit_bytes, edit_tree, to_text, wild_value

DTYPES = ("F32", "BF16", "F16", "F8_E4M3", "F8_E5M2", "F8_E8M0", "U8", "I8", "I32", "I64", "F64", "BOOL", "F4", "X9")


def _pick(rng: random.Random, files: Files, ending: str = "") -> tuple[dict[str, Tensor], str]:
    """A shard's tensors and the name of one of them; names that end like this first."""
    candidates = [(tensors, name) for tensors in files.shards.values() for name in tensors]
    wanted = [item for item in candidates if ending in item[1]] or candidates
    return rng.choice(wanted)


# tensors


def flip_bits(rng: random.Random, files: Files) -> None:
    for _ in range(rng.choice((1, 1, 1, 8, 64))):
        tensors, name = _pick(rng, files, rng.choice(("", "experts", "scale")))
        data = bytearray(tensors[name].data)
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        tensors[name].data = bytes(data)


def fill_with(rng: random.Random, files: Files) -> None:
    """A whole tensor of one byte: zeros, NaN codes, infinities."""
    tensors, name = _pick(rng, files, rng.choice(("experts", "scale", "")))
    tensor = tensors[name]
    pattern = rng.choice((b"\x00", b"\xff", b"\x7f", b"\x80\x7f", b"\x00\x00\x80\x7f", b"\x01\x00", b"\x00\x80"))
    tensor.data = (pattern * len(tensor.data))[: len(tensor.data)]


def scale_value(rng: random.Random, files: Files) -> None:
    """One scale negative, zero, tiny, huge, NaN or infinite."""
    from fuzz.small import bf16

    tensors, name = _pick(rng, files, "scale")
    tensor = tensors[name]
    if tensor.dtype not in ("F32", "BF16"):
        return
    import numpy as np

    value = rng.choice((-0.001, 0.0, -0.0, 1e-40, 1e-30, 1e30, 3e38, float("nan"), float("inf"), float("-inf")))
    one = np.float32(value).tobytes() if tensor.dtype == "F32" else bf16([value])
    data = bytearray(tensor.data)
    at = rng.randrange(len(data) // len(one)) * len(one)
    data[at : at + len(one)] = one
    tensor.data = bytes(data)


def drop_tensor(rng: random.Random, files: Files) -> None:
    for _ in range(rng.choice((1, 1, 5))):
        tensors, name = _pick(rng, files)
        if len(tensors) > 1:
            del tensors[name]


def twice(rng: random.Random, files: Files) -> None:
    """One tensor in both shards."""
    tensors, name = _pick(rng, files)
    other = next(each for each in files.shards.values() if each is not tensors)
    other[name] = Tensor(tensors[name].dtype, tensors[name].shape, tensors[name].data)


def rename_tensor(rng: random.Random, files: Files) -> None:
    tensors, name = _pick(rng, files)
    new = rng.choice(
        (
            name + "_x",
            name.replace("layers.1", "layers.7"),
            name.replace("layers.1.", f"layers.{10 ** rng.randrange(1, 30)}."),
            name.replace("experts.1", f"experts.{'9' * rng.choice((1, 20, 5000))}"),
            name.replace(".weight", ""),
            name.replace("weight_scale_inv", "scale"),
            name.replace("weight", "weight_packed"),
            name.replace("gate_proj", "gate"),
            "model." + name,
            str(wild_value(rng)),
        )
    )
    tensors[new] = tensors.pop(name)


def swap_tensors(rng: random.Random, files: Files) -> None:
    """Two names change places; with one shape the checkpoint stays whole, and is another model."""
    (a, first), (b, second) = _pick(rng, files), _pick(rng, files)
    a[first], b[second] = b[second], a[first]


def other_dtype(rng: random.Random, files: Files) -> None:
    tensors, name = _pick(rng, files, rng.choice(("", "scale", "experts", "norm")))
    tensors[name].dtype = rng.choice(DTYPES)


def resized(rng: random.Random, files: Files) -> None:
    """Another dtype with the right number of bytes for it."""
    tensors, name = _pick(rng, files, rng.choice(("", "scale", "bias", "gate.weight")))
    tensor = tensors[name]
    dtype, size = rng.choice(
        (("F32", 4), ("BF16", 2), ("F16", 2), ("F64", 8), ("I64", 8), ("I32", 4), ("F8_E4M3", 1), ("U8", 1))
    )
    count = 1
    for dimension in tensor.shape:
        count *= dimension
    tensor.dtype, tensor.data = dtype, bytes(rng.choice((0, 1, 60)) for _ in range(count * size))


def other_shape(rng: random.Random, files: Files) -> None:
    """Transposed, flattened, with one more dimension, or another size with bytes to match."""
    tensors, name = _pick(rng, files, rng.choice(("", "scale", "experts", "weight_shape")))
    tensor = tensors[name]
    change = rng.randrange(5)
    if change == 0:
        tensor.shape = tensor.shape[::-1]
    elif change == 1:
        count = 1
        for dimension in tensor.shape:
            count *= dimension
        tensor.shape = rng.choice(([count], [1, count], [count, 1], [1, 1, count], []))
    elif change == 2 and tensor.shape and tensor.shape[0]:
        per_row = len(tensor.data) // tensor.shape[0]
        rows = rng.choice((0, 1, tensor.shape[0] - 1, tensor.shape[0] + 1, tensor.shape[0] * 2))
        tensor.data = (tensor.data * 2)[: rows * per_row]
        tensor.shape = [rows, *tensor.shape[1:]]
    elif change == 3:
        tensor.shape = [*tensor.shape, 1]
    else:
        tensor.shape = [2**40, *tensor.shape]


def extra_tensor(rng: random.Random, files: Files) -> None:
    tensors, name = _pick(rng, files)
    new = rng.choice(
        (
            "model.layers.1.dummy",
            "model.layers.0.self_attn.k_scale",
            "model.layers.1.self_attn.v_scale",
            "model.layers.1.self_attn.rotary_emb.inv_freq",
            "model.layers.1.mlp.experts.gate_up_proj",
            "model.layers.1.mlp.experts.0.gate_proj.input_scale",
            "model.layers.1.mlp.experts.0.up_proj.weight_g_idx",
            "model.layers.1.mlp.experts.2.gate_proj.weight",
            "model.layers.3.input_layernorm.weight",
            "lm_head.weight_scale",
        )
    )
    if all(new not in each for each in files.shards.values()):
        tensors[new] = rng.choice((tensors[name], Tensor("F32", [1], b"\x00\x00\x80\x3f"), Tensor("BF16", [0, 4], b"")))


def edit_config(rng: random.Random, files: Files) -> None:
    for _ in range(rng.choice((1, 1, 2, 3))):
        edit_tree(rng, files.config)


def edit_quantization(rng: random.Random, files: Files) -> None:
    if isinstance(files.config.get("quantization_config"), dict):
        edit_tree(rng, files.config["quantization_config"])


# files


def edit_file(rng: random.Random, content: dict[str, bytes]) -> None:
    name = rng.choice(list(content))
    for _ in range(rng.choice((1, 1, 3))):
        content[name] = edit_bytes(rng, content[name])


def edit_header(rng: random.Random, content: dict[str, bytes]) -> None:
    """A shard's header, edited as a tree; the data stays."""
    name = rng.choice([each for each in content if each.endswith(".safetensors")])
    length = 8 + int.from_bytes(content[name][:8], "little")
    header = json.loads(content[name][8:length])
    edit_tree(rng, header)
    text = to_text(rng, header)
    content[name] = len(text).to_bytes(8, "little") + text + content[name][length:]


def cut_file(rng: random.Random, content: dict[str, bytes]) -> None:
    name = rng.choice([each for each in content if each.endswith((".safetensors", ".json"))])
    content[name] = content[name][: rng.choice((0, 4, 8, 100, len(content[name]) // 2, len(content[name]) - 1))]


def swap_shards(_: random.Random, content: dict[str, bytes]) -> None:
    first, second = sorted(name for name in content if name.endswith(".safetensors"))[:2]
    content[first], content[second] = content[second], content[first]


def foreign_file(rng: random.Random, content: dict[str, bytes]) -> None:
    name = rng.choice(
        (
            *content,
            "model.safetensors",
            "pytorch_model.bin",
            "model-00003-of-00002.safetensors",
            "modeling_x.py",
            "training_args.bin",
        )
    )
    content[name] = rng.choice(TEXTS)


def edit_index(rng: random.Random, content: dict[str, bytes]) -> None:
    index: Any = json.loads(content[INDEX])
    if rng.random() < 0.4:
        name = rng.choice(list(index["weight_map"]))
        index["weight_map"][name] = rng.choice(
            (
                "../x.safetensors",
                "/etc/passwd",
                "/tmp/x.safetensors",
                "a/../../x.safetensors",
                "./model-00001-of-00002.safetensors",
                "x",
                "model-00009-of-00002.safetensors",
            )
        )
    else:
        edit_tree(rng, index)
    content[INDEX] = to_text(rng, index)


def remove_file(rng: random.Random, content: dict[str, bytes]) -> None:
    del content[rng.choice(list(content))]


# the folder


def link_outside(rng: random.Random, folder: Path) -> None:
    """A side file, config or shard that is a link to something else."""
    names = [path for path in folder.rglob("*") if path.is_file()]
    path = rng.choice([*names, folder / "notes.txt", folder / "weights.safetensors"])
    path.unlink(missing_ok=True)
    path.symlink_to(
        rng.choice(("/etc/passwd", "/nowhere/at/all", "..", "/dev/zero", "config.json", "/proc/self/environ"))
    )


def odd_entry(rng: random.Random, folder: Path) -> None:
    """A folder, a pipe, an unreadable or an oddly named file."""
    name = rng.choice(("config.json", INDEX, "model-00001-of-00002.safetensors", "tokenizer.json", "extra"))
    path = folder / name
    path.unlink(missing_ok=True)
    kind = rng.randrange(4)
    if kind == 0:
        path.mkdir()
    elif kind == 1:
        os.mkfifo(path)
    elif kind == 2:
        (folder / "bad\nname").write_bytes(b"x")
    else:
        (folder / os.fsdecode(b"bad\xff")).write_bytes(b"x")


TENSORS: tuple[Callable[[random.Random, Files], None], ...] = (
    *(
        flip_bits,
        flip_bits,
        flip_bits,
        fill_with,
        scale_value,
        scale_value,
        drop_tensor,
        twice,
        rename_tensor,
        swap_tensors,
    ),
    *(other_dtype, resized, other_shape, extra_tensor, edit_config, edit_config, edit_quantization),
)
FILES: tuple[Callable[[random.Random, dict[str, bytes]], None], ...] = (
    *(edit_file, edit_file, edit_header, cut_file, swap_shards, foreign_file, edit_index, remove_file),
)
FOLDER: tuple[Callable[[random.Random, Path], None], ...] = (link_outside, odd_entry)
