"""Which processes serve a checkpoint, and their exact commands: one server, or prefill and decode behind a router.

    one server           sglang.launch_server                      on N GPUs
    prefill and decode   sglang.launch_server --disaggregation-mode prefill    FP8 weights
                         sglang.launch_server --disaggregation-mode decode     INT4 experts
                         sglang_router.launch_router --pd-disaggregation       one address for both

A `Deployment` is printed as a shell script or run (`serving.running`): the same commands. Flags come from the recipe that
the checkpoint carries and from the runtime contract; the KV dtype is always named, on both sides alike, because
"auto" resolves by the checkpoint's own config and decode compares names.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from moepress.errors import MoepressError, PlanRefused
from moepress.formats.checkpoint import Checkpoint, open_checkpoint
from moepress.formats.families import identify_family
from moepress.formats.runtime_contract import Contract, contract_for
from moepress.recipe import Recipe, check_recipe
from moepress.results import REPORT_NAME, output_digest
from moepress.serving.disaggregation import KvDtypeName, check_kv_dtypes, check_pair, kv_dtype_name
from moepress.serving.launch import Launch, ServeOptions, sglang_launch

RoleName = Literal["server", "prefill", "decode", "router"]
LOCAL = "127.0.0.1"
BOOTSTRAP_PORT = 8998
"""Where decode asks the prefill server for its layout (SGLang's default). A second pair on the machine needs another."""


@dataclass(frozen=True)
class Role:
    """One process: what it is for, and its command. `also_binds`: URLs that it listens on besides the launch's."""

    name: RoleName
    about: str
    launch: Launch
    also_binds: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        return {
            "role": self.name,
            "about": self.about,
            "command": list(self.launch.command),
            "environment": dict(self.launch.variables),
            "shell": self.launch.shell_line(),
            "url": self.launch.url,
        }


@dataclass(frozen=True)
class Deployment:
    """Processes in the order in which they are started; the last one is where requests go."""

    roles: tuple[Role, ...]
    notes: tuple[str, ...] = ()

    @property
    def url(self) -> str:
        """Where requests go."""
        return self.roles[-1].launch.url

    def script(self) -> str:
        """All commands as they can be pasted into shells, with what there is to know as comments."""
        blocks = ["\n".join(f"# {note}" for note in self.notes)] if self.notes else []
        if len(self.roles) > 1:
            blocks.append("# None of these commands ends by itself: give each a shell of its own, the router last.")
        blocks += [f"# {role.name}: {role.about}\n{role.launch.shell_line()}" for role in self.roles]
        return "\n\n".join(blocks) + "\n"

    def as_json(self) -> dict[str, Any]:
        return {"url": self.url, "notes": list(self.notes), "roles": [role.as_json() for role in self.roles]}


@dataclass(frozen=True)
class Server:
    """Where one server runs. ``tensor_parallel``: its GPUs."""

    host: str
    port: int
    tensor_parallel: int


@dataclass(frozen=True)
class Pressed:
    """A pressed checkpoint with what it was made for."""

    checkpoint: Checkpoint
    report: dict[str, Any]
    recipe: Recipe
    contract: Contract


def open_pressed(folder: Path, overrides: Sequence[str] = ()) -> Pressed:
    """Opens an output of convert.

    Args:
        overrides: ``field=value`` of its recipe, for this deployment.

    Raises:
        MoepressError: it is none, or it was made for another server than SGLang.
    """
    output_digest(folder)
    report = json.loads((folder / REPORT_NAME).read_text(encoding="utf-8"))
    recipe = check_recipe(dict(report["recipe"]), where=str(folder / REPORT_NAME), overrides=overrides)
    if recipe.serving.server != "sglang":
        raise PlanRefused(
            f"{folder} was made for {recipe.serving.server} {recipe.serving.version}; serve writes SGLang's commands",
            where="serving.server",
            hint="convert with --set serving.server=sglang --set serving.version=0.5.23",
        )
    checkpoint = open_checkpoint(folder)
    family = identify_family(checkpoint.config)
    return Pressed(checkpoint, report, recipe, contract_for(recipe.serving.server, recipe.serving.version, family.key))


def choose_kv_dtype(pressed: Pressed, wish: str) -> tuple[KvDtypeName, str]:
    """SGLang's name of the KV cache's dtype, and why.

    Args:
        wish: ``auto``, or a dtype. ``auto`` is FP8 where somebody has seen to its scales, else BF16.
    """
    if wish != "auto":
        return kv_dtype_name(wish), "asked for"
    if pressed.contract.kv_scales.dynamic:
        return "fp8_e4m3", "the cache scales every tile by itself"
    kv = pressed.report.get("kv_cache") or {}
    if kv.get("emission") in ("folded", "checkpoint"):
        return "fp8_e4m3", f"its scales were calibrated ({kv['emission']})"
    return "bfloat16", "no KV scales were calibrated for this checkpoint; --kv-dtype fp8 takes them as 1.0"


def one_server(
    pressed: Pressed,
    server: Server,
    *,
    python: Path | str,
    kv_dtype: str = "auto",
    options: ServeOptions | None = None,
    cpu_lab: bool = False,
) -> Deployment:
    """One server on `server.tensor_parallel` GPUs.

    Args:
        python: interpreter of the SGLang environment.
        kv_dtype: as for `choose_kv_dtype`.
        options: further choices; its parallel size and KV dtype are set here.
        cpu_lab: on this machine's CPU, for tests.
    """
    name, why = choose_kv_dtype(pressed, kv_dtype)
    launch = _launch(pressed.checkpoint, pressed.contract, server, name, python, options, cpu_lab=cpu_lab)
    gpus = "the CPU lab" if cpu_lab else _gpus(server.tensor_parallel, 0)
    role = Role("server", f"{pressed.checkpoint.location} on {gpus}", launch)
    return Deployment((role,), (f"KV cache {name}: {why}",))


def prefill_and_decode(
    prefill: Checkpoint,
    decode: Pressed,
    servers: tuple[Server, Server],
    router: Server,
    *,
    python: Path | str,
    router_python: Path | str,
    kv_dtypes: tuple[str, str] = ("auto", "auto"),
    options: ServeOptions | None = None,
    bootstrap_port: int = BOOTSTRAP_PORT,
    cpu_lab: bool = False,
) -> Deployment:
    """A prefill server, a decode server and a router in front.

    Args:
        prefill: the checkpoint that reads prompts, most often the FP8 source.
        decode: the pressed one, which writes tokens.
        servers: of prefill and of decode.
        router_python: interpreter of an environment with sglang-router.
        kv_dtypes: of prefill and of decode; ``auto`` follows the other side, or `choose_kv_dtype`.
        options: further choices for both servers.
        bootstrap_port: where decode asks the prefill server for its layout.

    Raises:
        PlanRefused: the two cannot share a cache.
    """
    names, why = _both_dtypes(decode, kv_dtypes)
    check_kv_dtypes(*names, decode.contract)
    check_pair(prefill, decode.checkpoint, decode.contract)
    options = options or ServeOptions()
    one_machine = servers[0].host == servers[1].host and not cpu_lab
    first_gpus = (0, servers[0].tensor_parallel if one_machine else 0)
    sides: tuple[tuple[Literal["prefill", "decode"], Checkpoint, str], ...] = (
        ("prefill", prefill, "reads prompts"),
        ("decode", decode.checkpoint, "writes tokens"),
    )
    roles = []
    for (side, checkpoint, does), server, name, first in zip(sides, servers, names, first_gpus, strict=True):
        flags = _side_flags(side, decode.recipe, first, bootstrap_port, cpu_lab=cpu_lab)
        mine = replace(options, extra=(*flags, *options.extra))
        launch = _launch(checkpoint, decode.contract, server, name, python, mine, cpu_lab=cpu_lab)
        where = "the CPU lab" if cpu_lab else f"{_gpus(server.tensor_parallel, first)} of {server.host}"
        also = (f"http://{server.host}:{bootstrap_port}",) if side == "prefill" else ()
        roles.append(Role(side, f"{checkpoint.location} {does}, on {where}", launch, also))
    in_front = _router(roles, router, bootstrap_port, router_python)
    roles.append(Role("router", "the address for requests", in_front))
    notes = [
        f"KV cache {names[0]} on both sides: {why}",
        "checked: both checkpoints are one model by config.json, and their KV scales are the same",
        "not seen on a GPU by moepress: flags and refusals are read from SGLang 0.5.23's source",
    ]
    return Deployment(tuple(roles), tuple(notes))


def _side_flags(
    side: Literal["prefill", "decode"], recipe: Recipe, first_gpu: int, bootstrap_port: int, *, cpu_lab: bool
) -> list[str]:
    pd = recipe.serving.disaggregation
    flags = ["--disaggregation-mode", side, "--disaggregation-transfer-backend", pd.transfer_backend]
    if pd.kv_checksum and not cpu_lab:  # its kernel runs on GPUs alone
        flags.append("--disaggregation-enable-kv-checksum")
    if side == "prefill":
        flags += ["--disaggregation-bootstrap-port", str(bootstrap_port)]
    if first_gpu:
        flags += ["--base-gpu-id", str(first_gpu)]
    return flags


def _both_dtypes(decode: Pressed, wishes: tuple[str, str]) -> tuple[tuple[KvDtypeName, KvDtypeName], str]:
    named = [kv_dtype_name(wish) for wish in wishes if wish != "auto"]
    if not named:
        chosen, why = choose_kv_dtype(decode, "auto")
        return (chosen, chosen), why
    return (named[0], named[-1]), "asked for"


def _launch(
    checkpoint: Checkpoint,
    contract: Contract,
    server: Server,
    kv_dtype: KvDtypeName,
    python: Path | str,
    options: ServeOptions | None,
    *,
    cpu_lab: bool,
) -> Launch:
    if checkpoint.folder is None:
        raise MoepressError("SGLang serves a folder", where=checkpoint.location, hint="moepress pull ID DIR")
    return sglang_launch(
        python,
        checkpoint.folder,
        port=server.port,
        host=server.host,
        options=replace(options or ServeOptions(), tensor_parallel=server.tensor_parallel, kv_cache_dtype=kv_dtype),
        contract_flags=contract.launch_arguments(fp8_kv=kv_dtype == "fp8_e4m3"),
        cpu_lab=cpu_lab,
    )


def _router(servers: Sequence[Role], router: Server, bootstrap_port: int, python: Path | str) -> Launch:
    prefill, decode = (role.launch.url for role in servers)
    flags = ("--pd-disaggregation", "--prefill", prefill, str(bootstrap_port), "--decode", decode)
    place = ("--host", router.host, "--port", str(router.port))
    command = (str(python), "-m", "sglang_router.launch_router", *flags, *place)
    return Launch(command, f"http://{router.host}:{router.port}")


def _gpus(count: int, first: int) -> str:
    return f"GPU {first}" if count == 1 else f"GPUs {first} to {first + count - 1}"
