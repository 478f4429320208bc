"""The two streams of a command, and figures for people. Data goes to stdout, talk to stderr.

What is printed is printed as it is: paths, tensor names and servers' words may hold brackets, which rich would read as
markup. Only `marked` reads markup, from a template of ours, and never from what is put into it.
"""

from __future__ import annotations

import shlex

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

stdout = Console(highlight=False, markup=False)
stderr = Console(stderr=True, highlight=False, markup=False)


def marked(template: str, **values: object) -> Text:
    """``"[bold]{name}[/bold]: {text}"`` with values that may hold anything."""
    return Text.from_markup(template.format(**{name: escape(str(value)) for name, value in values.items()}))


def quoted(*words: object) -> str:
    """Words of a command line as a shell takes them: spaces and brackets in a path stay in it."""
    return shlex.join(str(word) for word in words)


def table(*columns: str, right: tuple[str, ...] = ()) -> Table:
    """A table without lines: `columns` to the left, then `right` to the right, where figures belong."""
    made = Table(box=None, pad_edge=False, header_style="bold")
    for heading in columns:
        made.add_column(heading)
    for heading in right:
        made.add_column(heading, justify="right")
    return made


def size(count: float) -> str:
    """Bytes for people, binary: ``703.72 GiB``; the unit that every memory figure here uses."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(count) < 1024 or unit == "TiB":
            return f"{count:,.0f} B" if unit == "B" else f"{count:,.2f} {unit}"
        count /= 1024
    raise AssertionError("unreachable")


def params(count: int) -> str:
    """Parameters for people: ``753.33 B``, ``7.86 M``."""
    for unit, scale in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= scale:
            return f"{count / scale:,.2f} {unit}"
    return str(count)


def duration(seconds: float) -> str:
    """``42 s``, ``3 min 20 s``, ``2 h 05 min``."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def throughput(rate: float) -> str:
    """Bytes a second, decimal, as disks are sold: ``1.42 GB/s``, ``3.10 MB/s``."""
    return f"{rate / 1e9:.2f} GB/s" if rate >= 1e8 else f"{rate / 1e6:.2f} MB/s"


def next_step(command: str) -> None:
    """The command to run next, alone on its line so that it can be copied."""
    stdout.print(marked("\nnext: [bold]{command}[/bold]", command=command), soft_wrap=True)


def note(text: str) -> None:
    """Talk, on stderr."""
    stderr.print(text, soft_wrap=True)


def warnings(texts: tuple[str, ...]) -> None:
    for text in texts:
        stderr.print(marked("[yellow]warning:[/yellow] {text}", text=text), soft_wrap=True)
