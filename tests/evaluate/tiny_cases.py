"""Tool-call cases in the form that the tiny Kimi was trained on, with names that it may or may not have seen.

Four tools, one argument each, copied from the question: what a model of 8 million parameters can do, and does worse when it
is damaged. The names are made up from parts, so that copying them takes more than remembering.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from examples.tiny_kimi.chat import LOOKUPS, TOOLS, tool_schema

MODULES = (
    "json",
    "zipfile",
    "pathlib",
    "socket",
    "csv",
    "email",
    "os.path",
    "shutil",
    "logging",
    "argparse",
    "ssl",
    "re",
)
MEMBERS = (
    "open",
    "Path.exists",
    "reader",
    "copytree",
    "connect",
    "dumps",
    "Parser.close",
    "getLogger",
    "split",
    "match",
)


def case(number: int) -> tuple[str, str, str]:
    """Question, tool, and its argument."""
    name = f"{MODULES[number % len(MODULES)]}.{MEMBERS[number // len(MODULES) % len(MEMBERS)]}"
    kind = list(TOOLS)[number % 4]
    query = f"SELECT * FROM {name.split('.')[0]}_{number % 89} LIMIT {number % 9 + 1};"
    return {
        "lookup_doc": (LOOKUPS[number % len(LOOKUPS)].format(name), kind, name),
        "read_file": (f"What is in the file docs/{name}.txt?", kind, f"docs/{name}.txt"),
        "run_sql": (f"Run this query: {query}", kind, query),
        "search": (f"Search for {name} example.", kind, f"{name} example"),
    }[kind]


def rows(singles: int, conversations: int, turns: int) -> list[dict[str, Any]]:
    """Cases as ``--tool-cases`` reads them."""
    found: list[dict[str, Any]] = []
    for number in range(singles):
        question, kind, value = case(number)
        tools = sorted({kind, list(TOOLS)[(number // 4 + 1) % 4], list(TOOLS)[(number // 4 + 2) % 4]})
        found.append(
            {
                "id": f"single-{number}",
                "ask": question,
                "tools": [tool_schema(tool) for tool in tools],
                "calls": [{"name": kind, "arguments": {TOOLS[kind][1]: [value]}}],
            }
        )
    for number in range(conversations):
        made = []
        for turn in range(turns):
            question, kind, value = case(7 * number + 31 * turn + 3)
            call = {"name": kind, "arguments": {TOOLS[kind][1]: [value]}}
            made.append({"user": question, "calls": [call], "results": [f"({number % 9 + 1} rows)"]})
        found.append({"id": f"turns-{number}", "tools": [tool_schema(tool) for tool in TOOLS], "turns": made})
    return found


def write_cases(path: Path, *, singles: int, conversations: int, turns: int) -> Path:
    """Writes them as JSON lines."""
    path.write_text("\n".join(json.dumps(row) for row in rows(singles, conversations, turns)) + "\n")
    return path
