"""llm-compressor's `oneshot` with GPTQ on the experts of the trained tiny Kimi. Run it as a process of its own.

    python benchmarks/peers/oneshot_gptq.py TOKENS.npy OUT.safetensors --group-size 32 --experts all

The model is built from `export.dequantized_state_dict()` in float32: what the FP8 checkpoint decodes to, and what the
pressed checkpoint is judged against. INT4 symmetric, activation order `static`, damping 0.01: the library's own defaults.

    --experts all       every token through every expert while calibrating (moe_calibrate_all_experts, the default)
    --experts routed    each expert sees its own tokens only

OUT holds the experts after quantization, dequantized, float32, under their published names; the seconds that `oneshot` took go
to stdout as JSON. Importing llm-compressor changes transformers, so nothing is judged in this process.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from moepress.convert.llmcompressor.process import stand_in_for_torchvision

ROOT = Path(__file__).resolve().parents[2]
EXPERT = re.compile(r"\.mlp\.experts\.\d+\.(gate|up|down)_proj\.weight$")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tokens", type=Path, help="int64 [N, S], .npy")
    parser.add_argument("out", type=Path)
    parser.add_argument("--group-size", type=int, default=32)
    parser.add_argument("--experts", choices=["all", "routed"], default="all")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)

    sys.path.insert(0, str(ROOT / "examples"))
    import judge

    model = judge.load_source()
    model.config._name_or_path = str(judge.TINY / "master")  # oneshot looks up the configuration by name
    model.config.use_cache = False
    model.config.dtype = torch.float32  # the linear layers it unfuses experts into take their type from here

    stand_in_for_torchvision()
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from datasets import Dataset
    from llmcompressor import oneshot
    from llmcompressor.modifiers.gptq import GPTQModifier
    from transformers import PreTrainedTokenizerFast

    ids = np.load(arguments.tokens)
    rows = Dataset.from_dict({"input_ids": ids.tolist(), "attention_mask": np.ones_like(ids).tolist()})
    weights = QuantizationArgs(
        num_bits=4, type="int", symmetric=True, strategy="group", group_size=arguments.group_size
    )
    targets = [r"re:.*\.mlp\.experts\.\d+\.(gate_proj|up_proj|down_proj)$"]
    recipe = GPTQModifier(
        config_groups={"experts": QuantizationScheme(targets=targets, weights=weights)},
        ignore=["lm_head"],
        actorder="static",
        dampening_frac=0.01,
    )
    wall, cpu = time.monotonic(), time.process_time()
    oneshot(
        model=model,
        processor=PreTrainedTokenizerFast.from_pretrained(judge.TINY / "master"),
        dataset=rows,
        recipe=recipe,
        pipeline="sequential",
        sequential_targets=["DeepseekV3DecoderLayer"],
        num_calibration_samples=len(ids),
        max_seq_length=ids.shape[1],
        batch_size=arguments.batch_size,
        shuffle_calibration_samples=False,
        moe_calibrate_all_experts=arguments.experts == "all",
    )
    wall, cpu = time.monotonic() - wall, time.process_time() - cpu
    experts = {n: t.detach().float().contiguous() for n, t in model.state_dict().items() if EXPERT.search(n)}
    if not experts:
        raise SystemExit(f"no expert weights among {list(model.state_dict())[:20]}")
    save_file(experts, arguments.out)
    print(json.dumps({"wall": round(wall, 3), "cpu": round(cpu, 3), "experts": len(experts)}))


if __name__ == "__main__":
    main()
