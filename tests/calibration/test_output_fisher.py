"""The streamed backward pass against torch's autograd through transformers' whole model, for every family."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from moepress.calibration.activations import Scratch
from moepress.calibration.output_fisher import OutputFisher, output_fishers
from moepress.calibration.run_settings import RunSettings
from moepress.calibration.streamed_model import StreamedModel
from moepress.errors import QuantizeError

from .tiny_models import CONFIGS, published, whole_model

SEED = 5


def tokens(samples: int = 3, length: int = 24, vocabulary: int = 128) -> torch.Tensor:
    return torch.randint(3, vocabulary, (samples, length), generator=torch.Generator().manual_seed(1))


def by_autograd(model: torch.nn.Module, token_ids: torch.Tensor) -> dict[int, torch.Tensor]:
    """Σ δ δᵀ / tokens of every layer's output: labels drawn from the model, one backward through all of it."""
    outputs: list[torch.Tensor] = []

    def keep(_module: Any, _inputs: Any, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        hidden.retain_grad()
        outputs.append(hidden)

    hooks = [layer.register_forward_hook(keep) for layer in model.model.layers]  # type: ignore[union-attr]
    log_p = model(input_ids=token_ids, use_cache=False).logits.float().log_softmax(-1)
    for hook in hooks:
        hook.remove()
    total = torch.zeros(())
    for sample, rows in enumerate(log_p):
        generator = torch.Generator().manual_seed(SEED + sample)
        drawn = torch.multinomial(rows.detach().exp(), 1, generator=generator)
        total = total + rows.gather(-1, drawn).sum()
    total.backward()
    flat = [hidden.grad.reshape(-1, hidden.shape[-1]) for hidden in outputs]  # type: ignore[union-attr]
    return {index: delta.t() @ delta / len(delta) for index, delta in enumerate(flat)}


def streamed(
    key: str, model: Any, config: Any, folder: Path, token_ids: torch.Tensor, **how: Any
) -> list[OutputFisher]:
    settings = RunSettings(batch_size=2, expert_bytes=how.get("expert_bytes", 1))
    with Scratch(folder, memory_bytes=how.get("memory_bytes", 1 << 30)) as scratch:
        streaming = StreamedModel(config, published(key, model), scratch, settings)
        found = list(output_fishers(streaming, token_ids, how["layers"], seed=SEED))
        assert scratch.in_memory == scratch.in_files == 0, "everything was given back"
    return found


@pytest.mark.parametrize("key", sorted(CONFIGS))
def test_equals_autograd_through_the_whole_model(key: str, tmp_path: Path) -> None:
    config, model = whole_model(key)
    truth = by_autograd(model, tokens())
    found = streamed(key, model, config, tmp_path, tokens(), layers=set(truth))
    assert [each.layer for each in found] == sorted(truth, reverse=True)
    for each in found:
        assert each.tokens == 72
        assert float((each.fisher - truth[each.layer]).norm()) <= 1e-3 * float(truth[each.layer].norm()), each.layer


def test_files_and_blocks_of_experts_do_not_change_a_byte(tmp_path: Path) -> None:
    config, model = whole_model("deepseek_v3")
    last = config["num_hidden_layers"] - 1
    found = [
        streamed(
            "deepseek_v3", model, config, tmp_path, tokens(), layers={1, last}, expert_bytes=size, memory_bytes=room
        )
        for size, room in ((1, 1 << 30), (1 << 30, 1 << 30), (5 * 3 * 48 * 32 * 4, 0))
    ]
    for others in found[1:]:
        for one, other in zip(found[0], others, strict=True):
            assert torch.equal(one.fisher, other.fisher)
            assert torch.equal(one.fisher, one.fisher.t())


def test_it_is_the_curvature_of_the_divergence(tmp_path: Path) -> None:
    """KL(p ‖ p moved by a small error e in a layer's output) ≈ ½ eᵀ F e: F is what it is taken for."""
    config, model = whole_model("deepseek_v3")
    token_ids = tokens(samples=2, length=16).repeat(64, 1)  # labels drawn 64 times
    layer = config["num_hidden_layers"] - 1
    (found,) = streamed("deepseek_v3", model, config, tmp_path, token_ids, layers={layer})
    generator = torch.Generator().manual_seed(0)
    measured = predicted = 0.0
    with torch.no_grad():
        log_p = model(input_ids=token_ids[:2], use_cache=False).logits.double().log_softmax(-1)
        for _ in range(8):
            error = torch.randn(config["hidden_size"], generator=generator) * 1e-2
            hook = model.model.layers[layer].register_forward_hook(
                lambda _m, _i, out, error=error: (out[0] + error, *out[1:]) if isinstance(out, tuple) else out + error
            )
            log_q = model(input_ids=token_ids[:2], use_cache=False).logits.double().log_softmax(-1)
            hook.remove()
            measured += float((log_p.exp() * (log_p - log_q)).sum(-1).mean())
            predicted += float(error @ found.fisher @ error) / 2
    assert measured == pytest.approx(predicted, rel=0.1)


def test_a_gradient_that_is_not_finite_is_named_by_its_layer(tmp_path: Path) -> None:
    config, model = whole_model("deepseek_v3")
    with torch.no_grad():
        model.lm_head.weight[0] = torch.inf
    with pytest.raises((QuantizeError, RuntimeError)):
        streamed("deepseek_v3", model, config, tmp_path, tokens(), layers={1})
