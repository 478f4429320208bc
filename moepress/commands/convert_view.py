"""A conversion while it runs: three live lines on a terminal, one plain line now and then anywhere else (a log, a batch job).

    pressing layer 12 of 61 · expert 128 of 384 · 31 of 157 shards
    ━━━━━━━━━━━━━━━━━━╸━━━━━━━━━━━━━━━━━━━━━━━  34 %   1.42 GB/s   12 min 05 s gone, 23 min 40 s left, until about 14:32
    worst error so far 0.0812: layer 11, expert 17, down_proj

The bar counts source bytes; the time left comes from each kind of work's own pace (`convert.forecast.pace`), because a
calibrated layer's bytes take a hundred times as long as copied ones. Until a kind that is ahead was seen, nothing is claimed.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from moepress.commands.console import duration, stderr, throughput, warnings
from moepress.commands.stopping import stop_if_asked
from moepress.commands.worst import short_name

if TYPE_CHECKING:
    from moepress.convert.course import Course, LayerWork
    from moepress.convert.forecast.pace import Pace
    from moepress.convert.layout import ShardPlan
    from moepress.convert.plan import ConversionPlan

LOG_EVERY = (10.0, 60.0)
"""Seconds between lines of a log: in the first two minutes, and after them."""

RATE_WINDOW = 30.0
"""Seconds that the rate looks back."""

WORDS = {"press": "pressing", "follow": "running through", "measure": "measuring KV scales of"}


class ConvertView:
    """Watches a conversion (`convert.watcher.Watcher`) and shows it on stderr; a context manager.

    Attributes:
        finished: shards that are durable, those of earlier runs too; None before the conversion began.
        shards: shards of the whole conversion.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._live: Live | None = None
        self._ticker: threading.Thread | None = None
        self._over = threading.Event()
        self._pace: Pace | None = None
        self._plan: ConversionPlan | None = None
        self._what = "reading headers"
        self._layer: int | None = None
        self._in_work: dict[str, ShardPlan] = {}
        self._experts: dict[int, _Experts] = {}
        self._worst: tuple[float, str] | None = None
        self._done = self._total = 0
        self._lately: deque[tuple[float, int]] = deque()
        self._started = time.monotonic()
        self.finished: int | None = None
        self.shards = 0

    def __enter__(self) -> ConvertView:
        if stderr.is_terminal:
            self._live = Live(console=stderr, get_renderable=self._render, refresh_per_second=4, transient=True)
            self._live.start()
        else:
            self._ticker = threading.Thread(target=self._log, daemon=True, name="progress")
            self._ticker.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        if self._live is not None:
            self._live.stop()
        if self._ticker is not None:
            self._ticker.join()

    # what the conversion tells

    def begin(self, plan: ConversionPlan, course: Course) -> None:
        from moepress.convert.forecast.pace import Pace

        warnings(plan.warnings)
        guess = _tell_calibration_cost(plan)
        press_layers = course.ahead.get("press", 0)
        with self._lock:
            self._plan, self._total, self._done = plan, plan.source_bytes, course.bytes_finished
            self._pace = Pace(course.ahead, guess=guess / press_layers if guess and press_layers else None)
            self._experts = _experts_by_layer(plan)
            self.finished, self.shards = len(course.finished), len(plan.shards)
            for receipt in course.finished:
                self._note_errors(receipt)
            done = {str(receipt["unit"]) for receipt in course.finished}
            for shard in plan.shards:
                if shard.name in done and shard.layer in self._experts:
                    self._experts[shard.layer].done += _quantized_bytes(plan, shard)
            self._started = time.monotonic()
            self._lately.append((self._started, self._done))

    def shard(self, shard: ShardPlan) -> None:
        stop_if_asked()
        with self._lock:
            self._in_work[shard.name] = shard
            self._layer, self._what = shard.layer, f"writing {shard.label}"
            if self._pace is not None and self._plan is not None:
                from moepress.convert.course import shard_source_bytes

                self._pace.shard(shard.name, shard_source_bytes(self._plan, shard))

    def layer(self, index: int, work: LayerWork) -> None:
        stop_if_asked()
        with self._lock:
            self._layer, self._what = index, WORDS[work]
            if self._pace is not None:
                self._pace.layer(work)

    def step(self, text: str) -> None:
        with self._lock:
            self._layer, self._what = None, text
            if self._pace is not None:
                self._pace.opaque()

    def advance(self, source_bytes: int) -> None:
        stop_if_asked()
        with self._lock:
            now = time.monotonic()
            self._done += source_bytes
            self._lately.append((now, self._done))
            while len(self._lately) > 2 and self._lately[0][0] < now - RATE_WINDOW:
                self._lately.popleft()
            experts = self._experts.get(-1 if self._layer is None else self._layer)
            if experts is not None and len(self._in_work) <= 1:
                experts.done += source_bytes
            if self._pace is not None:
                self._pace.advance(source_bytes)
                if experts is not None:
                    self._pace.layer_share(experts.share)

    def unit_done(self, receipt: dict[str, Any]) -> None:
        with self._lock:
            self.finished = (self.finished or 0) + 1
            self._in_work.pop(receipt["unit"], None)
            self._note_errors(receipt)
            if self._pace is not None:
                self._pace.shard_done(receipt["unit"])

    # what people see

    def line(self) -> str:
        """Everything in one line, for a log."""
        with self._lock:
            if self._plan is None:
                return f"{time.strftime('%H:%M:%S')} {self._what}"
            parts = [f"{self._done / max(1, self._total):4.0%}", self._now(), self._rate(), _left(self._seconds_left())]
            if self._worst is not None:
                parts.append(f"worst error {self._worst[0]:.4f} ({short_name(self._worst[1])})")
        return f"{time.strftime('%H:%M:%S')} {', '.join(part for part in parts if part)}"

    def _render(self) -> RenderableType:
        with self._lock:
            if self._plan is None:
                return Text(f"{self._what} …")
            gone, left = duration(time.monotonic() - self._started), self._seconds_left()
            share = self._done / max(1, self._total)
            bar = Table.grid(padding=(0, 2))
            bar.add_row(
                ProgressBar(total=1.0, completed=share, width=min(40, max(10, stderr.width // 3))),
                f"{share:.0%}",
                self._rate(),
                f"{gone} gone, {_left(left)}{_until(left)}",
            )
            lines: list[RenderableType] = [Text(self._now(), no_wrap=True, overflow="ellipsis"), bar]
            if self._worst is not None:
                worst = f"worst error so far {self._worst[0]:.4f}: {short_name(self._worst[1])}"
                lines.append(Text(worst, style="dim", no_wrap=True, overflow="ellipsis"))
        return Group(*lines)

    def _now(self) -> str:
        shards = f"{self.finished or 0} of {self.shards} shards"
        if len(self._in_work) > 1:
            layers = sorted({shard.layer for shard in self._in_work.values() if shard.layer is not None})
            where = f" of layers {layers[0]} to {layers[-1]}" if len(layers) > 1 else ""
            return f"{len(self._in_work)} shards in work{where}, {shards} done"
        if self._layer is None or self._plan is None:
            return f"{self._what}, {shards} done"
        what = self._what if self._what in WORDS.values() else "pressing"
        text = f"{what} layer {self._layer} of {max(self._experts, default=self._layer)}"
        experts = self._experts.get(self._layer)
        if experts is not None and what == "pressing":
            text += f", {experts.finished} of {experts.count} experts"
        return f"{text}, {shards} done"

    def _rate(self) -> str:
        (first, before), (_, done) = self._lately[0], self._lately[-1]
        seconds = time.monotonic() - first
        return throughput((done - before) / seconds) if done > before and seconds > 0.2 else ""

    def _seconds_left(self) -> float | None:
        return self._pace.left() if self._pace is not None else None

    def _log(self) -> None:
        early, late = LOG_EVERY
        while not self._over.wait(early if time.monotonic() - self._started < 120 else late):
            print(self.line(), file=sys.stderr, flush=True)

    def _note_errors(self, receipt: Mapping[str, Any]) -> None:
        for name, record in receipt["weights"].items():
            error = record.get("relative_error")
            if error is not None and (self._worst is None or error > self._worst[0]):
                self._worst = (error, name)


def _left(seconds: float | None) -> str:
    return "time left not known yet" if seconds is None else f"{duration(seconds)} left"


def _until(seconds: float | None) -> str:
    if seconds is None or seconds < 600:
        return ""
    day = "%H:%M" if seconds < 43200 else "%a %H:%M"
    return f", until about {time.strftime(day, time.localtime(time.time() + seconds))}"


class _Experts:
    """How many of a layer's experts are pressed, by bytes: they are all of one size."""

    def __init__(self) -> None:
        self.names: set[int] = set()
        self.total = self.done = 0

    @property
    def count(self) -> int:
        return len(self.names)

    @property
    def share(self) -> float:
        return min(1.0, self.done / max(1, self.total))

    @property
    def finished(self) -> int:
        return int(self.share * self.count + 1e-9)


def _experts_by_layer(plan: ConversionPlan) -> dict[int, _Experts]:
    found: dict[int, _Experts] = {}
    for decision in plan.decisions.values():
        layer, expert = decision.identity.layer, decision.identity.expert
        if decision.action == "quantize" and layer is not None and expert is not None:
            of_layer = found.setdefault(layer, _Experts())
            of_layer.names.add(expert)
            of_layer.total += decision.stored.nbytes
    return found


def _quantized_bytes(plan: ConversionPlan, shard: ShardPlan) -> int:
    return sum(plan.decisions[w.name].stored.nbytes for w in shard.weights if w.action == "quantize")


def _tell_calibration_cost(plan: ConversionPlan) -> float | None:
    """Says what calibration will take; returns its seconds, where they were measured."""
    if not (plan.recipe.calibrated and plan.recipe.engine == "moepress" and Path(plan.source).is_dir()):
        return None
    from moepress.calibration.memory import available_memory
    from moepress.convert.forecast.calibration_cost import calibration_cost, timed
    from moepress.formats.checkpoint import open_checkpoint

    checkpoint = open_checkpoint(plan.source)
    cost = timed(calibration_cost(checkpoint.config, plan.recipe, available=available_memory()), checkpoint, plan)
    for line in cost.lines():
        stderr.print(line, soft_wrap=True)
    return cost.seconds
