"""Measurements in, the result out: each question's gates, and where and with what it was measured."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moepress.errors import MoepressError
from moepress.serving.kv_integrity.trial import GATE, Trial
from moepress.serving.kv_integrity.trial import judge as judge_trial
from moepress.serving.validation.gates import Gate, NotJudged, judge_loads, judge_memory, judge_sanity, judge_speed
from moepress.serving.validation.headroom import Headroom, SideMemory
from moepress.serving.validation.loads import Loads
from moepress.serving.validation.machine import Machine, packages
from moepress.serving.validation.request import Request
from moepress.serving.validation.result import Validation
from moepress.serving.validation.sanity import Sanity
from moepress.serving.validation.sides import Name, Side
from moepress.serving.validation.speed import Speed


@dataclass(frozen=True)
class Measured:
    """What a run found, and where. None: it was not measured.

    Attributes:
        begun: wall clock; seconds: since then.
        smoke: there is no GPU, so speed and memory mean nothing.
        side, baseline_side: the servers, as they were launched and as they describe themselves.
        memory: of each side that came up.
        remarks: what could not be done, in words.
        stopped: why the run ended before the servers were asked; empty when it did not.
    """

    begun: time.struct_time
    seconds: float
    machine: Machine
    smoke: bool
    side: Side
    baseline_side: Side | None
    loads: Loads | None
    memory: Mapping[Name, SideMemory]
    speed: Speed | None
    sanity: Sanity | None
    kv_integrity: Trial | None
    remarks: Sequence[str]
    stopped: str


def conclude(request: Request, measured: Measured) -> Validation:
    """The recipe's bounds against what was measured, and everything that the result says besides."""
    headroom = None
    if "candidate" in measured.memory:
        ranks = int(measured.side.info.get("tp_size") or 1)
        mine, theirs = measured.memory["candidate"], measured.memory.get("baseline")
        headroom = Headroom(ranks, request.planned_parallel, mine, theirs)
    speed, smoke = measured.speed, measured.smoke
    return Validation(
        output=str(request.out),
        baseline=None if request.baseline is None else str(request.baseline),
        recipe=request.recipe,
        asked=request.asked,
        started=time.strftime("%Y-%m-%dT%H:%M:%SZ", measured.begun),
        seconds=measured.seconds,
        smoke=smoke,
        machine=measured.machine,
        environment=_environment(request, measured.side),
        candidate=measured.side,
        baseline_side=measured.baseline_side,
        loads=measured.loads if "loads" in request.asked else None,
        memory=headroom if "memory" in request.asked else None,
        speed=speed,
        sanity=measured.sanity,
        kv_integrity=measured.kv_integrity,
        gates=tuple(_gates(request, measured, headroom)),
        remarks=(*measured.remarks, *(speed.remarks() if speed and not smoke else ())),
    )


def _gates(request: Request, measured: Measured, headroom: Headroom | None) -> list[Gate]:
    """Those of the questions that were asked."""
    bounds, smoke = request.gates, measured.smoke
    lost = measured.stopped or "; ".join(measured.remarks) or "was not measured"
    gates: list[Gate] = []
    if "loads" in request.asked:
        gates += judge_loads(bounds, measured.loads, lost)
    if "memory" in request.asked:
        gates += judge_memory(bounds, headroom, measured.stopped, smoke=smoke)
    if "speed" in request.asked:
        gates += judge_speed(bounds, measured.speed, lost, smoke=smoke)
    if "sanity" in request.asked:
        gates += judge_sanity(bounds, measured.sanity, lost)
    if request.kv_integrity is not None:
        trial = measured.kv_integrity
        gates.append(judge_trial(trial, smoke=smoke) if trial else Gate(GATE, NotJudged(lost)))
    return gates


def _environment(request: Request, side: Side) -> dict[str, Any]:
    host = request.host
    python = host.environment.python if host is not None and host.environment is not None else None
    if request.url is not None:
        how = "url"
    else:
        how = "container" if host is not None and host.container else "python"
    found: dict[str, str] = {}
    if python is not None:
        try:
            found = packages(python)
        except MoepressError as error:
            found = {"unknown": error.what}
    return {
        "how": how,
        "python": None if python is None else str(python),
        "sglang": side.info.get("version") or request.version,
        "cpu_lab": bool(host and host.cpu_lab),
        "packages": found,
    }
