"""Baseline and candidate, each as a server that is up when it is asked for.

    together   both servers run at once: a CPU, or small models on many GPUs
    turns      one at a time: asking for the other side stops the first and boots the second. A 700 GB model fills the GPUs

A server that was started by somebody else (a URL) is always up and never stopped. Every boot keeps its log, and the
load recorder's reports; what a later boot of the same side holds can be compared with the first.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from moepress.errors import ServerDied, ServingError
from moepress.serving import sglang
from moepress.serving.client import SGLangClient
from moepress.serving.container import PYTHON, enclose
from moepress.serving.launch import CPU_LAB, Launch, ServeOptions, sglang_launch
from moepress.serving.load_proof import RECORDER, RECORDER_VARIABLE
from moepress.serving.server_log import ServerLog
from moepress.serving.sglang import Environment, SGLangServer
from moepress.serving.validation.figures import Figure

Name = Literal["candidate", "baseline"]

# What the resolved arguments say about speed and memory; the other 500 are defaults that nobody asks about.
_TELLING = (
    *("tp_size", "ep_size", "dp_size", "pp_size", "dtype", "quantization", "kv_cache_dtype", "page_size", "device"),
    *("attention_backend", "prefill_attention_backend", "decode_attention_backend", "moe_runner_backend"),
    *("fp8_gemm_runner_backend", "mem_fraction_static", "max_total_tokens", "max_running_requests", "context_length"),
    *("chunked_prefill_size", "disable_cuda_graph", "disable_radix_cache", "disable_shared_experts_fusion"),
    *("speculative_algorithm", "random_seed", "launch_command"),
)


@dataclass(frozen=True)
class Host:
    """Where SGLang runs.

    Attributes:
        environment: its Python; None in a container.
        container: the words that start one, from `container_words`; empty for a Python of this machine.
        cpu_lab: with the CPU lab's kernels.
    """

    environment: Environment | None
    container: tuple[str, ...] = ()
    cpu_lab: bool = False

    @property
    def python(self) -> str:
        """The interpreter to name on a command line."""
        return PYTHON if self.environment is None else str(self.environment.python)

    def place(self, launch: Launch, *, folders: Sequence[Path], work: Path) -> Launch:
        """The launch as it runs here. `folders`: what it reads and writes."""
        if not self.container:
            return launch
        return enclose(launch, self.container, folders=[*folders, work], work=work)


@dataclass(frozen=True)
class Boot:
    """One start of a side. `reports`: the load recorder's folder."""

    seconds: float
    log: ServerLog
    log_path: Path
    command: str
    reports: Path
    checksums: dict[str, dict[str, str]] | None = None


@dataclass
class Side:
    """One of the two.

    Attributes:
        name: ``candidate`` or ``baseline``.
        model: its folder.
        options, contract_flags: how it is launched.
        url: of a server that is already there; None = booted here.
        plugins, variables: folders with more SGLang plug-ins, and what they read from the environment.
        boots: so far.
        info: /server_info of the last boot.
    """

    name: Name
    model: Path
    options: ServeOptions
    contract_flags: tuple[str, ...] = ()
    url: str | None = None
    plugins: tuple[Path, ...] = ()
    variables: dict[str, str] = field(default_factory=dict)
    boots: list[Boot] = field(default_factory=list)
    info: dict[str, Any] = field(default_factory=dict)

    @property
    def log(self) -> ServerLog | None:
        """Of the first boot; None for a server that somebody else started."""
        return self.boots[0].log if self.boots else None

    @property
    def context(self) -> int | None:
        """Tokens that a request may have, prompt and answer together; None = the server does not say."""
        longest = self.info.get("max_req_input_len")
        return None if longest is None else int(longest)

    @property
    def most_at_once(self) -> int | None:
        """Requests that run at the same time at most; None = the server does not say."""
        states = self.info.get("internal_states") or [{}]
        most = states[0].get("effective_max_running_requests_per_dp")
        return None if most is None else int(most)

    def as_json(self) -> dict[str, Any]:
        log = self.log
        load = log.load_seconds if log else None
        return {
            "model": str(self.model),
            "url": self.url,
            "command": self.boots[0].command if self.boots else None,
            "version": self.info.get("version"),
            "boot_seconds": [round(boot.seconds, 1) for boot in self.boots],
            "load_seconds": None if load is None else Figure(load, "s").as_json(),
            "model_class": log.model_class if log else None,
            "quantization": log.quantization if log else None,
            "kv_dtype": log.kv_dtype if log else None,
            "logs": [str(boot.log_path) for boot in self.boots],
            "flags": {name: self.info[name] for name in _TELLING if self.info.get(name) is not None},
        }


class Stage:
    """The two sides, and which of them is up. A context manager: nothing of it runs afterwards.

    Args:
        sides: candidate, and baseline where there is one.
        host: where they are booted.
        work: folder for logs and reports.
        together: keep both up.
        timeout_s: seconds that a boot may take.
        tell: called with a line about what happens now.
    """

    def __init__(
        self,
        sides: Sequence[Side],
        host: Host | None,
        *,
        work: Path,
        together: bool,
        timeout_s: float,
        tell: Callable[[str], None],
    ) -> None:
        self.sides: dict[Name, Side] = {side.name: side for side in sides}
        self._host = host
        self._work = work
        self._together = together
        self._timeout_s = timeout_s
        self._tell = tell
        self._running: dict[Name, SGLangServer] = {}

    def client(self, name: Name) -> SGLangClient:
        """A client of this side, which is up when this returns.

        Raises:
            ServingError, ServerDied: it does not come up, or does not answer.
        """
        side = self.sides[name]
        if side.url is not None:
            client = SGLangClient(side.url)
            side.info = side.info or client.server_info()
            return client
        if name not in self._running:
            if not self._together:
                self.stop()
            self._running[name] = self._boot(side)
        return self._running[name].client

    def is_booted_here(self, name: Name) -> bool:
        """Started here, and not by somebody else."""
        return self.sides[name].url is None

    def stop(self) -> None:
        """Stop whatever runs."""
        for server in self._running.values():
            server.stop()
        self._running.clear()

    def _boot(self, side: Side) -> SGLangServer:
        host = self._host
        if host is None:
            raise ServingError(
                f"there is no SGLang here to boot the {side.name} with", hint="name one: --sglang-python PATH"
            )
        number = len(side.boots) + 1
        reports = self._work / f"{side.name}-{number}-loaded"
        shutil.rmtree(reports, ignore_errors=True)
        reports.mkdir(parents=True)
        log_path = self._work / f"{side.name}-{number}.log"
        self._tell(f"booting the {side.name}: {side.model} (log: {log_path})")
        server = sglang.start_anywhere(
            lambda port: self._launch(side, host, port, reports), log=log_path, timeout_s=self._timeout_s
        )
        try:
            side.info = server.client.server_info()
            boot = Boot(server.boot_seconds, server.read_log(), log_path, server.command, reports)
            # Only ours is compared with itself: hashing a source's FP8 dequantizes it.
            sums = server.client.checksums() if side.name == "candidate" else None
            side.boots.append(replace(boot, checksums=sums))
        except BaseException as error:
            died = _why_no_answer(error, [server])
            server.stop()
            if died is not None:
                raise died from error
            raise
        return server

    def _launch(self, side: Side, host: Host, port: int, reports: Path) -> Launch:
        launch = sglang_launch(
            host.python,
            side.model.resolve(),
            port=port,
            options=side.options,
            contract_flags=side.contract_flags,
            cpu_lab=host.cpu_lab,
            plugins=[RECORDER, *side.plugins],
        )
        launch = replace(launch, variables={**launch.variables, RECORDER_VARIABLE: str(reports), **side.variables})
        folders = [side.model.resolve(), RECORDER, *side.plugins, *([CPU_LAB] if host.cpu_lab else [])]
        return host.place(launch, folders=folders, work=self._work)

    def __enter__(self) -> Stage:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        """ "No answer" becomes the cause of death, where a server of ours has died of something."""
        died = _why_no_answer(value, self._running.values())
        self.stop()
        if died is not None:
            raise died from value


def _why_no_answer(error: BaseException | None, servers: Iterable[SGLangServer]) -> ServerDied | None:
    """The death of one of `servers`, where `error` says that a server did not answer."""
    if not isinstance(error, ServingError) or isinstance(error, ServerDied):
        return None
    return next((died for server in servers if (died := server.autopsy())), None)
