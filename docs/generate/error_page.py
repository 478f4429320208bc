"""Every message an error of ours is raised with, read out of the source: what, where, and what to do next."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import moepress
from moepress import errors

PACKAGE = Path(moepress.__file__).parent
KINDS: dict[str, type[errors.MoepressError]] = {
    name: kind
    for name, kind in vars(errors).items()
    if inspect.isclass(kind) and issubclass(kind, errors.MoepressError)
}
HEAD = """# Errors

Every error says what is wrong with its numbers, where, and what to do next, on stderr; with `--json` the same facts are an
object on stdout. Exit code 1 means that the thing asked about is not as it should be, 2 that it could not be done. There is never a
traceback; one is a bug worth reporting.

    error: model-00002-of-000003.safetensors: 100 bytes short
      where: /data/kimi/model-00002-of-000003.safetensors
      hint:  download this shard again: moepress pull moonshotai/Kimi-K2-Instruct /data/kimi

Below is every message in the source, {count} of them, by kind; ‹…› stands for what a message fills in. Where a message
has no advice of its own, it ends with its kind's.
"""


@dataclass(frozen=True)
class Message:
    """One place in the source that raises, or builds, an error."""

    kind: str
    area: str
    what: str
    where: str
    hint: str


def messages() -> list[Message]:
    """All of them, in the order of the source; passing an error on with more context is no message of its own."""
    found = []
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(PACKAGE.rglob("*.py"))}
    kinds = {name: name for name in KINDS} | _narrower(trees.values())
    for path, tree in trees.items():
        area = path.relative_to(PACKAGE).as_posix().removesuffix(".py").removesuffix("/__init__")
        for call in _calls(tree, kinds):
            given = {keyword.arg: _text(keyword.value) for keyword in call.keywords}
            what = _text(call.args[0]) if call.args else ""
            if re.search(r"[a-z]", re.sub("‹[^›]*›", "", what)):  # else it passes on what another said
                assert isinstance(call.func, ast.Name)  # noqa: S101 (chosen by `_calls`)
                where, hint = (given.get(key, "") for key in ("where", "hint"))
                found.append(Message(kinds[call.func.id], area, what, where, hint))
    return found


def page() -> str:
    every = messages()
    text = HEAD.format(count=len(every))
    for kind, described in KINDS.items():
        of_kind = [message for message in every if message.kind == kind]
        if not of_kind:
            continue
        text += f"\n## {kind}\n\n{' '.join((described.__doc__ or '').split('Args:')[0].split())} Exit code {described.exit_code}.\n"
        text += f"\nOtherwise: {described.usual_hint}\n\n| in | message | what to do |\n|---|---|---|\n"
        for message in of_kind:
            text += f"| {message.area} | {_cell(message.what)} | {_cell(message.hint)} |\n"
    return text


def _narrower(trees: Iterable[ast.AST]) -> dict[str, str]:
    """Kinds that one file has for itself, to tell them apart when it catches them: name -> the kind they are for a user."""
    return {
        node.name: base.id
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
        for base in node.bases
        if isinstance(base, ast.Name) and base.id in KINDS and node.name not in KINDS
    }


def _calls(tree: ast.AST, kinds: Mapping[str, str]) -> Iterator[ast.Call]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in kinds:
            yield node


def _text(node: ast.expr) -> str:
    """The text an expression gives, with ‹…› for what is only known at run time."""
    if isinstance(node, ast.Constant):
        return "" if node.value is None else str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part) for part in node.values)
    if isinstance(node, ast.FormattedValue):
        return _slot(node.value)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _text(node.left) + _text(node.right)
    if isinstance(node, ast.IfExp):
        return " / ".join(part for part in (_text(node.body), _text(node.orelse)) if part)
    return _slot(node)


def _slot(node: ast.expr) -> str:
    if isinstance(node, ast.Name):
        return f"‹{node.id.strip('_').lower().replace('_', ' ')}›"
    if isinstance(node, ast.Attribute):
        return f"‹{node.attr.strip('_').replace('_', ' ')}›"
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        if node.func.id in ("len", "sum", "int", "min", "max"):
            return "‹N›"
        if node.func.id in ("str", "repr", "list", "list_some", "sorted") and len(node.args) == 1:
            return _slot(node.args[0])
    if isinstance(node, ast.BinOp):
        return "‹N›"
    if isinstance(node, ast.IfExp):
        return _text(node)
    return "‹…›"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*").replace("_", "\\_")
