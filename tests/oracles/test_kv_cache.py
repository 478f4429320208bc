"""transformers as the judge of folded KV scales: its own cache made to hold e4m3, as a server's does, at a scale of 1.0."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from tests.oracles.test_transformers import ALL_BF16, load
from tests.pressing import press
from tests.stretched import stretched

pytestmark = [pytest.mark.oracle, pytest.mark.slow]

SMALL = ("calibration.samples=4", "calibration.length=48", "kv_cache.samples=2")


class E4m3Cache(DynamicCache):
    """What a server's FP8 pool does to K and V (MLA: to the latent and the rotated key): one saturating cast, no scale."""

    def update(self, key: torch.Tensor, value: torch.Tensor, *where: Any, **more: Any) -> Any:
        def cast(x: torch.Tensor) -> torch.Tensor:
            return x.float().clamp(-448, 448).to(torch.float8_e4m3fn).to(x.dtype)

        return super().update(cast(key), cast(value), *where, **more)


@pytest.mark.parametrize("family", ["glm4", "kimi"])
def test_the_same_logits_and_a_smaller_error_behind_an_fp8_cache(family: str, tmp_path: Path) -> None:
    """Both outputs have the same INT4 experts; the folded one's attention weights are the other's times powers of two."""
    source = stretched(family, tmp_path / "src", mtp=0)
    tokens = torch.randint(3, 500, (2, 40), generator=torch.Generator().manual_seed(1))
    logits: dict[str, torch.Tensor] = {}
    error: dict[str, float] = {}
    for scales in ("none", "folded"):
        out = tmp_path / scales
        press(source.folder, out, family, *ALL_BF16, f"kv_cache.scales={scales}", *SMALL)
        model, info = load(family, out)
        assert not info["missing_keys"]
        with torch.no_grad():
            logits[scales] = model(tokens, use_cache=False).logits.float()
            cached = model(tokens, past_key_values=E4m3Cache(config=model.config), use_cache=True).logits.float()
        error[scales] = float((cached - logits[scales]).norm() / logits[scales].norm())
    assert torch.equal(logits["none"], logits["folded"])
    assert error["folded"] < 0.5 * error["none"], error
