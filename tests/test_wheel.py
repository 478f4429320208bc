"""A wheel built from the tree, installed away from it, works: recipes and data are inside."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from moepress.recipe import shipped_recipes

ROOT = Path(__file__).resolve().parents[1]

pytestmark = pytest.mark.slow


def test_a_wheel_holds_everything_and_runs_from_elsewhere(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", tmp_path, ROOT],
        check=True,
        capture_output=True,
    )
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        archive.extractall(tmp_path / "site")
    for recipe in shipped_recipes():
        assert f"moepress/recipes/{recipe}.yaml" in names
    assert not any(name.startswith(("tests/", "benchmarks/", "formats/", "examples/")) for name in names)
    # its dependencies from this environment, the package itself from the wheel alone
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path / 'site')!r})\n"
        "import moepress; assert 'site' in moepress.__file__, moepress.__file__\n"
        "from moepress.cli import app; app(['recipes', 'check', 'kimi-k2'], standalone_mode=False)"
    )
    done = subprocess.run([sys.executable, "-I", "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "kimi-k2: good" in done.stdout
