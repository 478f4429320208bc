"""AWQ's factors behind a rescaled norm, from the files alone: s = norm of the source / norm of the output.

With ``weights.awq.norm`` the norm before a layer's experts is divided by s [C], and router, shared expert and experts are
multiplied by it, column by column. s must be powers of two, the same for every reader: then nothing of the model changed
but the rounding of the experts. The quotient is computed here from both files and is not taken from anybody's word.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from moepress.formats.families import Component, Family, classify
from moepress.formats.storage import StoredWeight
from moepress.verify.findings import Findings

NORM = ".post_attention_layernorm.weight"


class NormFactors:
    """The factors of every layer that has any.

    Args:
        config, family: of the source.
        storage: the source's weights by name.
        rescaled: the recipe of the output says ``weights.awq.norm``.
        pressed: names of the output's packed experts.
        truth: gives a weight of the source, float32.
        served: gives a tensor of the output by name.
    """

    def __init__(
        self,
        config: Mapping[str, object],
        family: Family,
        storage: Mapping[str, StoredWeight],
        *,
        rescaled: bool,
        pressed: set[str],
        truth: Callable[[StoredWeight], torch.Tensor],
        served: Callable[[str], torch.Tensor],
        findings: Findings,
    ) -> None:
        self._config, self._family, self._findings = config, family, findings
        self._truth, self._served = truth, served
        self._found: dict[int, torch.Tensor] = {}
        self._norms: dict[int | None, StoredWeight] = {}
        if rescaled:
            layers = {classify(family, config, name).layer for name in pressed}
            norms = {classify(family, config, n).layer: s for n, s in storage.items() if n.endswith(NORM)}
            self._norms = {layer: norms[layer] for layer in layers if layer in norms}

    def reader(self, stored: StoredWeight) -> torch.Tensor | None:
        """s [C] of the norm that feeds this weight's columns; None when they are the source's."""
        identity = classify(self._family, self._config, stored.name)
        if identity.layer not in self._norms or len(stored.shape) != 2 or identity.projection == "down_proj":
            return None
        if identity.component not in (Component.ROUTER, Component.SHARED_EXPERT, Component.ROUTED_EXPERT):
            return None
        return self._of(identity.layer or 0)

    def holds(self, stored: StoredWeight) -> bool | None:
        """Whether a weight that stays in floating point is the source's with its factors; None when it has none."""
        layer = classify(self._family, self._config, stored.name).layer
        if layer in self._norms and self._norms[layer] is stored:
            self._check_norm(stored)
            return True
        factors = self.reader(stored)
        if factors is None:
            return None
        served = self._served(stored.name)
        if tuple(served.shape) != stored.shape or served.dtype not in (torch.bfloat16, torch.float32):
            return False
        return torch.equal(served.float(), self._truth(stored).to(served.dtype).float() * factors)

    def _of(self, layer: int) -> torch.Tensor:
        if layer not in self._found:
            norm = self._norms[layer]
            before, after = self._truth(norm), self._served(norm.name).float()
            self._found[layer] = torch.where(before != 0, before / torch.where(after != 0, after, 1.0), 1.0)
        return self._found[layer]

    def _check_norm(self, stored: StoredWeight) -> None:
        served = self._served(stored.name)
        if tuple(served.shape) != stored.shape:
            self._findings.problem(stored.name, f"is {list(served.shape)}, the source has {list(stored.shape)}")
            return
        factors = self._of(classify(self._family, self._config, stored.name).layer or 0)
        mantissa, _ = torch.frexp(factors)
        off = int((~((mantissa == 0.5) & (factors > 0))).sum()) + int(
            ((served == 0) & (self._truth(stored) != 0)).sum()
        )
        if off:
            self._findings.problem(
                stored.name, f"{off} of {len(factors)} values are not the source's over a power of two"
            )
