"""``moepress convert``: press a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moepress.commands.console import duration, marked, next_step, quoted, size, stderr, stdout, table
from moepress.commands.convert_view import ConvertView
from moepress.commands.device import Device, DeviceChoice, device_of_this_process
from moepress.commands.hub_source import DeleteSource, SourceFolder, Stream, here_or_arriving
from moepress.commands.kv_table import show_kv
from moepress.commands.options import (
    AsJson,
    Overrides,
    RecipeName,
    SameKvAs,
    Source,
    Threads,
    TrustRemoteCode,
    print_json,
    this_command,
)
from moepress.commands.workers import (
    Gather,
    RayAddress,
    WaitForWorkers,
    WorkerCount,
    WorkerGpus,
    WorkerThreads,
    place_of_work,
)
from moepress.commands.worst import fallbacks, worst_experts
from moepress.errors import HubError

if TYPE_CHECKING:
    from moepress.convert.run import Conversion

FATES = {"keep": "kept", "bf16": "to BF16", "rescale": "rescaled"}
"""What became of a weight that was not quantized (`convert.decide.Action`), for people."""


def convert(
    source: Source,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="New or empty folder, or one to resume.")],
    recipe: RecipeName,
    overrides: Overrides = None,
    same_kv_as: SameKvAs = None,
    threads: Threads = None,
    trust_remote_code: TrustRemoteCode = False,
    device: Device = DeviceChoice.auto,
    workers: WorkerCount = None,
    ray_address: RayAddress = None,
    worker_threads: WorkerThreads = 1,
    worker_gpus: WorkerGpus = 0,
    gather: Gather = None,
    wait_for_workers: WaitForWorkers = 0,
    stream: Stream = False,
    delete_source: DeleteSource = False,
    source_dir: SourceFolder = None,
    as_json: AsJson = False,
) -> None:
    """Press SRC into OUT. It can be stopped at any moment; the same command resumes."""
    from moepress import api
    from moepress.convert.finish import broken_limits
    from moepress.convert.journal import STATE_FOLDER

    loaded = api.load_recipe(recipe, overrides or ())
    place = place_of_work(workers, ray_address, worker_threads, worker_gpus, gather, wait_for_workers)
    computing = device_of_this_process(device, workers)
    if stream and place is not None:
        raise HubError("workers read the source from files, and --stream has none yet", where="--stream")
    view = ConvertView()
    try:
        with (
            here_or_arriving(source, out, stream=stream, delete=delete_source, folder=source_dir, quiet=as_json) as (
                here,
                arrivals,
            ),
            view,
        ):
            result = api.convert(
                here,
                out,
                loaded,
                threads=threads,
                trust_remote_code=trust_remote_code,
                watcher=view,
                place=place,
                arrivals=arrivals,
                device=computing,
                same_kv_as=same_kv_as,
            )
    except KeyboardInterrupt:
        # counted on the disk: the last one may have been finished and nobody told
        kept = len(list((out / STATE_FOLDER / "receipts").glob("*.json")))
        said = f"{kept} of {view.shards} shards are kept" if kept else "no shard was finished yet"
        stderr.print(f"\nstopped: {said}. To go on from there:\n  {this_command()}", soft_wrap=True)
        raise typer.Exit(130) from None
    broken = broken_limits(result.plan, result.report)
    if as_json:
        print_json(
            {
                **result.report,
                "seconds": round(result.seconds, 3),
                "resumed_shards": result.resumed,
                "broken_limits": broken,
            }
        )
    else:
        show(result, broken)
        words: list[object] = ["moepress", "verify", out]
        words += [] if delete_source else ["--source", here]
        words += ["--same-kv-as", same_kv_as] if same_kv_as else []
        next_step(quoted(*words))
    if broken:
        raise typer.Exit(1)


def show(result: Conversion, broken: list[str]) -> None:
    report, plan = result.report, result.plan
    resumed = f", {result.resumed} of {len(plan.shards)} shards from an earlier run" if result.resumed else ""
    ratio = report["output_bytes"] / max(1, report["source_bytes"])
    stdout.print(
        marked(
            f"[bold]{size(report['source_bytes'])} → {size(report['output_bytes'])}[/bold] ({ratio:.1%}) in "
            f"{duration(result.seconds)}, {len(plan.shards)} shards{resumed}, layout {report['layout']}"
        )
    )
    quantized = report["quantized"]
    rows = table("weights", "what became of them")
    rows.columns[0].justify = "right"
    weights = plan.recipe.weights
    if quantized["weights"]:
        how = f"INT{weights.num_bits}, group {weights.group_size}, {weights.algorithm} with {weights.scale} scales"
        if plan.recipe.engine != "moepress":
            how = f"INT{weights.num_bits}, group {weights.group_size}, {weights.algorithm} by {plan.recipe.engine}"
        error = (
            f"relative error mean {quantized['relative_error_mean']:.4f}, worst {quantized['relative_error_max']:.4f}"
        )
        rows.add_row(f"{quantized['weights']:,}", f"{how}: {error}")
    for reason, count in sorted(report["kept"].items(), key=lambda item: -item[1]):
        action, _, why = reason.partition(": ")
        rows.add_row(f"{count:,}", f"{FATES.get(action, action)} ({why})")
    stdout.print(rows)
    for found in (worst_experts(report), fallbacks(report)):
        if found is not None:
            stdout.print()
            stdout.print(found)
    show_kv(report["kv_cache"])
    for problem in broken:
        stderr.print(marked("[red]limit exceeded:[/red] {problem}", problem=problem), soft_wrap=True)
