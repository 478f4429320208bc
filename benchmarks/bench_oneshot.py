"""A whole GPTQ conversion against llm-compressor's `oneshot`: same model, same tokens, from the start of a process to its end.

    python -m benchmarks.bench_oneshot FOLDER --layers 2 --experts 16 --tokens 4096

The model is Kimi K2's architecture with a hidden size of 1,024 and experts of 1024 × 512, random weights in BF16: large enough that
starting up does not decide. Contenders are commands, each a process of its own:

    moepress             moepress convert, defaults but for KV scales, which the peer does not measure
    moepress, layer      the same with calibration.hessian=layer
    moepress, plain      no error-aware targets (so no source run) and no polish: the peer's algorithm, with searched scales
    moepress, fast       plain with calibration.hessian=layer
    llm-compressor       what `engine: llmcompressor` starts: load, oneshot with GPTQ on the experts, all tokens through all of them
    … imports alone      the same imports, and nothing else: what has to be taken off to compare the work

Wall and processor seconds and peak memory of each. JSON on standard output.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path

import numpy as np
import torch

from benchmarks.measure import Cost, interleaved, machine, run, summary
from moepress.convert.calibrated.samples import calibration_samples
from moepress.convert.llmcompressor.process import Request
from moepress.formats.architecture import expected_weights, parameter_count
from moepress.formats.checkpoint import open_checkpoint
from moepress.formats.writer import ShardWriter, write_index
from moepress.recipe import load_recipe

ROOT = Path(__file__).resolve().parents[1]
TINY = ROOT / "examples" / "tiny_kimi"
SIZES = {
    "hidden_size": 1024,
    "moe_intermediate_size": 512,
    "intermediate_size": 2048,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "q_lora_rank": 384,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
    "vocab_size": 2048,
    "first_k_dense_replace": 0,
    "num_nextn_predict_layers": 0,
    "num_experts_per_tok": 8,
}
LENGTH = 256
PLAIN = ["--set", "calibration.error_aware=false", "--set", "calibration.passes=0"]
FAST = [*PLAIN, "--set", "calibration.hessian=layer"]


def build(folder: Path, *, layers: int, experts: int) -> int:
    """Writes the checkpoint; returns its parameters."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    config = json.loads((ROOT / "tests" / "configs" / "kimi_k2_instruct.json").read_text())
    for field in ("quantization_config", "auto_map", "rope_scaling"):
        config.pop(field, None)
    config |= SIZES | {"num_hidden_layers": layers, "n_routed_experts": experts, "torch_dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    generator = torch.Generator().manual_seed(0)
    specs = expected_weights(config)
    tensors = [(spec.name, "F32" if spec.published.kind == "f32" else "BF16", spec.shape) for spec in specs]
    shapes = {name: (dtype, shape) for name, dtype, shape in tensors}
    shard = "model-00001-of-00001.safetensors"
    with ShardWriter(folder / shard, tensors, {"format": "pt"}) as writer:
        for name in writer.order:
            dtype, shape = shapes[name]
            value = torch.randn(shape, generator=generator) * (shape[-1] ** -0.5 if len(shape) > 1 else 0.1)
            value = value + 1 if "norm" in name else value
            writer.write(name, value if dtype == "F32" else value.to(torch.bfloat16))
    size = {"F32": 4, "BF16": 2}
    total = sum(size[dtype] * int(np.prod(shape)) for _, dtype, shape in tensors)
    names = {name: shard for name, _, _ in tensors}
    write_index(
        folder / "model.safetensors.index.json", names, total_size=total, total_parameters=parameter_count(specs)
    )
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(TINY / "master" / name, folder / name)
    return parameter_count(specs)


def contenders(folder: Path, tokens: int, threads: int) -> dict[str, list[str]]:
    """Name → command. OUT folders are emptied by whoever runs them."""
    options = ["serving.tensor_parallel=1", "weights.algorithm=gptq", "weights.group_size=128", "kv_cache.scales=none"]
    # the peer is given its tokens: we tokenize no more than they take
    text = (TINY / "calibration.txt").read_text(encoding="utf-8")[: 8 * tokens]
    (folder / "text.txt").write_text(text, encoding="utf-8")
    options += [f"calibration.text={folder / 'text.txt'}"]
    options += [f"calibration.samples={tokens // LENGTH}", f"calibration.length={LENGTH}"]
    recipe = load_recipe("kimi-k2-bf16", options)
    ids = calibration_samples(open_checkpoint(folder / "source"), recipe).token_ids
    np.save(folder / "tokens.npy", ids.numpy())
    Request(
        model=str(folder / "source"),
        model_type="deepseek_v3",
        decoder_layer="DeepseekV3DecoderLayer",
        tokens=str(folder / "tokens.npy"),
        out=str(folder / "peer"),
        num_bits=4,
        group_size=128,
        batch_size=recipe.calibration.batch_size,
        threads=threads,
    ).write(folder / "request.json")
    program = str(Path(sys.executable).with_name("moepress"))
    ours = [program, "convert", str(folder / "source"), str(folder / "out"), "--recipe", "kimi-k2-bf16", "--json"]
    ours += ["--threads", str(threads), *(word for option in options for word in ("--set", option))]
    import_ours = (
        "import moepress.cli, moepress.convert.calibrated.layers, transformers.models.deepseek_v3.modeling_deepseek_v3"
    )
    import_peer = (  # in the order of the process: transformers first
        "import moepress.convert.llmcompressor.process as p, transformers.models.deepseek_v3.modeling_deepseek_v3;"
        "p.stand_in_for_torchvision(); import llmcompressor, datasets; from llmcompressor.modifiers.gptq import GPTQModifier"
    )
    return {
        "moepress": ours,
        "moepress, layer": [*ours, "--set", "calibration.hessian=layer"],
        "moepress, plain": [*ours, *PLAIN],
        "moepress, fast": [*ours, *FAST],
        "llm-compressor": [
            sys.executable,
            "-m",
            "moepress.convert.llmcompressor.process",
            str(folder / "request.json"),
        ],
        "moepress, imports alone": [sys.executable, "-c", import_ours],
        "llm-compressor, imports alone": [sys.executable, "-c", import_peer],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--experts", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=1)
    arguments = parser.parse_args()
    folder: Path = arguments.folder
    parameters = build(folder / "source", layers=arguments.layers, experts=arguments.experts)
    environment = {"OMP_NUM_THREADS": str(arguments.threads), "OMP_WAIT_POLICY": "passive", "HF_HUB_OFFLINE": "1"}

    def once(command: list[str]) -> Cost:
        for name in ("out", "peer"):
            shutil.rmtree(folder / name, ignore_errors=True)
        (folder / "peer").mkdir()
        cost = run(command, env=environment)
        print(command[1:4], cost, file=sys.stderr, flush=True)
        return cost

    commands = contenders(folder, arguments.tokens, arguments.threads)
    found = interleaved(arguments.rounds, {name: lambda c=command: once(c) for name, command in commands.items()})
    medians = summary(found)

    def ratio(name: str, field: str, *, imports: bool) -> float:
        ours, theirs = medians[name][field], medians["llm-compressor"][field]
        if not imports:
            ours -= medians["moepress, imports alone"][field]
            theirs -= medians["llm-compressor, imports alone"][field]
        return round(theirs / ours, 2)

    report = {
        "options": {key: str(value) for key, value in vars(arguments).items() if key != "folder"},
        "machine": machine(),
        "parameters": parameters,
        "costs": medians,
        "times_faster": {
            name: {
                f"{field}, {'whole' if imports else 'without imports'}": ratio(name, f"{field}_median", imports=imports)
                for field in ("cpu", "wall")
                for imports in (True, False)
            }
            for name in ("moepress", "moepress, layer", "moepress, plain", "moepress, fast")
        },
    }
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
