"""Write the tiny checkpoint exactly as Kimi K2 is published: block FP8, many shards, an index, remote code.

    python export.py OUT [--format kimi-k2]

The idea: the 16 MB in master/ are the trained BF16 weights. What a converter meets in the wild is something else, so
this script produces it: the same names, dtypes, scale tensors, shard names and side files as the 1 TB original. Nothing
of the project's own code is used, so that a mistake in the converter cannot hide in its own input.

    self_attn.{q_a,q_b,kv_a_with_mqa,kv_b,o}_proj, mlp.experts.E.*, mlp.shared_experts.*, dense mlp.*
                                   `weight` F8_E4M3 [r, c] and `weight_scale_inv` F32 [ceil(r/128), ceil(c/128)]
    norms, mlp.gate.weight, embed_tokens, lm_head                                        BF16, as in master/
    mlp.gate.e_score_correction_bias                                                     F32, as in master/

A block's scale is its largest magnitude / 448; weight = decoded FP8 × scale. kv_a_proj_with_mqa has 576 rows: its last
block is 64 rows high.

A shard takes tensors in the order of the model until it holds SHARD_BYTES, so a layer, and even a weight and its scale,
may lie in two shards. The same master gives the same bytes on every machine.

Needs torch, safetensors and the standard library.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file

MASTER = Path(__file__).resolve().parent / "master"

BLOCK = 128
FP8_MAX = 448.0  # largest finite e4m3 value
SHARD_BYTES = 2_200_000
FP8_PARENTS = ("self_attn.", "mlp.experts.", "mlp.shared_experts.", "mlp.gate_proj.", "mlp.up_proj.", "mlp.down_proj.")
SIDE_FILES = (
    "LICENSE",
    "chat_template.jinja",
    "configuration_deepseek.py",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
)
SAFETENSORS_DTYPES = {torch.float8_e4m3fn: "F8_E4M3", torch.bfloat16: "BF16", torch.float32: "F32"}


def load_master_state_dict() -> dict[str, torch.Tensor]:
    """The trained weights under their published names, one tensor per expert and projection, in model order.

    BF16, but for e_score_correction_bias, which is float32 [16].
    """
    state = load_file(MASTER / "model.safetensors")
    return {name: state[name] for name in sorted(state, key=_model_order)}


def dequantized_state_dict() -> dict[str, torch.Tensor]:
    """What the exported checkpoint means: names as in `load_master_state_dict`, FP8 weights decoded to float32.

    Decoded the plain way: every scale repeated over its block and cut to the weight's shape. The other tensors are
    those of master/.
    """
    state = load_master_state_dict()
    return {n: decode_fp8_block(*encode_fp8_block(t)) if is_fp8(n) else t for n, t in state.items()}


def is_fp8(name: str) -> bool:
    """Whether Kimi K2 publishes this weight in block FP8."""
    tail = name.split(".", 3)[-1]  # of model.layers.L.<tail>
    return tail.startswith(FP8_PARENTS) and "layernorm" not in tail


def encode_fp8_block(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """weight [R, C] → (float8_e4m3fn [R, C], float32 scales [ceil(R/128), ceil(C/128)]); last blocks may be ragged."""
    rows, columns = weight.shape
    down, right = -(-rows // BLOCK), -(-columns // BLOCK)
    padded = torch.zeros(down * BLOCK, right * BLOCK)
    padded[:rows, :columns] = weight.float()
    blocks = padded.view(down, BLOCK, right, BLOCK)
    scale = blocks.abs().amax(dim=(1, 3)) / FP8_MAX
    scale[scale == 0] = 1.0  # a block of zeros
    scaled = (blocks / scale[:, None, :, None]).clamp(-FP8_MAX, FP8_MAX)
    return scaled.view_as(padded)[:rows, :columns].contiguous().to(torch.float8_e4m3fn), scale


def decode_fp8_block(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The inverse of `encode_fp8_block`, up to rounding: float32 [R, C]."""
    whole = scale.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    return codes.float() * whole[: codes.size(0), : codes.size(1)]


def write_safetensors(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """A safetensors file whose bytes depend on its content alone, with the mode that the umask gives.

    (safetensors' own save_file orders metadata at random and writes mode 0600.) Wider dtypes come first, so that every
    tensor is aligned; the header is padded with spaces to a multiple of 8 bytes.
    """
    names = sorted(tensors, key=lambda n: (-tensors[n].element_size(), n))
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in names:
        begin, end = end, end + tensors[name].nbytes
        dtype = SAFETENSORS_DTYPES[tensors[name].dtype]
        header[name] = {"dtype": dtype, "shape": list(tensors[name].shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in names:
            file.write(tensors[name].contiguous().view(torch.uint8).numpy().data)


def export(out: Path) -> Path:
    """Write the checkpoint into the folder `out`, made if missing; an earlier export is replaced. Returns `out`."""
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    shards: list[dict[str, torch.Tensor]] = []
    total = room = 0
    for name, tensor in _published_tensors():
        if room <= 0:
            shards.append({})
            room = SHARD_BYTES
        shards[-1][name] = tensor
        room -= tensor.nbytes
        total += tensor.nbytes
    weight_map = {}
    for number, tensors in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):06d}.safetensors"
        write_safetensors(out / file, tensors)
        weight_map.update(dict.fromkeys(tensors, file))
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    _write_json(out / "model.safetensors.index.json", index)
    _write_json(out / "config.json", _published_config())
    for file in SIDE_FILES:
        shutil.copyfile(MASTER / file, out / file)
    return out


def _published_tensors() -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) of the FP8 checkpoint in model order, a weight's scale right after it."""
    for name, tensor in load_master_state_dict().items():
        if is_fp8(name):
            codes, scale = encode_fp8_block(tensor)
            yield name, codes
            yield name + "_scale_inv", scale
        else:
            yield name, tensor


def _published_config() -> dict[str, object]:
    """master/config.json with what makes it Kimi K2's: model type, remote code, quantization."""
    config = json.loads((MASTER / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}
    config["model_type"] = "kimi_k2"
    config["quantization_config"] = {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [BLOCK, BLOCK],
    }
    return dict(sorted(config.items()))


def _model_order(name: str) -> tuple[int, list[tuple[int, str]]]:
    """Sort key: embedding, layers by number (experts by number), last norm, head."""
    parts = name.split(".")
    place = ["embed_tokens", "layers", "norm", "lm_head"].index(parts[0] if parts[0] == "lm_head" else parts[1])
    return place, [(int(part) if part.isdigit() else 1 << 30, part) for part in parts]


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("out", type=Path, help="folder to write")
    parser.add_argument("--format", choices=["kimi-k2"], default="kimi-k2", help="whose way of publishing")
    args = parser.parse_args()
    out = export(args.out)
    total = sum(file.stat().st_size for file in out.iterdir())
    print(f"{out}: {len(list(out.glob('*.safetensors')))} shards, {total / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
