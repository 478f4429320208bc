"""Train the tiny checkpoint: a DeepSeek-V3-style mixture of experts of 7.9 M parameters, in half an hour of two cores.

    export OMP_NUM_THREADS=1 MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=20000000000
    torchrun --standalone --nproc-per-node 2 train.py WORK

The idea: weights that a quantizer is judged on must be trained ones. Random weights have no outliers, no experts that
differ, no routing that matters, and hide nearly every mistake. The architecture is the one of Kimi K2 in every name and
ratio that a converter can see: MLA with 512 + 64 latent rows (576: the last 128-block is ragged), sigmoid routing with
a correction bias, one shared expert, a first dense layer, yarn.

How it is trained:

- Muon for matrices (every expert is a matrix of its own, gate and up apart); AdamW for embedding, head, router, norms.
- Balance without an auxiliary loss [1]: after each step the bias of an expert moves by a fixed amount against its load.
- Parameters, activations and gradients in BF16 (AMX or AVX-512 multiply them), float32 masters in the optimizer. The
  BF16 copy is what is saved, so nothing is lost between training and shipping.
- Windows of 256 tokens, and of 1024 for the last part, so that the whole context of the model has been trained.
- Learning rate: short warm-up, flat, then linear to zero.

Two processes of one thread each: on two cores that is far faster than one process of two threads, because the many
small products of 16 experts pay for a thread barrier each. The malloc settings keep freed memory mapped.

[1] Wang et al., Auxiliary-loss-free load balancing, 2024, arXiv:2408.15664
"""

import argparse
import json
import math
import re
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from build_corpus import MIXTURE
from export import dequantized_state_dict, write_safetensors
from model import MASTER, build_model, count_loads, routers
from muon import RANK, WORLD, Muon, all_sum
from torch import Tensor
from transformers import DeepseekV3ForCausalLM

SHORT, LONG = 256, 1024  # tokens per window; LONG is max_position_embeddings
EVAL_WINDOW = 512
BIAS_STEP = 0.004  # of e_score_correction_bias per training step, scaled like the learning rate


def schedule(step: int, progress: float) -> float:
    """Factor on every learning rate: 40 steps up, flat until 45 % of the run, then linear to zero."""
    return min(1.0, (step + 1) / 40) * min(1.0, (1 - progress) / 0.55)


def progress_of(step: int, began: float, args: argparse.Namespace) -> float:
    """Share of the run that is over, by steps or by the clock, whichever is further; the same on every process."""
    spent = (time.time() - began) / (60 * args.minutes) if args.minutes else 0.0
    value = torch.tensor(max(step / args.steps, spent), dtype=torch.float64)
    if WORLD > 1:
        dist.broadcast(value, 0)
    return value.item()


# ----------------------------------------------------------------------------------------------------------- data


class Windows:
    """Random windows of the training tokens, domains drawn in the proportions of MIXTURE."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.tokens = {d: np.load(folder / f"{d}.train.npy", mmap_mode="r") for d in MIXTURE}
        self.random = np.random.default_rng(seed)

    def draw(self, count: int, length: int) -> tuple[Tensor, Tensor]:
        """(inputs, targets), int64 [count, length] each."""
        rows = []
        for domain in self.random.choice(list(MIXTURE), count, p=list(MIXTURE.values())):
            start = self.random.integers(0, len(self.tokens[domain]) - length - 1)
            rows.append(self.tokens[domain][start : start + length + 1].astype(np.int64))
        batch = torch.from_numpy(np.stack(rows))
        return batch[:, :-1], batch[:, 1:]


def loss_of(model: torch.nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy in nats per token, float32 scalar."""
    logits = model(input_ids=inputs, use_cache=False).logits.float()
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


@torch.inference_mode()
def perplexity(model: torch.nn.Module, tokens: np.ndarray, window: int = EVAL_WINDOW, limit: int = 0) -> float:
    """exp(mean loss) over consecutive windows that do not overlap; the tail shorter than a window is left out."""
    count = (len(tokens) - 1) // window
    count = min(count, limit) if limit else count
    total = 0.0
    for first in range(0, count, 8):
        rows = [tokens[i * window : i * window + window + 1] for i in range(first, min(first + 8, count))]
        batch = torch.from_numpy(np.stack(rows).astype(np.int64))
        total += loss_of(model, batch[:, :-1], batch[:, 1:]).item() * len(rows)
    return math.exp(total / count)


# ----------------------------------------------------------------------------------------------------------- main


def train(args: argparse.Namespace) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = build_model(fast=True)
    gates = routers(model)
    loads = count_loads(gates)
    named = list(model.named_parameters())
    masters = [p.detach().float() for _, p in named]
    is_matrix = [p.ndim >= 2 and not any(k in n for k in ("embed", "lm_head", ".gate.weight")) for n, p in named]
    muon = Muon([m for m, yes in zip(masters, is_matrix, strict=True) if yes])
    others = [m for m, yes in zip(masters, is_matrix, strict=True) if not yes]
    adam = torch.optim.AdamW(others, lr=args.adam_lr, betas=(0.9, 0.95), weight_decay=0.0)
    windows = Windows(args.work / "corpus", seed=1000 + RANK)
    heldout = {d: np.load(args.work / "corpus" / f"{d}.heldout.npy") for d in MIXTURE}

    log, evals, smooth, began = [], [], None, time.time()
    step = 0
    while (progress := progress_of(step, began, args)) < 1:
        factor = schedule(step, progress)
        length = LONG if progress >= 1 - args.long_share else SHORT
        inputs, targets = windows.draw(args.tokens // length, length)
        loss = loss_of(model, inputs, targets)
        loss.backward()
        # An expert that no token chose has no gradient in the eager loop; fused parameters always have one.
        for master, (_, p) in zip(masters, named, strict=True):
            master.grad = p.grad.float() / WORLD
        value = loss.detach().float() / WORLD
        all_sum([m.grad for m in masters] + loads + [value])
        torch.nn.utils.clip_grad_norm_(others, 1.0)
        adam.param_groups[0]["lr"] = args.adam_lr * factor
        adam.step()
        muon.step(args.muon_lr * factor)
        for master, (_, p) in zip(masters, named, strict=True):
            p.data.copy_(master)
            p.grad = None
        imbalance = [(load.max() / load.mean()).item() for load in loads]
        for gate, load in zip(gates, loads, strict=True):
            gate.e_score_correction_bias.add_(torch.sign(load.mean() - load), alpha=BIAS_STEP * factor)
            load.zero_()
        smooth = value.item() if smooth is None else 0.95 * smooth + 0.05 * value.item()
        if RANK == 0 and ((step + 1) % args.every == 0):
            seconds = time.time() - began
            log.append([step + 1, round(smooth, 4), round(seconds, 1)])
            speed = (step + 1) * args.tokens * WORLD / seconds
            print(f"{step + 1:5d}  loss {smooth:.3f}  {speed:.0f} tokens/s  {seconds:.0f} s  "
                  f"max/mean load {max(imbalance):.2f}", flush=True)  # fmt: skip
        if RANK == 0 and (step + 1) % (args.every * 8) == 0:
            quick = {d: round(perplexity(model, t, limit=16), 3) for d, t in heldout.items()}
            for load in loads:
                load.zero_()
            evals.append([step + 1, quick])
            torch.save(model.state_dict(), args.work / "partial.pt")
            print(f"{step + 1:5d}  held-out {quick}", flush=True)
        step += 1
    if RANK == 0:
        finish(model, heldout, args, step, log, evals, time.time() - began)


@torch.inference_mode()
def fp8_divergence(model: torch.nn.Module, tokens: np.ndarray, count: int = 4) -> float:
    """KL divergence, nats per token, of the block-FP8 export from `model`, over the first `count` windows."""
    state = dequantized_state_dict()
    pressed = DeepseekV3ForCausalLM.from_pretrained(None, config=model.config, state_dict=state, dtype=torch.float32)
    batch = torch.from_numpy(tokens[: count * EVAL_WINDOW].astype(np.int64)).view(count, EVAL_WINDOW)
    p = model(input_ids=batch, use_cache=False).logits.log_softmax(-1)
    q = pressed.eval()(input_ids=batch, use_cache=False).logits.log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1).mean().item()


def finish(model, heldout, args, steps, log, evals, seconds) -> None:
    """Save the BF16 model, judge it and its FP8 export by transformers' own code, write master/train_log.json."""
    save_master(model.state_dict())
    plain = DeepseekV3ForCausalLM.from_pretrained(MASTER, dtype=torch.float32).eval()
    loads = count_loads(routers(plain))
    perplexities = {d: round(perplexity(plain, t), 4) for d, t in heldout.items()}
    shares = [(load / load.sum()).tolist() for load in loads]
    record = {
        "parameters": sum(p.numel() for p in plain.parameters()),
        "expert_parameters": sum(p.numel() for n, p in plain.named_parameters() if ".mlp.experts." in n),
        "steps": steps,
        "tokens": steps * args.tokens * WORLD,
        "seconds": round(seconds, 1),
        "processes": WORLD,
        "arguments": {k: v for k, v in vars(args).items() if k != "work"},
        "mixture": MIXTURE,
        "torch": torch.__version__.split("+")[0],
        "final_loss": log[-1][1] if log else None,
        "heldout_window": EVAL_WINDOW,
        "heldout_perplexity": perplexities,
        "fp8_kl": {d: round(fp8_divergence(plain, t), 6) for d, t in heldout.items()},
        "expert_share": [[round(v, 4) for v in share] for share in shares],
        "max_over_mean_load": [round(max(share) * len(share), 3) for share in shares],
        "correction_bias": [[round(v, 5) for v in g.e_score_correction_bias.tolist()] for g in routers(plain)],
        "corpus": json.loads((args.work / "corpus" / "stats.json").read_text()),
        "log_columns": ["step", "smoothed training loss", "seconds"],
        "log": log,
        "heldout_log": evals,
    }
    (MASTER / "train_log.json").write_text(compact_json(record) + "\n")
    print({k: record[k] for k in ("heldout_perplexity", "fp8_kl", "max_over_mean_load", "seconds")}, flush=True)


def save_master(state: dict[str, Tensor]) -> None:
    """Write master/model.safetensors, with the published name of every expert's weight.

    state: the model's state dict, with fused experts: gate_up_proj [E, 2I, H] (gate above up), down_proj [E, H, I].
    """
    weights = {}
    for name, tensor in state.items():
        if ".experts." not in name or ".shared_experts." in name:
            weights[name] = tensor
            continue
        prefix, kind = name.rsplit(".", 1)
        for expert, whole in enumerate(tensor):
            parts = [whole] if kind == "down_proj" else whole.chunk(2)
            names = ["down_proj"] if kind == "down_proj" else ["gate_proj", "up_proj"]
            for projection, part in zip(names, parts, strict=True):
                weights[f"{prefix}.{expert}.{projection}.weight"] = part
    write_safetensors(MASTER / "model.safetensors", weights)


def compact_json(value: object) -> str:
    """Indented JSON with every list of numbers on one line."""
    one_line = lambda match: "[" + ", ".join(match[1].split(",\n")).replace("\n", "").replace("  ", "") + "]"  # noqa: E731
    return re.sub(r"\[([^\[\]{}]*)\]", one_line, json.dumps(value, indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("work", type=Path, help="the folder that build_corpus.py wrote")
    parser.add_argument("--steps", type=int, default=1100)
    parser.add_argument("--minutes", type=float, default=0, help="end of the schedule at the latest; 0: by steps")
    parser.add_argument("--tokens", type=int, default=3072, help="per process and step")
    parser.add_argument("--muon-lr", type=float, default=0.02)
    parser.add_argument("--adam-lr", type=float, default=3e-3)
    parser.add_argument("--long-share", type=float, default=0.12, help="last part, with 1024-token windows")
    parser.add_argument("--every", type=int, default=25, help="steps between log lines")
    args = parser.parse_args()
    if WORLD > 1:
        dist.init_process_group("gloo")
    train(args)
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
