"""What somebody who looks at a conversion is told, by whoever does the work; and a watcher for when nobody looks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from moepress.convert.course import Course, LayerWork
    from moepress.convert.layout import ShardPlan
    from moepress.convert.plan import ConversionPlan


class Watcher(Protocol):
    """Told how far a conversion is. All calls come from the thread that runs the conversion.

    begin      once: what is pressed, what an earlier run finished, how much of which work is ahead
    shard      work on an output shard begins; with workers several are in work at once
    layer      the model runs on to this layer, and what is done there; the one before is done
    step       something else begins, in words
    advance    so many source bytes are pressed
    unit_done  a shard is durable; its receipt
    """

    def begin(self, plan: ConversionPlan, course: Course) -> None: ...
    def shard(self, shard: ShardPlan) -> None: ...
    def layer(self, index: int, work: LayerWork) -> None: ...
    def step(self, text: str) -> None: ...
    def advance(self, source_bytes: int) -> None: ...
    def unit_done(self, receipt: dict[str, Any]) -> None: ...


class Silent:
    """Watches nothing."""

    def begin(self, plan: ConversionPlan, course: Course) -> None: ...
    def shard(self, shard: ShardPlan) -> None: ...
    def layer(self, index: int, work: LayerWork) -> None: ...
    def step(self, text: str) -> None: ...
    def advance(self, source_bytes: int) -> None: ...
    def unit_done(self, receipt: dict[str, Any]) -> None: ...
