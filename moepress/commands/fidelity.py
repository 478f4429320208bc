"""``moepress fidelity``: where the error enters, and what it costs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moepress.commands.console import next_step, quoted, stdout, table
from moepress.commands.kept import keep
from moepress.commands.numbers import whole
from moepress.commands.options import AsJson, TrustRemoteCode, add_named_file, print_json, size_option
from moepress.commands.progress import Bar
from moepress.errors import MoepressError

if TYPE_CHECKING:
    from moepress.evaluate.fidelity import Fidelity


def fidelity(
    out: Annotated[Path, typer.Argument(metavar="OUT", help="A converted checkpoint.")],
    source: Annotated[Path, typer.Option("--source", metavar="SRC", help="The checkpoint it was made from.")],
    text: Annotated[
        list[Path] | None,
        typer.Option(
            "--text",
            metavar="FILE",
            help="Held-out .txt or .jsonl; may be repeated (default: shipped prose, code, chat and tool calls).",
        ),
    ] = None,
    samples: Annotated[
        int | None,
        typer.Option(metavar="N", parser=whole(), help="Samples per text (default: 32; of a shipped text, 12)."),
    ] = None,
    length: Annotated[int, typer.Option(metavar="N", parser=whole(16), help="Tokens per sample.")] = 512,
    memory: Annotated[
        str, typer.Option(metavar="SIZE", help="Memory for activations, and as much again for the experts being run.")
    ] = "4GiB",
    picture: Annotated[
        Path | None, typer.Option(metavar="FILE.svg", help="Draw a map of the errors, by layer and expert.")
    ] = None,
    trust_remote_code: TrustRemoteCode = False,
    as_json: AsJson = False,
) -> None:
    """Compare OUT with SRC on held-out text, layer by layer: KL, agreement, perplexity, and where the error enters."""
    from moepress import api
    from moepress.evaluate.fidelity import PICTURES, draw
    from moepress.recipe import parse_size

    texts: dict[str, Path] = {}
    for path in text or ():
        add_named_file(texts, path.stem, path, "--text")
    if picture is not None and (picture.suffix not in PICTURES or not picture.absolute().parent.is_dir()):
        raise MoepressError(
            f"no picture can be written there: it has to end in {', '.join(PICTURES)}, in a folder that is there",
            where=f"--picture {picture}",
        )
    with Bar(quiet=as_json, in_bytes=False) as bar:
        result = api.fidelity(
            out,
            source,
            texts,
            samples=samples,
            length=length,
            memory=size_option(memory, "--memory", parse_size),
            trust_remote_code=trust_remote_code,
            watcher=bar,
        )
    keep(out, "fidelity", "not judged", {"source": str(source), **result.as_json()})
    if picture is not None:
        draw(result, picture)
    if as_json:
        print_json(result.as_json())
    else:
        show(result, picture)
        next_step(f"moepress report {quoted(out)}")


def show(result: Fidelity, picture: Path | None) -> None:
    rows = table("text", right=("tokens", "KL, nats a token", "same top token", "perplexity", "pressed"))
    for name, d in result.texts.items():
        kl = f"{d.kl:.5f} ± {d.kl_standard_error:.5f}"
        rows.add_row(
            name,
            f"{d.tokens:,}",
            kl,
            f"{d.top1_agreement:.2%}",
            f"{d.source_perplexity:.3f}",
            f"{d.candidate_perplexity:.3f}",
        )
    stdout.print(rows)
    stdout.print(
        "drift of hidden states after each layer: " + " ".join(f"{value:.4f}" for value in result.drift), soft_wrap=True
    )
    if picture is not None:
        stdout.print(f"map of errors: {picture}")
