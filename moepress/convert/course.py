"""The work that is ahead of a run, by kind: what an honest estimate of its end is made of.

    shards    source bytes of shards that need no calibration         rounded and copied, GB/s
    follow    layers that the calibrated model only runs through      dense ones; ones that an earlier run finished
    press     layers whose experts are quantized on what they see     minutes each
    measure   layers that a rounded model's KV scales are measured in
    opaque    another program's work (llm-compressor's oneshot), which tells nobody how far it is

A byte of one kind costs a hundred times what a byte of another does, so a share of all bytes says nothing about time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from moepress.convert.layout import ShardPlan
from moepress.convert.plan import ConversionPlan

LayerWork = Literal["follow", "press", "measure"]
Kind = Literal["shards", "follow", "press", "measure", "opaque"]


@dataclass(frozen=True)
class Course:
    """What a run finds finished, and what it has before it.

    Attributes:
        finished: receipts of shards that an earlier run finished.
        bytes_finished: source bytes in them.
        ahead: kind of work -> its amount: source bytes for ``shards``, a number of layers or of programs otherwise.
    """

    finished: Sequence[Mapping[str, Any]]
    bytes_finished: int
    ahead: Mapping[Kind, float]


def course_of(
    plan: ConversionPlan, finished: Mapping[str, Mapping[str, Any]], unmeasured: Sequence[int] | set[int] = ()
) -> Course:
    """The course of a run of this plan.

    Args:
        finished: receipts by shard name.
        unmeasured: layers whose KV scales are still to be measured.
    """
    open_shards = [shard for shard in plan.shards if shard.name not in finished]
    ahead: dict[Kind, float] = {
        "shards": sum(
            shard_source_bytes(plan, shard)
            for shard in open_shards
            if shard.layer is None or not plan.recipe.calibrated
        )
    }
    to_press = {s.layer for s in open_shards if s.layer is not None} if plan.recipe.calibrated else set()
    if plan.recipe.engine == "llmcompressor" and to_press:
        ahead["opaque"] = 1
    elif to_press or unmeasured:
        layers = sorted({i for d in plan.decisions.values() if (i := d.identity.layer) is not None})
        last = max({*to_press, *unmeasured})
        met = [layer for layer in layers if layer <= last]
        if to_press:
            ahead["press"] = len(to_press)
            ahead["follow"] = len(met) - len(to_press)
        else:
            ahead["measure"] = len(met)
    done = [shard for shard in plan.shards if shard.name in finished]
    return Course(
        [finished[shard.name] for shard in done], sum(shard_source_bytes(plan, shard) for shard in done), ahead
    )


def shard_source_bytes(plan: ConversionPlan, shard: ShardPlan) -> int:
    """Source bytes that go into a shard."""
    return sum(plan.decisions[weight.name].stored.nbytes for weight in shard.weights)
