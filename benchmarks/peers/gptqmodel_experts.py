"""GPTQModel on the experts of the trained tiny Kimi. Run it as a process of its own, in an environment that has it.

    python benchmarks/peers/gptqmodel_experts.py TOKENS.npy OUT.safetensors --group-size 128

Its own defaults, INT4 symmetric: activation order within groups (`act_group_aware`), each expert calibrated with its routed
tokens, rounding where these are too few. The model is the one that `oneshot_gptq.py` is given, written as a checkpoint
because that is what it reads, and so are the tokens and what is written. In its files

    qweight [C/8, R] int32, low nibble first, code + 8;  scales [C/g, R] float16;  g_idx [C]: the group of a column
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file

ROOT = Path(__file__).resolve().parents[2]
EXPERT = re.compile(r"\.mlp\.experts\.\d+\.(gate|up|down)_proj$")
LEFT_ALONE = (r"-:.*self_attn.*", r"-:.*shared_experts.*", r"-:.*\.mlp\.(gate|up|down)_proj$", r"-:.*mlp\.gate$")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tokens", type=Path, help="int64 [N, S], .npy")
    parser.add_argument("out", type=Path)
    parser.add_argument("--group-size", type=int, default=128)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)

    os.environ.setdefault("GPTQMODEL_CPU_WORKERS", "2")  # one, its default on two processors, is too few for itself
    sys.path[:0] = [str(ROOT / "examples"), str(ROOT / "examples" / "tiny_kimi")]
    import export
    import judge
    from gptqmodel import GPTQModel, QuantizeConfig

    with tempfile.TemporaryDirectory() as scratch:
        source, made = Path(scratch) / "source", Path(scratch) / "made"
        write_source(source, export.dequantized_state_dict(), judge.TINY / "master")
        settings = QuantizeConfig(
            bits=4,
            group_size=arguments.group_size,
            sym=True,
            dynamic={pattern: {} for pattern in LEFT_ALONE},
            offload_to_disk=False,
        )
        model = GPTQModel.load(str(source), settings, trust_remote_code=True, dtype=torch.float32, device="cpu")
        ids = torch.from_numpy(np.load(arguments.tokens))
        rows = [{"input_ids": row[None], "attention_mask": torch.ones_like(row)[None]} for row in ids]
        wall, cpu = time.monotonic(), time.process_time()
        model.quantize(rows, batch_size=arguments.batch_size)
        wall, cpu = time.monotonic() - wall, time.process_time() - cpu
        model.save(str(made))
        experts = read_experts(made)
    if not experts:
        raise SystemExit("no expert was quantized")
    save_file(experts, arguments.out)
    print(json.dumps({"wall": round(wall, 3), "cpu": round(cpu, 3), "experts": len(experts)}))


def write_source(folder: Path, tensors: dict[str, torch.Tensor], published: Path) -> None:
    """A checkpoint in float32 with a tensor for each expert's projection, beside the published side files."""
    folder.mkdir()
    save_file(
        {n: t.float().contiguous() for n, t in tensors.items()}, folder / "model.safetensors", metadata={"format": "pt"}
    )
    config = json.loads((published / "config.json").read_text())
    config.pop("auto_map", None)
    (folder / "config.json").write_text(json.dumps({**config, "torch_dtype": "float32", "dtype": "float32"}))
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        (folder / name).write_bytes((published / name).read_bytes())


def read_experts(folder: Path) -> dict[str, torch.Tensor]:
    """Its experts, dequantized, float32 [R, C], under their published names."""
    tensors: dict[str, torch.Tensor] = {}
    for shard in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(shard)
    found = {}
    shifts = torch.arange(0, 32, 4, dtype=torch.int32)
    for name in [n.removesuffix(".qweight") for n in tensors if n.endswith(".qweight")]:
        if not EXPERT.search(name):
            raise SystemExit(f"{name} was quantized too")
        packed = tensors[f"{name}.qweight"]
        codes = ((packed[:, None] >> shifts[None, :, None]) & 15).reshape(-1, packed.shape[1]) - 8
        scales = tensors[f"{name}.scales"].float()[tensors[f"{name}.g_idx"].long()]
        found[f"{name}.weight"] = (codes * scales).T.contiguous()
    return found


if __name__ == "__main__":
    main()
