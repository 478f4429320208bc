"""What the inputs of a weight say about which of its errors matter.

    H = (2/n) Σ_t w_t x_t x_tᵀ        [C, C] float32, over the n tokens that reached the weight

with w_t = 1 unless said otherwise, so that tr(D H Dᵀ) is twice the mean squared error that a change D of the weight
makes in its output. Weights w_t put more on tokens whose error reaches the model's output: the router's probability
squared, for an expert.

**Few tokens: shrink.** H of n tokens in C dimensions has rank n at most, and trusting it overfits. So, with
λ = C / (n + C),

    H ← (1 − λ) H + λ T        gate, up:  T = ½ pooled + ½ mean(diag pooled) · I
                               down:      T = mean(diag H) · I

where ``pooled`` is the Hessian of all the layer's tokens. The inner channels of an expert are its own, so other
experts say nothing about them and down shrinks to the identity. An expert that saw no token at all is quantized by T
alone. Measured on a small trained model with about one token per column: KL divergence 4.7 against 10.0 without
shrinkage and 6.4 for rounding.

Sums are float32. Only blocks on and above the diagonal are accumulated, half the work; tokens go in chunks of
``CHUNK`` in the order given, so equal calls give equal bits.
"""

from __future__ import annotations

import torch

from moepress.errors import QuantizeError

CHUNK = 1024
_PANEL = 512


class HessianSum:
    """Running Σ w x xᵀ and token count of one weight's inputs.

    Args:
        columns: C, the width of the inputs.
        device: where the sum lives.
    """

    def __init__(self, columns: int, device: torch.device | str = "cpu") -> None:
        self._upper = torch.zeros(columns, columns, device=device)
        self.tokens = 0

    def add(self, inputs: torch.Tensor, weights: torch.Tensor | None = None) -> None:
        """Add tokens. Padding must have been removed: every row counts.

        Args:
            inputs: [n, C], any float type; read only.
            weights: float32 [n], not negative; all 1 when not given.

        Raises:
            QuantizeError: shapes that do not fit.
        """
        columns = self._upper.shape[0]
        if (
            inputs.ndim != 2
            or inputs.shape[1] != columns
            or (weights is not None and weights.shape != inputs.shape[:1])
        ):
            given = "" if weights is None else f" with weights {list(weights.shape)}"
            raise QuantizeError(
                f"inputs {list(inputs.shape)}{given} for a Hessian of {columns} columns", where="HessianSum"
            )
        for start in range(0, inputs.shape[0], CHUNK):
            x = inputs[start : start + CHUNK].float()
            weighted = x if weights is None else x * weights[start : start + CHUNK, None]
            for first in range(0, columns, _PANEL):
                panel = self._upper[first : first + _PANEL, first:]
                panel.addmm_(weighted[:, first : first + _PANEL].t(), x[:, first:])
        self.tokens += inputs.shape[0]

    def merge(self, other: HessianSum) -> None:
        """Add what another sum has seen."""
        self._upper += other._upper
        self.tokens += other.tokens

    def mean(self) -> torch.Tensor:
        """H = (2/n) Σ w x xᵀ, float32 [C, C], symmetric to the bit, newly allocated; zero when no token was seen."""
        upper = self._upper.triu() * (2 / max(self.tokens, 1))
        return upper + upper.triu(1).t()


def shrinkage(tokens: int, columns: int) -> float:
    """λ = C / (n + C): 1 without tokens, ½ with as many as columns."""
    return columns / (tokens + columns)


def shrink(hessian: torch.Tensor, target: torch.Tensor, tokens: int) -> torch.Tensor:
    """(1 − λ) H + λ T.

    Args:
        hessian: float32 [C, C], the mean over ``tokens`` tokens.
        target: float32 [C, C].
        tokens: how many tokens ``hessian`` has seen.

    Returns:
        float32 [C, C], newly allocated.
    """
    return torch.lerp(hessian, target, shrinkage(tokens, hessian.shape[0]))


def gate_up_target(pooled: torch.Tensor) -> torch.Tensor:
    """Half the layer's pooled Hessian, half its mean diagonal times the identity.

    Args:
        pooled: float32 [C, C], the mean over all the layer's tokens.
    """
    target = pooled * 0.5
    target.diagonal().add_(pooled.diagonal().mean() * 0.5)
    return target


def down_target(hessian: torch.Tensor, tokens: int, layer_mean_diagonal: float) -> torch.Tensor:
    """The identity times the expert's mean diagonal, or times the layer's when the expert saw nothing.

    Args:
        hessian: float32 [I, I], the expert's own mean.
        tokens: how many tokens it has seen.
        layer_mean_diagonal: the mean diagonal over the layer's experts that saw tokens.
    """
    size = float(hessian.diagonal().mean()) if tokens else layer_mean_diagonal
    return torch.eye(hessian.shape[0], dtype=hessian.dtype, device=hessian.device) * size
