"""The SGLang environment, where there is one: MOEPRESS_SGLANG_PYTHON, or .venv-sglang in the checkout."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from moepress.errors import ServingError
from moepress.serving.launch import CPU_LAB_VERSION
from moepress.serving.sglang import DEFAULT_PYTHON, PYTHON_VARIABLE, find_environment


@pytest.fixture(scope="session")
def sglang_python() -> Path:
    """Its interpreter. Skips when nothing is there; fails when what is named is not usable."""
    named = os.environ.get(PYTHON_VARIABLE)
    checkout = Path(__file__).parents[2] / DEFAULT_PYTHON
    if named is None and not checkout.exists():
        pytest.skip(f"no SGLang: `make sglang-cpu` makes {DEFAULT_PYTHON}, or name a Python in {PYTHON_VARIABLE}")
    try:
        environment = find_environment(named or checkout)
    except ServingError as error:
        pytest.fail(str(error))
    if environment.version != CPU_LAB_VERSION:
        pytest.skip(f"SGLang {environment.version}: the CPU lab is for {CPU_LAB_VERSION}")
    return environment.python
