"""The time left that a running conversion shows, on a clock of the test's own: honest from a tenth of the run on."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from moepress.convert.course import Course, LayerWork
from moepress.convert.forecast.pace import Pace
from moepress.convert.layout import ShardPlan
from moepress.convert.run import convert
from moepress.convert.watcher import Silent
from tests.pressing import StopAfter, recipe_for
from tests.tiny_checkpoints import TinyCheckpoint

ALLOWED = 0.2


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


Run = Callable[[Pace, Clock, random.Random], Iterator[None]]
GB = 10**9


def rounding(pace: Pace, clock: Clock, luck: random.Random) -> Iterator[None]:
    """157 shards in one process, piece by piece; the first tenth comes from a warm page cache, twice as fast."""
    for number in range(157):
        pace.shard(f"shard {number}", 4 * GB)
        for _ in range(256):
            clock.now += 0.012 * luck.uniform(0.7, 1.3) * (0.5 if number < 8 else 1)
            pace.advance(4 * GB // 256)
            yield
        pace.shard_done(f"shard {number}")


def calibrated(pace: Pace, clock: Clock, luck: random.Random) -> Iterator[None]:
    """Three dense layers, 57 with experts and an MTP layer; kept tensors last, because they wait for KV scales."""
    for layer in range(61):
        pace.layer("follow" if layer < 3 else "press")
        if layer < 3:
            clock.now += 40 * luck.uniform(0.8, 1.2)
            yield
            continue
        for _ in range(5):  # attention of both runs
            clock.now += 10 * luck.uniform(0.8, 1.2)
            yield
        for block in range(16):
            clock.now += 7 * luck.uniform(0.8, 1.2)
            pace.layer_share((block + 1) / 16)
            yield
        clock.now += 40 * luck.uniform(0.8, 1.2)  # the source's experts
        yield
    for number in range(5):
        pace.shard(f"kept {number}", 5 * GB)
        for _ in range(50):
            clock.now += 0.5 * luck.uniform(0.7, 1.3)
            pace.advance(5 * GB // 50)
            yield
        pace.shard_done(f"kept {number}")


def eight_workers(pace: Pace, clock: Clock, luck: random.Random) -> Iterator[None]:
    """Whole shards, eight at a time; all workers begin together, so at first all of them end together."""
    waiting = [f"shard {number}" for number in range(157)]
    busy: dict[str, float] = {}
    while waiting or busy:
        while waiting and len(busy) < 8:
            name = waiting.pop()
            pace.shard(name, 4 * GB)
            busy[name] = clock.now + 20 * luck.uniform(0.85, 1.15)
        name = min(busy, key=lambda n: busy[n])
        while clock.now < busy[name]:
            clock.now = min(busy[name], clock.now + 1)
            yield
        del busy[name]
        pace.advance(4 * GB)
        pace.shard_done(name)
        yield


@pytest.mark.parametrize(
    ("run", "ahead"),
    [
        (rounding, {"shards": 157 * 4 * GB}),
        (calibrated, {"shards": 25 * GB, "follow": 3, "press": 58}),
        (eight_workers, {"shards": 157 * 4 * GB}),
    ],
    ids=["rounding", "calibrated", "eight workers"],
)
@pytest.mark.parametrize("seed", range(5))
def test_from_a_tenth_on_the_end_is_foretold_within_a_fifth(run: Run, ahead: dict[Any, float], seed: int) -> None:
    clock = Clock()
    pace = Pace(ahead, clock=clock)
    told = []
    for _ in run(pace, clock, random.Random(seed)):
        told.append((clock.now, pace.left()))
    end = clock.now
    judged = [(now, left) for now, left in told if now >= end / 10]
    assert len(judged) > 100
    for now, left in judged:
        assert left is not None, f"nothing was said at {now / end:.0%}"
        assert abs(now + left - end) <= ALLOWED * end, f"at {now / end:.0%}: {now + left:.0f} s, and it was {end:.0f} s"


def test_nothing_is_claimed_about_layers_that_nobody_has_met() -> None:
    clock = Clock()
    pace = Pace({"shards": GB, "press": 10}, clock=clock)
    pace.shard("kept", GB)
    clock.now = 1.0
    pace.advance(GB // 2)
    assert pace.left() is None
    assert Pace({"press": 10}, clock=clock, guess=60.0).left() == pytest.approx(600.0)


def test_another_programs_work_has_no_end_that_we_know() -> None:
    pace = Pace({"opaque": 1}, clock=Clock())
    pace.opaque()
    assert pace.left() is None


class Counts(Silent):
    """A watcher that adds up what it is told."""

    def __init__(self) -> None:
        self.course: Course | None = None
        self.layers: dict[LayerWork, int] = {}
        self.began: list[str] = []
        self.units = self.bytes = 0

    def begin(self, plan: Any, course: Course) -> None:
        self.course = course

    def shard(self, shard: ShardPlan) -> None:
        self.began.append(shard.name)

    def layer(self, index: int, work: LayerWork) -> None:
        self.layers[work] = self.layers.get(work, 0) + 1

    def advance(self, source_bytes: int) -> None:
        self.bytes += source_bytes

    def unit_done(self, receipt: dict[str, Any]) -> None:
        self.units += 1


CALIBRATED = ("weights.algorithm=gptq", "calibration.samples=8", "calibration.length=32", "output.shard_size=1MB")


@pytest.mark.parametrize(
    "overrides",
    [("output.shard_size=1MB",), ("output.shard_size=1MB", "kv_cache.scales=folded"), CALIBRATED],
    ids=["rounding", "rounding with KV scales", "calibrated"],
)
@pytest.mark.slow
def test_a_course_holds_the_work_that_is_then_done(
    overrides: tuple[str, ...], tiny: Callable[[str], TinyCheckpoint], tmp_path: Path
) -> None:
    """Also of a run that takes up a stopped one: bytes, layers and shards announced are those met."""
    source, out, recipe = tiny("kimi").folder, tmp_path / "out", recipe_for("kimi", *overrides)
    stopped = StopAfter(2)
    with pytest.raises(KeyboardInterrupt):
        convert(source, out, recipe, threads=1, watcher=stopped)
    watcher = Counts()
    result = convert(source, out, recipe, threads=1, watcher=watcher)
    course = watcher.course
    assert course is not None
    assert len(course.finished) == 2 == result.resumed
    assert len(course.finished) + watcher.units == len(result.plan.shards)
    assert course.bytes_finished + watcher.bytes == result.plan.source_bytes
    for work in ("follow", "press", "measure"):
        assert course.ahead.get(work, 0) == watcher.layers.get(work, 0), work
