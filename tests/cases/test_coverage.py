"""docs/cases.md against the tests: every case once, and every test it names exists and names the case."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROW = re.compile(r"^\| ([A-Z][A-Z0-9]-\d\d) \| ([^|]+) \| ([^|]+) \| ([^|]+) \|$", re.MULTILINE)
TABLE = ROW.findall((ROOT / "docs" / "cases.md").read_text())


@cache
def docstrings(path: str) -> dict[str, str]:
    """Name of every test function of a file, also inside classes, and its docstring."""
    tree = ast.parse((ROOT / path).read_text())
    found = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")]
    return {node.name: ast.get_docstring(node) or "" for node in found}


def test_every_case_is_in_the_table_once() -> None:
    cases = [case for case, *_ in TABLE]
    assert len(cases) == 85
    assert len(set(cases)) == len(cases)


@pytest.mark.parametrize(("case", "cell"), [(case, cell) for case, _, _, cell in TABLE])
def test_the_tests_of_a_case_exist_and_name_it(case: str, cell: str) -> None:
    tests = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", cell)
    assert tests, f"{case} has no test"
    assert cell.count("`") == 2 * len(tests), f"{case}: a test's name that is none"
    for path, name in tests:
        assert name in docstrings(path), f"{case}: {path} has no {name}"
        assert case in docstrings(path)[name], f"{case}: the docstring of {path}::{name} does not name it"


def test_a_case_in_a_docstring_is_in_the_table() -> None:
    known = {case for case, *_ in TABLE}
    prefixes = {case.partition("-")[0] for case in known}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for name, text in docstrings(path.relative_to(ROOT).as_posix()).items():
            named = {case for case in re.findall(r"\b[A-Z][A-Z0-9]-\d\d\b", text) if case.partition("-")[0] in prefixes}
            assert named <= known, f"{path.name}::{name} names {sorted(named - known)}"
