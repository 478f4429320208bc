"""constraints.txt installs on every Python that pyproject.toml admits."""

from __future__ import annotations

import tomllib
from importlib.metadata import PackageNotFoundError, metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).resolve().parents[1]


def pins() -> list[Requirement]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return [Requirement(line) for line in lines if line and not line.startswith("#")]


def test_every_pin_runs_on_the_oldest_python_that_is_admitted() -> None:
    """A package that asks for 3.11.5 leaves whoever has 3.11.2, as Debian 12 does, without an environment."""
    admitted = SpecifierSet(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"])
    (oldest,) = (f"{part.version}.0" for part in admitted if part.operator == ">=")
    seen, refused = 0, {}
    for pin in pins():
        try:
            found = metadata(pin.name)
        except PackageNotFoundError:  # belongs to an extra that is not installed here
            continue
        if not pin.specifier.contains(found["Version"], prereleases=True):
            continue
        seen += 1
        wants = found["Requires-Python"] or ""
        if not SpecifierSet(wants).contains(oldest):
            refused[str(pin)] = wants
    assert seen > 50
    assert refused == {}
