"""Is every tensor of ours in the server? From the headers before it boots, from the data flow after. See `load_proof`.

What the log says about tensors counts too: a name that a loader passed over, and KV scales that were replaced by 1.0
although the checkpoint has some.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moepress.errors import ServingError
from moepress.formats.checkpoint import Checkpoint
from moepress.serving.load_proof import (
    LoadProof,
    Problem,
    compare_checksums,
    compare_headers,
    prove_load,
    read_reports,
)
from moepress.serving.server_log import ServerLog
from moepress.serving.validation.sides import Boot, Side

_KV_SCALES = (".k_scale", ".v_scale", ".kv_scale")


@dataclass(frozen=True)
class Loads:
    """What is known about a checkpoint in a server.

    Attributes:
        tensors: of the checkpoint.
        before: problems that the headers show.
        after: what the load recorder saw; None when the server was not booted here.
        not_proven: why `after` is None.
        log: problems that the log shows.
        unchanged: problems between two boots of the same checkpoint; None when it was booted once.
    """

    tensors: int
    before: tuple[Problem, ...]
    after: LoadProof | None = None
    not_proven: str = ""
    log: tuple[Problem, ...] = ()
    unchanged: tuple[Problem, ...] | None = None

    @property
    def problems(self) -> tuple[Problem, ...]:
        """All of them, the earliest seen first."""
        after = self.after.problems if self.after else ()
        return (*self.before, *after, *self.log, *(self.unchanged or ()))

    def as_json(self) -> dict[str, Any]:
        after = self.after
        return {
            "before": {"tensors": self.tensors, "problems": [str(problem) for problem in self.before]},
            "after": None
            if after is None
            else {
                "tensors": after.tensors,
                "used": after.used,
                "parameters": after.parameters,
                "excused": dict(after.excused),
                "problems": [str(problem) for problem in after.problems],
                "log": [str(problem) for problem in self.log],
            },
            "not_proven": self.not_proven or None,
            "unchanged": None if self.unchanged is None else not self.unchanged,
        }


def before_boot(checkpoint: Checkpoint, inert: Iterable[str]) -> Loads:
    """The headers alone. `inert`: suffixes of tensors that the server is known to pass over."""
    return Loads(len(checkpoint.tensors), compare_headers(checkpoint, inert=inert), not_proven="nothing was booted")


def after_boot(found: Loads, checkpoint: Checkpoint, side: Side, inert: Iterable[str]) -> Loads:
    """With what the server did, from the side's first boot."""
    if not side.boots:
        return Loads(
            found.tensors, found.before, not_proven="the server was started by somebody else, without the load recorder"
        )
    boot = side.boots[0]
    try:
        reports = read_reports(boot.reports)
    except ServingError as error:
        return Loads(
            found.tensors, found.before, not_proven=str(error.what), log=_log_problems(checkpoint, boot.log, inert)
        )
    return Loads(
        found.tensors,
        found.before,
        prove_load(checkpoint, reports, inert=inert),
        log=_log_problems(checkpoint, boot.log, inert),
        unchanged=_between_boots(side.boots, reports),
    )


def _log_problems(checkpoint: Checkpoint, log: ServerLog, inert: Iterable[str]) -> tuple[Problem, ...]:
    found = []
    endings = tuple(inert)
    held = [name for name in log.unused_tensors if name in checkpoint.tensors and not name.endswith(endings)]
    if held:
        found.append(Problem("tensor that the server's log says it did not use", tuple(sorted(held))))
    scales = sorted(name for name in checkpoint.tensors if name.endswith(_KV_SCALES))
    if scales and log.kv_scale_warnings:
        found.append(
            Problem("KV scale that the server replaced by 1.0", tuple(scales), log.kv_scale_warnings[0][-200:])
        )
    return tuple(found)


def _between_boots(boots: Sequence[Boot], reports: Sequence[Mapping[str, Any]]) -> tuple[Problem, ...] | None:
    """Parameters that nothing was loaded into (group indexes without activation order) hold whatever was in memory."""
    empty = {name for report in reports for name, held in report["parameters"].items() if not held["filled"]}
    sums = [
        {
            rank: {name: value for name, value in held.items() if name not in empty}
            for rank, held in boot.checksums.items()
        }
        for boot in boots
        if boot.checksums is not None
    ]
    if len(sums) < 2:
        return None
    return tuple(problem for later in sums[1:] for problem in compare_checksums(sums[0], later))
