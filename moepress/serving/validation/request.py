"""What to validate, and how: everything a run is told before it begins, and whom it tells what happens."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from moepress.recipe import Gates
from moepress.serving.launch import ServeOptions
from moepress.serving.validation.sides import Host

QUESTIONS = ("loads", "memory", "speed", "sanity")


class Watcher:
    """Told what happens; this one is silent."""

    def tell(self, line: str) -> None:
        """One line about what begins now."""

    def layer(self, done: int, total: int) -> None:
        """Layers of the reference."""


@dataclass(frozen=True)
class Request:
    """What to validate, and how.

    Attributes:
        out, baseline: checkpoint folders.
        gates, recipe, planned_parallel: the bounds, whose they are, and for how many GPUs.
        host: where SGLang is; None when both sides are URLs and no speed is asked.
        version: of SGLang, for the runtime contract.
        url, baseline_url: servers that are up already.
        work: folder for logs.
        options: how both are launched.
        fp8_kv: the KV cache is to be FP8: the contract's flags for it.
        together: both servers at once.
        asked: of `QUESTIONS`.
        concurrencies, rounds: of the speed measurement; the rest of its workload fits the machine and the model.
        tokens: greedy tokens of each prompt.
        prompts: file; None = shipped.
        kv_integrity: mode of the page-integrity plug-in to try as well; None = it is not asked about.
    """

    out: Path
    baseline: Path | None
    gates: Gates
    recipe: str | None
    planned_parallel: int
    host: Host | None
    version: str
    work: Path
    options: ServeOptions = field(default_factory=ServeOptions)
    fp8_kv: bool = False
    url: str | None = None
    baseline_url: str | None = None
    together: bool = False
    asked: tuple[str, ...] = QUESTIONS
    concurrencies: tuple[int, ...] = (1, 8, 32, 64)
    rounds: int = 2
    tokens: int = 16
    prompts: Path | None = None
    timeout_s: float = 3600.0
    kv_integrity: str | None = None
