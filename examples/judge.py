"""A pressed checkpoint in somebody else's hands: transformers loads it, and the source model is the measure.

    python examples/judge.py PRESSED --tokens 12000

Reads the held-out text beside the tiny checkpoint, and prints KL divergence, agreement of the most likely token, perplexity
of source and pressed, and the answer to a prompt. Also a library for the tests.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import os
import sys
from dataclasses import asdict, dataclass
from functools import partial
from importlib import import_module
from pathlib import Path

# Progress bars and advice of the libraries are not what this script is about. tqdm asks when it is imported, and torch imports it.
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("TQDM_DISABLE", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
logging.disable(logging.WARNING)

import torch  # noqa: E402

HERE = Path(__file__).resolve().parent
TINY = HERE / "tiny_kimi"
sys.path.insert(0, str(TINY))


@dataclass(frozen=True)
class Judgement:
    """Source against pressed on the same tokens. ``kl`` is KL(source ‖ pressed) in nats a token."""

    tokens: int
    kl: float
    top1_agreement: float
    source_perplexity: float
    pressed_perplexity: float


def without_bars_of_compressed_tensors() -> None:
    """Its two bars have a switch, which transformers leaves on; tqdm's variable does not reach them."""
    from compressed_tensors import quantization

    # by its name, because a function of the package has the same one
    dispatching = import_module("compressed_tensors.offload.convert.from_accelerate")
    quantization.apply_quantization_config = partial(quantization.apply_quantization_config, show_progress=False)
    dispatching.dispatch_with_map = partial(dispatching.dispatch_with_map, show_progress=False)


def load_pressed(folder: Path) -> torch.nn.Module:
    """The pressed checkpoint as transformers loads it; refuses any key it did not find or did not know."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    without_bars_of_compressed_tensors()
    # transformers knows Kimi K2's architecture as deepseek_v3, and fuses experts on loading only under that name
    published = json.loads((folder / "config.json").read_text())
    config = DeepseekV3Config.from_dict({**published, "model_type": "deepseek_v3"})
    model, info = DeepseekV3ForCausalLM.from_pretrained(
        folder, config=config, dtype=torch.float32, output_loading_info=True
    )
    wrong = {
        key: sorted(value)[:5]
        for key, value in info.items()
        if value and key in ("missing_keys", "unexpected_keys", "mismatched_keys")
    }
    if wrong:
        raise SystemExit(f"transformers did not load it cleanly: {wrong}")
    return model.eval()


def load_source() -> torch.nn.Module:
    """The model that the exported FP8 checkpoint is, decoded by the exporter's own plain torch."""
    import export
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    config = DeepseekV3Config.from_pretrained(TINY / "master")
    model = DeepseekV3ForCausalLM(config).float()
    missing, unexpected = load_per_expert(model, export.dequantized_state_dict())
    if missing or unexpected:
        raise SystemExit(
            f"the exported tensors are not the model's: missing {missing[:5]}, unexpected {unexpected[:5]}"
        )
    return model.eval()


def load_per_expert(model: torch.nn.Module, state: dict[str, torch.Tensor]) -> tuple[list[str], list[str]]:
    """Fills a transformers 5 model, whose experts are fused, from one tensor per expert and projection."""
    fused = {name: tensor.float() for name, tensor in state.items() if ".mlp.experts." not in name}
    for name, parameter in model.named_parameters():
        if ".mlp.experts." in name:
            prefix, _, which = name.rpartition(".")
            parts = ("gate_proj", "up_proj") if which == "gate_up_proj" else ("down_proj",)
            rows = [
                torch.cat([state[f"{prefix}.{e}.{p}.weight"].float() for p in parts]) for e in range(len(parameter))
            ]
            fused[name] = torch.stack(rows)
    missing, unexpected = model.load_state_dict(fused, strict=False)
    return list(missing), list(unexpected)


def heldout_windows(tokens: int, length: int = 256) -> torch.Tensor:
    """Held-out text of all domains in equal parts, [N, length] token ids."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(TINY / "master" / "tokenizer.json"))
    files = sorted((TINY / "heldout").glob("*.txt"))
    each = max(1, tokens // length // len(files))
    windows = []
    for file in files:
        ids = tokenizer.encode(file.read_text(encoding="utf-8"), add_special_tokens=False).ids
        windows += [ids[i * length : (i + 1) * length] for i in range(min(each, len(ids) // length))]
    return torch.tensor(windows)


@torch.no_grad()
def judge(source: torch.nn.Module, pressed: torch.nn.Module, windows: torch.Tensor) -> Judgement:
    """Compares next-token distributions at every position."""
    kl = agree = nll_source = nll_pressed = 0.0
    count = targets = 0
    for batch in windows.split(8):
        p = source(input_ids=batch, use_cache=False).logits.float().log_softmax(-1)
        q = pressed(input_ids=batch, use_cache=False).logits.float().log_softmax(-1)
        kl += float((p.exp() * (p - q)).sum())
        agree += float((p.argmax(-1) == q.argmax(-1)).sum())
        count += batch.numel()
        following = batch[:, 1:, None]
        nll_source -= float(p[:, :-1].gather(-1, following).sum())
        nll_pressed -= float(q[:, :-1].gather(-1, following).sum())
        targets += following.numel()
    return Judgement(count, kl / count, agree / count, math.exp(nll_source / targets), math.exp(nll_pressed / targets))


@torch.no_grad()
def answer(model: torch.nn.Module, folder: Path, question: str, length: int = 48) -> str:
    """Greedy answer to a chat message, through the checkpoint's own tokenizer and template."""
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )["input_ids"]
    stop = tokenizer.convert_tokens_to_ids("<|im_end|>")
    made = model.generate(prompt, max_new_tokens=length, do_sample=False, eos_token_id=stop, pad_token_id=stop)
    return str(tokenizer.decode(made[0, prompt.shape[1] :], skip_special_tokens=True)).strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pressed", type=Path)
    parser.add_argument("--tokens", type=int, default=12_000)
    parser.add_argument("--question", default="What is zipfile.ZipFile?")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    source, pressed = load_source(), load_pressed(arguments.pressed)
    result = judge(source, pressed, heldout_windows(arguments.tokens))
    if arguments.json:
        print(json.dumps(asdict(result)))
        return
    print("loaded by transformers: no missing and no unexpected keys")
    print(f"on {result.tokens:,} held-out tokens against the source model:")
    print(f"  KL divergence          {result.kl:.5f} nats a token")
    print(f"  same most likely token {result.top1_agreement:.2%}")
    print(f"  perplexity             {result.source_perplexity:.3f} → {result.pressed_perplexity:.3f}")
    print(f"\n  user:    {arguments.question}")
    print(f"  source:  {answer(source, TINY / 'master', arguments.question)!r}")
    print(f"  pressed: {answer(pressed, arguments.pressed, arguments.question)!r}")


if __name__ == "__main__":
    main()
