"""The number of threads changes no bit of a calibrated conversion, on any processor: by construction, and seen."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from moepress.calibration.activations import Activations
from moepress.calibration.expert_tap import RoutedTokens
from moepress.calibration.statistics import gate_up_moments, pooled_moments
from moepress.quantize.products import products_in
from moepress.quantize.side_by_side import side_by_side
from tests.pressing import press, shard_bytes
from tests.tiny_checkpoints import build

SMALL = ("calibration.samples=6", "calibration.length=48", "output.shard_size=1MB")
KL = ("weights.algorithm=awq+gptq", "weights.awq.norm=true", "calibration.loss=kl")

EXACT = {
    *(
        "abs",
        "add",
        "add_",
        "all",
        "aminmax",
        "clamp",
        "clamp_min",
        "equal",
        "div",
        "div_",
        "mul",
        "mul_",
        "neg",
        "rsub",
        "sub",
        "where",
    ),
    *(
        "_to_copy",
        "alias",
        "cat",
        "clone",
        "copy_",
        "detach",
        "diagonal",
        "expand",
        "index",
        "index_put_",
        "lift_fresh",
    ),
    *(
        "permute",
        "reshape",
        "select",
        "slice",
        "split",
        "stack",
        "t",
        "transpose",
        "tril",
        "triu",
        "unbind",
        "unsqueeze",
        "view",
    ),
    *("arange", "empty", "empty_like", "eye", "fill_", "full", "ones", "ones_like", "zero_", "zeros", "zeros_like"),
}
"""Operations that round each element once, or not at all: however they are split, the bits are the same."""
LONG = 1 << 12
"""Elements from which on anything else counts; matrix products always do."""


class Listening(TorchDispatchMode):
    """Notes what is computed in this thread while torch may split it over several, and is not exact."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if torch.get_num_threads() > 1 and func.__name__.split(".")[0] not in EXACT and self._is_long([*args, out]):
            frames = [frame for frame in traceback.extract_stack() if "moepress/" in frame.filename]
            if frames[-1].name != "all_finite":  # says yes or no, whatever the order
                self.found.add(f"{func} in {' < '.join(f'{f.filename}:{f.lineno}' for f in reversed(frames[-2:]))}")
        return out

    @staticmethod
    def _is_long(involved: list[Any]) -> bool:
        floats = [
            each
            for each in involved
            if isinstance(each, torch.Tensor) and each.is_floating_point() and not each.is_meta
        ]
        return sum(each.dim() == 2 for each in floats) > 1 or any(each.numel() >= LONG for each in floats)


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("kimi", KL),
        ("glm5", ("weights.algorithm=gptq", "calibration.hessian=layer")),
        ("qwen3_moe", ("weights.algorithm=awq", "kv_cache.scales=folded")),
    ],
    ids=["kl", "layer Hessian, MTP", "awq, KV scales"],
)
def test_nothing_that_adds_is_split_over_threads(family: str, overrides: tuple[str, ...], tmp_path: Path) -> None:
    source = build(family, tmp_path / "src")
    with threads(2), Listening() as listening:
        press(source.folder, tmp_path / "out", family, *overrides, *SMALL)
    assert listening.found == set()


def test_products_that_threads_would_split_have_the_bits_of_one(tmp_path: Path) -> None:
    """2,048 and more summands: there oneDNN's BF16 products change between 1 and 2 threads, MKL's with more."""
    generator = torch.Generator().manual_seed(0)
    tokens, hidden, experts = 4096, 96, 4
    x = torch.randn(tokens, hidden, generator=generator)
    routed = RoutedTokens(
        Activations.elsewhere(x),
        Activations.elsewhere(torch.arange(tokens)[:, None].remainder(experts).int()),
        Activations.elsewhere(torch.rand(tokens, 1, generator=generator)),
        experts,
    )
    source = RoutedTokens(Activations.elsewhere(x + 0.1), routed.expert, routed.weight, experts)
    for precision in ("mixed", "float32"):
        seen = []
        for count in (1, 2, 7, 64):
            with threads(count), products_in(precision):
                pooled = pooled_moments(routed, source=source)
                own = gate_up_moments(routed, range(experts), source=source)
            assert pooled.cross is not None
            assert own.cross is not None
            seen.append((pooled.gram, pooled.cross, own.gram, own.cross))
        for others in seen[1:]:
            assert all(torch.equal(one, other) for one, other in zip(seen[0], others, strict=True)), precision


def test_a_thread_that_is_new_multiplies_as_one_that_is_not() -> None:
    """oneDNN asks OpenMP how many threads there are; torch has told it nothing in a thread that never asked torch."""
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(2048, 256, generator=generator), torch.randn(2048, 48, generator=generator)
    with threads(2), products_in("mixed"):
        expected = side_by_side(lambda _: x.t() @ y, [0])[0]
        for _ in range(10):
            assert all(torch.equal(made, expected) for made in side_by_side(lambda _: x.t() @ y, range(6), 3))


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides", [KL, ("weights.algorithm=gptq", "calibration.hessian=layer"), ("weights.algorithm=awq",)], ids="/".join
)
def test_one_thread_and_more_than_there_are_processors_give_the_same_bytes(
    overrides: tuple[str, ...], tmp_path: Path
) -> None:
    """Samples of 1,100 tokens, so that experts get thousands: the sums that libraries split differently."""
    source, long = build("kimi", tmp_path / "src", layers=3), ("calibration.samples=4", "calibration.length=1100")
    for count in (1, 2, 5):
        with threads(count):
            press(source.folder, tmp_path / str(count), "kimi", *overrides, *long, "output.shard_size=1MB")
    assert shard_bytes(tmp_path / "2") == shard_bytes(tmp_path / "1")
    assert shard_bytes(tmp_path / "5") == shard_bytes(tmp_path / "1")
