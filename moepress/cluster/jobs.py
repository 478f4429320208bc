"""What a batch job is asked to do: the machines, the workers on them, and the `convert` command, the same everywhere."""

from __future__ import annotations

import shlex
from dataclasses import dataclass

from moepress.errors import MoepressError


@dataclass(frozen=True)
class Job:
    """A conversion on several machines.

    Attributes:
        source, out, recipe, overrides: as `moepress convert` takes them; paths as the machines see them.
        nodes: machines.
        cpus: processors used on each.
        gpus: GPUs used on each; 0 computes on processors.
        gather: folder on each machine's own disk, for an output that only the first machine sees.
        name: of the job.
    """

    source: str
    out: str
    recipe: str
    overrides: tuple[str, ...] = ()
    nodes: int = 1
    cpus: int = 32
    gpus: int = 0
    gather: str | None = None
    name: str = "moepress"

    def __post_init__(self) -> None:
        for what, value in (("--nodes", self.nodes), ("--cpus", self.cpus)):
            if value < 1:
                raise MoepressError(f"{value} is not a number of {what[2:]}", where=what)
        if self.gpus > self.cpus:
            raise MoepressError(
                f"{self.gpus} GPUs with {self.cpus} processors: each worker needs one of its own",
                where="--cpus",
                hint="ask for at least as many processors as GPUs",
            )

    @property
    def workers_per_node(self) -> int:
        """One worker a GPU; on processors one for every eight, whose threads share one layer."""
        return self.gpus or max(1, self.cpus // 8)

    @property
    def threads(self) -> int:
        """Processors of each worker; one per machine is left to the run itself where there are any to spare."""
        return max(1, (self.cpus - 1) // self.workers_per_node if self.cpus > self.workers_per_node else 1)

    def command(self, address: str) -> str:
        """The shell words of the conversion.

        Args:
            address: of the Ray head, as the shell will see it; not quoted.
        """
        words = ["moepress", "convert", self.source, self.out, "--recipe", self.recipe]
        for override in self.overrides:
            words += ["--set", override]
        words += ["--workers", str(self.nodes * self.workers_per_node), "--worker-threads", str(self.threads)]
        if self.gpus:
            words += ["--worker-gpus", "1"]
        if self.gather is not None:
            words += ["--gather", self.gather]
        words += ["--wait-for-workers", "300"]
        return f"{shlex.join(words)} --ray-address {address}"
