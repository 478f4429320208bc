"""The Python reference, from the signatures and docstrings of moepress.api."""

from __future__ import annotations

import inspect
import re
import textwrap

from moepress import api

SECTION = re.compile(r"^(Args|Returns|Raises):\n((?:    .*\n?|\n)+)", re.MULTILINE)


def page() -> str:
    head = inspect.getdoc(api) or ""
    title, _, rest = head.partition("\n\n")
    parts = [f"# Python\n\n{title}\n\n{rest}\n"]
    for name in api.__all__:
        function = getattr(api, name)
        parts.append(
            f"## {name}\n\n{_signature(name, inspect.signature(function))}\n\n{_body(inspect.getdoc(function) or '')}\n"
        )
    return "\n".join(parts)


def _signature(name: str, signature: inspect.Signature) -> str:
    """As it is written in the source, a parameter a line."""
    lines, starred = [], False
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and not starred:
            lines.append("*")
            starred = True
        default = "" if parameter.default is parameter.empty else f" = {parameter.default!r}"
        lines.append(f"{parameter.name}: {parameter.annotation}{default}")
    inner = ",\n".join(f"    {line}" for line in lines)
    text = (
        f"{name}(\n{inner},\n) -> {signature.return_annotation}"
        if lines
        else f"{name}() -> {signature.return_annotation}"
    )
    return f"```python\n{text}\n```"


def _body(doc: str) -> str:
    """The docstring's sections as lists."""
    parts, last = [], 0
    for found in SECTION.finditer(doc):
        parts.append(doc[last : found.start()].strip())
        last = found.end()
        parts.append(f"**{ {'Args': 'Arguments'}.get(found[1], found[1]) }**\n\n{_items(textwrap.dedent(found[2]))}")
    parts.append(doc[last:].strip())
    return "\n\n".join(part for part in parts if part).replace("``", "`")


def _items(text: str) -> str:
    entries = re.split(r"\n(?=\S)", text.strip())
    lines = []
    for entry in entries:
        one = " ".join(entry.split())
        name, colon, rest = one.partition(": ")
        named = colon and re.fullmatch(r"[\w, ]+", name)
        lines.append(f"- `{name}`: {rest}" if named else f"- {one}")
    return "\n".join(lines)
