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
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

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

    def share(self, scale: float) -> StoredShare:
        error = math.sqrt(self.wrong / self.energy) if self.energy else 0.0
        return StoredShare(scale, self.clipped / self.total, self.below / self.total, error)


class _SeenEnough(Exception):
    """Ends an attention call once its cache has been given what it stores: only the largest value was wanted."""


class CacheProbe:
    """Stands where transformers' KV cache stands, for one attention call at a time.

    Args:
        layer: the decoder layer to watch; the probe hangs on it until `detach`.
        view: what the family's attention gives to its cache.
        rope_dim: MLA: columns of the rotated key; 0 otherwise.

    Attributes:
        amax: cached tensor -> largest magnitude seen so far.
        seen: cached tensor -> counts at 1.0 of everything that was let through.
    """

    def __init__(self, layer: nn.Module, view: CacheView, rope_dim: int) -> None:
        self.amax: dict[str, float] = {}
        self.seen: dict[str, _Counts] = {}
        self._view = view
        self._rope_dim = rope_dim
        self._real: torch.Tensor | None = None
        self._then_stop = False
        self._scales: Mapping[str, float] | None = None
        self._counts: dict[str, _Counts] = {}
        self._hook: RemovableHandle | None = None
        if view != "key_value":
            norm = layer.get_submodule("self_attn.kv_a_layernorm")
            self._hook = norm.register_forward_hook(lambda _module, _inputs, output: self._pass("latent", output))

    def observe(self, real: torch.Tensor, *, then_stop: bool = False) -> None:
        """Let the next call's values through as they are.

        Args:
            real: [b, S] bool, which positions are tokens.
            then_stop: end the call with `_SeenEnough` before attention itself, which nobody wants.
        """
        self._real, self._scales, self._then_stop = real, None, then_stop

    def store(self, real: torch.Tensor, scales: Mapping[str, float], counts: dict[str, _Counts]) -> None:
        """Store the next call's values as FP8 at these scales, and count into `counts`."""
        self._real, self._scales, self._counts, self._then_stop = real, scales, counts, False

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
        if self._then_stop:
            raise _SeenEnough
        return passed

    def _store_both(self, first: torch.Tensor, second: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self._view == "key_value":
            return self._pass("k", first), self._pass("v", second)
        if self._view == "latent":  # the hook on the norm has seen the latent
            return first, self._pass("k_pe", second)
        nope = first.shape[-1] - self._rope_dim
        rotated = self._pass("k_pe", first[:, :1, :, nope:])
        return torch.cat([first[..., :nope], rotated.expand(-1, first.shape[1], -1, -1)], dim=-1), second

    def update_indexer(self, keys: torch.Tensor, layer_idx: int) -> torch.Tensor:
        """transformers' cache interface for the sparse indexer's keys: left alone."""
        del layer_idx
        return keys

    def _pass(self, name: str, values: torch.Tensor) -> torch.Tensor:
        """values [b, S, D] or [b, heads, S, D] -> the same, as stored."""
        if self._real is None:
            raise RuntimeError("neither observe() nor store() was called")
        real = self._real.to(values.device)
        seen = values.transpose(1, 2)[real] if values.dim() == 4 else values[real]
        magnitude = seen.float().abs()
        self.amax[name] = max(self.amax.get(name, 0.0), float(magnitude.max()) if magnitude.numel() else 0.0)
        if self._scales is None:
            self.seen.setdefault(name, _Counts()).count(magnitude, 1.0)
            return values
        counts = self._counts.setdefault(name, _Counts())
        counts.count(magnitude, self._scales[name])
        counts.compare(magnitude, self._scales[name])
        return store_e4m3(values, self._scales[name])


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
    try:
        for start, stop in layer.batches(stream):
            measured = samples is None or start < samples
            probe.observe(stream.real(start, stop), then_stop=not measured)
            with suppress(_SeenEnough):
                few.keep(start, stop, layer.attention(stream, start, stop, probe))
        for name, largest in probe.amax.items():
            if not 0 < largest < math.inf:
                raise QuantizeError(
                    f"layer {layer.index}: the largest cached value of {name} is {largest}",
                    hint="--set kv_cache.scales=none converts without KV scales",
                )
        for candidate, scales in candidate_scales(probe.amax, headroom).items():
            if candidates is None or candidate in candidates:
                few.store(candidate, scales)
        if choose is not None:
            few.store("chosen", choose(probe.amax, few.shares))
    finally:
        probe.detach()
    for name, seen in probe.seen.items():  # what clips at 1.0 may be rare: counted over everything
        everywhere, unit = seen.share(1.0), few.shares.get("unit", {})
        if name not in unit:
            continue
        unit[name] = replace(unit[name], clipped=everywhere.clipped, below_normal=everywhere.below_normal)
    return LayerCache(layer.index, dict(probe.amax), few.shares, few.errors)


class _Few:
    """The samples on which errors are measured, with their exact outputs."""

    def __init__(self, layer: OpenLayer, stream: Stream, probe: CacheProbe) -> None:
        self.shares: dict[str, dict[str, StoredShare]] = {}
        self.errors: dict[str, float] = {}
        self._layer, self._stream, self._probe = layer, stream, probe
        self._exact: list[tuple[int, int, torch.Tensor]] = []

    def keep(self, start: int, stop: int, exact: torch.Tensor) -> None:
        """A batch and its exact output [n, S, C]."""
        self._exact.append((start, stop, exact))

    def store(self, candidate: str, scales: Mapping[str, float]) -> None:
        """Runs attention with everything stored at these scales; scales measured before are not run again."""
        for other, shares in self.shares.items():
            if {name: share.scale for name, share in shares.items()} == dict(scales):
                self.shares[candidate], self.errors[candidate] = dict(shares), self.errors[other]
                return
        counts: dict[str, _Counts] = {}
        error = norm = 0.0
        for start, stop, exact in self._exact:
            real = self._stream.real(start, stop).to(exact.device)
            self._probe.store(real, scales, counts)
            stored = self._layer.attention(self._stream, start, stop, self._probe)
            error += float((stored[real] - exact[real]).double().square().sum())
            norm += float(exact[real].double().square().sum())
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
