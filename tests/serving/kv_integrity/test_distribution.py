"""The plug-in as a wheel of its own: entry point, no dependencies, nothing but its package."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from moepress.serving.kv_integrity import SITE


@pytest.mark.slow
def test_it_builds_into_a_wheel_without_dependencies(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    done = subprocess.run(
        [*command, "--wheel-dir", tmp_path, SITE.parent], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("moepress_kv_integrity-0.5.23-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        information = "moepress_kv_integrity-0.5.23.dist-info"
        assert {name.partition("/")[0] for name in names} == {"moepress_kv_integrity", information}
        assert {Path(name).name for name in names if name.startswith("moepress_kv_integrity/")} == {
            file.name for file in (SITE / "moepress_kv_integrity").glob("*.py")
        }
        assert "moepress_kv_integrity:register" in archive.read(f"{information}/entry_points.txt").decode()
        assert "Requires-Dist" not in archive.read(f"{information}/METADATA").decode()
