"""How far each way of making INT4 experts takes the trained tiny Kimi from its source, and what it costs.

    python -m benchmarks.bench_quality FOLDER --tokens 8192

Same model, same calibration token ids, same group size, same held-out text for all: rounding, llm-compressor's GPTQ
(`oneshot`, each expert calibrated with all tokens or with its routed ones), auto-round and GPTQModel where `--auto-round` and
`--gptqmodel` name a Python that has them, and ours. Two calibration sizes: *many*, thousands
of tokens per expert, and *few*, fewer than an expert has columns.

The experts of every contender are put into one and the same source model in transformers, and compared token by token: KL
divergence from source to pressed, and how often the most likely token is the same. So nothing but the experts differs.

Seconds are those of `convert` and of `oneshot` alone, without imports and loading the source, both with `--threads` threads;
the processor's seconds are the ones to compare on a shared machine. A first conversion compiles the loops and does not count.
The peer runs in a process of its own, because it changes transformers; what it left in FOLDER is used again.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from benchmarks.measure import machine
from moepress.calibration.text import load_tokenizer, make_samples, read_documents
from moepress.convert.run import convert
from moepress.formats.int4 import unpack_int4
from moepress.quantize.grid import dequantize
from moepress.recipe import load_recipe

ROOT = Path(__file__).resolve().parents[1]
TINY = ROOT / "examples" / "tiny_kimi"
TEXT = TINY / "calibration.txt"
PEER = ROOT / "benchmarks" / "peers" / "oneshot_gptq.py"
ELSEWHERE = {
    "auto-round": ROOT / "benchmarks" / "peers" / "auto_round_experts.py",
    "gptqmodel": ROOT / "benchmarks" / "peers" / "gptqmodel_experts.py",
}
"""Peers whose pins need an environment of their own."""
RESULTS = ROOT / "benchmarks" / "results"
SIZES = {"many": (64, 256), "few": (5, 128)}
"""Samples and their length; an expert of this model gets a quarter of the tokens."""
ROUNDING = {
    "round, max": ["weights.algorithm=rtn", "weights.scale=max"],
    "round, mse": ["weights.algorithm=rtn", "weights.scale=mse"],
}
FAST = ["calibration.error_aware=false", "calibration.passes=0"]
"""The peer's own algorithm, but for searched scales: no source run, no polish."""
OURS = {
    "moepress gptq": ["weights.algorithm=gptq"],
    "moepress gptq, signed scales": ["weights.algorithm=gptq", "weights.signed_scales=true"],
    "moepress gptq, loss: kl": ["weights.algorithm=gptq", "calibration.loss=kl"],
    "moepress gptq, loss: kl, signed scales": [
        "weights.algorithm=gptq",
        "calibration.loss=kl",
        "weights.signed_scales=true",
    ],
    "moepress gptq, hessian: layer": ["weights.algorithm=gptq", "calibration.hessian=layer"],
    "moepress gptq, fast": ["weights.algorithm=gptq", "calibration.hessian=layer", *FAST],
    "moepress awq": ["weights.algorithm=awq"],
    "moepress awq+gptq": ["weights.algorithm=awq+gptq"],
}
PEERS = {"llm-compressor gptq, all": "all", "llm-compressor gptq, routed": "routed"}

sys.path[:0] = [str(ROOT / "examples"), str(TINY)]
import export  # noqa: E402 (beside the tiny model, in no package)
import judge  # noqa: E402

Experts = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Row:
    """One contender. ``kl`` in nats a token; seconds are None where there was nothing to wait for."""

    calibration: str
    group_size: int
    name: str
    kl: float
    top1_agreement: float
    wall: float | None
    cpu: float | None


class Scale:
    """The source model's distributions on the held-out text, and anything held against them."""

    def __init__(self, tokens: int) -> None:
        self.model = judge.load_source()
        self.windows = judge.heldout_windows(tokens)
        self.source = self._log_probs()

    @torch.no_grad()
    def _log_probs(self) -> list[torch.Tensor]:
        return [
            self.model(input_ids=batch, use_cache=False).logits.float().log_softmax(-1)
            for batch in self.windows.split(8)
        ]

    def weigh(self, experts: Experts) -> tuple[float, float]:
        """KL(source ‖ model with these experts), and top-1 agreement."""
        self.put(experts)
        kl = agreed = 0.0
        for p, q in zip(self.source, self._log_probs(), strict=True):
            kl += float((p.exp() * (p - q)).sum(dtype=torch.float64))
            agreed += float((p.argmax(-1) == q.argmax(-1)).sum())
        return kl / self.windows.numel(), agreed / self.windows.numel()

    @torch.no_grad()
    def put(self, experts: Experts) -> None:
        """Fills the model's experts; every one has to be there."""
        for name, parameter in self.model.named_parameters():
            prefix, _, which = name.rpartition(".")
            if prefix.endswith(".mlp.experts"):
                parts = ("gate_proj", "up_proj") if which == "gate_up_proj" else ("down_proj",)
                for e in range(len(parameter)):
                    parameter[e] = torch.cat([experts[f"{prefix}.{e}.{p}.weight"] for p in parts])


def pressed_experts(folder: Path) -> Experts:
    """Dequantized experts of a pressed checkpoint."""
    experts = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118 (not a mapping)
                if ".mlp.experts." in key and key.endswith("_packed"):
                    name = key.removesuffix("_packed")
                    columns = int(file.get_tensor(f"{name}_shape")[1])
                    codes = unpack_int4(file.get_tensor(key), columns)
                    experts[name] = dequantize(codes, file.get_tensor(f"{name}_scale"))
    return experts


def ours(folder: Path, size: str, group_size: int, overrides: list[str]) -> tuple[Experts, float, float]:
    """Experts of a conversion, its wall and processor seconds."""
    samples, length = SIZES[size]
    wishes = ["serving.tensor_parallel=1", f"weights.group_size={group_size}", f"calibration.text={TEXT}"]
    wishes += [f"calibration.samples={samples}", f"calibration.length={length}"]
    recipe = load_recipe("kimi-k2-bf16", [*wishes, *overrides])
    out = folder / "pressed"
    shutil.rmtree(out, ignore_errors=True)
    wall, cpu = time.monotonic(), time.process_time()
    convert(folder / "source", out, recipe)
    wall, cpu = time.monotonic() - wall, time.process_time() - cpu
    return pressed_experts(out), wall, cpu


def peer(folder: Path, size: str, group_size: int, mode: str) -> tuple[Experts, float, float]:
    """The same of llm-compressor."""
    made = folder / f"peer_{size}_g{group_size}_{mode}.safetensors"
    return _of_process([sys.executable, str(PEER)], folder / f"{size}.npy", made, group_size, "--experts", mode)


def elsewhere(folder: Path, size: str, group_size: int, name: str, python: Path) -> tuple[Experts, float, float]:
    """The same of a peer in an environment of its own."""
    made = folder / f"{name.replace('-', '_')}_{size}_g{group_size}.safetensors"
    return _of_process([str(python), str(ELSEWHERE[name])], folder / f"{size}.npy", made, group_size)


def _of_process(
    program: list[str], tokens: Path, weights: Path, group_size: int, *options: str
) -> tuple[Experts, float, float]:
    """What a peer wrote, from an earlier run if there was one."""
    cost = weights.with_suffix(".json")
    if not cost.exists():
        command = [*program, str(tokens), str(weights), "--group-size", str(group_size), *options]
        done = subprocess.run(
            [*command, "--threads", str(torch.get_num_threads())],
            check=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        cost.write_bytes(done.stdout.splitlines()[-1])
    seconds = json.loads(cost.read_text())
    return load_file(weights), seconds["wall"], seconds["cpu"]


def write_tokens(folder: Path) -> None:
    """The calibration sets as ``convert`` will make them, for the peer."""
    tokenizer = load_tokenizer(folder / "source")
    for size, (samples, length) in SIZES.items():
        made = make_samples(
            read_documents(TEXT), tokenizer, samples=samples, length=length, seed=0, vocab_size=2048
        ).token_ids
        np.save(folder / f"{size}.npy", made.numpy())


def table(rows: list[Row]) -> str:
    """Markdown: one line per contender, relative to the better of the peer's two modes at the same size and group."""
    lines = ["| calibration | group | contender | KL ×1e-3 | × better peer | top-1 | processor s |"]
    lines.append("|---|---:|---|---:|---:|---:|---:|")
    for row in rows:
        rivals = [r.kl for r in rows if r.name in PEERS and (r.calibration, r.group_size) == _key(row)]
        ratio = f"{row.kl / min(rivals):.3f}" if rivals else ""
        cpu = "" if row.cpu is None else f"{row.cpu:.1f}"
        lines.append(
            f"| {row.calibration} | {row.group_size} | {row.name} | {row.kl * 1e3:.3f} | {ratio} "
            f"| {row.top1_agreement:.2%} | {cpu} |"
        )
    return "\n".join(lines) + "\n"


def _key(row: Row) -> tuple[str, int]:
    return row.calibration, row.group_size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="scratch folder")
    parser.add_argument("--tokens", type=int, default=24_576, help="held-out tokens, all four domains in equal parts")
    parser.add_argument("--group-sizes", type=int, nargs="+", default=[128, 32])
    parser.add_argument("--threads", type=int, default=1)
    for name in ELSEWHERE:
        parser.add_argument(f"--{name}", type=Path, metavar="PYTHON", help=f"of an environment with {name}")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    folder: Path = arguments.folder
    folder.mkdir(parents=True, exist_ok=True)
    export.export(folder / "source")
    write_tokens(folder)
    scale = Scale(arguments.tokens)
    rows: list[Row] = []

    def add(size: str, group_size: int, name: str, experts: Experts, wall: float | None, cpu: float | None) -> None:
        rows.append(Row(size, group_size, name, *scale.weigh(experts), wall, cpu))
        print(rows[-1], file=sys.stderr, flush=True)

    ours(folder, "few", arguments.group_sizes[0], OURS["moepress awq+gptq"])
    for group_size in arguments.group_sizes:
        rounded = {name: ours(folder, "few", group_size, overrides) for name, overrides in ROUNDING.items()}
        for size in SIZES:
            for name, done in rounded.items():
                add(size, group_size, name, *done)
            for name, mode in PEERS.items():
                add(size, group_size, name, *peer(folder, size, group_size, mode))
            for name in ELSEWHERE:
                if (python := getattr(arguments, name.replace("-", "_"))) is not None:
                    add(size, group_size, name, *elsewhere(folder, size, group_size, name, python))
            for name, overrides in OURS.items():
                add(size, group_size, name, *ours(folder, size, group_size, overrides))
    facts: dict[str, Any] = {
        "machine": machine(),
        "threads": arguments.threads,
        "heldout_tokens": scale.windows.numel(),
        "calibration_tokens": {size: samples * length for size, (samples, length) in SIZES.items()},
    }
    RESULTS.mkdir(exist_ok=True)
    groups = "_".join(f"g{g}" for g in arguments.group_sizes)
    (RESULTS / f"quality_{groups}.json").write_text(json.dumps(facts | {"rows": [asdict(r) for r in rows]}, indent=1))
    (RESULTS / "quality.md").write_text(table(rows))
    print(table(rows))


if __name__ == "__main__":
    main()
