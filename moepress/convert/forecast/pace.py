"""When a running conversion will end: each kind of work by the pace that was measured for it in this very run.

    left = Σ over kinds of  work ahead · seconds per unit of work        a kind of layer nobody has met has no pace: None

Shards (source bytes). In this process they advance piece by piece: the pace is that of the younger half of the run, which
forgets a page cache that was warm at first and yet does not jump. Workers advance by whole shards, all at about the same time
at first; there every shard in work counts by its age against the mean age of finished ones, over as many as work at once.
Where shards come last (kept tensors wait for KV scales) they count at the rate of a slow disk until one was seen.

Layers. A layer's own progress is uneven (attention, then experts, then their outputs), so one that is in work counts as the
mean of those before it, less its age: the estimate runs down evenly, and waits when a layer takes longer than its elders did. The
very first of a kind is judged by the share of its experts that are pressed.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from moepress.convert.course import Kind, LayerWork

UNSEEN_RATE = 200e6
"""Source bytes a second of shards before any was seen: minutes in a run of hours."""

SAMPLES = 512
"""Remembered moments of a stage, thinned out when there are more."""


@dataclass
class _Layers:
    """What is known of one kind of layer."""

    ahead: float
    seconds: float = 0.0
    done: int = 0


@dataclass
class _InWork:
    begun: float
    amount: int


class Pace:
    """Told what begins and ends, it says how long the rest takes.

    Args:
        ahead: from `convert.course.Course`.
        clock: seconds; a test's own.
        guess: seconds that a layer to press will take, from before the run; used until one was seen.
    """

    def __init__(
        self, ahead: Mapping[Kind, float], *, clock: Callable[[], float] = time.monotonic, guess: float | None = None
    ) -> None:
        self._ahead, self._clock, self._guess = ahead, clock, guess
        kinds: tuple[LayerWork, ...] = ("follow", "press", "measure")
        self._layers = {kind: _Layers(ahead.get(kind, 0)) for kind in kinds}
        self._stage: Kind | None = None
        self._since = 0.0  # when the stage, or the layer, began
        self._share = 0.0  # of the layer in work
        self._shard_seconds, self._shard_bytes = 0.0, 0
        self._moments: deque[tuple[float, int]] = deque()  # (seconds spent on shards, source bytes)
        self._in_work: dict[str, _InWork] = {}
        self._most_at_once = 0
        self._unit_seconds, self._unit_bytes = 0.0, 0  # of finished shards, each by its own time in work

    def shard(self, name: str, source_bytes: int) -> None:
        """A shard that needs no calibration is begun."""
        now = self._clock()
        if self._stage != "shards":
            self._enter("shards", now)
            self._moments = deque([(self._shard_seconds, self._shard_bytes)])
        self._in_work[name] = _InWork(now, source_bytes)
        self._most_at_once = max(self._most_at_once, len(self._in_work))

    def advance(self, source_bytes: int) -> None:
        """Source bytes of the shards in work are pressed."""
        if self._stage != "shards":
            return
        self._shard_bytes += source_bytes
        self._moments.append((self._shard_time(self._clock()), self._shard_bytes))
        if len(self._moments) > SAMPLES:
            self._moments = deque(list(self._moments)[::2])

    def shard_done(self, name: str) -> None:
        """A shard is durable; one that was pressed with its layer is not known here, and counts nothing."""
        found = self._in_work.pop(name, None)
        if found is not None:
            self._unit_seconds += self._clock() - found.begun
            self._unit_bytes += found.amount

    def layer(self, work: LayerWork) -> None:
        """The layer before is done; one with this work begins."""
        self._enter(work, self._clock())

    def layer_share(self, share: float) -> None:
        """Share of the layer's experts that are pressed, 0 to 1."""
        self._share = share

    def opaque(self) -> None:
        """Something begins that does not say how far it is."""
        self._enter("opaque", self._clock())

    def left(self) -> float | None:
        """Seconds to the end; None while a kind of work is ahead whose pace nobody knows."""
        now, total = self._clock(), 0.0
        if self._ahead.get("opaque", 0):
            return None
        bytes_left = self._ahead.get("shards", 0) - self._shard_bytes
        if bytes_left > 0:
            seconds = self._shards_left(bytes_left, now)
            if seconds is None:
                return None
            total += seconds
        for kind, layers in self._layers.items():
            seconds = self._layers_left(kind, layers, now)
            if seconds is None:
                return None
            total += seconds
        return total

    def rate(self) -> float | None:
        """Source bytes a second of the shards, lately; None before any."""
        if len(self._moments) < 2:
            return None
        return self._late_rate()

    def _shards_left(self, bytes_left: float, now: float) -> float | None:
        if not self._in_work and not self._moments:
            return bytes_left / UNSEEN_RATE
        if self._most_at_once > 1:
            if not self._unit_bytes:
                return None
            each = self._unit_seconds / self._unit_bytes  # seconds a byte of one worker
            credit = sum(min(each * w.amount, now - w.begun) for w in self._in_work.values())
            return max(0.0, bytes_left * each - credit) / self._most_at_once
        rate = self.rate()
        return None if not rate else bytes_left / rate

    def _late_rate(self) -> float:
        """Of the younger half of the stage."""
        last_time, last_bytes = self._moments[-1]
        first_time = self._moments[0][0]
        half = (first_time + last_time) / 2
        since = max((m for m in self._moments if m[0] <= half), default=self._moments[0])
        return (last_bytes - since[1]) / max(1e-9, last_time - since[0])

    def _layers_left(self, kind: LayerWork, layers: _Layers, now: float) -> float | None:
        left = layers.ahead - layers.done
        if left <= 0:
            return 0.0
        age = now - self._since if self._stage == kind else 0.0
        if layers.done:
            mean = layers.seconds / layers.done
        elif self._stage == kind and self._share > 0.05:
            mean = age / self._share
        elif kind == "press" and self._guess is not None:
            mean = self._guess
        elif kind == "follow":
            return self._unseen_following(left)
        else:
            return None
        return max(0.0, left * mean - min(age, mean))

    def _unseen_following(self, left: float) -> float:
        """Following costs no more than pressing; before any was seen it is taken for nothing: these layers come first."""
        press = self._layers["press"]
        return left * press.seconds / press.done if press.done else 0.0

    def _enter(self, stage: Kind, now: float) -> None:
        if self._stage in self._layers:
            layers = self._layers[self._stage]  # type: ignore[index]
            layers.seconds += now - self._since
            layers.done += 1
        elif self._stage == "shards":
            self._shard_seconds = self._shard_time(now)
        self._stage, self._since, self._share = stage, now, 0.0

    def _shard_time(self, now: float) -> float:
        return self._shard_seconds + (now - self._since if self._stage == "shards" else 0.0)
