"""The two models of `moepress evaluate`, each behind a URL that was given, or a server that is booted when it is needed.

`evaluate` knows URLs only; here serving meets it. Booted servers take turns, the source first.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from moepress.commands.console import note
from moepress.errors import MoepressError, PlanRefused

if TYPE_CHECKING:
    from moepress.evaluate.answers import Answers, Contestant, Watcher
    from moepress.serving.validation.sides import Host, Stage


@dataclass(frozen=True)
class Serving:
    """How servers are found or booted: the command's options."""

    sglang_python: str | None = None
    container: str | None = None
    cpu_lab: bool = False
    tensor_parallel: int = 1
    kv_dtype: str = "auto"
    flags: str = ""
    boot_timeout: float = 3600.0
    context_length: int | None = None
    api_key_variable: str | None = None
    concurrency: int = 8
    request_timeout: float = 900.0
    trust_remote_code: bool = False


@dataclass(frozen=True)
class Model:
    """One side as the user named it. checkpoint: folder, or any name behind a URL."""

    role: str
    checkpoint: str
    url: str | None
    served_name: str | None


@contextmanager
def contestants(
    source: Model, candidate: Model, serving: Serving, answers: Answers, *, work: Path, watcher: Watcher
) -> Iterator[tuple[Contestant, Contestant, Stage | None]]:
    """Both models, nothing running yet; whatever was booted has ended when the block ends.

    Raises:
        MoepressError: no way to reach one of them.
    """
    booted = [model for model in (source, candidate) if model.url is None]
    for model in booted:
        if not Path(model.checkpoint).is_dir():
            raise PlanRefused(
                f"{model.checkpoint} is no folder, so it cannot be booted here",
                where=model.role,
                hint="moepress pull ID DIR first, or --baseline-url of a server that has it",
            )
    host = _host(serving) if booted else None
    with _stage(booted, host, serving, work) as stage:
        pair = [_contestant(model, serving, answers, watcher, stage, host) for model in (source, candidate)]
        yield pair[0], pair[1], stage


@contextmanager
def _stage(booted: list[Model], host: Host | None, serving: Serving, work: Path) -> Iterator[Stage | None]:
    if host is None:
        yield None
        return
    from moepress.formats.checkpoint import open_checkpoint
    from moepress.formats.families import identify_family
    from moepress.formats.runtime_contract import contract_for
    from moepress.serving.launch import CPU_LAB_VERSION, ServeOptions
    from moepress.serving.tool_parsers import tool_call_flags
    from moepress.serving.validation.sides import Side, Stage

    version = host.environment.version if host.environment is not None else CPU_LAB_VERSION
    sides = []
    for model in booted:
        config = open_checkpoint(Path(model.checkpoint)).config
        own = tuple(shlex.split(serving.flags))
        parser = () if "--tool-call-parser" in own else tool_call_flags(config)
        options = ServeOptions(
            tensor_parallel=1 if serving.cpu_lab else serving.tensor_parallel,
            kv_cache_dtype={"bf16": "bfloat16", "fp8": "fp8_e4m3"}.get(serving.kv_dtype, "auto"),
            context_length=serving.context_length,
            trust_remote_code=serving.trust_remote_code,
            extra=(*parser, *own),
        )
        contract = contract_for("sglang", version, identify_family(config).key)
        flags = contract.launch_arguments(fp8_kv=serving.kv_dtype == "fp8")
        sides.append(Side(_side_name(model), Path(model.checkpoint), options, flags))
    work.mkdir(parents=True, exist_ok=True)
    with Stage(sides, host, work=work.resolve(), together=False, timeout_s=serving.boot_timeout, tell=note) as stage:
        yield stage


def _contestant(
    model: Model, serving: Serving, answers: Answers, watcher: Watcher, stage: Stage | None, host: Host | None
) -> Contestant:
    from moepress.evaluate.answers import Contestant
    from moepress.evaluate.endpoint import Endpoint, connect
    from moepress.evaluate.identity import answers_identity

    api_key = os.environ.get(serving.api_key_variable) if serving.api_key_variable else None
    if serving.api_key_variable and not api_key:
        raise MoepressError(f"the variable {serving.api_key_variable} is not set", where="--api-key-env")
    if model.url is not None:
        endpoint = connect(model.url, model=model.served_name, api_key=api_key, timeout_s=serving.request_timeout)
        facts = [f"{name}={value}" for name, value in endpoint.facts if name != "model_path"]
        return Contestant(
            model.role,
            model.checkpoint,
            answers_identity(model.checkpoint, endpoint.software, endpoint.model, *facts),
            endpoint.kind,
            endpoint.software,
            lambda: endpoint,
            answers,
            serving.concurrency,
            watcher,
        )
    if stage is None or host is None:
        raise ValueError("a model without a URL needs a stage")
    side = _side_name(model)

    def boot() -> Endpoint:
        return connect(stage.client(side).url, timeout_s=serving.request_timeout)

    version = "in a container" if host.environment is None else host.environment.version
    software = f"SGLang {version}" + (" on the CPU lab" if serving.cpu_lab else "")
    how = (software, serving.container or "", str(serving.tensor_parallel), serving.kv_dtype, serving.flags)
    return Contestant(
        model.role,
        model.checkpoint,
        answers_identity(model.checkpoint, *how),
        "sglang",
        software,
        boot,
        answers,
        serving.concurrency,
        watcher,
    )


def _side_name(model: Model) -> Literal["candidate", "baseline"]:
    return "candidate" if model.role == "candidate" else "baseline"


def _host(serving: Serving) -> Host:
    """Where SGLang is, or one clear error that also names the way without."""
    from moepress.errors import ServingError
    from moepress.serving.container import container_words
    from moepress.serving.sglang import find_environment
    from moepress.serving.validation.machine import this_machine
    from moepress.serving.validation.sides import Host

    if serving.container is not None:
        return Host(None, container_words(serving.container), serving.cpu_lab)
    try:
        environment = find_environment(serving.sglang_python)
    except ServingError as error:
        error.hint = f"{error.hint}; or give servers that are up: --url URL --baseline-url URL"
        raise
    if not serving.cpu_lab and not this_machine().gpus:
        raise PlanRefused(
            "no GPU here (nvidia-smi finds none)",
            hint="on a machine without one: --cpu-lab; or servers elsewhere: --url URL --baseline-url URL",
        )
    return Host(environment, (), serving.cpu_lab)
