"""Inputs and the textbook algorithm that the GPTQ tests judge by."""

from __future__ import annotations

import torch


def correlated_hessian(columns: int, tokens: int, seed: int) -> torch.Tensor:
    """(2/n) XᵀX of inputs that live near a quarter of the dimensions, with a few loud channels, as activations do."""
    g = torch.Generator().manual_seed(seed)
    mix = torch.randn(columns, columns // 4, generator=g) / (columns // 4) ** 0.5
    x = torch.randn(tokens, columns // 4, generator=g) @ mix.t() + 0.3 * torch.randn(tokens, columns, generator=g)
    x[:, :: max(columns // 8, 1)] *= 4
    return x.t() @ x * (2 / tokens)


def experts(count: int, rows: int, columns: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights [count, rows, columns] and one Hessian for each."""
    weight = torch.randn(count, rows, columns, generator=torch.Generator().manual_seed(seed)) * 0.02
    return weight, torch.stack([correlated_hessian(columns, 2 * columns, seed + 1 + e) for e in range(count)])


def loss(weight: torch.Tensor, served: torch.Tensor, hessian: torch.Tensor) -> torch.Tensor:
    """tr(D H Dᵀ) in float64, for each expert."""
    d = (weight - served).double()
    return ((d @ hessian.double()) * d).sum((-2, -1))


def textbook_gptq(
    weight: torch.Tensor, hessian: torch.Tensor, scales: torch.Tensor, damp: float, qmin: int, qmax: int
) -> torch.Tensor:
    """Codes by the paper's algorithm 1 without blocks: float64, explicit inverse, one column after the other.

    Args:
        weight: [R, C]; hessian: [C, C]; scales: [R, C], one for every weight.
    """
    h = hessian.double().clone()
    h.diagonal().add_(damp * h.diagonal().mean())
    order = torch.argsort(hessian.diagonal(), stable=True).flip(0)
    w, s = weight.double()[:, order], scales.double()[:, order]
    upper = torch.linalg.cholesky(torch.linalg.inv(h[order][:, order]), upper=True)
    codes = torch.zeros_like(w)
    for i in range(w.shape[1]):
        codes[:, i] = (w[:, i] / s[:, i]).round().clamp(qmin, qmax)
        error = (w[:, i] - codes[:, i] * s[:, i]) / upper[i, i]
        w[:, i + 1 :] -= error[:, None] * upper[i, i + 1 :]
    return codes[:, torch.argsort(order)].to(torch.int8)
