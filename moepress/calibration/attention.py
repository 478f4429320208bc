"""Attention whose queries and values have different widths, without S × S scores in memory.

MLA has queries and keys of 192 columns and values of 128. torch's fused kernel for the CPU takes one width alone; for two it
falls back to plain products, which hold all heads' scores at once (Kimi K2, 8 samples of 2,048 tokens: 8.6 GB, three times over)
and take two to three times as long. So values are padded with zeros to the keys' width, and cut back after:

    softmax(Q Kᵀ) [V 0] = [softmax(Q Kᵀ) V  0]

The sums are the same numbers in the same order; the kernel's blocks make the last bits differ from the plain products'.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.modeling_utils import AttentionInterface

EQUAL_WIDTHS = "moepress_equal_widths"
"""The name under which transformers finds it: ``config._attn_implementation``."""


def equal_widths_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **arguments: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention function, by its own signature.

    Args:
        query, key: [b, heads, S, D].
        value: [b, heads, S, V], V ≤ D.
        attention_mask: as transformers makes it for SDPA.

    Returns:
        [b, S, heads, V].
    """
    width = value.shape[-1]
    if width < key.shape[-1]:
        value = functional.pad(value, (0, key.shape[-1] - width))
    out: torch.Tensor = sdpa_attention_forward(module, query, key, value, attention_mask, **arguments)[0]
    return out[..., :width], None


def register() -> str:
    """Makes the name known to transformers in this process, and gives it back. May be called again."""
    AttentionInterface.register(EQUAL_WIDTHS, equal_widths_attention)
    AttentionMaskInterface.register(EQUAL_WIDTHS, sdpa_mask)
    return EQUAL_WIDTHS
