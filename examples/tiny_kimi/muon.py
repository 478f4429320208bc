"""Muon over processes: momentum, Nesterov, and an orthogonalized update for every matrix [1].

Experts are stacked: [E, r, c] is E matrices, a fused gate_up [E, 2r, c] is 2E of them. Their updates cost most, so each
process orthogonalizes its share and one sum over the processes puts the shares together.

[1] Jordan et al., Muon, 2024, https://kellerjordan.github.io/posts/muon/
"""

import os

import torch
import torch.distributed as dist
from torch import Tensor

RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
WEIGHT_DECAY = 0.05


def orthogonalize(g: Tensor) -> Tensor:
    """Nearest semi-orthogonal matrix, roughly: five Newton-Schulz steps in BF16 (Muon's quintic).

    g: float32 [..., rows, cols]; returns a new float32 tensor of the same shape with singular values near 1.
    """
    x = (g / (g.norm(dim=(-2, -1), keepdim=True) + 1e-7)).bfloat16()
    tall = x.size(-2) > x.size(-1)
    x = x.mT.contiguous() if tall else x
    for _ in range(5):
        a = x @ x.mT
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * (a @ a)) @ x
    return (x.mT if tall else x).float()


class Muon:
    """Momentum, Nesterov, orthogonalized; experts [E, r, c] are E matrices, fused gate_up [E, 2r, c] are 2E of them."""

    def __init__(self, parameters: list[Tensor]) -> None:
        self.parameters = parameters  # float32 masters; .grad is set by the training loop
        self.momentum = [torch.zeros_like(p) for p in parameters]

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """One update; processes share the work on experts and exchange the result."""
        updates = []
        for p, m in zip(self.parameters, self.momentum, strict=True):
            m.lerp_(p.grad, 0.05)
            update = p.grad.lerp(m, 0.95)
            if p.ndim == 3:
                if p.size(1) == p.size(2):  # gate and up, one above the other
                    update = update.view(p.size(0) * 2, p.size(1) // 2, p.size(2))
                share = update.size(0) // WORLD
                mine = slice(RANK * share, (RANK + 1) * share)
                whole = torch.zeros_like(update)
                whole[mine] = orthogonalize(update[mine])
                updates.append(whole)
            else:
                updates.append(orthogonalize(update))
        experts = [u for u in updates if u.ndim == 3]
        all_sum(experts)
        for p, update in zip(self.parameters, updates, strict=True):
            scale = max(1.0, update.size(-2) / update.size(-1)) ** 0.5
            p.mul_(1 - lr * WEIGHT_DECAY).add_(update.view_as(p), alpha=-lr * scale)


def all_sum(tensors: list[Tensor]) -> None:
    """Sum float32 tensors over the processes, in place, in one message."""
    if WORLD == 1:
        return
    flat = torch.cat([t.flatten() for t in tensors])
    dist.all_reduce(flat)
    for t, part in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
        t.copy_(part.view_as(t))
