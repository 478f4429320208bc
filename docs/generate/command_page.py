"""The command reference, from the command line's own definition."""

from __future__ import annotations

import re
from enum import Enum
from typing import Any, get_args

import typer

from moepress.cli import COMMANDS, app
from moepress.commands.examples import EXAMPLES, EXIT_CODES

HEAD = """# Commands

Commands that produce data take `--json`: data on stdout, messages on stderr. Every command ends with the one to run next.
`moepress COMMAND --help` shows what is written here.

    moepress --version               version, Python, and the versions of what results depend on
    moepress --install-completion    commands, options and recipes completed by bash, zsh, fish or PowerShell

## Exit codes

| code | meaning |
|---|---|
"""


def page() -> str:
    root: Any = typer.main.get_command(app)
    context = root.make_context("moepress", [], resilient_parsing=True)
    parts = [HEAD + "".join(f"| {code} | {what} |\n" for code, what in EXIT_CODES.items())]
    named = {command.__name__: panel for panel, commands in COMMANDS.items() for command in commands}
    panel = None
    for name in [*named, "recipes", "cluster"]:
        if named.get(name, "Set up") != panel:
            panel = named.get(name, "Set up")
            parts.append(f"## {panel}\n")
        command = root.get_command(context, name)
        if hasattr(command, "list_commands"):
            inner = command.make_context(name, [], resilient_parsing=True)
            parts.append(f"### moepress {name}\n\n{_text(command.help)}\n")
            parts.append(_examples(name))
            for child in command.list_commands(inner):
                parts.append(_command(f"{name} {child}", command.get_command(inner, child)))
        else:
            parts.append(_command(name, command))
            parts.append(_examples(name))
    return "\n".join(part for part in parts if part)


def _command(name: str, command: Any) -> str:
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    options = [p for p in command.params if p.param_type_name == "option" and p.name != "help"]
    usage = " ".join(_word(p) if p.required else f"[{_word(p)}]" for p in arguments)
    called = " ".join(["moepress", name, *([usage] if usage else []), "[OPTIONS]"])
    lines = [f"### moepress {name}\n", f"    {called}", ""]
    lines.append(f"{_text(command.help)}\n")
    rows = [(f"`{_word(p)}`", _text(getattr(p, "help", "") or "")) for p in arguments]
    rows += [(_names(p), _option_text(p)) for p in options]
    if rows:
        lines += ["| argument, option | meaning |", "|---|---|", *(f"| {left} | {right} |" for left, right in rows), ""]
    return "\n".join(lines)


def _word(parameter: Any) -> str:
    return str(parameter.metavar or parameter.name.upper()).strip("[]")


def _names(option: Any) -> str:
    names = ", ".join(f"`{name}`" for name in (*option.opts, *option.secondary_opts))
    takes = "" if option.is_flag else f" {option.metavar or _kind(option.type_descriptor.annotation)}"
    return names + takes.replace("|", "\\|")


def _kind(kind: Any) -> str:
    kind = next((part for part in get_args(kind) if part is not type(None)), kind)  # of `X | None` and `list[X]`
    if isinstance(kind, type) and issubclass(kind, Enum):
        return "|".join(member.value for member in kind)
    return {int: "N", float: "NUMBER"}.get(kind, "TEXT")


def _option_text(option: Any) -> str:
    text = _text(option.help or "")
    default = option.default
    if option.required:
        return f"{text} **Required.**"
    if default in (None, False, (), [], "") or callable(default) or "(default" in text:
        return text
    return f"{text} (default: {getattr(default, 'value', default)})"


def _examples(name: str) -> str:
    found = EXAMPLES.get(name, ())
    return "".join(f"    # {what}\n    {line}\n" for line, what in found) if found else ""


def _text(text: str | None) -> str:
    plain = " ".join((text or "").split())
    return re.sub(r"(?<!\\)\|", r"\|", plain).replace("<", "&lt;")
