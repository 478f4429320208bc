"""auto-round on the experts of the trained tiny Kimi. Run it as a process of its own, in an environment that has it.

    python benchmarks/peers/auto_round_experts.py TOKENS.npy OUT.safetensors --group-size 32 --iters 200

Signed gradient descent on rounding and clipping, decoder layer by decoder layer, 200 steps each by default. INT4 symmetric for
the experts, 16 bits for all else, its other settings as they are. The model is the one that `oneshot_gptq.py` is given, and
so are the tokens and what is written.
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

ROOT = Path(__file__).resolve().parents[2]
EXPERT = re.compile(r"\.mlp\.experts\.\d+\.(gate|up|down)_proj\.weight$")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tokens", type=Path, help="int64 [N, S], .npy")
    parser.add_argument("out", type=Path)
    parser.add_argument("--group-size", type=int, default=32)
    parser.add_argument("--iters", type=int, default=200)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)

    sys.path.insert(0, str(ROOT / "examples"))
    import judge
    from auto_round import AutoRound
    from transformers import PreTrainedTokenizerFast

    model = judge.load_source()
    model.config._name_or_path = str(judge.TINY / "master")
    ids = torch.from_numpy(np.load(arguments.tokens))
    samples, length = ids.shape
    # by name: what a pattern matches changes from release to release. Experts are no linear modules before it unfuses them
    dense = {name: {"bits": 16} for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    rounder = AutoRound(
        model,
        PreTrainedTokenizerFast.from_pretrained(judge.TINY / "master"),
        bits=4,
        group_size=arguments.group_size,
        sym=True,
        iters=arguments.iters,
        seqlen=length,
        nsamples=samples,
        batch_size=min(arguments.batch_size, samples),
        dataset=[{"input_ids": batch} for batch in ids.split(min(arguments.batch_size, samples))],
        layer_config=dense,
        device_map="cpu",
        enable_torch_compile=False,
        amp=False,
    )
    before = {name: tensor.clone() for name, tensor in model.state_dict().items() if ".mlp.experts." not in name}
    wall, cpu = time.monotonic(), time.process_time()
    made, _ = rounder.quantize()
    wall, cpu = time.monotonic() - wall, time.process_time() - cpu
    after = made.state_dict()
    if moved := [name for name, tensor in before.items() if not torch.equal(after[name].float(), tensor.float())]:
        raise SystemExit(f"more than the experts changed: {moved[:5]}")
    experts = {n: t.detach().float().contiguous() for n, t in after.items() if EXPERT.search(n)}
    if not experts:
        raise SystemExit(f"no expert weights among {list(made.state_dict())[:20]}")
    save_file(experts, arguments.out)
    print(json.dumps({"wall": round(wall, 3), "cpu": round(cpu, 3), "experts": len(experts)}))


if __name__ == "__main__":
    main()
