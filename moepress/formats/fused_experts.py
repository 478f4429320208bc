"""Experts of a layer as one tensor of three dimensions, as transformers 5 keeps and some publishers save them.

    torch's order    gate_up_proj [E, 2·I, H]    down_proj [E, H, I]      y = x @ w[e].T
    the other        gate_up_proj [E, H, 2·I]    down_proj [E, I, H]      y = x @ w[e]

There is no Linear module to match here, so tools that look for one leave these in 16 bits without a word. Which order
a file has is told by where the hidden size stands: gate and up read it, down writes it. In torch's order gate is the
first I rows of gate_up and up the rest; models that interleave the two (gpt-oss) are not read by this package.
"""

from __future__ import annotations

import re

_NAME = re.compile(
    r"(?P<parent>(?:.*\.)?experts\.)(?P<projection>gate_up_proj|down_proj|gate_proj|up_proj)(?P<rest>\.weight)?"
)
_NEIGHBOUR = {
    "gate_up_proj": "down_proj",
    "gate_proj": "down_proj",
    "up_proj": "down_proj",
    "down_proj": "gate_up_proj",
}


def is_fused_experts(name: str, shape: tuple[int, ...]) -> bool:
    """Whether a tensor holds one projection (or gate and up) of all experts."""
    return len(shape) == 3 and _NAME.fullmatch(name) is not None


def neighbour(name: str) -> str:
    """The layer's other fused tensor, whose order is the same."""
    found = _NAME.fullmatch(name)
    if found is None:
        return name
    return f"{found['parent']}{_NEIGHBOUR[found['projection']]}{found['rest'] or ''}"


def is_transposed(name: str, shape: tuple[int, ...], hidden_size: int) -> bool | None:
    """Whether a fused tensor is ``[experts, in, out]``.

    Args:
        name, shape: of a tensor for which `is_fused_experts` holds.
        hidden_size: of the text model; one of the last two dimensions.

    Returns:
        None when both dimensions are equal. Then the `neighbour` tells: 2·I = H and I = H cannot both be.
    """
    _, first, second = shape
    found = _NAME.fullmatch(name)
    if found is None or first == second:
        return None
    return (first if found["projection"] == "down_proj" else second) != hidden_size
