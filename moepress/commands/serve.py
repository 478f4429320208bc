"""``moepress serve``: the commands that serve a checkpoint, printed or run."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moepress.commands.console import marked, next_step, note, stdout
from moepress.commands.numbers import number, whole
from moepress.commands.options import AsJson, Overrides, SglangPython, TrustRemoteCode, print_json
from moepress.errors import MoepressError

if TYPE_CHECKING:
    from moepress.serving.launch import ServeOptions
    from moepress.serving.serve import Deployment, Pressed


def serve(
    out: Annotated[
        Path | None, typer.Argument(metavar="OUT", help="A converted checkpoint, served by one server.")
    ] = None,
    prefill: Annotated[
        Path | None, typer.Option(metavar="SRC", help="Checkpoint for the prefill server, usually the FP8 source.")
    ] = None,
    decode: Annotated[
        Path | None, typer.Option(metavar="OUT", help="A converted checkpoint for the decode server.")
    ] = None,
    print_only: Annotated[
        bool, typer.Option("--print", metavar="", help="Print the commands and start nothing.")
    ] = False,
    tp: Annotated[
        int | None,
        typer.Option(
            metavar="N", parser=whole(), help="GPUs of the server, or of the decode server (default: the recipe's)."
        ),
    ] = None,
    prefill_tp: Annotated[
        int | None, typer.Option(metavar="N", parser=whole(), help="GPUs of the prefill server.")
    ] = None,
    kv_dtype: Annotated[
        str,
        typer.Option(metavar="auto|bf16|fp8", help="KV cache type; auto: FP8 if the checkpoint was prepared for it."),
    ] = "auto",
    prefill_kv_dtype: Annotated[
        str | None, typer.Option(metavar="bf16|fp8", help="KV cache type on the prefill server.")
    ] = None,
    decode_kv_dtype: Annotated[
        str | None, typer.Option(metavar="bf16|fp8", help="KV cache type on the decode server.")
    ] = None,
    host: Annotated[
        str, typer.Option(metavar="HOST", help="Address of the server, or of the decode server.")
    ] = "127.0.0.1",
    prefill_host: Annotated[
        str | None, typer.Option(metavar="HOST", help="Address of the prefill server (default: --host).")
    ] = None,
    port: Annotated[
        int,
        typer.Option(
            metavar="N", parser=whole(1, 65535), help="Port for requests; a pair takes the three after it too."
        ),
    ] = 30000,
    mem_fraction: Annotated[
        float | None,
        typer.Option(metavar="SHARE", parser=number(0.05, 1), help="Share of GPU memory for weights and KV cache."),
    ] = None,
    context_length: Annotated[
        int | None, typer.Option(metavar="N", parser=whole(), help="Longest request, in tokens.")
    ] = None,
    mtp: Annotated[
        bool, typer.Option("--mtp", metavar="", help="Speculative decoding with the checkpoint's own MTP layer.")
    ] = False,
    overrides: Overrides = None,
    flags: Annotated[
        str, typer.Option(metavar="'--FLAG …'", help="More flags for every SGLang server, passed on unchanged.")
    ] = "",
    sglang_python: SglangPython = None,
    router_python: Annotated[
        str | None, typer.Option(metavar="PATH", help="Python with sglang-router (default: the same).")
    ] = None,
    cpu_lab: Annotated[
        bool,
        typer.Option("--cpu-lab", metavar="", help="Without a GPU: kernels in plain torch, for trying things out."),
    ] = False,
    logs: Annotated[Path | None, typer.Option(metavar="DIR", help="Folder for logs (default: OUT.logs).")] = None,
    boot_timeout: Annotated[
        float, typer.Option(parser=number(10), metavar="SECONDS", help="Limit until all servers are ready.")
    ] = 3600,
    trust_remote_code: TrustRemoteCode = False,
    as_json: AsJson = False,
) -> None:
    """Serve OUT, or prefill with SRC and decode with OUT; with --print, only print the exact commands."""
    from moepress.serving.launch import ServeOptions
    from moepress.serving.serve import open_pressed
    from moepress.serving.sglang import find_environment

    folder = _one_of(out, prefill, decode)
    python = sglang_python or "python"
    if not print_only:
        if prefill_host not in (None, host):
            raise MoepressError(
                "serve starts processes on this machine alone, and the servers are to be on two",
                where="--prefill-host, --host",
                hint="add --print, and run each command where it belongs",
            )
        python = str(find_environment(sglang_python).python)
    options = ServeOptions(
        mem_fraction_static=mem_fraction,
        context_length=context_length,
        mtp=mtp,
        trust_remote_code=trust_remote_code,
        extra=tuple(shlex.split(flags)),
    )
    pressed = open_pressed(folder, overrides or ())
    if prefill is None:
        if prefill_kv_dtype or decode_kv_dtype or prefill_tp or prefill_host:
            raise MoepressError(
                "options of a prefill server without one", hint="moepress serve --prefill SRC --decode OUT"
            )
        deployment = _single(pressed, host, port, tp, python, kv_dtype, options, cpu_lab)
    else:
        deployment = _pair(
            prefill,
            pressed,
            hosts=(prefill_host or host, host),
            port=port,
            sizes=(prefill_tp, tp),
            pythons=(python, router_python or python),
            kv_dtypes=(prefill_kv_dtype or kv_dtype, decode_kv_dtype or kv_dtype),
            options=options,
            cpu_lab=cpu_lab,
        )
    if print_only:
        if as_json:
            print_json(deployment.as_json())
        else:
            typer.echo(deployment.script(), nl=False)
        return
    place = logs or folder.resolve().with_name(f"{folder.resolve().name}.logs")
    _run(deployment, place, boot_timeout, as_json=as_json)


def _one_of(out: Path | None, prefill: Path | None, decode: Path | None) -> Path:
    """The pressed checkpoint, from either way of naming it."""
    if out is not None and decode is None and prefill is None:
        return out
    if out is None and decode is not None and prefill is not None:
        return decode
    raise MoepressError(
        "name one checkpoint, or one for prefill and one for decode",
        hint="moepress serve OUT, or moepress serve --prefill SRC --decode OUT",
    )


def _single(
    pressed: Pressed,
    host: str,
    port: int,
    tp: int | None,
    python: str,
    kv_dtype: str,
    options: ServeOptions,
    cpu_lab: bool,
) -> Deployment:
    from moepress.serving.serve import Server, one_server

    ranks = 1 if cpu_lab else tp or pressed.recipe.serving.tensor_parallel
    server = Server(host, port, ranks)
    return one_server(pressed, server, python=python, kv_dtype=kv_dtype, options=options, cpu_lab=cpu_lab)


def _pair(
    prefill: Path,
    pressed: Pressed,
    *,
    hosts: tuple[str, str],
    port: int,
    sizes: tuple[int | None, int | None],
    pythons: tuple[str, str],
    kv_dtypes: tuple[str, str],
    options: ServeOptions,
    cpu_lab: bool,
) -> Deployment:
    from moepress.formats.checkpoint import open_checkpoint
    from moepress.serving.serve import Server, prefill_and_decode

    serving = pressed.recipe.serving
    ranks = sizes[1] or serving.tensor_parallel
    first = sizes[0] or serving.disaggregation.prefill_tensor_parallel or ranks
    if cpu_lab:
        ranks = first = 1
    return prefill_and_decode(
        open_checkpoint(prefill),
        pressed,
        (Server(hosts[0], port + 1, first), Server(hosts[1], port + 2, ranks)),
        Server(hosts[1], port, 0),
        python=pythons[0],
        router_python=pythons[1],
        kv_dtypes=kv_dtypes,
        options=options,
        bootstrap_port=port + 3,
        cpu_lab=cpu_lab,
    )


def _run(deployment: Deployment, logs: Path, timeout_s: float, *, as_json: bool) -> None:
    from moepress.serving.running import running, watch

    for line in deployment.notes:
        note(line)
    note(f"starting {', '.join(role.name for role in deployment.roles)}; logs in {logs}")
    try:
        with running(deployment, logs=logs, timeout_s=timeout_s) as started:
            if as_json:
                print_json({**deployment.as_json(), "logs": {r.role.name: str(r.server.log_path) for r in started}})
            else:
                stdout.print(marked("[bold]ready: {url}[/bold]  (Ctrl-C ends it)", url=deployment.url))
                next_step(f"curl {deployment.url}/v1/models")
            watch(started)
    except KeyboardInterrupt:
        note("stopped; no process is left running")
