"""What a server would put into its KV cache, and what storing that as FP8 does to attention.

The probe stands where transformers' cache stands: every attention calls ``past_key_values.update(…)`` with what it
would store, and goes on with what it gets back. Giving back the same value measures; giving back the value as FP8 would
hold it,

    q(x; s) = s · e4m3(clamp(x / s, ±448))

shows the effect. What is stored depends on the family, and servers store it in the same form:

    GQA   k         K after rotation           v      V
    MLA   latent    c_kv after kv_a_layernorm  k_pe   rotated key, one for all heads

(transformers expands the latent before its cache where attention is sparse; there the latent is taken from the norm.)

e4m3 holds ±448 at most; below 2⁻⁶ it is subnormal and loses precision, and what is below 2⁻¹⁰ becomes zero. A scale too
small clips, one too large pushes values down there. Between the two, a float has the same relative precision everywhere:
scales matter for the range, not for the step. Candidates:

    unit          1.0: what a server uses that reads no scale
    calibrated    h · amax / 448, per tensor; amax is the true maximum in float32 over all real tokens, no moving average
    power_of_two  the next power of two above that: it can be folded into the weights without changing a bit
    one_scale     MLA only: the larger of the two calibrated scales for both, for servers that keep one per row
    chosen        what the caller makes of these figures

h is the headroom: text that nobody calibrated on has larger values, and a clipped key costs more than the one step in
fifteen binades that h = 2 takes from the other end.

Per layer and candidate: the shares of values that clip or fall below the normal range, the relative error of what is
stored, √(Σ(q(x) − x)² / Σx²), and that of the attention block's output. amax, and the shares at 1.0, are over all real
tokens; errors and the other shares over the first few samples. So attention runs once over everything (beyond the few
samples a call ends as soon as its cache is filled) and once more per candidate over the few. Which scales to write, and
where, is the runtime contract's question.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from moepress.calibration.decoder import CacheView
from moepress.calibration.layer_runner import OpenLayer
from moepress.calibration.stream import Stream
from moepress.errors import QuantizeError

E4M3_MAX = 448.0
E4M3_SMALLEST_NORMAL = 2.0**-6
_BEYOND = E4M3_MAX * (1 + 2.0**-20)  # amax / (amax / 448) is 448 only up to rounding


@dataclass(frozen=True)
class StoredShare:
    """How one cached tensor fares at one scale. Shares and the error are relative, 0 to 1.

    Attributes:
        scale: the value stored is x / scale.
        clipped: share of values beyond ±448.
        below_normal: share of values, zeros apart, that e4m3 holds as subnormal or as zero.
        error: relative error of the stored values.
    """

    scale: float
    clipped: float
    below_normal: float
    error: float


@dataclass(frozen=True)
class LayerCache:
    """One layer's measurements.

    Attributes:
        layer: index.
        amax: cached tensor (``k`` and ``v``, or ``latent`` and ``k_pe``) -> largest magnitude, float32.
        shares: candidate -> cached tensor -> shares.
        attention_error: candidate -> relative error of the attention block's output.
    """

    layer: int
    amax: Mapping[str, float]
    shares: Mapping[str, Mapping[str, StoredShare]]
    attention_error: Mapping[str, float]

    def scales(self, candidate: str) -> dict[str, float]:
        """Cached tensor -> scale, of one candidate."""
        return {name: share.scale for name, share in self.shares[candidate].items()}


def store_e4m3(values: torch.Tensor, scale: float) -> torch.Tensor:
    """The values as an FP8 cache gives them back: any shape, float; saturating, like the servers' kernels."""
    scaled = (values.float() / scale).clamp(-E4M3_MAX, E4M3_MAX)
    return (scaled.to(torch.float8_e4m3fn).float() * scale).to(values.dtype)


@dataclass
class _Counts:
    """Values of one cached tensor under one candidate: all, beyond the maximum, below the normal range."""

    total: int = 0
    clipped: int = 0
    below: int = 0
    wrong: float = 0.0
    energy: float = 0.0

    def count(self, magnitude: torch.Tensor, scale: float) -> None:
        """Adds real values, given by their magnitudes, any shape float32."""
        stored = magnitude / scale
        self.total += stored.numel()
        self.clipped += int((stored > _BEYOND).sum())
        self.below += int(((stored < E4M3_SMALLEST_NORMAL) & (stored > 0)).sum())

    def compare(self, magnitude: torch.Tensor, scale: float) -> None:
        """Adds what storing these magnitudes does to them."""
        self.wrong += float((store_e4m3(magnitude, scale) - magnitude).square_().sum(dtype=torch.float64))
        self.energy += float(magnitude.square().sum(dtype=torch.float64))

    def add(self, other: _Counts) -> None:
        """Adds what another call saw."""
        for name in ("total", "clipped", "below", "wrong", "energy"):
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def share(self, scale: float) -> StoredShare:
        error = math.sqrt(self.wrong / self.energy) if self.energy else 0.0
        return StoredShare(scale, self.clipped / self.total, self.below / self.total, error)


class _SeenEnough(Exception):
    """Ends an attention call once its cache has been given what it stores: only the largest value was wanted."""


@dataclass
class _Call:
    """One attention call: what is done to the values on their way to the cache, and what was seen of them.

    Args:
        real: [b, S] bool, which positions are tokens.
        scales: cached tensor -> scale, to store the values as FP8; None = let them through as they are.
        then_stop: end the call with `_SeenEnough` before attention itself, which nobody wants.

    Attributes:
        amax: cached tensor -> largest magnitude.
        counts: cached tensor -> counts, at 1.0 where values were let through.
    """

    real: torch.Tensor
    scales: Mapping[str, float] | None = None
    then_stop: bool = False
    amax: dict[str, float] = field(default_factory=dict)
    counts: dict[str, _Counts] = field(default_factory=dict)

    def see(self, name: str, values: torch.Tensor) -> torch.Tensor:
        """values [b, S, D] or [b, heads, S, D] -> the same, as stored."""
        real = self.real.to(values.device)
        seen = values.transpose(1, 2)[real] if values.dim() == 4 else values[real]
        magnitude = seen.float().abs()
        self.amax[name] = float(magnitude.max()) if magnitude.numel() else 0.0
        counts = self.counts.setdefault(name, _Counts())
        if self.scales is None:
            counts.count(magnitude, 1.0)
            return values
        counts.count(magnitude, self.scales[name])
        counts.compare(magnitude, self.scales[name])
        return store_e4m3(values, self.scales[name])


class CacheProbe:
    """Stands where transformers' KV cache stands, for one attention call of a thread at a time.

    Args:
        layer: the decoder layer to watch; the probe hangs on it until `detach`.
        view: what the family's attention gives to its cache.
        rope_dim: MLA: columns of the rotated key; 0 otherwise.
    """

    def __init__(self, layer: nn.Module, view: CacheView, rope_dim: int) -> None:
        self._view = view
        self._rope_dim = rope_dim
        self._threads = threading.local()
        self._hook: RemovableHandle | None = None
        if view != "key_value":
            norm = layer.get_submodule("self_attn.kv_a_layernorm")
            self._hook = norm.register_forward_hook(lambda _module, _inputs, output: self._see("latent", output))

    @contextmanager
    def watching(self, call: _Call) -> Iterator[None]:
        """Attention that this thread calls in the block is that call."""
        self._threads.call = call
        try:
            yield
        finally:
            self._threads.call = None

    def detach(self) -> None:
        """Leave the layer as it was."""
        if self._hook is not None:
            self._hook.remove()

    def update(
        self, first: torch.Tensor, second: torch.Tensor, layer_idx: int, *_: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """transformers' cache interface: what attention would store, [b, heads, S, columns] each."""
        del layer_idx
        passed = self._store_both(first, second)
        if self._call.then_stop:
            raise _SeenEnough
        return passed

    def _store_both(self, first: torch.Tensor, second: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self._view == "key_value":
            return self._see("k", first), self._see("v", second)
        if self._view == "latent":  # the hook on the norm has seen the latent
            return first, self._see("k_pe", second)
        nope = first.shape[-1] - self._rope_dim
        rotated = self._see("k_pe", first[:, :1, :, nope:])
        return torch.cat([first[..., :nope], rotated.expand(-1, first.shape[1], -1, -1)], dim=-1), second

    def update_indexer(self, keys: torch.Tensor, layer_idx: int) -> torch.Tensor:
        """transformers' cache interface for the sparse indexer's keys: left alone."""
        del layer_idx
        return keys

    @property
    def _call(self) -> _Call:
        call: _Call | None = getattr(self._threads, "call", None)
        if call is None:
            raise RuntimeError("attention was called outside watching()")
        return call

    def _see(self, name: str, values: torch.Tensor) -> torch.Tensor:
        return self._call.see(name, values)


Choose = Callable[[Mapping[str, float], Mapping[str, Mapping[str, StoredShare]]], Mapping[str, float]]
"""From amax and the shares of every candidate: cached tensor -> scale."""


@torch.no_grad()
def measure_cache(
    layer: OpenLayer,
    stream: Stream,
    *,
    headroom: float = 1.0,
    samples: int | None = None,
    candidates: Sequence[str] | None = None,
    choose: Choose | None = None,
) -> LayerCache:
    """Measure one layer; to be called before ``layer.dense_part``, which replaces the layer's inputs.

    Args:
        layer: open.
        stream: the layer's inputs; only read.
        headroom: how many times larger than amax a value may be.
        samples: on how many samples errors are measured, rounded up to whole batches; None = all.
        candidates: which to measure; None = all.
        choose: makes one more candidate, ``chosen``.

    Raises:
        QuantizeError: cached values that are not finite, or that are all zero.
    """
    probe = CacheProbe(layer.module, layer.cache_view, layer.rope_dim)
    few = _Few(layer, stream, probe)
    amax: dict[str, float] = {}
    everything: dict[str, _Counts] = {}

    def one(batch: tuple[int, int]) -> tuple[_Call, torch.Tensor | None]:
        call = _Call(stream.real(*batch), then_stop=samples is not None and batch[0] >= samples)
        with probe.watching(call), suppress(_SeenEnough):
            return call, layer.attention(stream, *batch, probe)
        return call, None

    try:
        for batch, (call, exact) in layer.side_by_side(one, layer.dense_batches(stream), products="float32"):
            if exact is not None:
                few.keep(batch, exact)
            for name, largest in call.amax.items():
                amax[name] = max(amax.get(name, 0.0), largest)
                everything.setdefault(name, _Counts()).add(call.counts[name])
        for name, largest in amax.items():
            if not 0 < largest < math.inf:
                raise QuantizeError(
                    f"layer {layer.index}: the largest cached value of {name} is {largest}",
                    hint="--set kv_cache.scales=none converts without KV scales",
                )
        for candidate, scales in candidate_scales(amax, headroom).items():
            if candidates is None or candidate in candidates:
                few.store(candidate, scales)
        if choose is not None:
            few.store("chosen", choose(amax, few.shares))
    finally:
        probe.detach()
    for name, seen in everything.items():  # what clips at 1.0 may be rare: counted over everything
        everywhere, unit = seen.share(1.0), few.shares.get("unit", {})
        if name not in unit:
            continue
        unit[name] = replace(unit[name], clipped=everywhere.clipped, below_normal=everywhere.below_normal)
    return LayerCache(layer.index, amax, few.shares, few.errors)


class _Few:
    """The samples on which errors are measured, with their exact outputs."""

    def __init__(self, layer: OpenLayer, stream: Stream, probe: CacheProbe) -> None:
        self.shares: dict[str, dict[str, StoredShare]] = {}
        self.errors: dict[str, float] = {}
        self._layer, self._stream, self._probe = layer, stream, probe
        self._exact: dict[tuple[int, int], torch.Tensor] = {}

    def keep(self, batch: tuple[int, int], exact: torch.Tensor) -> None:
        """A batch and its exact output [n, S, C]."""
        self._exact[batch] = exact

    def store(self, candidate: str, scales: Mapping[str, float]) -> None:
        """Runs attention with everything stored at these scales; scales measured before are not run again."""
        for other, shares in self.shares.items():
            if {name: share.scale for name, share in shares.items()} == dict(scales):
                self.shares[candidate], self.errors[candidate] = dict(shares), self.errors[other]
                return
        counts: dict[str, _Counts] = {}
        error = norm = 0.0

        def one(batch: tuple[int, int]) -> tuple[_Call, float, float]:
            exact = self._exact[batch]
            real = self._stream.real(*batch).to(exact.device)
            call = _Call(real, scales)
            with self._probe.watching(call):
                stored = self._layer.attention(self._stream, *batch, self._probe)
            wrong = float((stored[real] - exact[real]).double().square().sum())
            return call, wrong, float(exact[real].double().square().sum())

        for _, (call, wrong, energy) in self._layer.side_by_side(one, list(self._exact), products="float32"):
            error, norm = error + wrong, norm + energy
            for name, seen in call.counts.items():
                counts.setdefault(name, _Counts()).add(seen)
        self.shares[candidate] = {name: counts[name].share(scale) for name, scale in scales.items()}
        self.errors[candidate] = math.sqrt(error / norm) if norm else 0.0


def candidate_scales(amax: Mapping[str, float], headroom: float = 1.0) -> dict[str, dict[str, float]]:
    """candidate -> cached tensor -> scale; see the module's table."""
    calibrated = {name: headroom * value / E4M3_MAX for name, value in amax.items()}
    candidates = {
        "unit": dict.fromkeys(amax, 1.0),
        "calibrated": calibrated,
        "power_of_two": {name: 2.0 ** math.ceil(math.log2(scale)) for name, scale in calibrated.items()},
    }
    if "latent" in amax:
        candidates["one_scale"] = dict.fromkeys(amax, max(calibrated.values()))
    return candidates


def suspicious(layers: Sequence[Mapping[str, float]]) -> list[str]:
    """Reasons not to trust a set of measurements: one sentence each, empty when there are none.

    Calibrated scales differ from layer to layer. Equal ones mean that what was measured is not the cache: a hook that
    saw a constant, or a default that was never replaced.

    Args:
        layers: amax of each.
    """
    if len(layers) < 2:
        return []
    names = sorted({name for amax in layers for name in amax})
    return [
        f"{name}: the same largest value {layers[0][name]:.6g} in all {len(layers)} layers"
        for name in names
        if len({amax.get(name) for amax in layers}) == 1
    ]
