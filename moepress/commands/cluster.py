"""``moepress cluster``: job files for Slurm and Kubernetes, to be read before they are submitted."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from moepress.commands.console import next_step, quoted
from moepress.commands.numbers import whole
from moepress.commands.options import Overrides, RecipeName

app = typer.Typer(no_args_is_help=True, help="Job files that convert on several machines.")

Source = Annotated[str, typer.Argument(metavar="SRC", help="Checkpoint folder, as the machines see it.")]
Out = Annotated[str, typer.Argument(metavar="OUT", help="Output folder, as the machines see it.")]
Nodes = Annotated[int, typer.Option(metavar="N", parser=whole(), help="Machines.")]
Cpus = Annotated[int, typer.Option(metavar="N", parser=whole(), help="Processors to use on each machine.")]
Gpus = Annotated[
    int, typer.Option(metavar="N", parser=whole(0), help="GPUs to use on each machine; 0 computes on processors.")
]
Name = Annotated[str, typer.Option("--name", metavar="NAME", help="Name of the job.")]
File = Annotated[
    Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write to this file (default: print).")
]


@app.command()
def slurm(
    source: Source,
    out: Out,
    recipe: RecipeName,
    overrides: Overrides = None,
    nodes: Nodes = 1,
    cpus: Cpus = 32,
    gpus: Gpus = 0,
    gather: Annotated[
        str | None,
        typer.Option(
            metavar="FOLDER", help="Folder on each machine's own disk, for when only the first machine sees OUT."
        ),
    ] = None,
    time: Annotated[str, typer.Option(metavar="H:MM:SS", help="Time limit.")] = "04:00:00",
    partition: Annotated[
        str | None, typer.Option(metavar="NAME", help="Partition of the cluster (default: the site's).")
    ] = None,
    setup: Annotated[
        str | None, typer.Option(metavar="LINE", help="Shell line that activates moepress on the machines.")
    ] = None,
    name: Name = "moepress",
    output: File = None,
) -> None:
    """Write a batch file that starts Ray on its machines and converts there. Submitted again, it resumes."""
    from moepress.cluster.jobs import Job
    from moepress.cluster.slurm import sbatch_text

    job = Job(source, out, _checked(recipe, overrides), tuple(overrides or ()), nodes, cpus, gpus, gather, name)
    _give(sbatch_text(job, time=time, partition=partition, setup=setup), output, "sbatch")


@app.command()
def kuberay(
    source: Source,
    out: Out,
    recipe: RecipeName,
    image: Annotated[str, typer.Option(metavar="IMAGE", help="Container image with moepress and Ray.")],
    claim: Annotated[str, typer.Option(metavar="NAME", help="PersistentVolumeClaim that holds SRC and OUT.")],
    overrides: Overrides = None,
    nodes: Nodes = 1,
    cpus: Cpus = 32,
    gpus: Gpus = 0,
    mount: Annotated[str, typer.Option(metavar="FOLDER", help="Where the pods see the claim.")] = "/data",
    memory: Annotated[str, typer.Option(metavar="SIZE", help="Memory of each pod, as Kubernetes writes it.")] = "256Gi",
    name: Name = "moepress",
    output: File = None,
) -> None:
    """Write a RayJob manifest for the KubeRay operator."""
    from moepress.cluster.jobs import Job
    from moepress.cluster.kuberay import rayjob_text

    job = Job(source, out, _checked(recipe, overrides), tuple(overrides or ()), nodes, cpus, gpus, None, name)
    _give(rayjob_text(job, image=image, claim=claim, mount=mount, memory=memory), output, "kubectl apply -f")


def _checked(recipe: str, overrides: list[str] | None) -> str:
    """The recipe's name, after all its errors were found here and not in a queue."""
    from moepress.recipe import load_recipe

    load_recipe(recipe, overrides or ())
    return recipe


def _give(text: str, output: Path | None, command: str) -> None:
    from moepress.formats.atomic import atomic_write_text

    if output is None:
        typer.echo(text, nl=False)
        return
    atomic_write_text(output, text)
    next_step(f"{command} {quoted(output)}")
