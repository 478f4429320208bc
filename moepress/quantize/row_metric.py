"""Which outputs of a weight matter to the model's predictions: the metric G of two_sided.py.

An error e in what a layer adds to the residual stream changes the model's next-token distribution by

    KL ≈ ½ eᵀ F e,    F [C, C] = E[δ δᵀ],    δ = ∂ log p(y) / ∂ (the layer's output),  y drawn from the model itself

the Fisher information there (calibration/output_fisher.py measures it, one matrix a layer). From it, for an expert with
y = w · down(a), a = silu(g) · u, g = gate(x), u = up(x):

    down, [C, I]           G = F
    gate and up, [2I, C]   G = J ⊙ [[K, K], [K, K]],  K = downᵀ F down [I, I],  J = mean of w² j jᵀ over the expert's tokens,
                           j = (u · silu′(g), silu(g)):  how far an error in g and in u reaches a

G of gate and up is E[w² (diag(j) downᵀ δ)(…)ᵀ] with j taken as independent of δ. That needs no gradient of any single
expert: what a layer keeps is F, and everything else is made from the expert's own tokens while it is pressed.

**Few tokens: shrink**, as in hessian.py. F of n tokens becomes (1 − λ) F + λ mean(diag F) · I, λ = C / (n + C); not shrunk, with 2½
tokens a column it made a model worse than no metric at all. J of an expert's n tokens becomes (1 − λ) J + λ diag(J),
λ = 2I / (n + 2I): what is certain about J is how loud each row is. An expert that saw none has J = I.
"""

from __future__ import annotations

import torch

from moepress.errors import QuantizeError
from moepress.quantize.hessian import all_finite, shrinkage


def shrunk_fisher(fisher: torch.Tensor, tokens: int) -> torch.Tensor:
    """(1 − λ) F + λ mean(diag F) · I.

    Args:
        fisher: float32 [C, C], the mean over ``tokens`` tokens.
        tokens: different ones; labels drawn for one token again do not count.

    Returns:
        float32 [C, C], newly allocated.
    """
    level = torch.eye(len(fisher), device=fisher.device) * fisher.diagonal().mean()
    return torch.lerp(fisher, level, shrinkage(tokens, len(fisher)))


def gate_up_metric(jacobian: torch.Tensor, tokens: int, down: torch.Tensor, fisher: torch.Tensor) -> torch.Tensor:
    """G of gate and up stacked.

    Args:
        jacobian: float32 [2I, 2I], Σ w² j jᵀ over the expert's tokens; read only.
        tokens: how many.
        down: float32 [C, I], the source's down projection.
        fisher: float32 [C, C], F of the layer's output.

    Returns:
        float32 [2I, 2I], positive semidefinite.

    Raises:
        QuantizeError: values that are not finite.
    """
    rows = len(jacobian)
    if tokens:
        mean = jacobian / tokens
        mean = torch.lerp(mean, torch.diag(mean.diagonal()), shrinkage(tokens, rows))
    else:
        mean = torch.eye(rows, device=jacobian.device)
    metric = mean * (down.t() @ fisher @ down).repeat(2, 2)
    if not all_finite(metric):
        raise QuantizeError("how errors in gate and up reach the output is not finite", where="gate_up_metric")
    return (metric + metric.t()) / 2


def swiglu_slopes(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """j: the derivatives of silu(g) · u by g and by u, side by side. gate, up [n, I] -> [n, 2I]."""
    sigmoid = torch.sigmoid(gate)
    return torch.cat([up * sigmoid * (1 + gate * (1 - sigmoid)), gate * sigmoid], dim=-1)
