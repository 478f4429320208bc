"""Programs for the SGLang environment, run there with the plug-in's folder and the CPU lab's stand-ins on the path."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moepress.serving.kv_integrity import SITE
from moepress.serving.launch import CPU_LAB
from moepress.serving.ports import free_port

SIDE = Path(__file__).parent / "sglang_side"


@pytest.fixture(scope="session")
def in_sglang(sglang_python: Path) -> Callable[..., list[dict[str, Any]]]:
    """``in_sglang("fuzz.py", "clean", ...)``: the JSON lines that a program of `sglang_side` prints."""

    def run(program: str, *arguments: str, **variables: str) -> list[dict[str, Any]]:
        done = subprocess.run(
            [sglang_python, "-W", "ignore", SIDE / program, *arguments],
            env={
                **{name: value for name, value in os.environ.items() if name not in ("VIRTUAL_ENV", "PYTHONPATH")},
                "PYTHONPATH": f"{CPU_LAB}:{SITE}",
                "MOEPRESS_KV_INTEGRITY": "observe",
                "SGLANG_USE_CPU_ENGINE": "1",
                "CUDA_VISIBLE_DEVICES": "",
                "OMP_NUM_THREADS": "1",
                "KV_TEST_PORT": str(free_port()),
                **variables,
            },
            capture_output=True,
            text=True,
            timeout=850,
            check=False,
        )
        lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        assert lines, done.stderr[-3000:]
        return lines

    return run
