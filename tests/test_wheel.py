"""A wheel built from the tree, installed away from it, works: recipes and data are inside."""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from moepress.recipe import shipped_recipes
from tests import tiny_checkpoints

ROOT = Path(__file__).resolve().parents[1]

pytestmark = pytest.mark.slow


def test_a_wheel_holds_everything_and_runs_in_an_environment_of_its_own(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", tmp_path, ROOT]
    subprocess.run(build, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    for recipe in shipped_recipes():
        assert f"moepress/recipes/{recipe}.yaml" in names
    assert "moepress/calibration/data/default.txt" in names
    assert {f"moepress/requirements/{name}.txt" for name in ("lm-eval", "sglang-cpu")} <= names
    assert not any(name.startswith(("tests/", "benchmarks/", "formats/", "examples/")) for name in names)

    subprocess.run([sys.executable, "-m", "venv", tmp_path / "env"], check=True)
    python = tmp_path / "env" / "bin" / "python"
    install = [python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", wheel]
    subprocess.run(install, check=True, capture_output=True)
    # The dependencies are this environment's: a path in a .pth file is searched, but .pth files there are not read, so
    # the checkout, which is installed here in place, is not found.
    site = next((tmp_path / "env" / "lib").glob("python*/site-packages"))
    (site / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")

    def run(*command: object) -> str:
        done = subprocess.run([*map(str, command)], cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert str(tmp_path) in run(python, "-c", "import moepress; print(moepress.__file__)")
    lists = "from moepress.environments import version_list; print(version_list('sglang-cpu'))"
    assert str(tmp_path) in run(python, "-c", lists)
    moepress = tmp_path / "env" / "bin" / "moepress"
    assert "kimi-k2: good" in run(moepress, "recipes", "check", "kimi-k2")
    source = tiny_checkpoints.build("kimi", tmp_path / "src").folder
    recipe = ("--recipe", "kimi-k2", "--set", "serving.tensor_parallel=1", "--json")
    assert json.loads(run(moepress, "convert", source, tmp_path / "out", *recipe))["quantized"]["weights"] == 72
