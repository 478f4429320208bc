"""The trained tiny checkpoint: it is what its record says, and its FP8 export is deterministic and close to it.

Judges are transformers (loading, perplexity), safetensors (reading what we wrote) and torch. Nothing of moepress is
imported.
"""

import hashlib
import json
import math
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoTokenizer, DeepseekV3Config, DeepseekV3ForCausalLM

from examples.tiny_kimi import export as tiny
from examples.tiny_kimi import model as training_model

FOLDER = Path(tiny.__file__).parent
LOG = json.loads((FOLDER / "master" / "train_log.json").read_text())
WINDOW = LOG["heldout_window"]
DOMAINS = sorted(LOG["heldout_perplexity"])


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Small products of 16 experts: a barrier between threads costs several times what a second thread gains."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def loaded() -> tuple[DeepseekV3ForCausalLM, dict]:
    """The master as transformers loads it, in float32, and transformers' own report about the keys."""
    model, report = DeepseekV3ForCausalLM.from_pretrained(tiny.MASTER, dtype=torch.float32, output_loading_info=True)
    return model.eval(), report


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.export(tmp_path_factory.mktemp("tiny") / "kimi")


def heldout_tokens(domain: str) -> torch.Tensor:
    """Token ids int64 [n] of a held-out file; special tokens in the text become special tokens."""
    tokenizer = Tokenizer.from_file(str(tiny.MASTER / "tokenizer.json"))
    return torch.tensor(tokenizer.encode((FOLDER / "heldout" / f"{domain}.txt").read_text()).ids)


@torch.inference_mode()
def window_logits(model: DeepseekV3ForCausalLM, tokens: torch.Tensor, first: int, count: int) -> torch.Tensor:
    """Logits float32 [count, WINDOW, vocabulary] of consecutive windows."""
    inputs = torch.stack([tokens[i * WINDOW : (i + 1) * WINDOW] for i in range(first, first + count)])
    return model(input_ids=inputs, use_cache=False).logits.float()


def digest(folder: Path) -> dict[str, str]:
    return {f.name: hashlib.sha256(f.read_bytes()).hexdigest() for f in sorted(folder.iterdir())}


# --------------------------------------------------------------------------------------------------------- master


def test_master_loads_with_every_key_and_the_recorded_size(loaded):
    model, report = loaded
    assert not any(report[k] for k in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
    parameters = sum(p.numel() for p in model.parameters())
    assert parameters == LOG["parameters"] <= 8_000_000
    assert (tiny.MASTER / "model.safetensors").stat().st_size <= 16_000_000


@pytest.mark.parametrize("domain", DOMAINS)
def test_master_reproduces_its_heldout_perplexity(loaded, domain):
    tokens = heldout_tokens(domain)
    count = (len(tokens) - 1) // WINDOW
    total = 0.0
    for first in range(0, count, 8):
        n = min(8, count - first)
        logits = window_logits(loaded[0], tokens, first, n)
        targets = tokens[first * WINDOW + 1 : (first + n) * WINDOW + 1]
        total += torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets, reduction="sum").item()
    assert math.exp(total / (count * WINDOW)) == pytest.approx(LOG["heldout_perplexity"][domain], rel=0.005)


def test_experts_are_used_by_all_but_not_alike():
    for share in LOG["expert_share"]:
        mean = 1 / len(share)
        assert min(share) > 0.25 * mean
        assert 1.02 * mean < max(share) < 2 * mean


def test_calibration_text_repeats_no_heldout_text():
    """Files are split, not lines, so what may recur is boilerplate such as the notes to authors in every `whatsnew`."""
    calibration = (FOLDER / "calibration.txt").read_text()
    for domain in DOMAINS:
        paragraphs = [x for x in (FOLDER / "heldout" / f"{domain}.txt").read_text().split("\n\n") if len(x) > 150]
        assert len(paragraphs) > 100
        assert sum(x in calibration for x in paragraphs) <= 0.02 * len(paragraphs)


def test_fast_training_twins_equal_transformers(loaded):
    model = loaded[0]
    tokens = heldout_tokens("stdlib-py")
    fast = training_model.build_model(fast=True)
    fast.load_state_dict(model.state_dict())
    fast.float()
    expected, actual = window_logits(model, tokens, 0, 2), window_logits(fast, tokens, 0, 2)
    assert (actual - expected).abs().max() < 2e-3 * expected.abs().max()


def test_chat_template_speaks_kimi():
    tokenizer = AutoTokenizer.from_pretrained(tiny.MASTER)
    call = {"name": "search", "arguments": {"query": "x"}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "Find x"}]},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "functions.search:0", "function": call}]},
        {"role": "tool", "tool_call_id": "functions.search:0", "content": "found"},
    ]
    tools = [{"type": "function", "function": {"name": "search", "parameters": {}}}]
    text = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=True)
    assert text == (
        '<|im_system|>tool_declare<|im_middle|>[{"type":"function","function":{"name":"search","parameters":{}}}]<|im_end|>'
        "<|im_system|>system<|im_middle|>You are a helpful assistant.<|im_end|>"
        "<|im_user|>user<|im_middle|>Find x<|im_end|>"
        "<|im_assistant|>assistant<|im_middle|><|tool_calls_section_begin|><|tool_call_begin|>functions.search:0"
        '<|tool_call_argument_begin|>{"query": "x"}<|tool_call_end|><|tool_calls_section_end|><|im_end|>'
        "<|im_system|>tool<|im_middle|>## Return of functions.search:0\nfound<|im_end|>"
        "<|im_assistant|>assistant<|im_middle|>"
    )


# --------------------------------------------------------------------------------------------------------- export


def test_export_is_deterministic_and_keeps_the_umask(exported, tmp_path):
    assert digest(tiny.export(tmp_path / "again")) == digest(exported)
    umask = os.umask(0)
    os.umask(umask)
    for file in exported.iterdir():
        assert stat.S_IMODE(file.stat().st_mode) == 0o666 & ~umask, file.name


def test_export_has_the_tensors_of_a_block_fp8_checkpoint(exported):
    index = json.loads((exported / "model.safetensors.index.json").read_text())
    master = tiny.load_master_state_dict()
    seen: dict[str, tuple[str, list[int]]] = {}
    size = 0
    for shard in sorted(exported.glob("*.safetensors")):
        with safe_open(shard, "pt") as file:
            for name in file.keys():  # noqa: SIM118 (a safe_open is no mapping)
                tensor = file.get_tensor(name)
                assert index["weight_map"][name] == shard.name
                seen[name] = (str(tensor.dtype), list(tensor.shape))
                size += tensor.nbytes
    assert index["metadata"]["total_size"] == size
    assert set(index["weight_map"]) == set(seen)
    assert {n for n in seen if not n.endswith("_scale_inv")} == set(master)
    for name, tensor in master.items():
        scale = seen.get(name + "_scale_inv")
        if "_proj" in name:
            assert seen[name] == ("torch.float8_e4m3fn", list(tensor.shape))
            assert scale == ("torch.float32", [-(-n // 128) for n in tensor.shape])
        else:
            bias = name.endswith("e_score_correction_bias")
            assert seen[name] == ("torch.float32" if bias else "torch.bfloat16", list(tensor.shape))
            assert scale is None
    assert seen["model.layers.1.self_attn.kv_a_proj_with_mqa.weight_scale_inv"][1] == [5, 2]
    homes = index["weight_map"]
    assert any(homes[n] != homes[n + "_scale_inv"] for n in seen if n + "_scale_inv" in seen)  # a hard case, on purpose


def test_remote_code_configuration_describes_the_model(exported):
    config = AutoConfig.from_pretrained(exported, trust_remote_code=True)
    assert config.model_type == "kimi_k2"
    assert config.quantization_config["weight_block_size"] == [128, 128]
    master = DeepseekV3Config.from_pretrained(tiny.MASTER)
    for field in ("kv_lora_rank", "n_routed_experts", "routed_scaling_factor", "rope_parameters", "topk_method"):
        assert getattr(config, field) == getattr(master, field)


def test_dequantized_export_stays_close_to_the_master(loaded, exported):
    """KL divergence in nats per token of what the FP8 files mean, loaded into transformers' module, from the master."""
    model = loaded[0]
    state = tiny.dequantized_state_dict()
    shards = {}
    for shard in exported.glob("*.safetensors"):
        with safe_open(shard, "pt") as file:
            shards |= {n: file.get_tensor(n) for n in file.keys()}  # noqa: SIM118
    name = "model.layers.1.self_attn.kv_a_proj_with_mqa.weight"
    assert torch.equal(state[name], tiny.decode_fp8_block(shards[name], shards[name + "_scale_inv"]))

    fp8 = DeepseekV3ForCausalLM.from_pretrained(None, config=model.config, state_dict=state, dtype=torch.float32).eval()
    divergence = {}
    for domain in DOMAINS:
        tokens = heldout_tokens(domain)
        p = window_logits(model, tokens, 0, 4).log_softmax(-1)
        q = window_logits(fp8, tokens, 0, 4).log_softmax(-1)
        divergence[domain] = (p.exp() * (p - q)).sum(-1).mean().item()
    for domain, recorded in LOG["fp8_kl"].items():
        assert divergence[domain] == pytest.approx(recorded, rel=0.05)
    assert max(divergence.values()) < 0.01
