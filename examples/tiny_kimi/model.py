"""The tiny model as transformers builds it, and two faster twins of its forward pass for training on a CPU.

Attention: keys are 96 wide and values 32; padded to one width they fit the fused kernel. Experts: tokens are laid out
by expert instead of gathered and scattered sixteen times. Both need whole windows without a cache, so they serve
training alone; perplexity is always reported by transformers' own code, and a test holds the twins to it.
"""

import json
from pathlib import Path
from types import MethodType

import torch
from torch import Tensor
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

MASTER = Path(__file__).resolve().parent / "master"


def build_model(fast: bool) -> DeepseekV3ForCausalLM:
    """The model of master/config.json with BF16 parameters; buffers (inverse frequencies, router bias) stay float32.

    fast: attention and experts by the two twins below, else transformers' own code.
    """
    ALL_ATTENTION_FUNCTIONS.register("padded_causal", padded_causal)
    ALL_MASK_ATTENTION_FUNCTIONS.register("padded_causal", lambda *_args, **_kwargs: None)
    config = DeepseekV3Config(**json.loads((MASTER / "config.json").read_text()))
    config.dtype = torch.float32
    config.use_cache = False
    attention = "padded_causal" if fast else "sdpa"
    model = DeepseekV3ForCausalLM._from_config(config, attn_implementation=attention, experts_implementation="eager")
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16()
    for layer in model.model.layers:
        if fast and hasattr(layer.mlp, "experts"):
            layer.mlp.experts.forward = MethodType(sorted_experts, layer.mlp.experts)
    return model


class Dispatch(torch.autograd.Function):
    """Rows of tokens laid out by expert: out[p] = x[source[p]]; backward sums the k slots of a token by a gather."""

    @staticmethod
    def forward(ctx, x: Tensor, source: Tensor, position: Tensor) -> Tensor:
        ctx.position = position
        return x[source]

    @staticmethod
    def backward(ctx, grad: Tensor):
        return grad[ctx.position].sum(1), None, None


class Collect(torch.autograd.Function):
    """The k rows of each token back from the layout by expert; backward writes them there, padding stays zero."""

    @staticmethod
    def forward(ctx, y: Tensor, position: Tensor) -> Tensor:
        ctx.position, ctx.rows = position, len(y)
        return y[position]

    @staticmethod
    def backward(ctx, grad: Tensor):
        whole = grad.new_zeros(ctx.rows, grad.size(-1))
        whole[ctx.position] = grad
        return whole, None


def sorted_experts(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """What DeepseekV3Experts.forward computes, with tokens laid out by expert, each expert padded to 128 rows.

    The padding is what saves the time: the CPU library compiles a kernel for every new matrix shape.
    hidden_states [tokens, hidden], top_k_index int64 [tokens, k], top_k_weights float32 [tokens, k] → [tokens, hidden].
    """
    slots = top_k_index.flatten()
    counts = torch.bincount(slots, minlength=self.num_experts)
    padded = (counts + 127) // 128 * 128
    order = slots.argsort(stable=True)
    shift = (padded.cumsum(0) - padded) - (counts.cumsum(0) - counts)  # of an expert's rows, by padding before it
    rows = torch.arange(len(slots)) + shift[slots[order]]
    position = torch.empty_like(slots)
    position[order] = rows
    position = position.view_as(top_k_index)
    sizes = padded.tolist()
    source = torch.zeros(sum(sizes), dtype=torch.int64)
    source[rows] = order // top_k_index.size(1)

    inputs = Dispatch.apply(hidden_states, source, position).split(sizes)
    both = torch.cat([x @ w.T for x, w in zip(inputs, self.gate_up_proj.unbind(), strict=True)])
    gate, up = both.chunk(2, dim=-1)
    inner = (torch.nn.functional.silu(gate) * up).split(sizes)
    out = torch.cat([x @ w.T for x, w in zip(inner, self.down_proj.unbind(), strict=True)])
    return (top_k_weights.to(out.dtype).unsqueeze(1) @ Collect.apply(out, position)).squeeze(1)


def padded_causal(_module, query, key, value, _mask, scaling=None, **_unused) -> tuple[Tensor, None]:
    """Causal attention over whole windows; values padded to the width of keys, which the fused CPU kernel wants."""
    width = value.size(-1)
    value = torch.nn.functional.pad(value, (0, query.size(-1) - width))
    out = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling)
    return out[..., :width].transpose(1, 2).contiguous(), None


def routers(model: DeepseekV3ForCausalLM) -> list[torch.nn.Module]:
    """The routers of the MoE layers, first layer first."""
    return [layer.mlp.gate for layer in model.model.layers if hasattr(layer.mlp, "gate")]


def count_loads(gates: list[torch.nn.Module]) -> list[Tensor]:
    """Hooks every router; returns float32 [experts] counters per router, which each forward pass adds to."""
    loads = [torch.zeros(g.num_experts) for g in gates]

    def counter(load: Tensor):
        def count(_module, _inputs, outputs) -> None:  # outputs: logits, weights, indices [tokens, top_k]
            load.add_(torch.bincount(outputs[2].flatten(), minlength=len(load)))

        return count

    for gate, load in zip(gates, loads, strict=True):
        gate.register_forward_hook(counter(load))
    return loads
